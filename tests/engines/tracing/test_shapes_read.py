"""Shapes that follow from values of the batch give Python a number of it, however Python gets to know them."""

from __future__ import annotations

import pytest
import torch
from row_losses import DOUBLE, batch, head, params
from torch.nn import functional as F

from dpfunc.engines import bookkeeping, loop
from dpfunc.errors import UnsupportedModel


def counts(x):
    return (5 * x[:, 0]).long().abs()


def selected(x):
    return x.detach()[x[:, 0] > 0]


def matrices(x):
    """Of rank 2, or 1 where the first number of a row is not positive."""
    one = torch.stack([x[:, 0], x[:, 1], torch.ones_like(x[:, 0])], 1)
    return torch.stack([one, one.flip(1) * (x[:, :1] > 0)], 2).detach()


ONE = torch.ones(1, 1, dtype=DOUBLE)
READS = {
    "as many counts as the largest value": lambda x: len(torch.bincount(counts(x))),
    "as many positions as the counts say": lambda x: torch.repeat_interleave(counts(x)).shape[0],
    "as many copies as the counts say": lambda x: len(torch.repeat_interleave(torch.ones(len(x)), counts(x))),
    "numbers of a sparse tensor": lambda x: x.detach().clamp(min=0).to_sparse()._nnz(),
    "positions of a sparse tensor": lambda x: x.detach().clamp(min=0).to_sparse().indices().shape[1],
    "different values": lambda x: len(torch._unique(counts(x))[0]),
    "bytes": lambda x: selected(x).nbytes,
    "turns of a loop": lambda x: sum(1 for _ in selected(x)),
    "parts": lambda x: len(selected(x).unbind()),
    "parts of one row": lambda x: len(torch.cat([selected(x), torch.zeros(1, 2, dtype=DOUBLE)]).split(1)),
    "a comparison of shapes": lambda x: torch.is_same_size(selected(x), torch.zeros(2, 2)),
    "the order in memory": lambda x: selected(x).t().is_contiguous(),
    "torch.numel": lambda x: torch.numel(selected(x)),
    "constants of the same shape": lambda x: ONE.expand_as(selected(x)[:, :1]).sum(),
    "constants beside it": lambda x: torch.broadcast_tensors(torch.ones(1, 2, dtype=DOUBLE), selected(x))[0].sum(),
    "a grid": lambda x: torch.meshgrid(torch.ones(2, dtype=DOUBLE), selected(x)[:, 0], indexing="ij")[0].sum(),
    "residuals only where all ranks are full": lambda x: torch.linalg.lstsq(
        matrices(x), torch.ones(len(x), 3, 1, dtype=DOUBLE), driver="gelsd"
    ).residuals.numel(),
    "as many classes as a number says": lambda x: F.one_hot(torch.zeros(4).long(), counts(x).max() + 1).shape[1],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_shape_is_a_number_of_the_batch(read):
    with pytest.raises(UnsupportedModel, match="influence each other"):
        bookkeeping()(lambda p, x: head(x * (1 + read(x)), p), params(), batch(0))


@pytest.mark.parametrize(
    "count", [lambda x: torch.bincount(counts(x).clamp(max=9), minlength=10), lambda x: selected(x).dtype.itemsize]
)
def test_what_is_the_same_for_each_row_is_no_such_number(count):
    def loss_fn(p, x):
        return head(x * len(torch.ones(10 if isinstance(count(x), int) else count(x).shape[0])), p)

    found = bookkeeping()(loss_fn, params(), batch(0)).sq_norms()
    torch.testing.assert_close(found, loop()(loss_fn, params(), batch(0)).sq_norms())
