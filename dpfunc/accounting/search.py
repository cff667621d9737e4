"""Roots and minima of functions of one number: secants and golden sections, without scipy, which is slow to import."""

from __future__ import annotations

import math
from collections.abc import Callable

_FLAT = 50.0  # stands for the logarithm of 0 and inf


def _gap(cost: float, target: float) -> float:
    """`log(cost / target)`, finite: positive where the cost is too high."""
    if cost <= 0:
        return -_FLAT
    return min(_FLAT, max(-_FLAT, math.log(cost) - math.log(target))) if cost < math.inf else _FLAT


def _secant(low: float, low_gap: float, high: float, high_gap: float) -> float:
    """Zero of the line through two points, one on each side; the middle where a gap is clipped."""
    if max(abs(low_gap), abs(high_gap)) >= _FLAT or low_gap == high_gap:
        return (low + high) / 2
    return low - low_gap * (high - low) / (high_gap - low_gap)


def falling_root(function: Callable[[float], float], low: float, high: float, rtol: float) -> float:
    """A value with function <= 0, at most `rtol` (relative) above one with function > 0; for a falling function.

    Args:
        function: finite. low, high: 0 <= low < high, with function(low) > 0 >= function(high).

    >>> root = falling_root(lambda x: 2 - x * x, 0.0, 2.0, 1e-12)
    >>> 2 <= root * root < 2 + 1e-11
    True
    """
    at_low, at_high = function(low), function(high)
    turn = 0
    while high - low > rtol * high:
        turn += 1
        x = low + (high - low) * at_low / (at_low - at_high)
        if turn % 3 == 0 or not low < x < high:
            x = (low + high) / 2
        if not low < x < high:  # neighbours in float64
            break
        value = function(x)
        if value > 0:  # Illinois: the weight of an end that stays is halved
            low, at_low, at_high = x, value, at_high / 2
        else:
            high, at_high, at_low = x, value, at_low / 2
    return high


def least(function: Callable[[float], float], low: float, high: float, width: float) -> tuple[float, float]:
    """Minimum of a function that has only one: its place, within `width`, and its value, by golden sections.

    >>> x, value = least(lambda x: (x - 1) ** 2, 0.0, 3.0, 1e-3)
    >>> abs(x - 1) < 1e-3, value < 1e-6
    (True, True)
    """
    share = (math.sqrt(5) - 1) / 2
    left, right = high - share * (high - low), low + share * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > width:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - share * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + share * (high - low)
            at_right = function(right)
    return (left, at_left) if at_left <= at_right else (right, at_right)


def smallest_real(cost: Callable[[float], float], target: float, fails: float, passes: float, rtol: float) -> float:
    """A value with cost <= target, at most `rtol` above one that fails; for a falling cost.

    Args:
        fails, passes: 0 < fails < passes, on either side of the root.
    """
    low, high = math.log(fails), math.log(passes)
    low_gap, high_gap = _gap(cost(fails), target), _gap(cost(passes), target)
    turn, width = 0, high - low
    while math.log(passes / fails) > rtol:
        turn += 1
        if turn % 3 == 0 and high - low > width / 4:
            x = (low + high) / 2
        else:  # probe both sides of the predicted root
            x = _secant(low, low_gap, high, high_gap) + (0.4 if turn % 2 else -0.4) * rtol
        width = high - low if turn % 3 == 0 else width
        x = min(max(x, low + 0.1 * (high - low)), high - rtol / 4) if high - low > rtol else (low + high) / 2
        value = math.exp(x)
        found = _gap(cost(value), target)
        if found <= 0:
            high, high_gap, passes = x, found, value
        else:
            low, low_gap, fails = x, found, value
    return passes


def largest_integer(cost: Callable[[int], float], target: float, limit: int, guess: int) -> int:
    """The k in 0..limit with cost(k) <= target < cost(k + 1), for a rising cost; 0 also when even 0 costs more.

    Args:
        guess: near the answer, to save evaluations.
    """
    if cost(limit) <= target:
        return limit
    if cost(0) > target:
        return 0
    low, low_gap, high, high_gap = 0, -_FLAT, limit, _FLAT
    probe, factor, turn = guess, 1.1, 0
    while high - low > 1:
        k = min(max(probe, low + 1), high - 1)
        found = _gap(cost(k), target)
        if found <= 0:
            low, low_gap = k, found
        else:
            high, high_gap = k, found
        turn += 1
        if low_gap > -_FLAT and high_gap < _FLAT:
            root = _secant(math.log(low), low_gap, math.log(high), high_gap)
            # both sides of the predicted root, and now and then the middle
            probe = (low + high) // 2 if turn % 3 == 0 else int(math.exp(root)) + turn % 2
        elif turn > 20:
            probe = (low + high) // 2
        else:  # walk away from the guess, ever faster
            probe = int(k * factor) + 1 if found <= 0 else int(k / factor)
            factor *= 1.5
    return low
