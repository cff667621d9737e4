"""Bounds that follow a quantile of the norms, which each step estimates privately.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpfunc._utils.validation import checked, integer, named, open_unit, positive
from dpfunc.clipping.rules import ALL, LARGEST, SMALLEST, Flat, check_clip_norm, group_bounds
from dpfunc.clipping.telemetry import BELOW, Statistic, Telemetry
from dpfunc.errors import InvalidArgument
from dpfunc.types import ClipRule, Groups


def count_share(noise_multiplier: float, count_noise: float, num_groups: int = 1) -> float:
    """The share of `Adaptive` at which the counts have noise of a standard deviation: `G (z / (2 sigma_b))^2`.

    With it the gradient has `z_delta = (z^-2 - G (2 sigma_b)^-2)^(-1/2) = z / sqrt(1 - share)` times its bound as
    noise. Andrew et al. 2021, Theorem 1, for G = 1; they take sigma_b = b / 20 with b records expected in a batch.

    Args:
        noise_multiplier: z > 0 of the plan.
        count_noise: sigma_b > z sqrt(G) / 2, in records.
        num_groups: G >= 1.

    Returns:
        The share, 0 < share < 1.

    Raises:
        InvalidArgument: so little noise on the counts that they alone would cost more than the plan.

    Guarantees:
        tests/clipping/test_adaptive.py::test_noise_multipliers_of_the_paper.

    >>> share = count_share(1.1, 12.8)
    >>> round(share, 6), round(1.1 / math.sqrt(1 - share), 8)
    (0.001846, 1.10101688)
    """
    groups = integer("num_groups", num_groups, minimum=1)
    share = groups * (positive("noise_multiplier", noise_multiplier) / (2 * positive("count_noise", count_noise))) ** 2
    if share >= 1:
        raise InvalidArgument(
            f"Expected count_noise > noise_multiplier * sqrt(num_groups) / 2 = {noise_multiplier * groups**0.5 / 2:g}, "
            f"got count_noise={count_noise:g}: the counts alone would cost more than the plan."
        )
    return share


@named
@dataclass(frozen=True)
@checked({"clip_norm": check_clip_norm, "quantile": open_unit, "rate": positive, "share": open_unit})
class Adaptive:
    """Flat clipping to a quantile of the norms that each step estimates: `C <- C exp(-rate (b - quantile))`.

    b is the share of records whose norm is within C, with noise: `b = 1/2 + (sum_i s_i + noise) / expected batch size`
    with s_i = 1/2 for such a record and else -1/2. The sums are released with the gradient, by one call of the
    mechanism: the counts have `share` of the squared sensitivity, so that the step costs what it costs without. In
    units of C the gradient has noise of `z / sqrt(1 - share)`, and each count one of `z sqrt(G / share) / 2` records
    with G clip groups (twice as much of both with replace_one). C stays within a step, and is public: it is in
    `state.clip_state`, by clip group. A step without records has b = 1/2 and noise.
    Andrew et al. 2021, Differentially Private Learning with Adaptive Clipping, Algorithm 1.

    Args:
        clip_norm: the first bound, as of `Flat`. It is soon forgotten: 0.1 grows to 10 in 46 steps.
        quantile: share of the norms that C is to bound, 0 < quantile < 1. Each clip group has its own C.
        rate: > 0.
        share: of the squared sensitivity, 0 < share < 1; `count_share` of the noise that the counts should have.
        groups: as of `Flat`.

    Guarantees:
        tests/clipping/test_adaptive.py: the algorithm of the paper (test_the_algorithm_of_the_paper), one record moves
        gradient and counts together by at most the sensitivity (test_sensitivity), the noise is that of the plan
        (test_the_noise_of_the_count), C comes to the quantile (test_convergence), and does not depend on engine or
        microbatches (test_engines_agree), nor on the number of processes
        (tests/distributed/test_ranks.py, test_fsdp.py::test_statistics_are_those_of_one_process).

    >>> rule = Adaptive(clip_norm=1.0, share=0.19)
    >>> rule.at(0, {"all": 0.9}).clip_norm
    {'all': 1.0}
    >>> rule.next({"all": 0.9}, {"(below)": [1.0]})["all"] == 0.9 * math.exp(-0.2 * 0.5)
    True
    """

    clip_norm: float | Mapping[str, float] = 0.1
    quantile: float = 0.5
    rate: float = 0.2
    share: float = 0.01
    groups: Groups = ALL

    def factors(self, norms_BG: Tensor, bounds_G: Tensor) -> Tensor:
        """Scale factors (B, G) as those of `Flat`."""
        return Flat.factors(Flat(1.0), norms_BG, bounds_G)

    def initial(self, group_names: tuple[str, ...]) -> dict[str, float]:
        """The first bound of each group."""
        return group_bounds(self.clip_norm, group_names)

    def at(self, step: int, state: Any) -> ClipRule:
        """`Flat` of the bounds C / sqrt(1 - share): C for the gradient, and the rest for the counts."""
        if not state:
            raise InvalidArgument(
                "Expected the state of clipping.Adaptive, which has its bounds, got none. Take steps with it: "
                "dpfunc.make_dp_step, and the state of dp_step.init. In a sum alone use clipping.Flat."
            )
        rest = math.sqrt(1 - self.share)
        return Flat({group: min(bound / rest, LARGEST) for group, bound in state.items()}, self.groups)

    def released(self, state: Any) -> Telemetry:
        """The count of each group: all together of norm 1, as each has two values."""
        return Telemetry((Statistic(BELOW, high=math.sqrt(len(state)), size=len(state)),), self.share)

    def next(self, state: Any, released: Any) -> dict[str, float]:
        """The bounds after a step."""
        bounds = {}
        for (group, bound), mean in zip(state.items(), released[BELOW], strict=True):
            exponent = -self.rate * ((1 + mean) / 2 - self.quantile)
            bounds[group] = min(max(bound * math.exp(min(exponent, 100.0)), SMALLEST), LARGEST)
        return bounds
