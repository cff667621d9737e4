"""Numbers that differ between positions of the batch, or come from another position, are no constants of a row."""

from __future__ import annotations

import pytest
import torch
from row_losses import DOUBLE, batch, head, params
from torch.nn import functional as F

from dpfunc.engines import bookkeeping, loop
from dpfunc.errors import UnsupportedModel


def column(x, start=0.0):
    return torch.arange(start, start + len(x), dtype=DOUBLE)[:, None]


def behind_one_more(x):
    rows = torch.zeros(len(x) + 1, 2, dtype=DOUBLE)
    rows[1:] = x
    return x + rows[:-1]


def result_behind_one_more(x):
    rows = torch.zeros(len(x) + 1, 2, dtype=DOUBLE)
    torch.add(x.detach(), 1, out=rows[1:])
    return x + rows[:-1]


def overlapping_zeros(x):
    """They are as many as the memory has numbers, and leave three of them as they are."""
    mean = (0 * x.detach() + x.detach().mean(0)).clone()
    mean.as_strided((4, 2), (1, 1)).zero_()
    return x * (1 + mean.view(-1)[-2:])


def draws_by_position(x):
    return x + torch.zeros_like(column(x)).bernoulli_((column(x) > 0).to(DOUBLE))


def normal_draws_by_position(x):
    return x + torch.normal(column(x), torch.zeros_like(column(x)), out=torch.zeros_like(column(x)))


def draws_below_a_number(x):
    return x + torch.randint_like(torch.zeros(1, 2, dtype=DOUBLE), (1000 * x.detach().max()).long() + 2000)


def draws_that_are_compared(x):
    draws = torch.rand(len(x), 1, dtype=DOUBLE)
    return x * (1 + (draws == draws.t()).to(DOUBLE)[:, :2])


def draws_of_a_seed(x):
    torch.manual_seed(0)
    return x + torch.rand(len(x), 1, dtype=DOUBLE)


def draws_of_a_seeded_generator(x):
    return x + torch.rand(len(x), 1, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))


def equations(x):
    return torch.linalg.solve(torch.diag_embed(x * x + 1), torch.arange(2.0 * len(x), dtype=DOUBLE).view(len(x), 2))


def least_squares(x):
    right = torch.arange(2.0 * len(x), dtype=DOUBLE).view(len(x), 2)
    return x + torch.linalg.lstsq(torch.diag_embed(x.detach() ** 2 + 1), right).solution


def written_into_the_first_row(x):
    return x.scatter(1, torch.zeros(1, 1, dtype=torch.int64), 3.0)


def added_to_the_first_row(x):
    return x.scatter_add(1, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=DOUBLE))


def distances_to_a_batch(x):
    """Samples are on the second axis of the distances (4, 4, 2), as many as there are on the first."""
    return x + torch.cdist(x, torch.arange(16.0, dtype=DOUBLE).view(4, 2, 2)).sum(1)


def signs_of_zeros(x):
    zeros = torch.zeros(len(x), 1, dtype=DOUBLE)
    zeros[0] = -0.0
    return x + torch.atan2(zeros, -x.abs())


def equal_elements(x):
    """torch sorts all of them, and finds an element among the others."""
    return x * (1 + torch.isin((x[:, 0] > 0).long() + 100, torch.arange(30), assume_unique=True)[:, None])


def joined_targets(x):
    scores = torch.cat([x, 2 * x[:, :1]], 1).expand(6, len(x), 3).log_softmax(-1)
    ones = torch.ones(len(x), dtype=torch.int64)
    loss_B = F.ctc_loss(scores, (x[:, 0] > 0).long() + 1, 6 * ones, (x[:, 0] < 99).long(), reduction="none")
    return x * loss_B[:, None]


def joined_targets_of_lengths(x):
    scores = torch.cat([x, 2 * x[:, :1]], 1).expand(6, len(x), 3).log_softmax(-1)
    loss_B = F.ctc_loss(scores, (x[:, 0] > 0).long() + 1, [6] * 4, [2, 0, 1, 1], reduction="none")
    return x * loss_B[:, None]


def number_copied_into_the_first_row(x):
    rows = x.clone()
    rows[:1].copy_(2)
    return rows


MIXING = [
    behind_one_more, result_behind_one_more, overlapping_zeros, draws_by_position, normal_draws_by_position,
    draws_below_a_number, draws_that_are_compared, draws_of_a_seed, draws_of_a_seeded_generator, equations,
    least_squares, written_into_the_first_row, added_to_the_first_row, distances_to_a_batch, signs_of_zeros, equal_elements, joined_targets,
    joined_targets_of_lengths, number_copied_into_the_first_row,
]  # fmt: skip


@pytest.mark.parametrize("make", MIXING, ids=lambda make: make.__name__)
def test_positions_are_no_constants(make):
    with torch.random.fork_rng(), pytest.raises(UnsupportedModel):
        bookkeeping()(lambda p, x: head(make(x), p), params(), batch(0))


def own_part_of_a_memory(x):
    rows = torch.zeros(len(x) + 1, 2, dtype=DOUBLE)
    rows[1:] = x
    return rows[1:]


def all_but_the_first_time(x):
    times = torch.zeros(3, len(x), 2, dtype=DOUBLE)
    times[1:] = x
    return times.sum(0)


HONEST = [
    own_part_of_a_memory,
    all_but_the_first_time,
    lambda x: torch.linalg.solve(torch.diag_embed(x * x + 1), x),
    lambda x: torch.linalg.solve(torch.diag_embed(x * x + 1), torch.ones(len(x), 2, dtype=DOUBLE)),
    lambda x: x.scatter(1, torch.zeros(len(x), 1, dtype=torch.int64), 3.0),
    lambda x: x + x.clone().copy_(2),
]


@pytest.mark.parametrize("make", HONEST)
def test_rows_at_their_own_positions_are_proven(make):
    def loss_fn(p, x):
        return head(make(x), p)

    found = bookkeeping()(loss_fn, params(), batch(0)).sq_norms()
    torch.testing.assert_close(found, loop()(loss_fn, params(), batch(0)).sq_norms())


@pytest.mark.parametrize("name", ["full", "detach", "pointwise"])
def test_operations_of_others_are_not_those_of_torch(name):
    """Neither by their name nor by what they say of themselves."""
    library = torch.library.Library(f"dpfunc_test_{name}", "DEF")
    library.define(f"{name}(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,) if name == "pointwise" else ())
    library.impl(name, lambda x: x.mean(0, keepdim=True).repeat(len(x), 1), "CPU")
    operation = getattr(getattr(torch.ops, f"dpfunc_test_{name}"), name)
    with pytest.raises(UnsupportedModel, match="influence each other"):
        bookkeeping()(lambda p, x: head(x + operation(x.detach()), p), params(), batch(0))


def test_axes_in_a_tensor_are_not_remembered():
    """The shapes are those of the step before: the axes that are summed follow from numbers."""
    matrix, engine = torch.arange(16.0, dtype=DOUBLE).view(4, 4), bookkeeping()

    def loss_of(axes):
        return lambda p, x: head(torch.tensordot(x, matrix, dims=torch.tensor(axes))[:, :2], p)

    rows = batch(0).repeat(1, 2)
    engine(loss_of([[1], [0]]), params(), rows)
    with pytest.raises(UnsupportedModel):
        engine(loss_of([[0], [0]]), params(), rows)


def test_a_generator_may_go_back_as_checkpoints_do():
    def loss_fn(p, x):
        state = torch.get_rng_state()
        first = F.dropout(x, 0.5)
        torch.set_rng_state(state)
        return head(first + F.dropout(x, 0.5), p)

    assert not bookkeeping(unproven="audit")(loss_fn, params(), batch(0)).evidence.doubts
