"""Roots and minima of functions of one number, without scipy, which is slow to import.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import math
from collections.abc import Callable

MOST_NOISE, _LEAST_NOISE = 2.0**30, 2.0**-10


def _gap(cost: float, target: float) -> float:
    """`log(cost / target)`: positive where the cost is too high, or no number; infinite for a cost of 0 or inf."""
    if cost <= 0:
        return -math.inf
    return math.log(cost) - math.log(target) if cost < math.inf else math.inf


def _zero(low: float, at_low: float, high: float, at_high: float) -> float:
    return low - at_low * (high - low) / (at_high - at_low)


def falling_root(
    function: Callable[[float], float], low: float, high: float, *, rtol: float = 0.0, atol: float = 0.0
) -> float:
    """A value with function <= 0, at most `max(rtol * value, atol)` (or one float64) above one with function > 0."""
    at_low, at_high = function(low), function(high)
    turn, width = 0, high - low
    while high - low > (distance := max(rtol * high, atol)):
        turn += 1
        if (turn % 3 == 0 and high - low > width / 4) or not math.isfinite(at_high - at_low):
            x = (low + high) / 2
        else:  # probe both sides of the predicted root
            x = _zero(low, at_low, high, at_high) + (0.4 if turn % 2 else -0.4) * distance
        width = high - low if turn % 3 == 0 else width
        x = min(max(x, low + 0.1 * (high - low)), high - distance / 4)
        x = x if low < x < high else (low + high) / 2
        if not low < x < high:  # neighbours in float64
            break
        value = function(x)
        if value > 0:
            low, at_low = x, value
        else:
            high, at_high = x, value
    return high


def least(
    function: Callable[[float], float], low: float, high: float, width: float, rtol: float = 0.0
) -> tuple[float, float]:
    """Minimum of a function by golden sections: its place, within `width`, and its value.

    With `rtol` the search ends before, where the function is flat to this share of itself; the ends count as well.
    """
    share = (math.sqrt(5) - 1) / 2
    left, right = high - share * (high - low), low + share * (high - low)
    at_left, at_right = function(left), function(right)
    at_low, at_high = (function(low), function(high)) if rtol else (math.inf, math.inf)
    lowest = min((at_low, low), (at_high, high))
    while high - low > width and max(at_low, at_high) > (1 + rtol) * min(at_left, at_right):
        if at_left <= at_right:
            high, at_high = right, at_right
            right, at_right = left, at_left
            left = high - share * (high - low)
            at_left = function(left)
        else:
            low, at_low = left, at_left
            left, at_left = right, at_right
            right = low + share * (high - low)
            at_right = function(right)
    value, place = min(lowest, (at_left, left), (at_right, right))
    return place, value


def least_scale(
    cost: Callable[[float], float], target: float, near: float = 1.0, factor: float = 2.0, rtol: float = 1e-4
) -> float | None:
    """The smallest scale of noise that costs at most the target, up to `rtol`; None if even 2**30 costs more."""
    fails = passes = near
    if cost(near) <= target:
        while cost(fails := max(passes / factor, _LEAST_NOISE)) <= target:
            if fails == _LEAST_NOISE:
                return fails
            passes, factor = fails, factor**2
    elif cost(MOST_NOISE) > target:
        return None
    else:
        while cost(passes := min(fails * factor, MOST_NOISE)) > target:
            fails, factor = passes, factor**2
    known = {math.log(fails): fails, math.log(passes): passes}  # exp(log(x)) may be a neighbour of x

    def gap(x: float) -> float:
        return _gap(cost(known.setdefault(x, math.exp(x))), target)

    return known[falling_root(gap, math.log(fails), math.log(passes), atol=rtol)]


def largest_integer(cost: Callable[[int], float], target: float, limit: int, guess: int) -> int:
    """The k in 0..limit with cost(k) <= target < cost(k + 1), for a rising cost; 0 also when even 0 costs more."""
    low, low_gap, high, high_gap = -1, -math.inf, limit + 1, math.inf
    probe, factor, turn = guess, 1.01, 0
    while high - low > 1:
        k = min(max(probe, low + 1), high - 1)
        gap = _gap(cost(k), target)
        if gap <= 0:
            low, low_gap = k, gap
        else:
            high, high_gap = k, gap
        turn += 1
        if low > 0 and math.isfinite(high_gap - low_gap):
            root = _zero(math.log(low), low_gap, math.log(high), high_gap)
            # both sides of the predicted root, and now and then the middle
            probe = (low + high) // 2 if turn % 4 == 0 else int(math.exp(root)) + turn % 2
        elif turn > 20:
            probe = (low + high) // 2
        else:  # walk away from the guess, ever faster
            probe = int(k * factor) + 1 if gap <= 0 else int(k / factor)
            factor = min(factor * factor, 1e6)
    return max(low, 0)
