"""The application behind `dpfunc train` and `dpfunc generate`.

May import: its folder, hf and below. Trusted: no.
"""
