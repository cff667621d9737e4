"""Small tools that know nothing of privacy: checks of arguments, containers of tensors, split tensors, locks.

May import: its folder, errors. Privacy depends on it: no.
"""
