"""Errors about exhausted memory, which torch does not tell apart from others on a CPU."""

from __future__ import annotations

import re

import torch

from dpfunc.errors import OutOfMemory

_WORDS = re.compile(r"out of memory|can't allocate memory|not enough memory|_STATUS_ALLOC_FAILED", re.IGNORECASE)
_ASKED = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)


def out_of_memory(error: BaseException) -> str:
    """The memory that an error says was asked for, in words; empty for an error about something else."""
    if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not _WORDS.search(str(error)):
        return ""
    asked = _ASKED.search(str(error))
    return asked[1] if asked else "an unknown number of bytes"


def refuse_out_of_memory(error: BaseException) -> None:
    """Raise an error about exhausted memory again: another way to compute the same must not hide it."""
    if out_of_memory(error):
        raise error


def refuse_microbatch(error: BaseException, microbatch_size: object, num_samples: int) -> None:
    """Raise an error about exhausted memory as one about the size of a microbatch."""
    asked, together = out_of_memory(error), microbatch_size or num_samples
    if asked:
        raise OutOfMemory(
            f"Expected enough memory for a microbatch, got microbatch_size={microbatch_size!r}: {asked} could not be "
            f"had. Set it to a number{'' if together == 'auto' else f' smaller than {together}'} in make_dp_step, the "
            "sum stays the same; if one row is too much, shorten the rows. The state can be used again: nothing was "
            "released and nothing was spent."
        ) from error
