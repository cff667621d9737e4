"""Versions in use.

May import: its folder, errors. Privacy depends on it: no.
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch


@cache
def installed() -> dict[str, str]:
    """Versions of this library and of torch; a source tree that is not installed has none."""
    try:
        own = version("dpfunc")
    except PackageNotFoundError:
        own = "not installed"
    return {"dpfunc": own, "torch": str(torch.__version__)}
