"""Composition: the law of the sum of discrete losses, by a Fourier sum whose errors only add.

For K(z) = sum_i T_i log E e^(z L_i) of the discrete losses, and z = t + i s on a line with t > 0,

    delta(epsilon) = 1/(2 pi) int e^(K(z) - z epsilon) / (z (1 + z)) ds.

1. A Gaussian release with a tiny mu is added. It cannot lower delta, and its factor e^(-mu^2 s^2 / 2) makes the
   integral end. Events without sampling are Gaussians, too.
2. A sum with spacing D is `sum_k e^(2 pi k t / D) delta(epsilon + 2 pi k / D)` over all integers k (Poisson summation):
   the wanted term and others that are not negative.
3. Dropped frequencies count by a bound on their absolute value, as |E e^(i s L)| <= 1 for every further kind.
4. Rounding, which the tilt makes relative to delta, counts as an estimate of its size, times a large factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpfunc.accounting._losses import Array
from dpfunc.accounting._search import falling_root
from dpfunc.accounting._tilted_aim import TINY, Aim, Sampled
from dpfunc.accounting._tilted_law import ULP, Law, TiltedUnavailable

_SMOOTH_ERROR = 1e-5  # relative to epsilon
_MAX_FREQUENCIES = 2**18


def compose(laws: list[Law], base: Sampled, aim: Aim, delta: float, floor: float) -> tuple[float, float]:
    """The least epsilon, up to 1e-9, at which the bound on delta is at most `delta`, or `floor`: (epsilon, slope)."""
    infinite = sum(law.steps * law.infinite for law in laws) * (1 + 1e-9)
    if not infinite < delta / 2:
        raise TiltedUnavailable(f"The tails hold {infinite:g}, which matters at delta={delta:g}. Use method 'rdp'.")
    t, target = aim.tilt, math.log(delta - infinite) - 2 * ULP
    spacing = 2 * math.pi / aim.period
    # the mu^2 of a Gaussian costs about mu^2 (1 + slope) / 2: none is added where there is enough
    added = max(2 * _SMOOTH_ERROR * aim.fine * aim.epsilon / (1 + aim.slope), 80.0 / (_MAX_FREQUENCIES * spacing) ** 2)
    gaussian = base.gaussian + (added if base.gaussian < added else 0.0)
    moment = sum(law.steps * law.log_moment for law in laws) + gaussian * t * (1 + t) / 2
    drift = sum(law.steps * law.mean for law in laws) + gaussian * (t + 0.5)
    # what may be dropped, relative to e^(K(t) - t epsilon)
    log_drop = math.log(math.pi / spacing) + math.log(TINY) + target - (moment - t * aim.epsilon)
    waves = _wave_sum(laws, t, gaussian, spacing, log_drop)
    rounding = 64 * ULP + sum(law.steps * law.error for law in laws)  # of e^K(z), relative; and of a sum
    constant = moment + math.log(spacing / math.pi) + rounding

    def log_bound(epsilon: float) -> float:
        total = waves.at(drift - epsilon) + waves.dropped + rounding * waves.absolute
        return constant - t * epsilon + math.log(total) if total > 0 else math.inf

    found = _least_epsilon(log_bound, target, aim.epsilon, t, floor)
    step = 1e-3 * found
    return found, (log_bound(found - step) - log_bound(found + step)) / (2 * step) if found > 0 else t


@dataclass(frozen=True)
class _Waves:
    """Terms `f(0) / 2, f(D), ..` without the phase of epsilon; bounds on the absolute values of others, and of all."""

    s: Array
    real: Array
    imag: Array
    dropped: float
    absolute: float

    def at(self, offset: float) -> float:
        """`sum Re f(s) e^(i s offset)`."""
        phase = self.s * offset
        return float(self.real @ np.cos(phase) - self.imag @ np.sin(phase))


def _wave_sum(laws: Sequence[Law], t: float, gaussian: float, spacing: float, log_drop: float) -> _Waves:
    """The terms that are not negligible: all others together have the absolute value `e^log_drop` at most."""
    allowed = math.exp(min(max(log_drop, -600.0), 0.0)) / (len(laws) + 1)
    highest = math.sqrt(2 * max(1.0, -math.log(allowed) + math.log1p(1 / (spacing * t)))) / math.sqrt(gaussian)
    number = min(_MAX_FREQUENCIES, math.ceil(highest / spacing) + 2)
    # the terms that follow: at most int e^(-mu^2 s^2 / 2) / s^2 ds / D, and int 1/s^2 = 1/s
    dropped = math.exp(-gaussian * ((number - 1) * spacing) ** 2 / 2) / ((number - 1) * spacing) / spacing
    s: Array = np.arange(number, dtype=np.float64) * spacing
    size = 1 / np.hypot(t, s) / np.hypot(1 + t, s)
    log_size = np.log(size) - gaussian * s * s / 2
    log_size[0] += math.log(0.5)
    angle = -np.arctan2(s, t) - np.arctan2(s, 1 + t)
    for law in laws:
        transform = _characteristic(law, spacing, len(s))
        log_size = log_size + law.steps * np.log(np.maximum(np.abs(transform), 1e-300))
        angle = angle + law.steps * np.angle(transform)
        tail = np.append(np.cumsum(np.exp(log_size)[::-1])[::-1], 0.0)
        keep = max(1, int(np.argmax(tail <= allowed)))
        dropped += float(tail[keep])
        s, log_size, angle = s[:keep], log_size[:keep], angle[:keep]
    final: Array = np.exp(log_size).astype(np.float64)
    real: Array = (final * np.cos(angle)).astype(np.float64)
    imag: Array = (final * np.sin(angle)).astype(np.float64)
    return _Waves(s, real, imag, dropped, float(final.sum()) + dropped)


def _characteristic(law: Law, spacing: float, number: int) -> NDArray[np.complex128]:
    """`sum w e^(i s loss)` at s = 0, D, 2 D, .. as a matrix product: s = (a m + b) D."""
    inner = max(1, math.isqrt(number))
    outer = -(-number // inner)
    fine = _waves_of(law.loss, spacing, inner)
    coarse = _waves_of(law.loss, spacing * inner, outer) * law.weight
    return np.asarray((coarse @ fine.T).ravel()[:number])


def _waves_of(loss: Array, spacing: float, number: int) -> NDArray[np.complex128]:
    """`e^(i k D loss)` for k = 0..number-1, (number, losses), by doubling: few exponentials and few roundings."""
    table = np.empty((number, len(loss)), dtype=np.complex128)
    table[0] = 1
    done = 1
    while done < number:
        more = min(done, number - done)
        np.multiply(table[:more], np.exp(1j * (spacing * done) * loss), out=table[done : done + more])
        done += more
    return table


def _least_epsilon(log_bound: Callable[[float], float], target: float, start: float, t: float, floor: float) -> float:
    """The least epsilon >= floor with `log_bound(epsilon) <= target`, up to 1e-10 of it, from above."""
    if log_bound(floor) <= target:
        return floor
    low, high = floor, max(start, floor * (1 + 1e-9), 1e-300)
    for _ in range(1000):
        gap = log_bound(high) - target
        if gap <= 0:
            break
        low, high = high, high + max(1.1 * min(gap, 1e3) / t, 1e-2 * high)
    else:
        raise TiltedUnavailable(f"Expected an epsilon below {high:g}, got none. Use method 'rdp'.")
    found = falling_root(lambda epsilon: min(max(log_bound(epsilon) - target, -1e6), 1e6), low, high, rtol=1e-11)
    step = 1e-11
    while log_bound(found) > target:  # to the safe side of the rounding
        found, step = found * (1 + step), 10 * step
    return found
