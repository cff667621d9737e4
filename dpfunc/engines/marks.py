"""Marks by which the host decides what is computed next, read together.

Marks are set for few samples, in few steps: a norm that lost its digits, parts that cancel, a row that is dropped. A
host that reads them parameter by parameter waits for the device each time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

_Result = TypeVar("_Result")

_LONGEST_PAUSE = 63
_unread: ContextVar[list[Tensor] | None] = ContextVar("dpfunc_unread_marks", default=None)


def any_set(marks: Tensor) -> bool:
    """True if a mark (bool) is set. Inside of `ReadTogether`: False, and it is read later.

    >>> any_set(torch.tensor([False, True]))
    True
    """
    unread = _unread.get()
    if unread is None:
        return bool(marks.any())
    unread.append(marks)
    return False


@dataclass
class ReadTogether:
    """Compute as if no mark were set and read all marks once; if one is set, compute again and read each.

    A result is always the one that reading each mark gives, bit for bit. Where marks are set in each step, computing
    twice would cost more than reading: after a failure some steps read each mark, after the next one twice as many.

    Args:
        pause: steps that read each mark after the next failure. left: of the present pause.

    >>> read_together = ReadTogether()
    >>> read_together(lambda: "few" if any_set(torch.tensor([True])) else "none")
    'few'
    """

    pause: int = 1
    left: int = 0

    def __call__(self, compute: Callable[[], _Result]) -> _Result:
        """The result of a function that has no effects, called once or twice."""
        if self.left:
            self.left -= 1
            return compute()
        unread: list[Tensor] = []
        token = _unread.set(unread)
        try:
            result = compute()
        finally:
            _unread.reset(token)
        if not _any_of(unread):
            self.pause = 1
            return result
        del result  # its memory is needed again
        self.left, self.pause = self.pause, min(2 * self.pause + 1, _LONGEST_PAUSE)
        return compute()


def _any_of(marks: list[Tensor]) -> bool:
    """True if a mark is set; one read for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for each in marks:
        by_device.setdefault(each.device, []).append(each.flatten())
    return any(bool(torch.cat(each).any()) for each in by_device.values())
