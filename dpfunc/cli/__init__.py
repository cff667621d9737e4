"""The `dpfunc` command.

May import: its folder, train and below. Trusted: no.
"""
