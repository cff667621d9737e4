"""The application behind `dpfunc train` and `dpfunc generate`."""
