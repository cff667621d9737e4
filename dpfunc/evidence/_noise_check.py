"""The noise of an audited run: what was added to each clipped sum, against the normal law that the plan claims.

May import: its folder, checkpoint and below. Privacy depends on it: no.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from scipy.special import erfc
from scipy.stats import chisquare
from torch import Tensor

from dpfunc.evidence.watch import Add, WatchedNoise
from dpfunc.noise import Run, Turn
from dpfunc.noise.gaussian import noise_std
from dpfunc.plan import Plan
from dpfunc.types import ClippedSum

_CELLS = 16  # of equal probability, by which the law is compared
_LOOKED_AT = 2**16  # numbers of one parameter and step
_LEVEL = 1e-6  # probability that noise as claimed is found to be another one


@dataclass
class _ParameterNoise:
    """Noise of one parameter, divided by its claimed deviation."""

    cells: Tensor = field(default_factory=lambda: torch.zeros(_CELLS, dtype=torch.float64, device="cpu"))
    squares: float = 0.0
    earlier: list[Tensor] = field(default_factory=list)  # independent normals of the last steps, the newest first
    products: float = 0.0
    pairs: int = 0

    def add(self, noise_P: Tensor, weights: Sequence[float]) -> None:
        """Record the noise of a step, after subtracting the weighted noise of earlier steps."""
        drawn_P = noise_P.clone()
        for weight, other_P in zip(weights[1:], self.earlier, strict=False):
            drawn_P -= weight * other_P
        normal_P = drawn_P / weights[0]
        share_P = torch.special.ndtr(normal_P).clamp(0, 1 - 1e-12)
        self.cells += torch.bincount((share_P * _CELLS).long(), minlength=_CELLS)
        self.squares += float(normal_P.square().sum())
        if self.earlier:
            self.products += float(normal_P @ self.earlier[0])
            self.pairs += len(normal_P)
        self.earlier = [normal_P, *self.earlier][: len(weights)]  # a step has one weight more at most

    def difference(self, level: float) -> str:
        """The difference of the noise from its claim, in words; empty where there is none at this level."""

        def normal(total: float, variance: float) -> float:
            """The probability that a sum with this variance is so far from 0."""
            return float(erfc(abs(total) / math.sqrt(2 * max(variance, 1))))

        count = float(self.cells.sum())
        if normal(self.squares - count, 2 * count) < level:
            return f"its deviation is {math.sqrt(self.squares / count):.3g} of what is claimed"
        if chisquare(self.cells.numpy()).pvalue < level:
            return "it has the deviation that is claimed, and another law: parts of it have more than others"
        dependent = normal(self.products, self.pairs) < level
        return "that of one step is not independent of that of the step before" if dependent else ""


@dataclass(frozen=True)
class NoiseCheck:
    """Noise that is compared with its claim where it is added; of each parameter what was seen.

    `weights` of the noise: see `Noise`.
    """

    weights: Callable[[Run, int], Sequence[float]]
    seen: dict[str, _ParameterNoise] = field(default_factory=dict)

    def around(self, inner: Add, run: Run) -> Add:
        """The addition of noise, which looks at the numbers before and after."""

        def add(clipped: ClippedSum, state: Any, turn: Turn) -> tuple[dict[str, Tensor], Any]:
            sums = {name: _some(value).clone() for name, value in clipped.sums.items()}
            stds, weights = noise_std(clipped, 1.0, run.allocation), self.weights(run, turn.step)
            values, after = inner(clipped, state, turn)
            for name, before_P in sums.items():
                noise_P = (_some(values[name]) - before_P) / stds[clipped.group_of[name]]
                self.seen.setdefault(name, _ParameterNoise()).add(noise_P, weights)
            return values, after

        return add

    def differs(self) -> str:
        """The first parameter whose noise is not what the plan claims, in words; empty if there is none."""
        level = _LEVEL / max(1, 2 * len(self.seen))
        differences = {name: seen.difference(level) for name, seen in self.seen.items()}
        return next((f"the noise of {name!r}: {words}" for name, words in differences.items() if words), "")


def _some(value: Tensor) -> Tensor:
    """Numbers of a sum, at most so many, evenly spaced: float64, on the CPU."""
    flat_P = value.detach().flatten()
    return flat_P[:: -(-flat_P.numel() // _LOOKED_AT) or 1].double().cpu()


def with_noise_check(plan: Plan) -> Plan:
    """The plan, by its repr, whose noise is compared with its claim; noise without `weights` has none."""
    weights = getattr(plan.noise, "weights", None)
    return plan if weights is None else replace(plan, noise=WatchedNoise(plan.noise, NoiseCheck(weights)))
