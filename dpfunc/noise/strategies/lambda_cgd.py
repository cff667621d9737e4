"""Lambda-CGD: each release takes back a part of the noise of the last one.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import math
from dataclasses import dataclass

import numpy as np

from dpfunc._utils.validation import below_one, checked
from dpfunc.noise.strategies.base import Array, Recursion, check_participation, check_step, most_participations


@dataclass(frozen=True)
@checked({"decay": below_one})
class LambdaCGD:
    """Noise `d_t (z_t - decay z_(t-1))` with `d_t = sqrt((1 - decay^(2 (n - t))) / (1 - decay^2))`; arXiv 2601.22334.

    C has the entries `decay^(i - j) / d_j`: columns of norm 1, so that one participation costs what independent noise
    does. Nothing is kept: the noise of the last step is drawn again.

    Args:
        decay: lambda, 0 <= decay < 1; 0 is independent noise.

    Guarantees:
        published values (tests/noise/test_strategies.py::test_lambda_cgd_has_its_published_values).

    >>> print(LambdaCGD(0.9).row(100, step=50).round(8))
    [ 2.29412687 -2.06471418]
    """

    decay: float

    @property
    def bands(self) -> int | None:
        """C is banded for a decay of 0 alone."""
        return 1 if self.decay == 0 else None

    def _scale(self, steps_left: int) -> float:
        return math.sqrt((1 - self.decay ** (2 * steps_left)) / (1 - self.decay**2))

    def row(self, num_steps: int, step: int) -> Array:
        """Row `step` of C^-1: d_t and -d_t decay."""
        check_step(num_steps, step)
        weights = np.array([1.0, -self.decay]) * self._scale(num_steps - step)
        return weights[:2] if step and self.decay else weights[:1]

    def sensitivity(self, num_steps: int, separation: int, participations: int) -> float:
        """`sqrt(sum over i, j < k of decay^(b |i - j|) d_max(i, j) / d_min(i, j))`, d at the steps 0, b, 2 b, ..

        The product of the columns s < t is `decay^(t - s) d_t / d_s`, whose square is `(decay^(2 g) - x) / (1 - x)`
        with g = t - s and `x = decay^(2 (n - s))`. It is positive, and falls with the gap g and with s. So a record
        does most in the first steps that its separation b allows, with all vectors of one direction.

        Guarantees:
            equal to a search over all participations
            (tests/noise/test_strategies.py::test_sensitivity_against_all_participations).
        """
        check_participation(num_steps, separation, participations)
        count = most_participations(num_steps, separation, participations)
        steps = np.arange(count) * separation
        left = num_steps - steps
        # decay^(t - s) d_t / d_s = (decay^t d_t) / (decay^s d_s), in logarithms: powers of many steps are 0 in float64
        if self.decay == 0:
            return math.sqrt(count)
        logs = steps * math.log(self.decay) + np.log(-np.expm1(2 * left * math.log(self.decay))) / 2
        # the sum over s < t of the ratio of t and s
        before = np.logaddexp.accumulate(-logs)
        return float(np.sqrt(count + 2 * np.exp(logs[1:] + before[:-1]).sum()))

    def recursion(self, num_steps: int) -> Recursion | None:
        """None: `row` has two weights."""
        return None
