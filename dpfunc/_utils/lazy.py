"""Packages whose names are imported when they are first used: accounting and the command do not wait for torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Make the `__getattr__` of a package.

    Args:
        package: its `__name__`. homes: public name -> the module in the package that defines it. Other names are
            modules of the package.

    >>> import dpfunc
    >>> lazy("dpfunc", {"Ledger": "accounting"})("Ledger") is dpfunc.accounting.Ledger
    True
    """

    def attribute(name: str) -> object:
        if name in homes:
            value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        elif name.isidentifier() and not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        vars(sys.modules[package])[name] = value
        return value

    return attribute
