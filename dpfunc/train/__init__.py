"""The application behind `dpfunc train` and `dpfunc generate`.

May import: its folder, features and below. Trusted: no.
"""
