"""Errors of files that could not be written: what was released by then, and what to do.

May import: its folder, step and below. Privacy depends on it: yes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from dpfunc.accounting import Ledger
from dpfunc.accounting.accountant import upper
from dpfunc.errors import NotWritten

if TYPE_CHECKING:  # `dpfunc ledger show` reads journals, and must not wait for torch
    from dpfunc.plan import Plan

REFUSED = (OSError, SafetensorError, RuntimeError)  # some of which mean that a file could not be written


def unwritten(error: BaseException) -> bool:
    """True for an error of `REFUSED` about a file that could not be written: torch has no type of error for it."""
    return not isinstance(error, RuntimeError) or isinstance(error, NotWritten) or "inline_container" in str(error)


@contextmanager
def writing(path: Path, ledger: Ledger, plan: Plan) -> Iterator[None]:
    """Context for writing files of a run: NotWritten names the file, the reason, what was spent, and what to do."""
    try:
        yield
    except REFUSED as error:
        if isinstance(error, NotWritten) or not unwritten(error):
            raise
        raise NotWritten(
            f"{getattr(error, 'filename', None) or path} could not be written: "
            f"{getattr(error, 'strerror', None) or error}. At most {ledger.num_steps} steps were released and epsilon="
            f"{upper(ledger.epsilon(plan.delta, plan.accountant).epsilon, 4)} at delta={plan.delta:g} is spent. "
            "Make room, or make it writable; then resume from the newest checkpoint, with the journal."
        ) from error
