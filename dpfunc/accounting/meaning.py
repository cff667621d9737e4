"""Meanings of values of epsilon and delta, as rows of a table."""

from __future__ import annotations

import math
from typing import NamedTuple

from dpfunc._utils.validation import integer, non_negative, open_unit, real


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
        0.1,
        "delta from 1/(10n) to 1/(2n): giving away some record once in ten runs satisfies it. Prefer a smaller one.",
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
    return min(1e-5, 0.05 / integer("dataset_size", dataset_size, minimum=2))


def explain_delta(delta: float, dataset_size: int) -> DeltaMeaning:
    """Describe a delta for a number of records by the first row of the table that is not above it.

    Args:
        delta: 0 < delta < 1. dataset_size: number of records, >= 1.

    >>> explain_delta(1e-3, 1000).ratio
    1.0
    """
    ratio = open_unit("delta", delta) * integer("dataset_size", dataset_size, minimum=1)
    real("delta * dataset_size", ratio, "a finite product")
    words = next((row.words for row in DELTA_TABLE if ratio >= row.ratio * (1 - 1e-9)), DELTA_TABLE[-1].words)
    return DeltaMeaning(ratio, words)
