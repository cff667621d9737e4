"""Honest losses: the batch axis moves, is merged, cut and joined; rows are normalised, sorted, masked by their own values."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from isolation.cases import (
    VOCAB,
    D,
    T,
    batch,
    growing,
    modules,
    same_length,
    sized,
    squares,
    table,
    tokens,
    usual,
)
from isolation.forward import real, written

table("honest: where the samples are", {
    "time first": lambda h, b, p: torch.tanh(b.x.transpose(0, 1) @ p["w"]).transpose(0, 1),
    "batch merged with time": lambda h, b, p: torch.tanh(b.x.reshape(-1, D) @ p["w"]).view(-1, T, D),
    "time merged before batch": lambda h, b, p: torch.tanh(b.x.transpose(0, 1).reshape(-1, D) @ p["w"]).view(T, -1, D).transpose(0, 1),
    "samples last": lambda h, b, p: torch.tanh(p["w"].T @ b.y.T).T,
    "einsum that keeps rows": lambda h, b, p: torch.einsum("btd,bse,de->bts", b.x, b.x, p["w"]).tanh(),
}, of=tokens, honest=True)  # fmt: skip

modules("honest: modules", {
    "lstm with time first": (lambda: nn.LSTM(D, D), lambda net, b: net(b.x.transpose(0, 1))[0].transpose(0, 1)),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), lambda net, b: net(F.pad(b.x, (0, 1)))),
    "batch norm with fixed statistics": (lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)).eval(), lambda net, b: net(b.y)),
}, honest=True)  # fmt: skip


def twice_the_batch(h, b, p):
    """Two views of each row, run as one batch of twice the size."""
    first, second = torch.tanh(torch.cat([b.y, b.z]) @ p["w"]).chunk(2)
    return first - 0.5 * second


table("honest: cut and joined", {
    "chunks of the batch": lambda h, b, p: torch.cat([torch.tanh(part @ p["w"]) for part in b.y.chunk(3)]),
    "rows one by one": lambda h, b, p: torch.stack([torch.tanh(b.y[i] @ p["w"]) for i in range(len(b.y))]),
    "rows in a list with their length": lambda h, b, p: torch.stack([(b.x[i, : int(n)] @ p["w"]).square().mean() for i, n in enumerate(b.n)]),
    "unbound and stacked": lambda h, b, p: torch.stack([row.cumsum(0) for row in h.unbind(0)]),
    "table of positions": lambda h, b, p: torch.tanh(p["v"][b.ids] + p["v"][:T]) @ p["w"],
    "same number selected in each row": lambda h, b, p: h[b.x.sum(2).argsort(1).argsort(1) < 2].view(-1, 2, D),
    "twice the batch": twice_the_batch,
}, of=tokens, honest=True)  # fmt: skip


table("honest: own entries", {
    # the product of all rows, of which only each row's own entry is used
    "own diagonal of a product": lambda h, b, p: (h[:, 0] @ b.z.T).diagonal() + squares(h),
    "cross entropy by hand": lambda h, b, p: -torch.log_softmax(b.y @ p["w"], -1).gather(1, b.label[:, None])[:, 0],
    "scattered within rows": lambda h, b, p: torch.zeros_like(h).scatter_add(1, (b.ids % T)[..., None].expand(-1, -1, D), h),
    "index put into own rows": lambda h, b, p: h + written(
        torch.zeros_like(h), lambda out: out.__setitem__((torch.arange(len(h)), b.n - 1), h[:, 0])),
}, of=tokens, honest=True)  # fmt: skip
table("honest: own entries", {
    "sum over rows in one segment each": lambda h, b, p: torch.zeros(len(h), D, dtype=h.dtype).index_add(
        0, torch.arange(len(h)).repeat_interleave(T), h.reshape(-1, D)),
}, same_length, tokens, honest=True)  # fmt: skip


def any_padding_at_all(h, b, p):
    """The usual shortcut: without padding no mask is made."""
    scores, mask = h @ h.mT, real(b)
    if not bool(mask.all()):
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
    return torch.softmax(scores, -1) @ h


table("honest: Python", {
    "any padding at all": any_padding_at_all,
    # padding that no row looks at is cut off for all
    "cut to the longest row": lambda h, b, p: (h * real(b)[..., None])[:, : int(b.n.max())].square().sum((1, 2)) / b.n,
}, of=tokens, honest=True)  # fmt: skip
table("honest: Python", {
    "batches of one": lambda h, b, p: h if len(h) > 1 else torch.tanh(b.y[0] @ p["w"])[None],
}, sized(1, 5, 1), honest=True)  # fmt: skip


own = "honest: own statistics"
table(own, {
    "centred within rows": lambda h, b, p: h - h.mean(1, keepdim=True),
    "top entries within rows": lambda h, b, p: h.topk(2, 1).values,
    "vmap over rows": lambda h, b, p: torch.func.vmap(lambda y: torch.tanh(y @ p["w"]) * y.norm())(b.y),
    "histogram of own tokens": lambda h, b, p: F.one_hot(b.ids, VOCAB).sum(1).to(h.dtype) @ p["v"],
    # what is taken from the whole batch, and changes no result: it makes exp safe, it is put back, no row needs it
    "largest of all subtracted": lambda h, b, p: (b.y @ p["w"] - b.y.max()).exp().sum(1).log() + b.y.max(),
    "shifted by the batch and back": lambda h, b, p: (h - h.detach().mean(0)) + h.detach().mean(0),
    "default of the batch that no row needs": lambda h, b, p: h / (0.1 + torch.where(h.abs() >= 0, h.abs(), h.abs().mean(0))),
}, honest=True)  # fmt: skip
table(own, {
    "running sum within rows": lambda h, b, p: h.cumsum(1),
    "mean over own tokens": lambda h, b, p: (h.square().sum(2) * real(b)).sum(1) / real(b).sum(1),
}, of=tokens, honest=True)  # fmt: skip
table(own, {
    "attention within rows in float32": lambda h, b, p: F.scaled_dot_product_attention(h, h, h, is_causal=True),
    "layer norm in float32": lambda h, b, p: F.layer_norm(h, (D,), p["u"], p["c"]),
}, growing, tokens, dtype=torch.float32, honest=True)  # fmt: skip


table("honest: losses", {
    "cosine similarity": lambda h, b, p: 1.0 - F.cosine_similarity(h[:, 0], b.z, dim=1),
    "cross entropy of tokens": lambda h, b, p: F.cross_entropy((h @ p["v"].T).mT, b.ids, reduction="none").mean(1),
    "tied weights": lambda h, b, p: F.cross_entropy(
        (torch.tanh(p["v"][b.ids] @ p["w"]) @ p["v"].T).flatten(0, 1), b.ids.flatten(), reduction="none").view(-1, T).sum(1),
    "zero for some rows": lambda h, b, p: squares(h) * (b.label == 0),
}, of=tokens, honest=True)  # fmt: skip


def without_gradient_inside(h, b, p):
    with torch.no_grad():
        scale = torch.tanh(b.y @ p["w"]).norm(dim=1, keepdim=True)
    return h / (1.0 + scale)


table("honest: no gradient", {
    "target detached": lambda h, b, p: h - 0.5 * h.detach().flip(1),
    "weights detached in one use": lambda h, b, p: torch.tanh(h @ p["w"].detach()),
    "without gradient inside": without_gradient_inside,
}, honest=True)  # fmt: skip


# Random, each row for itself: the gradient of a row has an entry of its own, times what the random numbers say.


def unit_rows(dtype):
    """Row i has a one at entry i: what u gets at entry i comes from row i."""
    eye = torch.eye(D, dtype=dtype)
    return [batch(D, seed, dtype)._replace(y=eye.clone(), x=eye[:, None].repeat(1, T, 1)) for seed in range(4)]


def plain(p, b):
    """The sum of u at the entries of each row."""
    return (b.y * p["u"]).sum(1)


RANDOM = {
    "dropout": (2.0, lambda h, b, p: F.dropout(h, 0.5)),
    "dropout before a parameter": (2.0, lambda h, b, p: F.dropout(b.y, 0.5) * p["u"]),
    "drop path": (1.25, lambda h, b, p: h * b.y.new_empty(len(h), 1).bernoulli_(0.8) / 0.8),
    "noise on the loss": (1.0, lambda h, b, p: h + torch.randn(h.shape)),
}
own_entry = lambda p, b: b.y * p["u"]
for _name, (_factor, _draw) in RANDOM.items():
    _change = {_name: lambda h, b, p, draw=_draw: draw(h, b, p).sum(1)}
    table("honest: random", _change, unit_rows, own_entry, honest=True, plain=plain, factors=(_factor,))


# Rows that share a computation: equal rows are computed once, penalties belong to all.


def repeating(dtype):
    """Rows that differ, then rows of which some are equal."""
    first, second, third = batch(4, 4, dtype), batch(5, 5, dtype), batch(6, 6, dtype)
    again = torch.tensor([0, 1, 0, 2, 1])
    third.ids[:, 0] = 2
    return [first, second._replace(y=second.y[again], ids=second.ids[again]), third]


def unique_first(values, of, **options):
    """A function of different values only, put back."""
    different, back = torch.unique(values, return_inverse=True, **options)
    return of(different)[back]


def common_beginning_computed_once(h, b, p):
    """Where all rows begin alike, the beginning is computed for one and expanded."""
    alike = bool((b.ids[:, 0] == b.ids[0, 0]).all())
    first = torch.tanh(p["v"][b.ids[:1, 0] if alike else b.ids[:, 0]] @ p["w"])
    return first.expand(len(h), -1) + h


table("honest: computed once for several rows", {
    "equal rows computed once": lambda h, b, p: unique_first(b.y, lambda rows: torch.tanh(rows @ p["w"]), dim=0) * b.z,
    "equal tokens embedded once": lambda h, b, p: unique_first(b.ids, lambda ids: p["v"][ids]) @ p["w"],
    "common beginning computed once": common_beginning_computed_once,
    "all tokens embedded and looked up": lambda h, b, p: torch.tanh(p["v"] @ p["w"])[b.ids],
}, repeating, honest=True)  # fmt: skip
table("honest: penalties", {
    "weight decay in each loss": lambda h, b, p: squares(h) + 0.1 * p["w"].square().sum(),
    "entropy of a parameter": lambda h, b, p: squares(h) - (torch.softmax(p["u"], 0) * torch.log_softmax(p["u"], 0)).sum(),
}, honest=True)  # fmt: skip


def inner_step_of_each_row(h, b, p):
    inner = torch.func.grad(lambda w, y: torch.tanh(y @ w).square().sum())
    steps = torch.func.vmap(inner, in_dims=(None, 0))(p["w"].detach(), b.y)
    return torch.einsum("bi,bij->bj", b.z, p["w"] - 0.1 * steps)


table("honest: usual code", {
    "padded to eight rows": lambda h, b, p: torch.tanh(F.pad(b.y, (0, 0, 0, 8 - len(h))) @ p["w"])[: len(h)],
    "inner step of each row": inner_step_of_each_row,
    "weights from its own row": lambda h, b, p: torch.einsum("bi,bij->bj", b.y, p["w"] + b.y[:, :, None] * b.z[:, None]).tanh(),
    "masked tokens filled with a parameter": lambda h, b, p: torch.where(real(b)[..., None], tokens(p, b), p["u"]) @ p["w"],
}, usual, honest=True)  # fmt: skip
