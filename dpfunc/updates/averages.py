"""Averages of released parameters over the steps of a run: less noise than those of the last step, at no cost.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dpfunc._utils.validation import checked, expect, fail, integer, named, open_unit, set_fields, shorten
from dpfunc.types import Params


class Average(Protocol):
    """An average as two functions, `begin(params) -> state` and `add(state, params) -> state`.

    A state is `{"step": number of steps, "params": {name: tensor}}`; the tensors are the average so far, in float32 or
    wider. It follows from released values and is released. `dpfunc.save` takes it as, or in, `optimizer_state`.
    """

    def begin(self) -> dict[str, Any]:
        """The state before the first step."""

    def add(self, state: dict[str, Any], params: Params) -> dict[str, Any]:
        """The state with the parameters after one more step; nothing is written into either."""


class _FromNothing:
    """An average that has no parameters before the first step."""

    def begin(self) -> dict[str, Any]:
        """The state before the first step."""
        return {"step": 0, "params": {}}


def _add(state: dict[str, Any], params: Params, weight: float) -> dict[str, Any]:
    """The state in which the new parameters have this weight, and the average so far has the rest."""
    before: dict[str, Tensor] = state["params"]
    was, now = ({name: tuple(value.shape) for name, value in each.items()} for each in (before, params))
    expect(
        not before or was == now, "the parameters of the average, in their shapes", "params",
        dict(sorted(now.items() - was.items())),
        f"Of the average: {shorten(sorted(map(str, was.items() - now.items())))}.",
    )  # fmt: skip

    def mixed(name: str, value: Tensor) -> Tensor:
        wide = value.detach().to(torch.promote_types(value.dtype, torch.float32))
        return torch.lerp(before[name], wide, weight) if before else wide.clone()

    return {"step": state["step"] + 1, "params": {name: mixed(name, value) for name, value in params.items()}}


@named
@dataclass(frozen=True)
@checked({"decay": open_unit})
class Ema(_FromNothing):
    """Exponential moving average: the parameters of a step have `decay` times the weight of those of the next one.

    After t steps the average is `(1 - d) / (1 - d^t) sum_s d^(t - s) params_s`: those before the first step have no
    weight. De et al. 2022, Unlocking High-Accuracy Differentially Private Image Classification through Scale.

    Args:
        decay: d, 0 < d < 1; about 1 / (1 - d) steps count.

    Guarantees:
        tests/updates/test_averages.py: the sum above (test_the_sum_of_each_average), also after a checkpoint
        (test_a_checkpoint_has_the_average).

    >>> average = Ema(0.5)
    >>> state = average.begin()
    >>> for value in (1.0, 2.0, 4.0):
    ...     state = average.add(state, {"w": torch.tensor([value])})
    >>> state["step"], state["params"]["w"]  # (4 + 2 / 2 + 1 / 4) / (1 + 1 / 2 + 1 / 4)
    (3, tensor([3.]))
    """

    decay: float

    def add(self, state: dict[str, Any], params: Params) -> dict[str, Any]:
        """The state with the parameters after one more step."""
        return _add(state, params, (1 - self.decay) / (1 - self.decay ** (state["step"] + 1)))


@named
@dataclass(frozen=True)
class LastSteps(_FromNothing):
    """The mean of the parameters after the last steps of a run; before these, the parameters themselves.

    Shejwalkar et al. 2022, Recycling Scraps: Improving Private Learning by Leveraging Intermediate Checkpoints (UTA).
    The number of steps of a plan is known before it begins, so that one sum is kept and not the last parameters.

    Args:
        count: number of the last steps that count, >= 1. num_steps: of the run, >= count.

    Guarantees:
        tests/updates/test_averages.py::test_the_sum_of_each_average.

    >>> average = LastSteps(2, num_steps=3)
    >>> state = average.begin()
    >>> for value in (1.0, 2.0, 4.0):
    ...     state = average.add(state, {"w": torch.tensor([value])})
    >>> state["params"]["w"]
    tensor([3.])
    """

    count: int
    num_steps: int

    def __post_init__(self) -> None:
        count = integer("count", self.count, minimum=1)
        set_fields(self, {"count": count, "num_steps": integer("num_steps", self.num_steps, minimum=count)})

    def add(self, state: dict[str, Any], params: Params) -> dict[str, Any]:
        """The state with the parameters after one more step."""
        number = state["step"] + 1 - (self.num_steps - self.count)  # of those that count
        return _add(state, params, 1.0 / max(1, number))


def average_of(text: str | None, num_steps: int, name: str) -> Average | None:
    """The average over a run of so many steps that a text names: `ema:DECAY` or `last:COUNT`; None of None.

    Errors are of the argument `name`.

    >>> average_of("last:20", num_steps=10, name="average")
    LastSteps(count=10, num_steps=10)
    """
    if text is None:
        return None
    kind, _, value = text.partition(":") if isinstance(text, str) else ("", "", "")
    decimal = value.replace(".", "", 1).isdecimal()
    if kind == "ema" and decimal:
        return Ema(float(value))
    if kind == "last" and value.isdecimal():
        return LastSteps(min(int(value), num_steps), num_steps)
    raise fail("ema:DECAY, or last:COUNT", name, text, "For example ema:0.99, or last:20.")
