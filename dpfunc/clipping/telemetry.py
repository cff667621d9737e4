"""Private telemetry: statistics of the records of a step, in the same Gaussian release as the gradient.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

The scaled statistics of a record get a share of the squared bound C^2 behind its clipped gradient, whose norm is the
rest: sensitivity, noise and ledger are those of a plan without telemetry.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpfunc._utils.validation import (
    checked,
    count,
    expect,
    fail,
    line,
    named,
    open_unit,
    optional,
    real,
    set_fields,
    shorten,
    wrong_type,
)
from dpfunc.clipping.rules import SLACK
from dpfunc.errors import InvalidArgument
from dpfunc.types import Unreleased

LEAF = "(telemetry)"  # name of the statistics among the sums, and of their clip group
_FAR = 1e100  # scaled numbers are at most so large, and so have a finite norm
BELOW = "(below)"  # statistic of each clip group: 1 for a norm within the bound, else -1


@named
@dataclass(frozen=True)
@checked({"name": line, "low": partial(real, domain="a finite low"), "size": optional(count)})
class Statistic:
    """A statistic of each record, whose mean over a step is released.

    Args:
        name: `"loss"`; `"norm"`, of the gradient; `"clipped"`, 1 where a norm is above its bound, else 0; or a key of
            the mapping `aux` of a loss that returns `(losses, aux)`.
        low, high: public bounds, to which other values are moved. The noise grows with their distance. Not of
            `"clipped"`, nor of a histogram.
        edges: increasing: a histogram, the shares of records below the first edge, between two, and above the last.
        size: the record has so many numbers (B, size), scaled down to L2 norm `high`, e.g. the load of each expert.

    >>> Statistic("loss", high=4.0)
    Statistic(name='loss', low=0.0, high=4.0, edges=(), size=None)
    """

    name: str
    low: float = 0.0
    high: float | None = None
    edges: tuple[float, ...] = ()
    size: int | None = None

    def __post_init__(self) -> None:
        edges = tuple(real("edges", edge, "finite edges") for edge in self.edges)
        expect(list(edges) == sorted(set(edges)), "increasing edges", "edges", self.edges)
        high = 1.0 if self.name == "clipped" or edges else self.high
        domain = f"a public bound high > low = {self.low:g} of {self.name!r}"
        set_fields(self, {"edges": edges, "high": real("high", high, domain, inside=lambda high: high > self.low)})
        if bool(edges) + bool(self.size) + bool(self.low) > 1:
            raise fail("one of low, edges and size", "size", self.size, f"{self.name!r} has a norm, or an interval.")

    @property
    def num_values(self) -> int:
        """Count of the numbers that are released."""
        return len(self.edges) + 1 if self.edges else self.size or 1

    @property
    def _unit(self) -> tuple[float, float]:
        """Centre and half width: the scaled statistic `(value - centre) / width` of a record has norm at most 1."""
        high = 1.0 if self.high is None else self.high
        return (0.0, high) if self.edges or self.size else ((self.low + high) / 2, (high - self.low) / 2)

    def _scaled(self, values: Tensor) -> Tensor:
        """The scaled statistic of each record (B, num_values), of norm at most 1; of what is not finite 0."""
        given = 1 if self.size is None else self.size
        domain = f"aux[{self.name!r}] of shape {'(B,)' if self.size is None else f'(B, {given})'}"
        expect(values.numel() == len(values) * given, domain, "shape of a record", tuple(values.shape[1:]))
        values_BN = values.double().reshape(len(values), given)
        finite_B = torch.isfinite(values_BN).all(1, keepdim=True)
        if self.edges:
            place_B = torch.bucketize(values_BN[:, 0].contiguous(), values_BN.new_tensor(self.edges), right=True)
            scaled_BN = torch.nn.functional.one_hot(place_B, self.num_values).double()
        else:
            centre, width = self._unit
            scaled_BN = ((values_BN.nan_to_num() - centre) / width).clamp(-_FAR, _FAR)
            length = scaled_BN.abs() if self.size is None else scaled_BN.norm(dim=1, keepdim=True)
            scaled_BN = scaled_BN / length.clamp(min=1.0)
        return torch.where(finite_B, scaled_BN, torch.zeros_like(scaled_BN))

    def _mean(self, scaled: Tensor) -> float | list[float]:
        centre, width = self._unit
        values: list[float] = (centre + width * scaled).tolist()
        return values if self.edges or self.size else values[0]


@named
@dataclass(frozen=True)
class Telemetry:
    """Statistics that each step releases with its gradient; of a plan, `Plan(..., telemetry=...)`.

    The statistics s_k of a record, k < K, are centred and scaled to norm at most `C sqrt(share / K)`, and its gradient
    is clipped to `C sqrt(1 - share)`. Their sum gets the noise of the gradient, and is divided by the *expected* batch
    size: `mean_k = centre_k + width_k (sum + noise) / (C sqrt(share / K) b)`, which under Poisson sampling is without
    bias the mean over all records (of their bounded values). A step without records releases the centre, with noise.

    Args:
        statistics: what is released.
        share: of the squared bound, 0 < share < 1, e.g. 0.05: the gradient has `sqrt(1 - share)` of its bound left.

    Guarantees:
        one record moves gradient and statistics together by at most the sensitivity; a record whose gradient is not
        finite moves nothing (tests/clipping/test_telemetry.py::test_sensitivity); the noise is that of the plan
        (test_noise_scale), and the mean has no bias (test_unbiased).

    >>> telemetry = Telemetry((Statistic("loss", high=4.0), Statistic("norm", edges=(0.5, 1.0))), share=0.05)
    >>> telemetry.num_values
    4
    """

    statistics: tuple[Statistic, ...]
    share: float

    def __post_init__(self) -> None:
        statistics = tuple(self.statistics) if isinstance(self.statistics, Sequence) else ()
        if not statistics or not all(isinstance(each, Statistic) for each in statistics):
            raise wrong_type("statistics to be some clipping.Statistic", "statistics", self.statistics)
        names = [each.name for each in statistics]
        expect(len(set(names)) == len(names), "one statistic of each name", "statistics", names)
        set_fields(self, {"statistics": statistics, "share": open_unit("share", self.share)})

    @property
    def num_values(self) -> int:
        """Count of the numbers that a step releases."""
        return sum(each.num_values for each in self.statistics)

    def total(self, unreleased: Unreleased, bounds: Sequence[float], bound: float) -> Tensor:
        """The sum of the scaled statistics of records, of norm at most `bound` each. UNRELEASED, as what goes in.

        Args:
            unreleased: of the records. bounds: of each clip group. bound: of the statistics.
        """
        norms_BG = unreleased.norms_BG
        total = norms_BG.new_zeros(self.num_values, dtype=torch.float32)
        if not len(norms_BG):
            return total
        finite_B1 = torch.isfinite(norms_BG).all(1, keepdim=True)
        own_G = norms_BG.new_tensor(bounds)
        scaled_BN = torch.cat([each._scaled(self._values(each.name, unreleased, own_G)) for each in self.statistics], 1)
        scaled_BN = torch.where(finite_B1, scaled_BN, torch.zeros_like(scaled_BN))
        return total + (self._scale(bound) * scaled_BN.sum(0)).float()

    def _values(self, name: str, unreleased: Unreleased, bounds_G: Tensor) -> Tensor:
        """The values of a statistic, one row for each record."""
        norms_BG = unreleased.norms_BG
        if name == BELOW:
            return torch.where(norms_BG <= bounds_G, 1.0, -1.0)
        aux: Mapping[str, Any] = unreleased.aux if isinstance(unreleased.aux, Mapping) else {}
        own = {
            "loss": unreleased.losses_B, "norm": norms_BG.double().square().sum(1).sqrt(),
            "clipped": (norms_BG > bounds_G).any(1),
        }  # fmt: skip
        values = own.get(name, aux.get(name))
        if not isinstance(values, Tensor):
            raise InvalidArgument(
                f"Expected the loss to return (losses, aux), where the mapping aux has {name!r} with one row a sample, "
                f"for the telemetry of the plan, got {shorten([*own, *map(str, aux)], 9)}."
            )
        return values

    def _scale(self, bound: float) -> float:
        return bound * (1 - SLACK) / math.sqrt(len(self.statistics))

    def read(self, values: Tensor, bound: float, batch_size: float) -> dict[str, float | list[float]]:
        """The released means by name, of a histogram its shares, from a total with noise and the expected size."""
        scaled = values.double().cpu() / (self._scale(bound) * batch_size)
        parts = scaled.split([each.num_values for each in self.statistics])
        return {each.name: each._mean(part) for each, part in zip(self.statistics, parts, strict=True)}

    def errors(self, noise: float, batch_size: float) -> dict[str, float]:
        """Standard deviation of the noise in each mean, by name, from that of the noise / C and the expected size."""
        scale = self._scale(math.sqrt(self.share)) * batch_size
        return {each.name: noise * each._unit[1] / scale for each in self.statistics}
