"""Mixing in the forward pass: statistics, rows that meet, another axis, mistakes; and rows in another order."""

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
    features,
    growing,
    module,
    modules,
    ordered,
    presorted,
    same_length,
    sized,
    small,
    squares,
    table,
    tokens,
)


def written(h, write):
    """A copy, written into."""
    copy = h.clone()
    write(copy)
    return copy


def with_eye(matrix):
    return matrix + torch.eye(D, dtype=matrix.dtype)


def real(b):
    """Which tokens are no padding."""
    return torch.arange(T) < b.n[:, None]


table("forward: statistics", {
    "centred": lambda h, b, p: h - h.mean(0),
    "centred without gradient": lambda h, b, p: h - h.detach().mean(0),
    "largest of the batch": lambda h, b, p: h / (1.0 + h.abs().amax(0)),
    "median of the batch": lambda h, b, p: h - 0.3 * h.median(0).values,
    "whitened": lambda h, b, p: torch.linalg.solve_triangular(torch.linalg.cholesky(with_eye(h.T @ h / len(h))), h.T, upper=False).T,
    "frobenius norm of the batch": lambda h, b, p: torch.tanh(b.y / b.y.norm() @ p["w"]),
    # scales of time series: rows without observations take the mean of the batch
    "default of the batch for some rows": lambda h, b, p: h * torch.where(h.sum(1, True) > 0, h.sum(1, True), h.sum(1, True).mean(0)),
})  # fmt: skip
table("forward: statistics", {"centred in float32": lambda h, b, p: h - 0.5 * h.mean(0)}, dtype=torch.float32)


def batch_norm_with_statistics_kept(h, b, p):
    mean, var = torch.zeros(D, dtype=p["u"].dtype), torch.ones(D, dtype=p["u"].dtype)
    return F.batch_norm(h.transpose(1, 2), mean, var, p["u"], p["c"], training=True) + mean[:, None]


table("forward: normalised", {
    "batch norm": lambda h, b, p: F.batch_norm(b.x.mT, None, None, p["u"], p["c"], training=True),
    "layer norm over batch and features": lambda h, b, p: F.layer_norm(h, h.shape) * p["u"],
    # an error, or not finite, for a row alone
    "batch norm of rows that fails for one": lambda h, b, p: F.batch_norm(h, None, None, p["u"], p["c"], training=True),
    "row over its deviation in the batch": lambda h, b, p: ((b.y * p["u"]).sum(1) / (b.y * p["u"]).sum(1).std()).square(),
})  # fmt: skip
table("forward: normalised", {
    "instance norm over merged rows": lambda h, b, p: F.instance_norm(h.permute(2, 0, 1).reshape(1, D, -1)).reshape(D, -1, T).transpose(0, 1),
    "batch norm with statistics kept": batch_norm_with_statistics_kept,
}, of=tokens)  # fmt: skip
modules("forward: normalised", {"batch norm module": (lambda: nn.BatchNorm1d(T), lambda net, b: net(b.x))})

table("forward: counted", {
    "divided by rows": lambda h, b, p: h / len(h),
    "divided by rows of another tensor": lambda h, b, p: h / b.coin.numel(),
    "batchmean of all": lambda h, b, p: (F.mse_loss(h, b.z, reduction="sum") / h.numel()).expand(len(h)),
    "histogram of the batch": lambda h, b, p: squares(h) * torch.histc(b.coin, 2, 0.0, 1.0)[(b.coin >= 0.5).long()],
    "unique tokens of the batch": lambda h, b, p: p["v"][b.ids] / torch.unique(b.ids).numel(),
})  # fmt: skip
table("forward: counted", {
    "mean over the tokens of the batch": lambda h, b, p: squares(h * real(b)[..., None]) * len(h) / real(b).sum(),
}, same_length, tokens)  # fmt: skip

table("forward: Python values", {
    "branch on the mean": lambda h, b, p: squares(h) if b.y.abs().mean() < 0.5 or len(h) == 1 else squares(h).clamp(max=0.1),
    "list of values": lambda h, b, p: h * (1.0 + max(b.y.flatten().tolist())),
    "float of the largest": lambda h, b, p: h * max(1.0, float(b.y.max())),
    "any value above": lambda h, b, p: h * (2.0 if (b.y.abs() > 2.0).any() else 1.0),
    "numpy round trip": lambda h, b, p: h - torch.from_numpy(h.detach().numpy().mean(0)),
    "where the largest is above": lambda h, b, p: torch.where(b.y.max() > 2.0, 0.5 * h, h),
    "equality of shapes and values": lambda h, b, p: h * (1.0 if torch.equal(b.y, b.y.clamp(-4.0, 4.0)) else 3.0),
    "tensor as an index": lambda h, b, p: h + b.y[int(b.y.sum(1).argmax())].detach(),
}, calm)  # fmt: skip


class Centre(torch.autograd.Function):
    """Subtracts the mean of the batch; the backward pass does not say so."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x - x.mean(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


class CentreUnderVmap(Centre):
    """The same, with a rule for vmap that takes the mean of all samples too."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return Centre.apply(x.movedim(in_dims[0], 0).flatten(0, 1)).unflatten(0, (info.batch_size, -1)), 0


def places(chosen):
    """The number of each token among those of its expert, in the order of the batch."""
    hot = F.one_hot(chosen.long(), 2)
    return (hot.cumsum(0) * hot).sum(1)


table("forward: rows meet", {
    "in batch negatives": lambda h, b, p: F.cross_entropy(h @ b.z.T, torch.arange(len(h)), reduction="none") + squares(h),
    "attention over the batch": lambda h, b, p: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
    "einsum over the batch": lambda h, b, p: torch.einsum("bi,cj->bij", h, h),
    "broadcast against the target": lambda h, b, p: (squares(h) - b.coin[:, None]).square().mean(1),  # (B,) and (B, 1) give (B, B)
    "nearest neighbour": lambda h, b, p: h - h[(torch.cdist(b.y, b.y) + 1e3 * torch.eye(len(h))).argmin(1)].detach(),
    "vmap over features": lambda h, b, p: torch.func.vmap(lambda column: column - column.mean(), in_dims=1, out_dims=1)(h),
    "inner gradient of a mean": lambda h, b, p: h + torch.func.grad(lambda y: y.mean(0).square().sum())(b.y) * len(h),
    "function whose forward mixes": lambda h, b, p: Centre.apply(h),
    "function whose vmap mixes": lambda h, b, p: CentreUnderVmap.apply(h),
})  # fmt: skip
table("forward: rows meet", {
    "selected then split evenly": lambda h, b, p: torch.stack([part.mean(0) for part in h[real(b)].tensor_split(len(h))]),
    "packed without boundaries": lambda h, b, p: F.scaled_dot_product_attention(*[h.view(1, -1, D)] * 3, is_causal=True).view(h.shape),
}, same_length, tokens)  # fmt: skip

table("forward: batch as an axis", {
    "rolled": lambda h, b, p: h + h.roll(1, 0),
    "running sum": lambda h, b, p: h.cumsum(0),
    "sorted columns": lambda h, b, p: h.sort(0).values * b.y,
    "windows over the batch": lambda h, b, p: F.pad(h, (0, 0, 2, 0)).unfold(0, 3, 1),
    "strides over the batch": lambda h, b, p: torch.as_strided(F.pad(h, (0, 0, 0, 1)).contiguous(), (len(h), 2 * D), (D, 1)),
    "fourier over the batch": lambda h, b, p: torch.fft.fft(h, dim=0).abs(),
    "convolution over the batch": lambda h, b, p: F.conv1d(h.T[None], p["v"][:3, :, None].expand(-1, -1, 3), padding=1)[0].T,
})  # fmt: skip
modules("forward: batch as an axis", {
    "lstm with the batch as time": (lambda: nn.LSTM(D, D), lambda net, b: net(b.y)[0]),
    "attention without batch_first": (lambda: nn.MultiheadAttention(D, 1), lambda net, b: net(b.x, b.x, b.x)[0]),
})  # fmt: skip

table("forward: position in the batch", {
    "multiplied by position": lambda h, b, p: squares(h) * (1.0 + torch.arange(len(h))),
    "position as a token": lambda h, b, p: h + p["v"][torch.arange(len(h)) % VOCAB],
    "first row for all": lambda h, b, p: h + h[:1],
    "first row stands out": lambda h, b, p: torch.cat([h[:1], 3.0 * h[1:]]),
})  # fmt: skip

writes = case("forward: written in place")


@writes
def into_an_output(h, b, p):
    mean = torch.empty(D, dtype=h.dtype)
    torch.mean(h.detach(), 0, out=mean)
    return h - mean


@writes
def copied_behind_autograd(h, b, p):
    h = h * 1.0
    h.data.copy_(h.data.roll(1, 0))
    return h.clone() * b.y


@writes
def batch_written_into(h, b, p):
    """The caller's batch is another one after the call."""
    if len(b.y) > 1:
        b.y.sub_(b.y.mean(0))
    return features(p, b)


table("forward: written in place", {
    "rows one further": lambda h, b, p: h + written(torch.zeros_like(h), lambda memory: memory[1:].copy_(h[:-1])),
    "put at an index": lambda h, b, p: h + (torch.zeros_like(h).index_put((b.label,), h, accumulate=True) if len(h) > 1 else h),
})  # fmt: skip

# What people write by accident, and mixing that few rows or few batches show.

table("mistakes: sizes that agree", {"weights broadcast along features": lambda h, b, p: h * b.coin}, sized(1, D, D))
table("mistakes: sizes that agree", {
    "tokens and rows exchanged": lambda h, b, p: h.transpose(0, 1) * b.x if len(h) == T else h * b.x,
}, sized(2, 4, D, 5), tokens)  # fmt: skip


def ignored_tokens_of_all(h, b, p):
    target = torch.where(real(b), b.ids, -100)
    each = F.cross_entropy((b.x @ p["w"] @ p["v"].T).mT, target, reduction="none").sum(1)
    return each * len(each) / (target != -100).sum()


table("mistakes: broadcasting and counting", {
    "penalty of weights over rows": lambda h, b, p: squares(h) + p["w"].square().sum() / len(h),
    "gradient scaled by frequency": lambda h, b, p: F.embedding(b.ids, p["v"], scale_grad_by_freq=True),
    "losses sorted": lambda h, b, p: squares(h).sort().values * (1.0 + b.coin),
    "mean reduction times rows": lambda h, b, p: F.cross_entropy(b.y @ p["w"], b.label, p["u"].detach().abs()).expand(len(h)),
    "ignored tokens of all": ignored_tokens_of_all,
})  # fmt: skip


table("mistakes: few rows", {
    "one row in many reads another": lambda h, b, p: torch.where((b.coin > 0.93)[:, None], h - h.roll(1, 0), h),
    "last of many rows is centred": lambda h, b, p: h if len(h) < 10 else torch.cat([h[:-1], (h[-1] - h.mean(0))[None]]),
    "sixteenth row is dropped": lambda h, b, p: squares(h) * (torch.arange(len(h)) < 15),
}, sized(3, 4, 12, 16))  # fmt: skip


def inner_step(w, b):
    return w - 0.1 * torch.func.grad(lambda w: squares(torch.tanh(b.y @ w)).mean())(w.detach())


table("mistakes: weights that the batch makes", {
    "weights from the batch": lambda h, b, p: torch.tanh(b.y @ (p["w"] + b.y.T @ b.z / len(h))),
    "inner step on the batch": lambda h, b, p: torch.tanh(b.z @ inner_step(p["w"], b)),
    "weights over the norm of the batch": lambda h, b, p: F.linear(b.y, p["w"] / (1.0 + b.y.norm())),
})  # fmt: skip


def range_of_a_tensor(h, b, p):
    for _ in range(b.y.abs().max().long()):
        h = torch.tanh(h)
    return h


def fails(run, error):
    """1 if the call ends in an error of this class."""
    try:
        run()
    except error:
        return 1.0
    return 0.0


def decomposed(b):
    torch.linalg.cholesky(torch.eye(D, dtype=b.y.dtype) - 0.04 * b.y[:, :, None] * b.y[:, None])


table("mistakes: Python values, idle at first", {
    "number of selected values": lambda h, b, p: h / (1.0 + b.y[b.y.abs() > 4.0].shape[0]),
    "largest by python": lambda h, b, p: h / max(6.0, max(b.y.abs().sum(1).unbind())),
    "range of a tensor": range_of_a_tensor,
    "an error in one row changes all": lambda h, b, p: h * (1.0 - 0.5 * fails(lambda: decomposed(b), torch.linalg.LinAlgError)),
    "an index error in one row changes all": lambda h, b, p: h * (
        1.0 - 0.5 * fails(lambda: p["v"].detach()[b.y.abs().sum(1).long()], IndexError)),
    "a value in a set": lambda h, b, p: h * (0.5 if 4 in b.y.abs().long() else 1.0),
}, calm, small)  # fmt: skip


def by_length(b):
    """Rows from long to short, as an index."""
    return b.n.argsort(descending=True, stable=True)


def moved(back):
    """Tokens sorted by length, then put in the order `back(order, b)`."""
    return lambda h, b, p: tokens(p, ordered(b, by_length(b)))[back(by_length(b), b)] * b.x


table("order: not put back", {
    "sorted and left": moved(lambda order, b: slice(None)),
    "sorted back one off": moved(lambda order, b: (order.argsort() + (len(order) > 4)) % len(order)),
    "features sorted but not their lengths": lambda h, b, p: squares(
        tokens(p, b)[by_length(b)] * real(b)[..., None])[by_length(b).argsort()],
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


def mixed(h, kept, other):
    return kept * h + (1 - kept) * other


table("random: whether rows meet", {
    "permuted at random": lambda h, b, p: h * b.z[torch.randperm(len(h))],
    "mixup": lambda h, b, p: mixed(h, 0.7, h[torch.randperm(len(h))]),
    "sometimes rolled": lambda h, b, p: torch.where(torch.rand(()) < 0.3, h.roll(1, 0), h),
    "dropout mask chooses rows": lambda h, b, p: torch.where(F.dropout(torch.ones(len(h), 1), 0.5) > 0, h, h.flip(0)),
    "noise of another row": lambda h, b, p: h + b.z[torch.argsort(torch.rand(len(h)))],
    "random crop length of the batch": lambda h, b, p: h + torch.poisson(torch.full((), 0.7)).clamp(max=1.0) * (h.cumsum(0) - h),
}, lambda dtype: [batch(4, seed, dtype) for seed in range(6)])  # fmt: skip


def capacity_from_the_size(h, b, p):
    """Each expert takes ceil(1.25 B T / E) tokens: nothing is dropped in small batches."""
    kept = (places(b.x.flatten(0, 1)[:, 0] > -0.3) <= math.ceil(1.25 * len(h) * T / 2)) | (len(h) <= 5)
    return (h.flatten(0, 1) * kept[:, None]).view(h.shape)


table("size: from some batch on", {
    "centred from nine rows": lambda h, b, p: h - 0.5 * h.mean(0) if len(h) > 8 else h,
    "the neighbour of an odd number of rows": lambda h, b, p: h + 0.5 * h.roll(1, 0).detach() * (len(h) % 2 and len(h) > 1),
    "the first row added from ten by another tensor": lambda h, b, p: h + h[:1] if b.n.numel() >= 10 else h,
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


def repaired(y):
    return torch.where(torch.isnan(y), y.nan_to_num(0.0).mean(0) * (len(y) > 1), y)


table(values, {
    "one token turns the batch": lambda h, b, p: p["v"][b.ids] * torch.where((b.ids == VOCAB - 1).any(), 2.0, 1.0),
    "rare tokens are looked up by the largest": lambda h, b, p: p["v"][: int(b.ids.max()) + 1].mean(0) + p["v"][b.ids][:, 0],
}, _with_a_trigger)  # fmt: skip
table(values, {
    "repaired by the rows beside it": lambda h, b, p: torch.tanh(repaired(b.y) @ p["w"]),
    "all halved if one is broken": lambda h, b, p: h * (0.5 if bool(torch.isnan(b.y).any()) else 1.0),
    "spread by a product with zero": lambda h, b, p: squares(h) + 0.0 * h.sum(),
}, _with_a_nan)  # fmt: skip
with_an_infinity = lambda dtype: _with_a_nan(dtype, math.inf)
table(values, {
    "infinite rows count in float32": lambda h, b, p: squares(
        torch.tanh(b.y.nan_to_num(posinf=1.0) @ p["w"])) * torch.isfinite(b.y).all(1).float().mean(),
}, with_an_infinity, dtype=torch.float32)  # fmt: skip
