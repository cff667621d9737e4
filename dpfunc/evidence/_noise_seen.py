"""The noise of an audited run: what was added to each clipped sum, against the normal law that the plan claims."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dpfunc.evidence._watch import Add, WatchedNoise
from dpfunc.noise import Gaussian, Run, Turn
from dpfunc.noise.gaussian import noise_std
from dpfunc.plan import Plan
from dpfunc.types import ClippedSum, schedule_at

_CELLS = 16  # of equal probability, by which the law is compared
_LOOKED_AT = 2**16  # numbers of one parameter and step
_LEVEL = 1e-6  # probability that noise as claimed is found to be another one


@dataclass
class _Seen:
    """Noise of one parameter, divided by its claimed deviation."""

    cells: Tensor = field(default_factory=lambda: torch.zeros(_CELLS, dtype=torch.float64, device="cpu"))
    squares: float = 0.0
    before: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64, device="cpu"))
    products: float = 0.0
    pairs: int = 0

    def add(self, normal_P: Tensor) -> None:
        share_P = torch.special.ndtr(normal_P).clamp(0, 1 - 1e-12)
        self.cells += torch.bincount((share_P * _CELLS).long(), minlength=_CELLS)
        self.squares += float(normal_P.square().sum())
        if len(self.before) == len(normal_P):
            self.products += float(normal_P @ self.before)
            self.pairs += len(normal_P)
        self.before = normal_P

    def found(self, level: float) -> str:
        """The difference of the noise from its claim, in words; empty where there is none at this level."""
        from scipy.special import chdtrc, erfc

        def normal(total: float, variance: float) -> float:
            """The probability that a sum with this variance is so far from 0."""
            return float(erfc(abs(total) / math.sqrt(2 * max(variance, 1))))

        count = float(self.cells.sum())
        if normal(self.squares - count, 2 * count) < level:
            return f"its deviation is {math.sqrt(self.squares / count):.3g} of what is claimed"
        off = float((self.cells - count / _CELLS).square().sum()) / (count / _CELLS)
        if chdtrc(_CELLS - 1, off) < level:
            return "it has the deviation that is claimed, and another law: parts of it have more than others"
        dependent = normal(self.products, self.pairs) < level
        return "that of one step is not independent of that of the step before" if dependent else ""


@dataclass(frozen=True)
class NoiseSeen:
    """Noise that is compared with its claim where it is added; of each parameter what was seen."""

    seen: dict[str, _Seen] = field(default_factory=dict)

    def around(self, inner: Add, run: Run) -> Add:
        """The addition of noise, which looks at the numbers before and after."""

        def add(clipped: ClippedSum, state: Any, turn: Turn) -> tuple[dict[str, Tensor], Any]:
            sums = {name: _some(value).clone() for name, value in clipped.sums.items()}
            stds = noise_std(clipped, schedule_at(run.noise_multiplier, turn.step), run.allocation)
            values, after = inner(clipped, state, turn)
            for name, before_P in sums.items():
                if std := stds[clipped.group_of[name]]:
                    self.seen.setdefault(name, _Seen()).add((_some(values[name]) - before_P) / std)
            return values, after

        return add

    def differs(self) -> str:
        """The first parameter whose noise is not what the plan claims, in words; empty if there is none."""
        level = _LEVEL / max(1, 2 * len(self.seen))
        found = {name: own.found(level) for name, own in self.seen.items()}
        return next((f"the noise of {name!r}: {words}" for name, words in found.items() if words), "")


def _some(value: Tensor) -> Tensor:
    """Numbers of a sum, at most so many, evenly spaced: float64, on the CPU."""
    flat_P = value.detach().flatten()
    return flat_P[:: -(-flat_P.numel() // _LOOKED_AT) or 1].double().cpu()


def seen_noise(plan: Plan) -> Plan:
    """The plan, by its repr, whose noise is compared with its claim; noise that is not Gaussian has no claim here."""
    return replace(plan, noise=WatchedNoise(plan.noise, NoiseSeen())) if isinstance(plan.noise, Gaussian) else plan
