"""The inverse of epsilon: noise, steps or batch size from a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpfunc.accounting.epsilon import epsilon as epsilon_of
from dpfunc.accounting.exact import bisect
from dpfunc.accounting.ledger import Ledger
from dpfunc.accounting.schedules import schedule_ledger
from dpfunc.checks import fail, one_of, open_unit, positive, whole
from dpfunc.errors import UnreachableBudget
from dpfunc.types import Adjacency, Event, Schedule

BOUNDS = ("auto", "prv", "rdp")  # what may decide a budget
SMALLEST_SIGMA, LARGEST_SIGMA = 1e-2, 1e6
RELATIVE = 1e-4


def _target(epsilon: float, delta: float, method: str) -> float:
    one_of("method", method, BOUNDS, "The GDP approximation under-reports: no budget.")
    open_unit("delta", delta)
    return positive("epsilon", epsilon)


def calibrate(ledger_for: Callable[[float], Ledger], *, epsilon: float, delta: float, method: str = "auto") -> float:
    """The smallest noise multiplier (to 1e-4, from above) whose ledger stays within (epsilon, delta).

    Args:
        ledger_for: noise multiplier -> ledger of everything that counts; less noise must not cost less.
        epsilon: target, > 0. delta: 0 < delta < 1. method: `auto`, `prv` or `rdp`.

    Raises:
        UnreachableBudget: not even a noise multiplier of 1e6 is enough.
    """
    target = _target(epsilon, delta, method)

    def exceeds(by: str) -> Callable[[float], bool]:
        return lambda sigma: epsilon_of(ledger_for(sigma), delta, by).epsilon > target

    # Renyi is cheap and an upper bound: its answer starts the search from above.
    high = 1.0
    while exceeds("rdp")(high):
        high *= 2
        if high > LARGEST_SIGMA:
            floor = epsilon_of(ledger_for(LARGEST_SIGMA), delta, method).epsilon
            if floor <= target:
                break
            raise UnreachableBudget(
                f"No noise meets epsilon={target:g} at delta={delta:g}: with noise_multiplier={LARGEST_SIGMA:g} "
                f"epsilon is still {floor:.4g}. Take fewer steps or smaller batches, or see what was spent before."
            )
    low = high / 2
    while low > SMALLEST_SIGMA and not exceeds("rdp")(low):
        low, high = low / 2, low
    high = bisect(exceeds("rdp"), low, high, 1e-3)
    if method == "rdp":
        return bisect(exceeds("rdp"), low, high, RELATIVE)
    low = high * 0.9
    while low > SMALLEST_SIGMA and not exceeds(method)(low):
        low, high = low * 0.8, low
    if exceeds(method)(high):  # `prv` alone may be above Renyi by its error
        high *= 1.5
    return bisect(exceeds(method), low, high, RELATIVE)


def calibrate_noise(
    *,
    epsilon: float,
    delta: float,
    sampling_prob: float,
    num_steps: int,
    schedule: Schedule | None = None,
    adjacency: Adjacency = "add_remove",
    spent: Ledger | None = None,
    method: str = "auto",
) -> float:
    """The smallest noise multiplier with which `num_steps` steps stay within (epsilon, delta).

    Args:
        epsilon: target, > 0. delta: 0 < delta < 1. sampling_prob: 0 < q <= 1. num_steps: >= 1.
        schedule: relative noise over the steps; the result is the number to multiply it with.
        adjacency: the neighbours. spent: what was already released. method: `auto`, `prv` or `rdp`.

    Raises:
        UnreachableBudget: no noise is enough.

    >>> sigma = calibrate_noise(epsilon=2.0, delta=1e-5, sampling_prob=1.0, num_steps=10)
    >>> Ledger((Event(1.0, sigma, 10),)).epsilon(1e-5).epsilon <= 2.0
    True
    """
    before = spent or Ledger(adjacency=adjacency)
    shape = schedule or Schedule(((1, 1.0),))

    def ledger_for(scale: float) -> Ledger:
        noise = Schedule(tuple((n, scale * value) for n, value in shape.pieces))
        return before.compose(schedule_ledger(sampling_prob, noise, num_steps, adjacency))

    ledger_for(1.0)  # bad arguments are found before the search
    return calibrate(ledger_for, epsilon=epsilon, delta=delta, method=method)


def affordable_steps(
    ledger_after: Callable[[int], Ledger], *, epsilon: float, delta: float, limit: int, method: str = "auto"
) -> int:
    """The largest number of steps, at most `limit`, after which the ledger is within (epsilon, delta).

    Args:
        ledger_after: number of further steps -> ledger of everything. epsilon, delta, method: see `calibrate`.
        limit: the answer is at most this.
    """
    target = _target(epsilon, delta, method)

    def fits(steps: int) -> bool:
        return epsilon_of(ledger_after(steps), delta, method).epsilon <= target

    if not fits(min(1, limit)):
        return 0
    if fits(limit):
        return limit
    low, high = 1, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def calibrate_steps(
    *,
    epsilon: float,
    delta: float,
    sampling_prob: float,
    noise_multiplier: float,
    adjacency: Adjacency = "add_remove",
    spent: Ledger | None = None,
    limit: int = 10**7,
    method: str = "auto",
) -> int:
    """How many steps of this kind fit into (epsilon, delta); 0 when not one does.

    Args:
        epsilon, delta, sampling_prob, adjacency, spent, method: see `calibrate_noise`.
        noise_multiplier: > 0. limit: the answer is at most this.

    >>> calibrate_steps(epsilon=2.6, delta=1e-5, sampling_prob=1.0, noise_multiplier=5.0)
    10
    """
    before = spent or Ledger(adjacency=adjacency)
    positive("noise_multiplier", noise_multiplier)

    def after(steps: int) -> Ledger:
        return before.record(Event(sampling_prob, noise_multiplier, steps)) if steps else before

    return affordable_steps(after, epsilon=epsilon, delta=delta, limit=whole("limit", limit, minimum=1), method=method)


def calibrate_batch_size(
    *,
    epsilon: float,
    delta: float,
    dataset_size: int,
    noise_multiplier: float,
    num_steps: int,
    adjacency: Adjacency = "add_remove",
    spent: Ledger | None = None,
    method: str = "auto",
) -> int:
    """The largest expected batch size with which `num_steps` steps stay within (epsilon, delta).

    Args:
        epsilon, delta, num_steps, adjacency, spent, method: see `calibrate_noise`.
        dataset_size: number of records. noise_multiplier: > 0.

    Raises:
        UnreachableBudget: not even batches of one record fit.

    >>> calibrate_batch_size(epsilon=30.0, delta=1e-5, dataset_size=100, noise_multiplier=5.0, num_steps=10)
    100
    """
    n = whole("dataset_size", dataset_size, minimum=1)
    before = spent or Ledger(adjacency=adjacency)

    def with_batch(size: int) -> Ledger:
        return before.record(Event(size / n, positive("noise_multiplier", noise_multiplier), num_steps))

    size = affordable_steps(with_batch, epsilon=epsilon, delta=delta, limit=n, method=method)
    if size == 0:
        raise UnreachableBudget(
            f"Batches of one record exceed epsilon={epsilon:g} at delta={delta:g} with noise_multiplier="
            f"{noise_multiplier:g} and {num_steps} steps. Take more noise or fewer steps."
        )
    return size


@dataclass(frozen=True)
class Remaining:
    """What is left of a budget. Steps, because epsilon is not additive.

    Args:
        num_steps: further steps that fit. epsilon_spent: so far. epsilon_left: target minus spent; not what the next
            steps may "cost".
    """

    num_steps: int
    epsilon_spent: float
    epsilon_left: float


def remaining(
    ledger: Ledger, *, epsilon: float, delta: float, event: Event, limit: int = 10**7, method: str = "auto"
) -> Remaining:
    """What is left of (epsilon, delta) after a ledger, in steps like `event`.

    Args:
        ledger: spent so far. epsilon, delta, method: the budget. event: one step of the kind to come (its num_steps
            must be 1). limit: the number of steps is at most this.

    >>> remaining(Ledger((Event(1.0, 5.0, 4),)), epsilon=2.6, delta=1e-5, event=Event(1.0, 5.0, 1)).num_steps
    6
    """
    if event.num_steps != 1:
        raise fail("an event of one step", "event.num_steps", event.num_steps)
    spent = epsilon_of(ledger, delta, method).epsilon
    steps = calibrate_steps(
        epsilon=epsilon,
        delta=delta,
        sampling_prob=event.sampling_prob,
        noise_multiplier=event.noise_multiplier,
        adjacency=ledger.adjacency,
        spent=ledger,
        limit=limit,
        method=method,
    )
    return Remaining(steps, spent, max(epsilon - spent, 0.0))
