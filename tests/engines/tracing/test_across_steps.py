"""Rows that meet in a later step only, or by numbers that no operation shows, are refused in that step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from row_losses import DOUBLE, batch, head, params
from torch.autograd import forward_ad
from torch.nn import functional as F

from dpfunc.engines import bookkeeping, loop
from dpfunc.errors import UnsupportedModel


def read_when_functions_run_as_a_whole(p, x, step, kept):
    """The read is in the attempt that is given up: the backward pass has to be followed after all."""
    if step == 1:
        kept.number = 1.0
    elif not kept.read:
        kept.read, kept.number = True, x.mean().item()
    return head(F.normalize(x, dim=1) * kept.number, p)


def read_before_a_wrong_guess(p, x, step, kept):
    if step > 1 and not kept.read:
        kept.read, kept.number = True, x.mean().item()
    same = F.linear(torch.ones(len(x), 2, dtype=DOUBLE), p["w"]).t() @ torch.ones(len(x), 1, dtype=DOUBLE)
    return head(x * kept.number, p) if step == 1 else head(x * kept.number, p) + (x * same.t()).sum(1)


def shape_that_is_kept(p, x, step, kept):
    if step > 1 and not kept.read:
        kept.read, kept.number = True, 1.0 + len(x[x[:, 0] > 0])
    return head(x * kept.number, p)


def error_that_is_kept(p, x, step, kept):
    if step == 2:
        try:
            torch.linalg.cholesky(torch.diag_embed(x - x - 1))
        except RuntimeError:
            kept.number = 3.0
    return head(x * kept.number, p)


def forward_derivative(p, x, step, kept):
    """The derivative lies in memory of its own, which a function that runs as a whole does not show."""
    zeros = torch.zeros(1, 2, dtype=DOUBLE)
    if step == 1:
        return head(x + torch.sin(zeros), p)
    with forward_ad.dual_level():
        dual = torch.sin(forward_ad.make_dual(zeros, x.mean(0, keepdim=True)))
        return head(x + forward_ad.unpack_dual(dual).tangent, p)


def tensor_of_a_list(p, x, step, kept):
    return head(x if step == 1 else x * torch.tensor([x.mean(), x.std()], dtype=DOUBLE), p)


def old_constructor(p, x, step, kept):
    return head(x if step == 1 else x * torch.DoubleTensor([x.mean(), x.std()]), p)


def index_of_a_list(p, x, step, kept):
    table = torch.arange(6.0, dtype=DOUBLE).view(3, 2)
    return head(x if step == 1 else x * table[[[x.argmax() // 6, x.argmax() // 3]]].prod(0), p)


def split_at_a_number(p, x, step, kept):
    if step == 1:
        return head(x, p)
    parts = torch.tensor_split(torch.ones(1, 4, dtype=DOUBLE), (x[0, :1] > 0).long() + 1, dim=1)
    return head(x * parts[0].sum(1, keepdim=True), p)


def contracted_along_a_number(p, x, step, kept):
    matrix = torch.arange(4.0, dtype=DOUBLE).view(2, 2)
    if step == 1:
        return head(torch.tensordot(x, matrix, dims=([1], [0])), p)
    number = (x[0, 0] > 0).long()
    return head(torch.tensordot(x, matrix, dims=torch.stack([number - number + 1, number]).view(2, 1)), p)


def constants_that_numpy_writes(p, x, step, kept):
    weights = torch.zeros(len(x), 1, dtype=DOUBLE)
    numbers = weights.numpy()
    weights.fill_(1.0)
    if step > 1:
        numbers[1:] = 2.0
    return head(x * weights, p)


def written_in_a_list(p, x, step, kept):
    weights = torch.ones(1, 2, dtype=DOUBLE)
    torch._foreach_add_([weights], [x.mean(0, keepdim=True) if step > 1 else torch.ones(1, 2, dtype=DOUBLE)])
    return head(x * weights, p)


def written_by_a_python_function(p, x, step, kept):
    weights = torch.ones(1, 2, dtype=DOUBLE)
    if step > 1:
        weights.map_(x.mean(0, keepdim=True), lambda old, new: new)
    return head(x * weights, p)


def read_by_a_python_function(p, x, step, kept):
    seen = [1.0]
    if step > 1:
        x.mean(0).apply_(lambda number: seen.append(number) or number)
    return head(x * seen[-1], p)


MIXING = [
    read_when_functions_run_as_a_whole, read_before_a_wrong_guess, shape_that_is_kept, error_that_is_kept,
    forward_derivative, tensor_of_a_list, old_constructor, index_of_a_list, split_at_a_number,
    contracted_along_a_number, constants_that_numpy_writes, written_in_a_list, written_by_a_python_function,
    read_by_a_python_function,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")  # of torch
@pytest.mark.parametrize("loss", MIXING, ids=lambda loss: loss.__name__)
def test_rows_that_meet_in_a_later_step(loss):
    kept, engine = SimpleNamespace(step=1, number=1.0, read=False), bookkeeping()

    def loss_fn(p, x):
        return loss(p, x, kept.step, kept)

    engine(loss_fn, params(), batch(0))  # proven, so that its answers are kept
    for step in (2, 3):  # in the third one, some losses only use what Python has kept
        kept.step = step
        with pytest.raises(UnsupportedModel, match="influence each other"):
            engine(loss_fn, params(), batch(step))


def memory_of_others(x, make):
    """What `make` gives where the mean over the batch was, right after that was freed."""
    mean = x.detach().mean(0).expand(len(x), 2).contiguous()
    del mean
    return make(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.empty(len(x), 2, dtype=DOUBLE),
        torch.empty_like,
        lambda x: x.new_empty(len(x), 2),
        lambda x: torch.DoubleTensor(len(x), 2),
        lambda x: torch.zeros(1, 2, dtype=DOUBLE).resize_(len(x), 2),
        lambda x: x.detach().clone().resize_(2 * len(x), 2)[len(x) :],
    ],
)
def test_memory_that_nobody_has_written_into_is_cleared(make):
    """Also in functions that ran before: what was in it may be of other samples."""
    engine, seen = bookkeeping(), []

    def loss_fn(p, x):
        seen.append(memory_of_others(x, make))
        return head(x + seen.pop(), p)

    for seed in range(4):
        found = engine(loss_fn, params(), batch(seed)).sq_norms()
        expected = loop()(lambda p, x: head(x, p), params(), batch(seed)).sq_norms()
        torch.testing.assert_close(found, expected)


def test_another_default_dtype():
    """Rows of 8 bytes a number that were remembered are no rows of 4 bytes a number: one would be two samples."""
    engine = bookkeeping()
    before = torch.get_default_dtype()

    def loss_fn(p, x):
        third = (100 * x).long() / 3
        pairs = third.view(2, 2, 2).sum(1)
        return head(third if third.dtype == DOUBLE else torch.cat([pairs.to(DOUBLE), x[2:]]), p)

    try:
        torch.set_default_dtype(torch.float64)
        engine(loss_fn, params(), batch(0))
        torch.set_default_dtype(torch.float32)
        with pytest.raises(UnsupportedModel):
            engine(loss_fn, params(), batch(1))
    finally:
        torch.set_default_dtype(before)


def test_a_write_through_a_function_that_gave_a_copy_before():
    """`resolve_conj` copies, or gives its argument: the rows of that are those of its own memory."""
    engine = bookkeeping()
    kept = SimpleNamespace(step=1)

    def loss_fn(p, x):
        z = x.conj() if kept.step == 1 else x
        z.resolve_conj()
        if kept.step == 2:
            x[0].copy_(x[1])
        return head(x.real + x.imag, p)

    complex_batch = [torch.complex(batch(seed), batch(seed + 9)) for seed in range(2)]
    engine(loss_fn, params(), complex_batch[0])
    kept.step = 2
    with pytest.raises(UnsupportedModel, match="writes into a tensor of its batch"):
        engine(loss_fn, params(), complex_batch[1])
