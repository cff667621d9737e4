"""A Python file with a loop, as `dpfunc verify` and `dpfunc audit` take it."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpfunc.errors import InvalidArgument
from dpfunc.evidence._neighbours import Init, Step
from dpfunc.rng import Key
from dpfunc.step import DPStep
from dpfunc.types import Batch

_NAMES = "dp_step, data, and either init and step or train"


@dataclass(frozen=True)
class Script:
    """The loop of a file, and canaries among the records if it has some."""

    dp_step: DPStep
    data: Batch = field(repr=False)
    init: Init
    step: Step
    canaries: Batch | None = field(default=None, repr=False)


@dataclass(frozen=True)
class _Going:
    """A loop under way: a generator, and what it has yielded last."""

    rest: Iterator[Any] = field(repr=False)
    shown: Any


def read_script(path: Path) -> Script:
    """Run a file, and take its loop: `init(dp_step, data, key)` and `step(dp_step, data, carry)`, as in `replay`; or
    `train(dp_step, data, key)`, a plain loop that yields what it has, before its first step and after each.

    Raises:
        InvalidArgument: a name is missing, or is something else.
    """
    names = runpy.run_path(str(path), run_name="__dpfunc__")
    dp_step, data, canaries = names.get("dp_step"), names.get("data"), names.get("canaries")
    if not isinstance(dp_step, DPStep) or data is None:
        raise InvalidArgument(
            f"Expected {_NAMES} in {path.name}; dp_step is that of dpfunc.make_dp_step, got "
            f"dp_step={type(dp_step).__name__}, data={type(data).__name__}."
        )
    init, step = names.get("init"), names.get("step")
    if callable(init) and callable(step):
        return Script(dp_step, data, init, step, canaries)
    train = names.get("train")
    if not callable(train):
        raise InvalidArgument(f"Expected {_NAMES} in {path.name}, got neither.")

    def begin(dp_step: Any, data: Batch, key: Key) -> _Going:
        rest = iter(train(dp_step, data, key))
        return _Going(rest, next(rest))

    return Script(dp_step, data, begin, _next, canaries)


def _next(dp_step: Any, data: Batch, carry: _Going) -> _Going | None:
    """The loop one step later; None at its end."""
    try:
        return replace(carry, shown=next(carry.rest))
    except StopIteration:
        return None
