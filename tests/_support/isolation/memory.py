"""Numbers by another way than operations on rows: positions, shapes that follow from values, reads and writes of torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from isolation.cases import Built, D, add, case, features, params, squares, usual

DOUBLE = torch.float64
position = case("memory: positions in the batch")
own = case("memory: own places", honest=True)


def column(h):
    return torch.arange(float(len(h)), dtype=DOUBLE)[:, None]


@position
def result_written_one_row_further(p, b):
    h = features(p, b)
    rows = torch.zeros(len(h) + 1, D, dtype=DOUBLE)
    torch.add(h.detach(), 1, out=rows[1:])
    return squares(h + rows[:-1])


@position
def zeroed_by_overlapping_strides(p, b):
    h = features(p, b)
    mean = (0 * h.detach() + h.detach().mean(0)).clone()
    mean.as_strided((2 * len(h), 2), (1, 1)).zero_()
    return squares(h * (1 + mean.view(-1)[-2:].sum()))


@position
def strides_in_place(p, b):
    h = features(p, b)
    first = (h * 1.0).as_strided_((D,), (1,))
    return squares(h + first)


@position
def draws_of_a_seeded_generator(p, b):
    return squares(
        features(p, b) + torch.rand(len(b["y"]), 1, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    )


@position
def equations_for_the_batch(p, b):
    h = features(p, b)
    right = torch.arange(float(D * len(h)), dtype=DOUBLE).view(len(h), D)
    return squares(torch.linalg.solve(torch.diag_embed(h * h + 1), right))


@position
def least_squares_for_the_batch(p, b):
    h = features(p, b)
    right = torch.arange(float(D * len(h)), dtype=DOUBLE).view(len(h), D)
    return squares(h + torch.linalg.lstsq(torch.diag_embed(h.detach() ** 2 + 1), right).solution)


@position
def matrices_and_sides_of_different_rank(p, b):
    """torch broadcasts the axis of rows against another one."""
    h = features(p, b)
    left = torch.eye(D, dtype=DOUBLE) * 3 + h.mT @ h
    return squares(torch.linalg.solve(left, h[:, :, None])[..., 0])


@position
def scattered_into_the_first_row(p, b):
    return squares(features(p, b).scatter(1, torch.zeros(1, 1, dtype=torch.int64), 3.0))


@position
def signs_of_zeros(p, b):
    h = features(p, b)
    zeros = torch.zeros(len(h), 1, dtype=DOUBLE)
    zeros[0] = -0.0
    return squares(h + torch.atan2(zeros, -h.abs()))


@position
def number_copied_into_the_first_row(p, b):
    rows = features(p, b).clone()
    rows[:1].copy_(2)
    return squares(rows)


@position
def joined_targets(p, b):
    h = features(p, b)
    scores = torch.cat([h, 2 * h[:, :1]], 1).expand(6, len(h), D + 1).log_softmax(-1)
    ones = torch.ones(len(h), dtype=torch.int64)
    targets = (b["y"][:, 0] > 0).long() + 1
    losses = F.ctc_loss(scores, targets, 6 * ones, (b["y"][:, 0] < 99).long() * (column(h)[:, 0] > 0), reduction="none")
    return squares(h) * losses


@own
def own_part_of_a_memory(p, b):
    h = features(p, b)
    rows = torch.zeros(len(h) + 1, D, dtype=DOUBLE)
    rows[1:] = h
    return squares(rows[1:])


@own
def all_but_the_first_time(p, b):
    h = features(p, b)
    times = torch.zeros(3, len(h), D, dtype=DOUBLE)
    times[1:] = h
    return squares(times.sum(0))


@own
def own_equations(p, b):
    h = features(p, b)
    return squares(torch.linalg.solve(torch.diag_embed(h * h + 1), h))


@own
def scattered_into_own_row(p, b):
    h = features(p, b)
    return squares(h.scatter(1, torch.zeros(len(h), 1, dtype=torch.int64), 3.0))


@own
def memory_that_is_filled_first(p, b):
    h = features(p, b)
    return squares(torch.empty_like(h).fill_(2.0) * h)


def counts(x):
    return (5 * x[:, 0]).long().abs()


def selected(x):
    return x.detach()[x[:, 0] > 0]


def _written_in_a_list(x):
    weights = torch.ones(1, D, dtype=DOUBLE)
    torch._foreach_add_([weights], [x.mean(0, keepdim=True)])
    return weights


def _written_by_a_python_function(x):
    weights = torch.ones(1, D, dtype=DOUBLE)
    return weights.map_(x.mean(0, keepdim=True), lambda old, new: new)


def _read_by_a_python_function(x):
    seen = []
    x.mean(0).apply_(lambda number: seen.append(number) or number)
    return seen[-1]


def _read_by_hooks_of_saved_tensors(x):
    seen = []

    def keep(tensor):
        seen.append(tensor.detach().flatten().tolist()[0])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        x.clone().requires_grad_().sin()
    return seen[0]


def _read_by_a_distance(x):
    seen = []

    def distance(one, other):
        seen.append(float(one.detach().sum()))
        return (one - other).sum(1)

    F.triplet_margin_with_distance_loss(x, x, x, distance_function=distance, reduction="none")
    return seen[0]


def _said_by_an_error(x):
    try:
        x[x[:, 0] > 0].narrow(0, 0, 3)
    except RuntimeError:
        return 2.0
    return 1.0


ONE = torch.ones(1, 1, dtype=DOUBLE)
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
    "constants of the same shape": lambda x: ONE.expand_as(selected(x)[:, :1]).sum(),
    "constants beside it": lambda x: torch.broadcast_tensors(torch.ones(1, D, dtype=DOUBLE), selected(x))[0].sum(),
    "as many classes as a number says": lambda x: F.one_hot(torch.zeros(4).long(), counts(x).max() + 1).shape[1],
    "a shape that an argument gets": lambda x: torch.nonzero(x > 0, out=torch.empty(0, dtype=torch.int64)).shape[0],
    "a tensor of a list": lambda x: torch.tensor([x.mean(), x.amax(), x.sum()], dtype=DOUBLE),
    "an old constructor": lambda x: torch.DoubleTensor([x.mean(), x.amax(), x.sum()]),
    "an index of two numbers": lambda x: torch.arange(81.0, dtype=DOUBLE).view(9, 9)[x.argmax() % 9, x.argmin() % 9],
    "split at a number": lambda x: torch.tensor_split(torch.ones(1, 9), (x.argmax()[None] % 8 + 1).cpu(), dim=1)[0].sum(),
    "contracted along a number": lambda x: torch.tensordot(
        torch.arange(9.0).view(3, 3), torch.ones(3), dims=torch.stack([x.argmax() // D % 2, 0 * x.argmax()]).view(2, 1)
    ),
    "written in a list of tensors": _written_in_a_list,
    "written by a Python function": _written_by_a_python_function,
    "read by a Python function": _read_by_a_python_function,
    "read by hooks of saved tensors": _read_by_hooks_of_saved_tensors,
    "read by a distance of the user": _read_by_a_distance,
    "said by an error": _said_by_an_error,
}  # fmt: skip


def _loss_of(read):
    return lambda p, b: squares(features(p, b) * (1 + read(b["y"])))


for _name, _read in READS.items():
    add(f"read: {_name}", "memory: reads", lambda read=_read: Built(_loss_of(read), params(), usual()), False)
