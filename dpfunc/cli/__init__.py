"""The `dpfunc` command.

May import: its folder, train and below. Privacy depends on it: no.
"""
