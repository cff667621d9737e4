"""The `dpfunc` command."""
