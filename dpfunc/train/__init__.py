"""The application behind `dpfunc train` and `dpfunc generate`.

May import: its folder, features and below. Privacy depends on it: no.
"""
