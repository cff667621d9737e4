"""Tight upper bound on epsilon from losses on one lattice: some 1e-7 of itself above it, where few points are enough.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

The losses of each kind of step are put on points `c + j h`, j = 0, 1, .., with one h for all kinds: by cells that
dominate them as in _losses.py, which adds about `steps t (1 + t) h^2 / 12` to log delta. The masses of the sum are an
inverse FFT of the product of the transforms, with weights `e^(t loss)`, so that they are largest near epsilon and the
rounding of an FFT is small there; a bound on it counts as mass. The FFT is periodic: what lies below the window
(0, end] is added to masses in it, which can only raise delta; what lies above its end counts as infinite.
"""

import math

import numpy as np

from dpfunc.accounting import _losses as losses
from dpfunc.accounting import _tilted_aim as aims
from dpfunc.accounting._losses import MEANS, ULP, UNBOUNDED, Array, Atoms, Direction, Law

_ERROR = 2e-7  # relative to epsilon
_FEWEST, _MOST = 2**14, 2**21  # points
_LARGEST_EXPONENT = 600.0
_WIDER = 1.01  # than for the epsilon of the aim


def lattice_epsilon(table: aims.LossTable, aim: aims.Aim, delta: float) -> float:
    """A bound on epsilon, near that of the aim; infinite where the lattice would be too large."""
    law = lattice_law(table, aim, delta, _ERROR)
    left = (delta - float(law.infinite)) * (1 - 1e-9)
    return losses.epsilon_at(law.loss, law.mass, left) if left > delta / 2 else math.inf


def lattice_law(table: aims.LossTable, aim: aims.Aim, delta: float, error: float, most: int = _MOST) -> Atoms:
    """Positive losses of all steps together that dominate theirs, in order, without infinite ones of given laws.

    All of the mass is infinite where the lattice would be too large.

    Args:
        table, aim: see `_tilted_aim`. delta: about that at the epsilon of the aim. error: relative to epsilon.
        most: points.
    """
    from scipy.fft import irfft, next_fast_len, rfft

    t, length = aim.tilt, _WIDER * aim.epsilon + aim.period
    steepest = max(t, aim.slope)
    number_of_steps = float(table.steps.sum()) + sum(steps for steps, _ in table.fixed) + 1
    width = math.sqrt(12 * error * aim.scale * aim.slope / (number_of_steps * steepest * (1 + steepest)))
    width = min(width, length / _FEWEST)
    kinds = _continuous(table, delta)
    points = sum(float(np.ptp(losses.loss_of(q, s, ends, table.direction))) for q, s, ends, _ in kinds) / width
    if max(points, length / width) > most or max(t * aim.epsilon, length) > _LARGEST_EXPONENT:
        return UNBOUNDED
    parts = [(_cells(q, s, ends, width, table.direction), steps) for q, s, ends, steps in kinds]
    parts += [(_apart(law, width), float(steps)) for steps, law in table.fixed]
    laws = [losses.tilt(atoms, steps, t) for atoms, steps in parts]
    starts = [float(atoms.loss[0]) for atoms, _ in parts]
    size = int(next_fast_len(math.ceil(length / width), real=True))
    slip = 16 * ULP * math.log2(size)  # of an FFT of masses that sum to 1
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    log_sizes = []
    for law, start in zip(laws, starts, strict=True):
        places = np.rint((law.loss + law.mean - start) / width).astype(np.int64) % size
        transform = rfft(np.bincount(places, law.weight, size))
        spectrum *= transform**law.steps
        log_sizes.append(np.log(np.abs(transform) + slip + law.error))
    log_size = np.sum([law.steps * one for law, one in zip(laws, log_sizes, strict=True)], axis=0)
    # |d z^n| = n |z|^(n - 1) |dz|
    noise = slip * float(np.exp(log_size).sum())
    for law, one in zip(laws, log_sizes, strict=True):
        noise += law.steps * (slip + law.error) * float(np.exp(log_size - one).sum())
    offset = math.fsum(law.steps * start for law, start in zip(laws, starts, strict=True))
    first = math.floor(-offset / width) + 1
    loss: Array = np.asarray(offset + width * (first + np.arange(size)), dtype=np.float64)
    folded = np.roll(irfft(spectrum, size), -(first % size))
    rounding = 64 * ULP + sum(law.steps * law.error for law in laws)
    moment = math.fsum(law.steps * law.log_moment for law in laws)
    infinite = sum(law.steps * law.infinite for law in laws) + _beyond(laws, aim, float(loss[-1]))
    if moment > _LARGEST_EXPONENT:
        return UNBOUNDED
    tilted = np.maximum(folded, 0.0) + 2 * noise / size
    mass: Array = tilted * np.exp(moment + rounding - t * loss)
    largest = sum(law.steps * float(np.abs(law.loss + law.mean).max()) for law in laws)
    return Atoms(mass, loss + 16 * ULP * largest, np.asarray(infinite))


def _continuous(table: aims.LossTable, delta: float) -> list[tuple[float, float, Array, float]]:
    """The kinds of steps with Gaussian noise: q, sigma, the ends of the outputs, steps."""
    from scipy.special import ndtri

    ends = [x[[0, -1]] for x in table.x]
    kinds = list(zip(table.q.tolist(), table.sigma.tolist(), ends, table.steps.tolist(), strict=True))
    if table.gaussian > 0:  # those without sampling are one
        s = (1 - 4 * ULP) / math.sqrt(table.gaussian)
        reach = max(9.5, -float(ndtri(aims.TINY * delta / 2)))
        kinds.append((1.0, s, np.array([-reach * s, reach * s + MEANS[table.direction][0]]), 1.0))
    return kinds


def _cells(q: float, s: float, ends: Array, width: float, direction: Direction) -> Atoms:
    """The law of one step on a lattice; what is below the first end has the first loss, what is above is infinite."""
    low, high = losses.loss_of(q, s, ends, direction)
    loss = low + width * np.arange(math.ceil((high - low) / width) + 1)
    x = np.maximum.accumulate(np.append(ends[0], losses.point(q, s, loss[1:], direction)))
    return losses.atoms(q, s, x, direction, loss)


def _apart(law: Atoms, width: float) -> Atoms:
    """Each loss of a law put on the points of a lattice next to it, such that both masses are kept."""
    low = float(law.loss.min())
    below = np.floor((law.loss - low) / width)
    raised = law.mass * np.expm1(low + below * width - law.loss) / math.expm1(-width)
    places = np.concatenate([below, below + 1])
    return Atoms(np.concatenate([law.mass - raised, raised]), low + places * width, np.zeros(()))


def _beyond(laws: list[Law], aim: aims.Aim, end: float) -> float:
    """A Chernoff bound on the probability of a total loss above the end."""
    t = float(aim.tilts[np.argmin(aim.moments - aim.tilts * end)])
    more = t - aim.tilt
    exponent = -t * end
    for law in laws:
        rest = losses.tilt(Atoms(law.weight, law.loss, np.zeros(())), law.steps, more).log_moment
        exponent += law.steps * (law.log_moment + more * law.mean + rest)
    return math.exp(min(exponent, 0.0))
