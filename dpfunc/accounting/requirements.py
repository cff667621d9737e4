"""Requirements for a privacy target: steps, sampling, noise, and a sensible batch size; and what a target means.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from dpfunc._utils.validation import expect, integer, non_negative, open_unit, positive, real, total_steps
from dpfunc.accounting._gaussian import as_float
from dpfunc.accounting.accountant import Guarantee
from dpfunc.accounting.calibration import calibrate_noise
from dpfunc.accounting.ledger import schedule_ledger
from dpfunc.errors import InvalidArgument

_MOST_SIZES = 9  # beside n
_NEAR_BEST = 1.1

_GUIDANCE = (
    "epsilon does not depend on the clip norm: noise is scaled with it. Choose the clip norm for utility.",
    "At a fixed noise multiplier and number of epochs, larger batches cost MORE epsilon, not less.",
    "At a fixed epsilon, larger batches need a larger noise multiplier, yet noise relative to the summed signal, "
    "sigma / batch size, falls: each step is cleaner, and there are fewer of them.",
    "Recipes (dpfunc.recipes) follow this: a linear head takes half of the records in each of 200 to 400 steps.",
    "delta must be below 1 / number of records: a mechanism that publishes one random record has delta = 1/n.",
    "There is no closed form for epsilon under sampling: these numbers come from a numerical accountant.",
    "They hold for Poisson sampling. Shuffled batches have no such guarantee; account each shuffled epoch as one "
    "step with sampling_prob = 1.",
)


@dataclass(frozen=True)
class BatchChoice:
    """One batch size at the same epochs and the same epsilon.

    Args:
        batch_size: expected batch size B. sampling_prob: B / n. total_steps: `ceil(epochs n / B)`.
        noise_multiplier: the least that meets the target.
        noise_per_step: noise multiplier / B, in units of the clip norm: how far one averaged gradient is off.
        noise_per_run: noise multiplier / (B sqrt(steps)), the same for the average over all steps.
    """

    batch_size: int
    sampling_prob: float
    total_steps: int
    noise_multiplier: float
    noise_per_step: float
    noise_per_run: float


@dataclass(frozen=True)
class Requirements:
    """Result of `privacy_requirements`: the request, and the settings that meet the target.

    Args:
        dataset_size, batch_size, epochs, target_epsilon: as asked. delta: as asked, or suggested.
        sampling_prob, total_steps, noise_multiplier: of this batch size, see `BatchChoice`. guarantee: of them.
        recommended_batch_size: see `privacy_requirements`. choices: the sizes compared, and batch_size, ascending.
        guidance: what to keep in mind, in sentences.
    """

    dataset_size: int
    batch_size: int
    epochs: float
    target_epsilon: float
    delta: float
    sampling_prob: float
    total_steps: int
    noise_multiplier: float
    guarantee: Guarantee
    recommended_batch_size: int
    choices: tuple[BatchChoice, ...]
    guidance: tuple[str, ...]


def privacy_requirements(
    *, dataset_size: int, batch_size: int, epochs: float, target_epsilon: float, delta: float | None = None
) -> Requirements:
    """Steps, sampling probability, noise and a batch size for a privacy target, under Poisson sampling.

    Args:
        dataset_size: number of records n, >= 2. batch_size: expected batch size, 1..n. epochs: > 0.
        target_epsilon: > 0, for one record added or removed. delta: 0 < delta < 1 / n; None: `min(1e-5, 1 / (20 n))`.

    Returns:
        `Requirements`, from public facts only. The recommended batch size is the smallest power of two compared, from 1
        to n, whose noise over the run is within 10 % of the least one at the same epochs and epsilon; or n.

    Raises:
        InvalidArgument: an argument outside its domain. UnreachableBudget: no noise meets the target.

    Guarantees:
        tests/accounting/test_requirements.py::test_no_step_is_lost_to_rounding,
        ::test_advice_does_not_depend_on_the_batch_size_asked_for.

    >>> need = privacy_requirements(dataset_size=1000, batch_size=32, epochs=3, target_epsilon=3.0)
    >>> need.total_steps, need.sampling_prob
    (94, 0.032)
    """
    n = integer("dataset_size", dataset_size, minimum=2)
    size = integer("batch_size", batch_size, minimum=1)
    expect(size <= n, f"batch_size <= dataset_size = {n}", "batch_size", batch_size)
    positive("epochs", epochs)
    target = positive("target_epsilon", target_epsilon)
    chosen = suggest_delta(n) if delta is None else open_unit("delta", delta)
    if chosen * n >= 1:
        raise InvalidArgument(
            f"Expected delta < 1 / dataset_size = {1 / n:.3g}, got delta={chosen:g}. A mechanism that publishes one "
            f"random record in full has delta = 1 / {n}. Choose e.g. delta={suggest_delta(n):.1g}."
        )
    apart = -(-n.bit_length() // _MOST_SIZES)  # of the powers of two that are compared
    sizes = sorted({*(2**power for power in range(0, n.bit_length(), apart)), n})
    rows = {b: _choice(n, b, epochs, target, chosen) for b in sorted({*sizes, size})}
    asked, most = rows[size], _NEAR_BEST * min(rows[b].noise_per_run for b in sizes)
    good = min(b for b in sizes if rows[b].noise_per_run <= most)
    ledger = schedule_ledger(asked.sampling_prob, asked.noise_multiplier, asked.total_steps)
    return Requirements(
        n, size, float(epochs), target, chosen, asked.sampling_prob, asked.total_steps, asked.noise_multiplier,
        guarantee=ledger.epsilon(chosen), recommended_batch_size=good, choices=tuple(rows.values()), guidance=_GUIDANCE,
    )  # fmt: skip


def _choice(n: int, size: int, epochs: float, target: float, delta: float) -> BatchChoice:
    q, steps = size / n, total_steps(n, size, epochs)
    sigma = calibrate_noise(epsilon=target, delta=delta, sampling_prob=q, num_steps=steps)
    return BatchChoice(size, q, steps, sigma, sigma / size, sigma / size / math.sqrt(steps))


class EpsilonMeaning(NamedTuple):
    """Limits that an epsilon sets for an attacker who knows everything but one record, apart from delta.

    Attributes:
        epsilon: the value.
        odds_factor: `e^epsilon`, the most by which the odds that the record took part can change.
        posterior: the most that a belief of 1/2 can become, `e^epsilon / (1 + e^epsilon)`.
        detection_at_1_percent: the most true positives of a test with 1 % false positives, at most 1.
        words: what it means, in a sentence.
    """

    epsilon: float
    odds_factor: float
    posterior: float
    detection_at_1_percent: float
    words: str


class DeltaMeaning(NamedTuple):
    """Meaning of a delta in words. `ratio` is delta times the number of records."""

    ratio: float
    words: str


_EPSILON_WORDS = (
    (0.1, "an observer learns next to nothing about whether a record took part"),
    (1.0, "a strong bound, on its own enough for most purposes"),
    (3.0, "a moderate bound; an observer who is sure can still be wrong"),
    (8.0, "a weak bound in theory; known attacks do far worse than it allows, which is evidence and no guarantee"),
    (20.0, "no useful bound on an observer's certainty; only attacks that were tried tell how much leaks"),
)

DELTA_TABLE: tuple[DeltaMeaning, ...] = (
    DeltaMeaning(1.0, "delta >= 1/n: publishing one random record in full satisfies it. Not acceptable."),
    DeltaMeaning(
        0.5, "delta from 1/(2n) to 1/n: publishing one record with probability 1/2 satisfies it. Not acceptable."
    ),
    DeltaMeaning(
        0.1, "delta from 1/(10n) to 1/(2n): giving away one record in ten runs satisfies it. Prefer a smaller one."
    ),
    DeltaMeaning(1e-3, "delta from 1/(1000n) to 1/(10n): the chance that some record is given away is below 10 %."),
    DeltaMeaning(0.0, "delta < 1/(1000n): it no longer matters next to epsilon."),
)


def explain_epsilon(epsilon: float) -> EpsilonMeaning:
    """Describe one value of epsilon in numbers and words.

    Args:
        epsilon: >= 0.

    >>> row = explain_epsilon(1.0)
    >>> print(f"{row.odds_factor:.2f} {row.posterior:.2f} {row.detection_at_1_percent:.3f}")
    2.72 0.73 0.027
    """
    value = non_negative("epsilon", epsilon)
    words = next((text for limit, text in _EPSILON_WORDS if value <= limit), _EPSILON_WORDS[-1][1])
    factor = math.exp(value) if value < 700 else math.inf
    return EpsilonMeaning(value, factor, 1 / (1 + math.exp(-value)), min(1.0, 0.01 * factor), words)


EPSILON_TABLE: tuple[EpsilonMeaning, ...] = tuple(explain_epsilon(limit) for limit, _ in _EPSILON_WORDS)


def suggest_delta(dataset_size: int) -> float:
    """`min(1e-5, 1 / (20 n))`: below 1/(10 n), where the chance that some record is given away is below 10 %.

    Args:
        dataset_size: number of records n, >= 2.

    >>> suggest_delta(60_000) * 60_000 < 1 / 10
    True
    """
    n = as_float(integer("dataset_size", dataset_size, minimum=2))
    return min(1e-5, positive("1 / (20 dataset_size)", 0.05 / n))


def explain_delta(delta: float, dataset_size: int) -> DeltaMeaning:
    """Describe a delta for a number of records by the first row of the table that is not above it.

    Args:
        delta: 0 < delta < 1. dataset_size: number of records, >= 1.

    >>> explain_delta(1e-3, 1000).ratio
    1.0
    """
    ratio = open_unit("delta", delta) * as_float(integer("dataset_size", dataset_size, minimum=1))
    real("delta * dataset_size", ratio, "a finite product")
    return DeltaMeaning(ratio, next(row.words for row in DELTA_TABLE if ratio >= row.ratio * (1 - 1e-9)))
