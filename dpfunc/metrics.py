"""Metrics of private records that may be published: recall of each class, ROC curves, from one table of noisy counts.

May import: budget, evidence, rehearsal, release and below. Privacy depends on it: yes.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc._utils.validation import expect, integer, named
from dpfunc.accounting import Ledger
from dpfunc.errors import InvalidArgument
from dpfunc.release import release_mean
from dpfunc.rng import Key
from dpfunc.types import Adjacency

_HIDDEN = 3.0  # standard deviations of the noise of a row's count, below which a share of it says nothing


class ReleasedCounts(NamedTuple):
    """A table of counts that may be published; see `release_counts`.

    Args:
        counts: number of records in each cell, with noise; may be below 0. std: standard deviation of the noise of each
            count, a public fact. ledger: what was spent, earlier releases included.
    """

    counts: Tensor
    std: float
    ledger: Ledger


class Shares(NamedTuple):
    """Shares of rows of a released table, and the standard deviation of their noise; see `shares`."""

    share: Tensor
    std: Tensor


@named
def release_counts(
    cells: Tensor,
    *,
    shape: Sequence[int],
    noise_multiplier: float,
    dataset_size: int,
    delta: float,
    key: Key,
    ledger: Ledger | None = None,
    epsilon: float | None = None,
    journal: Path | str | None = None,
    adjacency: Adjacency = "add_remove",
) -> ReleasedCounts:
    """Number of records in each cell of a table, with noise: what recall, precision and ROC curves are made of.

    `counts[c] + noise_multiplier * sensitivity * N(0, 1)`. Each record is in one cell, so one record more changes the
    whole table by 1, however many cells it has: one release, of the cost of one number. It is `release_mean` of the
    indicator of the cell, times `dataset_size`. Dwork & Roth 2014, The Algorithmic Foundations of Differential Privacy,
    section 3.3 (histogram queries) and appendix A.

    Args:
        cells: (n, len(shape)), whole numbers: the place of each record, from it and what was released before.
        shape: of the table, public: e.g. (classes, 2), or (2, thresholds + 1).
        noise_multiplier, dataset_size, delta, key, ledger, epsilon, journal, adjacency: see `release_mean`. The number
            of records may be below `dataset_size`: counts are not divided by it.

    Returns:
        `ReleasedCounts(counts, std, ledger)`, counts of this shape. Released.

    Raises:
        InvalidArgument: a place outside of the table, or what `release_mean` refuses; nothing was spent.
        BudgetExhausted, LedgerConflict: see `release_mean`.

    Guarantees:
        tests/test_metrics.py: the scale of the noise (test_noise_of_counts_has_the_promised_scale), one record changes
        the table by 1 (test_one_record_changes_the_table_by_one), one event in ledger and journal
        (test_a_table_costs_what_one_number_costs).

    >>> from dpfunc.rng import secure_key
    >>> labels = torch.tensor([0, 1] * 500)
    >>> right = torch.ones(1000)
    >>> released = release_counts(torch.stack([labels, right.long()], 1), shape=(2, 2), noise_multiplier=4.0,
    ...     dataset_size=1000, delta=1e-5, key=secure_key())
    >>> released.std, released.counts.shape, released.ledger
    (4.0, torch.Size([2, 2]), Ledger(1 steps, add_remove: (q=1, sigma=4) x 1))
    """
    sides = tuple(integer("shape", side, minimum=1) for side in shape)
    whole = isinstance(cells, Tensor) and not (cells.is_floating_point() or cells.is_complex())
    expect(
        whole and cells.ndim == 2 and cells.shape[1] == len(sides),
        f"whole numbers of shape (n, {len(sides)}), a place in the table for each record", "shape of a record",
        tuple(getattr(cells, "shape", ())[1:]),
    )  # fmt: skip
    places = cells.long().cpu()
    if bool(((places < 0) | (places >= torch.tensor(sides))).any()):
        raise InvalidArgument(
            f"Expected places in a table of shape={sides}, got cells outside of it. Give a class or a bin that "
            "is not known a cell of its own. Nothing was spent."
        )
    steps = torch.tensor([math.prod(sides[axis + 1 :]) for axis in range(len(sides))])
    values = F.one_hot((places * steps).sum(1), math.prod(sides)).double()
    mean = release_mean(
        values, bound=1.0, noise_multiplier=noise_multiplier, dataset_size=dataset_size, delta=delta, key=key,
        ledger=ledger, epsilon=epsilon, journal=journal, adjacency=adjacency,
    )  # fmt: skip
    counts = (mean.mean.reshape(sides) * mean.divided_by).float()
    return ReleasedCounts(counts, mean.std * mean.divided_by, mean.ledger)


def shares(released: ReleasedCounts) -> Shares:
    """Of each row of a released table of C columns, the share of its records in the columns from k on, k = 1 .. C - 1.

        share[r, k] = sum_{c >= k} counts[r, c] / sum_c counts[r, c],  within 0..1
        std[r, k]   = std sqrt((1 - share)^2 (C - k) + share^2 k) / sum_c counts[r, c]       (the delta method)

    Columns (wrong, right) of a row for each class: the recall of each class. Columns of bins of a score, in rows
    (negative, positive): false and true positives at each threshold, which is a ROC curve. It reads what is released,
    so it costs nothing.

    Args:
        released: of `release_counts`, counts (R, C), C >= 2.

    Returns:
        `Shares(share, std)`, both (R, C - 1). NaN in rows whose count is below 3 standard deviations of its own noise:
        of a class that is so rare, nothing can be said at this noise.

    Raises:
        InvalidArgument: a table of another form.

    Guarantees:
        tests/test_metrics.py: exact without noise (test_shares_are_recall_and_roc), std is that of many releases
        (test_the_std_of_a_share_is_that_of_many_releases), rare rows (test_a_row_that_noise_hides_has_no_share).

    >>> shares(ReleasedCounts(torch.tensor([[10.0, 90.0], [30.0, 10.0]]), 1.0, Ledger())).share
    tensor([[0.9000],
            [0.2500]])
    """
    counts = released.counts
    expect(counts.ndim == 2 and counts.shape[1] > 1, "counts (R, C), C >= 2", "counts", tuple(counts.shape))
    columns = counts.shape[1]
    total = counts.sum(1, keepdim=True)
    total = torch.where(total > _HIDDEN * math.sqrt(columns) * released.std, total, math.nan)
    above = counts.flip(1).cumsum(1).flip(1)[:, 1:]
    share = (above / total).clamp(0, 1)
    below = torch.arange(1, columns)
    noise = (1 - share).square() * (columns - below) + share.square() * below
    return Shares(share, released.std * noise.sqrt() / total)
