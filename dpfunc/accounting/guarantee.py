"""Privacy guarantee as an accountant computes it: epsilon, delta, and the method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dpfunc.types import Adjacency

Method = Literal["tilted", "prv", "rdp", "gaussian", "gdp-approximation"]


@dataclass(frozen=True)
class Guarantee:
    """An (epsilon, delta) statement, and how it was obtained.

    Args:
        epsilon: an upper bound on the privacy loss, >= 0; inf means no protection. With method
            `gdp-approximation` it is not a bound.
        delta: the delta it holds at.
        method: `tilted` (numerical composition, tight), `prv` (numerical composition by opacus), `rdp` (Renyi),
            `gaussian` (exact, when all data is in every batch).
        adjacency: which data sets count as neighbours.
        note: its error, and why another method was not used.

    >>> print(Guarantee(1.25, 1e-5, "prv", "add_remove", "about 0.01 above the truth"))
    (epsilon=1.25, delta=1e-05)-DP under add_remove, by prv: about 0.01 above the truth
    >>> float(Guarantee(1.25, 1e-5, "prv", "add_remove"))
    1.25
    """

    epsilon: float
    delta: float
    method: Method
    adjacency: Adjacency
    note: str = ""

    def __float__(self) -> float:
        return self.epsilon

    def __str__(self) -> str:
        tail = f": {self.note}" if self.note else ""
        return f"(epsilon={self.epsilon:.6g}, delta={self.delta:g})-DP under {self.adjacency}, by {self.method}{tail}"
