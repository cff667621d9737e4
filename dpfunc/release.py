"""A statistic of private records that may be published, and what it costs.

May import: checkpoint and below. Privacy depends on it: yes.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dpfunc._utils.validation import expect, named, positive
from dpfunc.accounting import Ledger
from dpfunc.checkpoint import Journal
from dpfunc.clipping import Flat
from dpfunc.plan import Plan
from dpfunc.rng import Key
from dpfunc.sampling import Poisson
from dpfunc.step import make_dp_step
from dpfunc.types import Adjacency, Batch, Params


class ReleasedMean(NamedTuple):
    """A mean that may be published; see `release_mean`.

    Args:
        mean: of the shape of one value, and of their dtype. std: standard deviation of the noise on each of its
            numbers, a public fact. ledger: what was spent, earlier releases included.
        divided_by: the `dataset_size` that was given, which the sum is divided by however many values there were: the
            mean of fewer is smaller by as much, and their number stays private.
    """

    mean: Tensor
    std: float
    ledger: Ledger
    divided_by: int


@named
def release_mean(
    values: Tensor,
    *,
    bound: float,
    noise_multiplier: float,
    dataset_size: int,
    delta: float,
    key: Key,
    ledger: Ledger | None = None,
    epsilon: float | None = None,
    journal: Path | str | None = None,
    adjacency: Adjacency = "add_remove",
) -> ReleasedMean:
    """The mean of one value a record, with noise: a loss, an accuracy, a share of records, that may be published.

    `(sum_i clip(value_i) + noise_multiplier * sensitivity * N(0, 1)) / dataset_size`. It is one private step in which
    every record takes part (`make_dp_step`): the same clipping, noise, checks and journal.
    Dwork & Roth 2014, The Algorithmic Foundations of Differential Privacy, appendix A.

    Args:
        values: (n,) or (n, ...), one row a record, computed from this record and from what was released before.
        bound: largest norm of a row, > 0, a public number; longer rows are scaled down to it. 1 for an accuracy.
        noise_multiplier: standard deviation of the noise / sensitivity, > 0.
        dataset_size: number of records n, or a public bound on it; the sum is divided by it.
        delta: 0 < delta < 1 / dataset_size.
        key: `secure_key()`, or `fold_in(key, "metric", number)` of one: a key serves one release.
        ledger: what was spent on the same records, e.g. `state.ledger`. None: nothing.
        epsilon: budget for all, > 0. None: no budget, only accounting.
        journal: path of the journal of the runs on these records, which then counts this release too. A training run
            is ended before: the next one begins with the ledger that is returned.
        adjacency: which data sets are neighbours.

    Returns:
        `ReleasedMean(mean, std, ledger, divided_by)`. Released.

    Raises:
        InvalidArgument: an argument outside its domain, or more values than `dataset_size`.
        BudgetExhausted: it does not fit into the budget. LedgerConflict: the ledger lacks runs of the journal.

    Guarantees:
        tests/test_release.py: the scale of the noise (test_noise_has_the_promised_scale), one record moves the mean by
        at most bound / n (test_one_record_moves_the_mean_by_its_bound), also one of very many, since sums are float64
        (test_sums_are_float64); journal and ledger count it (test_the_journal_counts_it); no value and no number of
        records is an error (test_no_record_is_an_error).

    >>> import torch
    >>> from dpfunc.rng import secure_key
    >>> correct = torch.tensor([1.0, 0.0, 1.0, 1.0] * 250)
    >>> released = release_mean(correct, bound=1.0, noise_multiplier=4.0, dataset_size=1000, delta=1e-5,
    ...     key=secure_key())
    >>> released.std
    0.004
    >>> released.ledger
    Ledger(1 steps, add_remove: (q=1, sigma=4) x 1)
    """
    limit, multiplier = positive("bound", bound), positive("noise_multiplier", noise_multiplier)
    expect(
        isinstance(values, Tensor) and values.ndim and values.is_floating_point(),
        "values to be a floating tensor with one row a record", "values", type(values).__name__,
    )  # fmt: skip
    plan = Plan(
        sampler=Poisson(dataset_size, 1.0), clip=Flat(limit), noise_multiplier=multiplier, num_steps=1,
        delta=delta, epsilon=epsilon, adjacency=adjacency, spent=ledger,
    )  # fmt: skip
    step = make_dp_step(_times, plan, engine="vmap", journal=None if journal is None else Journal(journal, plan))
    # float64: values of many records often have one sign, and a float32 sum of 2e7 of them moves by 2 where one moves 1
    wide = _within(values.detach().to("cpu", torch.float64), limit)
    params = {"mean": wide.new_zeros(wide.shape[1:])}
    size = plan.sampler.dataset_size
    count = len(wide) if len(wide) != size else None
    grads, state, _ = step(params, wide, step.init(params, key, num_records=count))
    sensitivity = limit * (2 if adjacency == "replace_one" else 1)
    return ReleasedMean(grads["mean"].to(values), multiplier * sensitivity / size, state.ledger, size)


def _within(values: Tensor, limit: float) -> Tensor:
    """Rows scaled down until their largest number is at most the bound; their direction stays.

    Clipping gives them that length or less anyway, and the norm of one as it is could be beyond float32.
    """
    largest = values.abs().reshape(len(values), values[:1].numel()).amax(1) if values.numel() else values.new_zeros(0)
    largest = largest.reshape(-1, *[1] * (values.ndim - 1))
    return torch.where(largest > limit, values / largest * limit, values) if values.numel() else values


def _times(params: Params, batch: Batch) -> Tensor:
    """A loss whose gradient is the value of the record."""
    values: Tensor = batch
    return (values * params["mean"]).flatten(1).sum(1) if values.ndim > 1 else values * params["mean"]
