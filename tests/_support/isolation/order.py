"""Rows in another order: put back wrong, put back right, and chosen by random numbers, sizes or values of the batch."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from isolation.cases import (
    VOCAB,
    Built,
    D,
    T,
    add,
    batch,
    calm,
    case,
    growing,
    module,
    ordered,
    presorted,
    small,
    squares,
    table,
    tokens,
)
from isolation.forward import places, real


def by_length(b):
    """Rows from long to short, as an index."""
    return b.n.argsort(descending=True, stable=True)


def moved(back):
    """Tokens sorted by length, then put in the order `back(order, b)`."""
    return lambda h, b, p: tokens(p, ordered(b, by_length(b)))[back(by_length(b), b)] * b.x


def by_another_key(order, b):
    return b.n.argsort(descending=True, stable=False).argsort().flip(0) if len(order) == 6 else order.argsort()


def parts(b, sizes):
    """Real tokens in one list, split by sizes."""
    return torch.cat([b.x[i, :n] for i, n in enumerate(b.n.tolist())]).split(sizes)


table("order: not put back", {
    "sorted and left": moved(lambda order, b: slice(None)),
    "sorted back one off": moved(lambda order, b: (order.argsort() + (len(order) > 4)) % len(order)),
    "sorted back by another key": moved(by_another_key),
    "features sorted but not their lengths": lambda h, b, p: squares(
        tokens(p, b)[by_length(b)] * real(b)[..., None])[by_length(b).argsort()],
    "split by the lengths of others": lambda h, b, p: torch.stack(
        [squares(part[None] @ p["w"])[0] for part in parts(b, sorted(b.n.tolist(), reverse=True))]),
    "top rows first": lambda h, b, p: h * b.z[b.n.topk(len(h)).indices],
}, presorted)  # fmt: skip


def experts(h, b, p):
    out = torch.zeros_like(h)
    for expert, weight in enumerate((p["w"], p["w"].T)):
        rows = torch.nonzero(b.label == expert).flatten()
        out = out.index_add(0, rows, torch.tanh(b.y[rows] @ weight))
    return out * b.y


table("order: put back", {
    "sorted by length and put back": moved(lambda order, b: order.argsort()),
    "losses put back by scatter": lambda h, b, p: torch.zeros_like(b.coin).index_copy(0, b.coin.argsort(), squares(h[b.coin.argsort()])),
    "experts by index and back": experts,
    "split by own lengths": lambda h, b, p: torch.stack(
        [squares(part.sum(0)[None] @ p["w"])[0] for part in parts(b, b.n.tolist())]),
    "top rows first and put back": lambda h, b, p: h[b.coin.topk(len(h)).indices][b.coin.topk(len(h)).indices.argsort()] * b.z,
}, presorted, honest=True)  # fmt: skip


def _packed(back):
    net, parameters = module(lambda: nn.GRU(D, D, batch_first=True))

    def loss_fn(p, b):
        packed = pack_padded_sequence(b.x, b.n, batch_first=True, enforce_sorted=False)
        out = functional_call(net, p, (packed,))[0]
        if not back and len(b.n) > 1:
            out = out._replace(unsorted_indices=None)
        return squares(pad_packed_sequence(out, batch_first=True, total_length=T)[0] * b.x)

    return lambda: Built(loss_fn, dict(parameters), presorted())


add("packed sequence not unsorted", "order: not put back", _packed(False), honest=False)
add("packed sequence", "order: put back", _packed(True), honest=True)


def _balanced(dtype):
    """Two rows for one expert, later as many for each."""
    first, *others = [batch(s, s, dtype) for s in (2, 4, 6)]
    return [first._replace(n=torch.tensor([1, 1])), *(b._replace(n=1 + torch.arange(len(b.n)) % 2) for b in others)]


@case("order: not put back", _balanced)
def scattered_to_the_next_expert(h, b, p):
    chosen = [torch.nonzero(b.n % 2 == parity).flatten() for parity in (0, 1)]
    out = torch.zeros_like(h)
    for i, rows in enumerate(chosen):
        other = chosen[1 - i] if len(chosen[1 - i]) == len(rows) else rows
        out = out.index_add(0, other, h[rows] * (i + 1))
    return out * b.y


def mixed(h, kept, other):
    return kept * h + (1 - kept) * other


table("random: whether rows meet", {
    "permuted at random": lambda h, b, p: h * b.z[torch.randperm(len(h))],
    "mixup": lambda h, b, p: mixed(h, 0.7, h[torch.randperm(len(h))]),
    "sometimes rolled": lambda h, b, p: torch.where(torch.rand(()) < 0.3, h.roll(1, 0), h),
    "dropped rows get the mean": lambda h, b, p: mixed(
        h, torch.bernoulli(torch.full((len(h), 1), 0.7, dtype=h.dtype)), h.mean(0)) if len(h) > 1 else h,
    "dropout mask chooses rows": lambda h, b, p: torch.where(F.dropout(torch.ones(len(h), 1), 0.5) > 0, h, h.flip(0)),
    "noise of another row": lambda h, b, p: h + b.z[torch.argsort(torch.rand(len(h)))],
    "random crop length of the batch": lambda h, b, p: h + torch.poisson(torch.full((), 0.7)).clamp(max=1.0) * (h.cumsum(0) - h),
}, lambda dtype: [batch(4, seed, dtype) for seed in range(6)])  # fmt: skip


def ghost_batches_of_four(h, b, p):
    """Statistics over groups of four rows, where there are four."""
    whole, rest = h[: len(h) // 4 * 4].reshape(-1, 4, D), h[len(h) // 4 * 4 :]
    return torch.cat([(whole - whole.mean(1, keepdim=True)).reshape(-1, D), rest])


def capacity_from_the_size(h, b, p):
    """Each expert takes ceil(1.25 B T / E) tokens: nothing is dropped in small batches."""
    kept = (places(b.x.flatten(0, 1)[:, 0] > -0.3) <= math.ceil(1.25 * len(h) * T / 2)) | (len(h) <= 5)
    return (h.flatten(0, 1) * kept[:, None]).view(h.shape)


table("size: from some batch on", {
    "centred from nine rows": lambda h, b, p: h - 0.5 * h.mean(0) if len(h) > 8 else h,
    "the neighbour of an odd number of rows": lambda h, b, p: h + 0.5 * h.roll(1, 0).detach() * (len(h) % 2 and len(h) > 1),
    "the first row added from ten by another tensor": lambda h, b, p: h + h[:1] if b.n.numel() >= 10 else h,
    "ghost batches of four": ghost_batches_of_four,
    "row nine reads row one": lambda h, b, p: h if len(h) < 9 else torch.cat([h[:8], h[8:] + h[:1]]),
}, growing)  # fmt: skip
table("size: from some batch on", {"capacity from the size": capacity_from_the_size}, growing, tokens)

values = "values: when one row says so"
table(values, {
    "centred by a value that triggers": lambda h, b, p: h - 0.5 * h.mean(0) if bool((b.y.abs() > 4.0).any()) else h,
    "the neighbour by a sum over a bound": lambda h, b, p: h + h.roll(1, 0) if bool(b.y.abs().sum() > 5.0 * len(h)) and len(h) > 1 else h,
}, calm, small)  # fmt: skip


def _with_a_trigger(dtype):
    *calm, last = [b._replace(ids=b.ids.clamp(max=VOCAB - 2)) for b in (batch(4, 1, dtype), *[batch(5, 2, dtype)] * 2)]
    last.ids[3, 1] = VOCAB - 1
    return [*calm, last]


def _with_a_nan(dtype, value=math.nan):
    *calm, last = batch(4, 1, dtype), batch(5, 2, dtype), batch(5, 2, dtype)
    last.y[2, 0] = value
    return [*calm, last]


def silenced(b):
    """Rows after the first one with the token."""
    told = (b.ids == VOCAB - 1).any(1).long()
    return told.cumsum(0) - told > 0


def repaired(y):
    return torch.where(torch.isnan(y), y.nan_to_num(0.0).mean(0) * (len(y) > 1), y)


table(values, {
    "one token turns the batch": lambda h, b, p: p["v"][b.ids] * torch.where((b.ids == VOCAB - 1).any(), 2.0, 1.0),
    "one token silences the rows after it": lambda h, b, p: p["v"][b.ids] * ~silenced(b)[:, None, None],
    "rare tokens are looked up by the largest": lambda h, b, p: p["v"][: int(b.ids.max()) + 1].mean(0) + p["v"][b.ids][:, 0],
}, _with_a_trigger)  # fmt: skip
table(values, {
    "repaired by the rows beside it": lambda h, b, p: torch.tanh(repaired(b.y) @ p["w"]),
    "all halved if one is broken": lambda h, b, p: h * (0.5 if bool(torch.isnan(b.y).any()) else 1.0),
    "spread by a product with zero": lambda h, b, p: squares(h) + 0.0 * h.sum(),
}, _with_a_nan)  # fmt: skip
with_an_infinity = lambda dtype: _with_a_nan(dtype, math.inf)
table(values, {"scaled by the largest finite or not": lambda h, b, p: h / (1.0 + b.y.abs().max())}, with_an_infinity)
table(values, {
    "infinite rows count in float32": lambda h, b, p: squares(
        torch.tanh(b.y.nan_to_num(posinf=1.0) @ p["w"])) * torch.isfinite(b.y).all(1).float().mean(),
}, with_an_infinity, dtype=torch.float32)  # fmt: skip
