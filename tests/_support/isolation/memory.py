"""Numbers by another way than operations on rows: positions, shapes that follow from values, reads and writes of torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from isolation.cases import DOUBLE, D, case, squares, table
from isolation.forward import written

position = case("memory: positions in the batch")


def column(h):
    return torch.arange(float(len(h)), dtype=DOUBLE)[:, None]


def numbered(h):
    """Right sides that differ from row to row."""
    return torch.arange(float(D * len(h)), dtype=DOUBLE).view(len(h), D)


@position
def result_written_one_row_further(h, b, p):
    rows = torch.zeros(len(h) + 1, D, dtype=DOUBLE)
    torch.add(h.detach(), 1, out=rows[1:])
    return h + rows[:-1]


@position
def zeroed_by_overlapping_strides(h, b, p):
    mean = (0 * h.detach() + h.detach().mean(0)).clone()
    mean.as_strided((2 * len(h), 2), (1, 1)).zero_()
    return h * (1 + mean.view(-1)[-2:].sum())


@position
def signs_of_zeros(h, b, p):
    zeros = torch.zeros(len(h), 1, dtype=DOUBLE)
    zeros[0] = -0.0
    return h + torch.atan2(zeros, -h.abs())


@position
def joined_targets(h, b, p):
    scores = torch.cat([h, 2 * h[:, :1]], 1).expand(6, len(h), D + 1).log_softmax(-1)
    lengths = (b.y[:, 0] < 99).long() * (column(h)[:, 0] > 0)
    targets = (b.y[:, 0] > 0).long() + 1
    losses = F.ctc_loss(scores, targets, torch.full((len(h),), 6), lengths, reduction="none")
    return squares(h) * losses


table("memory: positions in the batch", {
    "strides in place": lambda h, b, p: h + (h * 1.0).as_strided_((D,), (1,)),
    "draws of a seeded generator": lambda h, b, p: h + torch.rand(len(h), 1, generator=torch.Generator().manual_seed(0)),
    "equations for the batch": lambda h, b, p: torch.linalg.solve(torch.diag_embed(h * h + 1), numbered(h)),
    # torch broadcasts the axis of rows against another one
    "matrices and sides of different rank": lambda h, b, p: torch.linalg.solve(torch.eye(D) * 3 + h.mT @ h, h[:, :, None])[..., 0],
    "scattered into the first row": lambda h, b, p: h.scatter(1, torch.zeros(1, 1, dtype=torch.int64), 3.0),
    "number copied into the first row": lambda h, b, p: written(h, lambda rows: rows[:1].copy_(2)),
})  # fmt: skip
table("memory: own places", {
    "own part of a memory": lambda h, b, p: written(torch.zeros(len(h) + 1, D, dtype=DOUBLE), lambda rows: rows[1:].copy_(h))[1:],
    "own equations": lambda h, b, p: torch.linalg.solve(torch.diag_embed(h * h + 1), h),
    "scattered into own row": lambda h, b, p: h.scatter(1, torch.zeros(len(h), 1, dtype=torch.int64), 3.0),
    "memory that is filled first": lambda h, b, p: torch.empty_like(h).fill_(2.0) * h,
}, honest=True)  # fmt: skip


def counts(x):
    return (5 * x[:, 0]).long().abs()


def selected(x):
    return x.detach()[x[:, 0] > 0]


def _written_in_a_list(x):
    weights = torch.ones(1, D, dtype=DOUBLE)
    torch._foreach_add_([weights], [x.mean(0, keepdim=True)])
    return weights


def _seen_by(run):
    """What a function of Python was called with at last: `run(see)`."""
    seen = []
    run(lambda number: seen.append(float(number)) or number)
    return seen[-1]


def _saved(x, see):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: see(t.detach().flatten()[0]) * 0 + t, lambda t: t):
        x.clone().requires_grad_().sin()


def _distance(x, see):
    distance = lambda one, other: see(one.detach().sum()) * 0 + (one - other).sum(1)
    F.triplet_margin_with_distance_loss(x, x, x, distance_function=distance, reduction="none")


def _said_by_an_error(x):
    try:
        x[x[:, 0] > 0].narrow(0, 0, 3)
    except RuntimeError:
        return 2.0
    return 1.0


ONES = torch.ones(1, D, dtype=DOUBLE)
READS = {
    "as many counts as the largest value": lambda x: len(torch.bincount(counts(x))),
    "as many positions as the counts say": lambda x: torch.repeat_interleave(counts(x)).shape[0],
    "as many copies as the counts say": lambda x: len(torch.repeat_interleave(torch.ones(len(x)), counts(x))),
    "numbers of a sparse tensor": lambda x: x.detach().clamp(min=0).to_sparse()._nnz(),
    "different values": lambda x: len(torch._unique(counts(x))[0]),
    "bytes": lambda x: selected(x).nbytes,
    "turns of a loop": lambda x: sum(1 for _ in selected(x)),
    "parts": lambda x: len(selected(x).unbind()),
    "a comparison of shapes": lambda x: 1.0 + torch.is_same_size(selected(x), torch.zeros(1, D)),
    "torch.numel": lambda x: torch.numel(selected(x)),
    "constants of the same shape": lambda x: ONES[:, :1].expand_as(selected(x)[:, :1]).sum(),
    "constants beside it": lambda x: torch.broadcast_tensors(ONES, selected(x))[0].sum(),
    "as many classes as a number says": lambda x: F.one_hot(torch.zeros(4).long(), counts(x).max() + 1).shape[1],
    "a shape that an argument gets": lambda x: torch.nonzero(x > 0, out=torch.empty(0, dtype=torch.int64)).shape[0],
    "a tensor of a list": lambda x: torch.tensor([x.mean(), x.amax(), x.sum()], dtype=DOUBLE),
    "an old constructor": lambda x: torch.DoubleTensor([x.mean(), x.amax(), x.sum()]),
    "an index of two numbers": lambda x: torch.arange(81.0, dtype=DOUBLE).view(9, 9)[x.argmax() % 9, x.argmin() % 9],
    "split at a number": lambda x: torch.tensor_split(torch.ones(1, 9), (x.argmax()[None] % 8 + 1).cpu(), dim=1)[0].sum(),
    "contracted along a number": lambda x: torch.tensordot(
        torch.arange(9.0).view(3, 3), torch.ones(3), dims=torch.stack([x.argmax() // D % 2, 0 * x.argmax()]).view(2, 1)),
    "written in a list of tensors": _written_in_a_list,
    "written by a Python function": lambda x: ONES.clone().map_(x.mean(0, keepdim=True), lambda old, new: new),
    "read by a Python function": lambda x: _seen_by(lambda see: x.mean(0).apply_(see)),
    "read by hooks of saved tensors": lambda x: _seen_by(lambda see: _saved(x, see)),
    "read by a distance of the user": lambda x: _seen_by(lambda see: _distance(x, see)),
    "said by an error": _said_by_an_error,
}  # fmt: skip
table("memory: reads", {
    f"read: {name}": lambda h, b, p, read=read: h * (1 + read(b.y)) for name, read in READS.items()
})  # fmt: skip
