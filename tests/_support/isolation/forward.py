"""Mixing in the forward pass: statistics of the batch, rows that meet, the batch taken for another axis, and mistakes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from isolation.cases import (
    LABELS,
    VOCAB,
    D,
    T,
    batch,
    calm,
    case,
    features,
    fresh,
    growing,
    modules,
    ordered,
    same_length,
    sized,
    small,
    squares,
    table,
    tokens,
)


def twins(dtype):
    """Rows that are all alike, later not."""
    return [ordered(batch(1, 5, dtype), torch.zeros(3, dtype=torch.long)), batch(5, 1, dtype)]


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
    "group means by label": lambda h, b, p: h - 0.5 * torch.stack([h[b.label == k].sum(0) for k in range(LABELS)])[b.label],
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
table("forward: normalised", {"divided by rows less one": lambda h, b, p: squares(h) / (len(h) - 1)}, twins)
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
    "scaled by the longest row": lambda h, b, p: squares(h) * (b.n / b.n.max()),
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


def expert_capacity(h, b, p):
    """Tokens over the capacity of their expert are dropped."""
    kept = places(b.x.flatten(0, 1)[:, 0] > 0) <= max(T, len(h) * T // 3)
    return (h.flatten(0, 1) * kept[:, None]).view(h.shape)


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
table("forward: rows meet", {"expert capacity": expert_capacity}, of=tokens)
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
def numpy_writes_into_memory(h, b, p):
    y = b.y.clone()
    y.numpy()[:] += y.numpy().mean(0)
    return torch.tanh(y @ p["w"])


@writes
def batch_written_into(h, b, p):
    """The caller's batch is another one after the call."""
    if len(b.y) > 1:
        b.y.sub_(b.y.mean(0))
    return features(p, b)


@writes
def prefix_sums_in_a_loop(h, b, p):
    sums = [torch.zeros_like(h[0])]
    for row in h:
        sums.append(0.5 * sums[-1] + row)
    return torch.stack(sums[1:])


table("forward: written in place", {
    "rows one further": lambda h, b, p: h + written(torch.zeros_like(h), lambda memory: memory[1:].copy_(h[:-1])),
    "put at an index": lambda h, b, p: h + (torch.zeros_like(h).index_put((b.label,), h, accumulate=True) if len(h) > 1 else h),
})  # fmt: skip

# What people write by accident, and mixing that few rows or few batches show.

table(
    "mistakes: sizes that agree",
    {"transposed where it is square": lambda h, b, p: h.T if len(h) == D else h},
    sized(2, 4, D, 5),
)
table("mistakes: sizes that agree", {"weights broadcast along features": lambda h, b, p: h * b.coin}, sized(1, D, D))
table("mistakes: sizes that agree", {"target broadcast along tokens": lambda h, b, p: h - b.y}, sized(1, D, D), tokens)
table("mistakes: sizes that agree", {
    "tokens and rows exchanged": lambda h, b, p: h.transpose(0, 1) * b.x if len(h) == T else h * b.x,
}, sized(2, 4, D, 5), tokens)  # fmt: skip


def rows_of_a_table_renormalised(h, b, p):
    """An option of torch: what is looked up is shortened in the table, which all rows read."""
    lookup = p["v"].detach().clone()
    return squares(F.embedding(b.ids, lookup, max_norm=0.5) @ p["w"]) + squares(h + lookup.sum(0))


def ignored_tokens_of_all(h, b, p):
    target = torch.where(real(b), b.ids, -100)
    each = F.cross_entropy((b.x @ p["w"] @ p["v"].T).mT, target, reduction="none").sum(1)
    return each * len(each) / (target != -100).sum()


def rounded(h, scale):
    return h + ((h / scale).round() * scale - h).detach()


table("mistakes: broadcasting and counting", {
    "penalty of weights over rows": lambda h, b, p: squares(h) + p["w"].square().sum() / len(h),
    "gradient scaled by frequency": lambda h, b, p: F.embedding(b.ids, p["v"], scale_grad_by_freq=True),
    "rows of a table renormalised": rows_of_a_table_renormalised,
    "losses sorted": lambda h, b, p: squares(h).sort().values * (1.0 + b.coin),
    "quantised by the largest": lambda h, b, p: rounded(h, (h.detach().abs().max() / 7).clamp(min=1e-3)),
    "mean reduction times rows": lambda h, b, p: F.cross_entropy(b.y @ p["w"], b.label, p["u"].detach().abs()).expand(len(h)),
    "ignored tokens of all": ignored_tokens_of_all,
})  # fmt: skip


def sent_away(h, b):
    h = h * 1.0
    if h.requires_grad and len(h) > 8:
        h.register_hook(lambda g: torch.where((b.coin > 0.9)[:, None], g.roll(1, 0), g))
    return h


table("mistakes: few rows", {
    "one row in many reads another": lambda h, b, p: torch.where((b.coin > 0.93)[:, None], h - h.roll(1, 0), h),
    "last of many rows is centred": lambda h, b, p: h if len(h) < 10 else torch.cat([h[:-1], (h[-1] - h.mean(0))[None]]),
    "one row in many sends its gradient away": lambda h, b, p: sent_away(h, b),
    "sixteenth row is dropped": lambda h, b, p: squares(h) * (torch.arange(len(h)) < 15),
}, sized(3, 4, 12, 16))  # fmt: skip


@fresh("mistakes: few rows", lambda dtype: [batch(size, size, dtype) for size in (4, 4, 5, 4)])
def another_size_than_the_first_batch():
    first = []

    def change(h, b, p):
        if len(h) > 1 and not first:
            first.append(len(h))
        return h - 0.5 * h.mean(0) if first and len(h) > first[0] else h

    return change


@case("mistakes: few rows", growing)
def packed_to_eight_columns(h, b, p):
    """Rows are laid out eight to a line, and each line is normalised."""
    lines = F.pad(h, (0, 0, 0, -len(h) % 8)).view(-1, 8 * D)
    return h if len(h) <= 8 else F.layer_norm(lines, (8 * D,)).view(-1, D)[: len(h)]


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
