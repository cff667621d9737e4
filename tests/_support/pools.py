"""Operations for random programs, by the number of their inputs. A line: name -> choices made -> the function.

`m` makes the choices: `m.axis(x)` is an axis that mostly holds no samples, `m.const(...)` a constant, `m.size(1, 3)` a
number. Operations named in HONEST keep samples apart with the choices that an honest program makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines.tracing.rows import Rows

CURRENT: list[Any] = [None]
"""The trace that follows the program that runs now: for reading shapes, which only a tracker of functions sees."""


def then(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    return lambda *tensors: function(*tensors, *args, **kwargs)


def seeded(seed: int, function: Callable[..., Any]) -> Callable[..., Any]:
    def drawn(*tensors: Tensor) -> Any:
        torch.manual_seed(seed)
        return function(*tensors)

    return drawn


def measured(x: Tensor, axis: int) -> int:
    """A size, as Python reads it under an engine."""
    CURRENT[0].note_shape_read(x)
    return x.shape[axis]


class Through(torch.autograd.Function):
    """A function of its own for each number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class MixedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class MixedBackward(torch.autograd.Function):
    """Honest forward, mixed backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + grad.flip(0)


def hooked(hook: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y = x * 1.0
        y.register_hook(hook)
        return y

    return run


def inside(x: Tensor, m: Any, axis: int) -> tuple[int, int]:
    start = m.size(0, x.shape[axis] - 1)
    return start, m.size(1, x.shape[axis] - start)


def narrow(m: Any, x: Tensor) -> Any:
    axis = m.axis(x)
    start, length = inside(x, m, axis)
    return then(torch.narrow, axis, start, length)


def strided_slice(m: Any, x: Tensor) -> Any:
    axis = m.axis(x)
    index = (*[slice(None)] * axis, slice(m.size(0, 1), None, m.size(1, 2)))
    return lambda t: t[index]


def merged(m: Any, x: Tensor) -> Any:
    if x.ndim < 2:
        return then(torch.flatten)
    start = m.size(0, x.ndim - 2)
    return then(torch.flatten, start, m.size(start + 1, x.ndim - 1))


def unflattened(m: Any, x: Tensor) -> Any:
    axis = m.any_axis(x)
    inner = m.rng.choice([n for n in range(1, x.shape[axis] + 1) if x.shape[axis] % n == 0])
    sizes = m.rng.choice([(-1, inner), (inner, -1)])
    return then(torch.unflatten, axis, sizes)


def reshaped(m: Any, x: Tensor) -> Any:
    flat = x.numel()
    first = m.rng.choice([n for n in range(1, flat + 1) if flat % n == 0])
    rest = flat // first
    second = m.rng.choice([n for n in range(1, rest + 1) if rest % n == 0])
    return then(
        torch.reshape,
        (first, second, rest // second)[: m.size(2, 3)] if rest == second else (first, second, rest // second),
    )


def permuted(m: Any, x: Tensor) -> Any:
    axes = list(range(x.ndim))
    m.rng.shuffle(axes)
    return then(torch.permute, axes)


def swapped(m: Any, x: Tensor) -> Any:
    return then(torch.transpose, m.any_axis(x), m.any_axis(x))


def expanded(m: Any, x: Tensor) -> Any:
    count = m.rng.choice([2, 3, CURRENT[0].num_samples])
    place = m.size(0, x.ndim)

    def run(t: Tensor) -> Tensor:
        wide = t.unsqueeze(place)
        return wide.expand(*wide.shape[:place], count, *wide.shape[place + 1 :])

    return run


def strided(m: Any, x: Tensor) -> Any:
    sizes = [m.size(1, 4) for _ in range(m.size(1, 3))]
    strides = [m.rng.choice([0, 1, 2, *x.stride()]) for _ in sizes]
    offset = x.storage_offset() + m.size(0, 3)
    return then(torch.as_strided, sizes, strides, offset)


def windows(m: Any, x: Tensor) -> Any:
    axis = m.axis(x)
    return lambda t: t.unfold(axis, min(2, t.shape[axis]), 1)


def diagonal(m: Any, x: Tensor) -> Any:
    return then(torch.diagonal, m.size(-1, 1), m.any_axis(x), m.any_axis(x))


def axes(m: Any, x: Tensor) -> Any:
    found = {m.axis(x) for _ in range(m.size(1, 2))}
    return sorted(found)


def over(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction over some axes."""
    return lambda m, x: then(function, axes(m, x), keepdim=m.rng.random() < 0.4)


def over_one(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda m, x: then(function, m.axis(x), keepdim=m.rng.random() < 0.4)


def along(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    return lambda m, x: then(function, *args, m.axis(x))


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    return lambda m, *xs: then(function, *args, **kwargs)


def at_axis(m: Any, x: Tensor) -> tuple[int, Tensor]:
    axis = m.axis(x)
    return axis, m.ints(x.shape[axis], m.size(1, 4))


def selected_by_constants(m: Any, x: Tensor) -> Any:
    return then(torch.index_select, *at_axis(m, x))


def gathered_by_constants(m: Any, x: Tensor) -> Any:
    axis = m.axis(x)
    return then(torch.gather, axis, m.ints(x.shape[axis], *x.shape))


def gathered_by_own(m: Any, x: Tensor) -> Any:
    axis = m.axis(x)
    other = m.rng.random() < 0.3
    return lambda t: t.gather(axis, (t.sum(0, keepdim=True).expand_as(t) if other else t).argsort(axis))


def scattered(m: Any, x: Tensor) -> Any:
    axis = m.axis(x)
    way = m.rng.choice(["scatter", "scatter_add", "amax"])
    own = m.rng.random() < 0.5
    index = m.ints(x.shape[axis], *x.shape)

    def run(t: Tensor) -> Tensor:
        places = t.argsort(axis) if own else index
        if way == "amax":
            return torch.zeros_like(t).scatter_reduce(axis, places, t, "amax")
        return getattr(torch.zeros_like(t) if own else t, way)(axis, places, t * 0.5)

    return run


def permutation_and_back(m: Any, x: Tensor) -> Any:
    back, any_process = m.rng.random() < 0.5, m.rng.random() < 0.3

    def run(t: Tensor) -> Tensor:
        score = t.reshape(len(t), -1).sum(1)
        score = score - score.mean() if any_process else score
        order = score.argsort()
        ordered = t[order] * 2
        if not back:
            return ordered
        if any_process:
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order))
        else:
            inverse = order.argsort()
        return ordered[inverse]

    return run


def inverse_as_numbers(m: Any, x: Tensor) -> Any:
    def run(t: Tensor) -> Tensor:
        order = t.reshape(-1, t.shape[-1]).sum(0).argsort()
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return t * inverse

    return run


def tokens_permuted(m: Any, x: Tensor) -> Any:
    """All positions of all rows, sorted within rows by what depends on other rows, or by own values, or over all rows."""
    way = m.rng.choice(["within", "over", "stable"])

    def run(t: Tensor) -> Tensor:
        flat = t.flatten(0, 1)
        score = flat.reshape(len(flat), -1).sum(1)
        if way == "within":
            score = score - 2 * score.flip(0) + 1e3 * torch.arange(len(t)).repeat_interleave(t.shape[1])
        order = (score > 0).long().argsort(stable=True) if way == "stable" else score.argsort()
        return flat[order]

    return run


def one_of_all(m: Any, x: Tensor) -> Any:
    """Rows at positions that depend on all rows, on an axis without samples."""
    axis = m.axis(x)
    return lambda t: t.index_select(axis, t.movedim(axis, 0).flatten(1).sum(1).argsort()[:1])


def put(m: Any, x: Tensor) -> Any:
    axis = m.axis(x)
    way = m.rng.choice(["constant", "mixed", "mixed constant"])
    add = m.rng.random() < 0.5
    index = m.ints(x.shape[axis], m.size(1, 3))

    def run(t: Tensor) -> Tensor:
        places = index if way == "constant" else t.movedim(axis, 0).flatten(1).sum(1).argmax(0, keepdim=True)
        moved = t.clone().movedim(axis, 0)
        values = torch.ones(1) if way == "mixed constant" else moved[places] * 3
        moved.index_put_((places,), values.double(), accumulate=add)
        return moved

    return run


def put_into_zeros(m: Any, x: Tensor) -> Any:
    order = m.rng.random() < 0.5

    def run(t: Tensor) -> Tensor:
        places = t.reshape(len(t), -1).sum(1).argsort() if order else torch.arange(len(t))
        return torch.zeros_like(t).index_put((places,), t[places] * 2)

    return run


def own_column(m: Any, x: Tensor) -> Any:
    if x.ndim < 2:
        return plain(torch.clone)(m, x)
    mixed = m.rng.random() < 0.3

    def run(t: Tensor) -> Tensor:
        best = t.argmax(1) if not mixed else t.argmax(1).flip(0)
        return t[torch.arange(len(t)), best] if t.ndim == 2 else t[torch.arange(len(t)), best[:, 0]]

    return run


def put_own_column(m: Any, x: Tensor) -> Any:
    mixed, wide = m.rng.random() < 0.3, m.rng.random() < 0.5

    def run(t: Tensor) -> Tensor:
        t = t.reshape(len(t), -1)
        best = t.sum(0).argmax().expand(len(t)) if mixed else t.argmax(1)
        y = torch.zeros_like(t) if wide else t * 2
        y[torch.arange(len(t)), best] = t[:, 0].abs()
        return y

    return run


def index_added(m: Any, x: Tensor) -> Any:
    axis, index = at_axis(m, x)

    def run(t: Tensor) -> Tensor:
        return t.index_add(axis, index, t.index_select(axis, index) * 2)

    return run


def masked(m: Any, x: Tensor) -> Any:
    way = m.rng.choice(["own rows", "own numbers", "constant", "put", "mixed"])
    constant = m.ints(2, len(x)) > 0

    def run(t: Tensor) -> Tensor:
        mask = t.reshape(len(t), -1).sum(1) > 0
        if way == "own rows":
            return t[mask]
        if way == "own numbers":
            return t[t > 0]
        if way == "constant":
            return t[constant]
        if way == "put":
            return t.index_put((mask,), t[mask] * 2)
        return t[mask & (t.sum() > 0)]

    return run


def counted(m: Any, x: Tensor) -> Any:
    """Numbers that only the shape of what was selected says."""
    way = m.rng.choice(["ones", "size", "selected", "like"])

    def run(t: Tensor) -> Tensor:
        picked = t[t.reshape(len(t), -1).sum(1) > 0]
        if way == "ones":
            return t * torch.ones_like(picked).sum()
        if way == "size":
            return t * measured(picked + 1, 0)
        if way == "selected":
            return t * measured(torch.masked_select(t, t > 0) * 2, 0)
        return t * torch.full_like(picked.reshape(-1)[:0], 1.0).sum() + t

    return run


def nonzero_back(m: Any, x: Tensor) -> Any:
    def run(t: Tensor) -> Tensor:
        places = (t > 0).nonzero(as_tuple=True)
        return torch.zeros_like(t).index_put(places, t[places] * 2)

    return run


def wheres(m: Any, x: Tensor, y: Tensor) -> Any:
    return m.rng.choice([
        lambda a, b: torch.where(a > b, a, b * 2), lambda a, b: torch.where(a > 0, b, 0.0),
        lambda a, b: a.masked_fill(b > 0, -1.0), lambda a, b: a.masked_fill(b > 0, a.sum() * 0 + 1),
    ])  # fmt: skip


def scattered_by_mask(m: Any, x: Tensor) -> Any:
    way = m.rng.choice(["constants", "own", "same"])

    def run(t: Tensor) -> Tensor:
        if way == "constants":
            return torch.zeros_like(t).masked_scatter(t > 0, torch.arange(t.numel()).double())
        if way == "own":
            return t.masked_scatter(t > 0, t * 2)
        mask = torch.zeros_like(t, dtype=torch.bool)
        mask[:, :1] = True
        return t.masked_scatter(mask, t[:, :1] * 2)

    return run


def written_slice(m: Any, x: Tensor) -> Any:
    axis = m.axis(x)
    start, length = inside(x, m, axis)
    way = m.rng.choice(["copy", "add", "mul", "zero", "fill", "fill_tensor", "constant", "other"])
    base = m.rng.choice(["clone", "zeros", "itself"])
    constant = m.const(*[length if k == axis else n for k, n in enumerate(x.shape)])

    def run(t: Tensor) -> Tensor:
        y = t * 1.0 if base == "clone" else torch.zeros_like(t) if base == "zeros" else t
        part, source = y.narrow(axis, start, length), t.narrow(axis, start, length) * 2
        if way == "copy":
            part.copy_(source)
        elif way == "add":
            part.add_(source)
        elif way == "mul":
            part.mul_(constant)
        elif way == "zero":
            part.zero_()
        elif way == "fill":
            part.fill_(2.0)
        elif way == "fill_tensor":
            part.fill_(t.detach().sum())
        elif way == "constant":
            part.copy_(constant)
        else:
            part.copy_(t.flip(0).narrow(axis, start, length))
        return y if base == "itself" else [y]

    return run


def written_samples(m: Any, x: Tensor) -> Any:
    """One sample after the other, at its place or at another's."""
    shift = m.rng.choice([0, 0, 1])
    axis = m.rng.choice([0, 0, 1])

    def run(t: Tensor) -> Tensor:
        sizes = (len(t), *t.shape[1:]) if axis == 0 else (t.shape[1], len(t), *t.shape[2:])
        y = t.new_zeros(sizes)
        for row in range(len(t)):
            y.select(axis, row).copy_(t[(row + shift) % len(t)] * 2)
        return y

    return run


def out_into(m: Any, x: Tensor, y: Tensor) -> Any:
    """Results in memory that was made before: of the right size, or empty."""
    whole = m.rng.random() < 0.5

    def run(a: Tensor, b: Tensor) -> Tensor:
        a, b = a.detach(), b.detach()
        out = torch.zeros(torch.broadcast_shapes(a.shape, b.shape), dtype=a.dtype) if whole else a.new_empty(0)
        torch.mul(a, b, out=out)
        return out

    return run


def joined(m: Any, x: Tensor, *rest: Any) -> Any:
    axis = m.axis(x)
    return lambda *ts: torch.cat(ts, axis)


def stacked(m: Any, x: Tensor, *rest: Any) -> Any:
    place = m.size(0, x.ndim)
    return lambda *ts: torch.stack(ts, place)


def apart_and_together(m: Any, x: Tensor) -> Any:
    """Slices along an axis, each by itself, and joined again in the same or another order."""
    axis, stack, order = m.any_axis(x), m.rng.random() < 0.5, m.rng.choice([1, 1, -1])

    def run(t: Tensor) -> Tensor:
        if stack:
            return torch.stack([part.sin() for part in t.unbind(axis)[::order]], axis)
        return torch.cat([part * 2 for part in t.chunk(2, axis)[::order]], axis)

    return run


def doubled(m: Any, x: Tensor) -> Any:
    axis = m.any_axis(x)
    return lambda t: torch.cat([t, t * 2], axis)


def repeated(m: Any, x: Tensor) -> Any:
    return then(Tensor.repeat, [m.size(1, 2) for _ in range(x.ndim)])


def padded(m: Any, x: Tensor) -> Any:
    pads = [0] * (2 * x.ndim)
    pads[2 * (x.ndim - 1 - m.axis(x)) + m.size(0, 1)] = m.size(1, 2)
    return then(F.pad, pads)


def by_features(make: Callable[..., Any]) -> Callable[..., Any]:
    """The last axis are features: not in an honest program that has its samples there."""

    def checked(m: Any, x: Tensor) -> Any:
        kind = m.kind(x)
        if m.honest and isinstance(kind, Rows) and kind.axis == x.ndim - 1:
            raise ValueError("samples")
        return make(m, x)

    return checked


def multiplied(m: Any, x: Tensor) -> Any:
    return then(F.linear, m.const(m.rng.choice([2, x.shape[-1], CURRENT[0].num_samples]), x.shape[-1]))


def squared(m: Any, x: Tensor, *rest: Any) -> Any:
    """Products of two tensors of one shape."""
    way = m.rng.choice(["ABt", "AtB", "AB", "einsum", "cdist", "bmm"])

    def run(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        if way == "ABt":
            return a @ b.transpose(-1, -2)
        if way == "AtB":
            return a.transpose(-1, -2) @ b
        if way == "AB":
            return a @ b
        if way == "einsum":
            return torch.einsum("bij,bkj->bik" if a.ndim == 3 else "ij,kj->ik", a, b)
        if way == "cdist":
            return torch.cdist(a, b)
        return torch.baddbmm(c @ b.transpose(-1, -2), a, b.transpose(-1, -2))

    return run


def attention(m: Any, x: Tensor, *rest: Any) -> Any:
    lift = m.rng.choice([0, 1])
    causal = m.rng.random() < 0.3

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t if t.ndim == 4 else t.unsqueeze(lift) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


def convolved(m: Any, x: Tensor) -> Any:
    """Over the last axis, of (N, C, L): sometimes with samples in the channels, and groups."""
    way = m.rng.choice(["plain", "grouped", "merged", "own weights", "other weights"])
    channels = x.shape[1] if x.ndim > 2 else 1
    weight = m.const(2 * channels, 1, 2) if way == "grouped" else m.const(2, channels, 2)
    bias = m.const(2)

    def run(t: Tensor) -> Tensor:
        if way == "plain":
            return F.conv1d(t, weight, bias)
        if way == "grouped":
            return F.conv1d(t, weight, groups=t.shape[1])
        flat = t.reshape(1, -1, t.shape[-1])
        if way == "merged":
            return F.conv1d(flat, weight.repeat(len(t), 1, 1), groups=len(t))
        kernel = t.reshape(-1, t.shape[-1])[:, None, :2]
        return F.conv1d(flat, kernel.flip(0) if way == "other weights" else kernel, groups=flat.shape[1])

    return run


def normed(m: Any, x: Tensor) -> Any:
    way = m.rng.choice(["layer", "group", "instance", "batch", "eval", "rms", "instance", "own statistics"])

    def run(t: Tensor) -> Tensor:
        if way == "layer":
            return F.layer_norm(t, t.shape[-1:])
        if way == "rms":
            return F.rms_norm(t, t.shape[-1:])
        if way == "group":
            return F.group_norm(t, 1)
        if way == "instance":
            return F.instance_norm(t)
        if way == "batch":
            return F.batch_norm(t, None, None, training=True)
        channels = t.shape[1]
        if way == "own statistics":
            mean, var = torch.zeros(channels).double(), torch.ones(channels).double()
            F.batch_norm(t.detach(), mean, var, training=True)
            return t * mean.sum()
        return F.batch_norm(t, torch.zeros(channels).double(), torch.ones(channels).double())

    return run


def pooled(m: Any, x: Tensor) -> Any:
    return m.rng.choice([
        then(F.max_pool1d, 2, 1), then(F.avg_pool1d, 2, 1), then(F.adaptive_avg_pool1d, 2),
        then(F.adaptive_max_pool1d, 2), then(F.max_pool2d, 2, 1), then(F.avg_pool2d, 2, 1),
        then(F.interpolate, scale_factor=2), then(F.pad, (1, 1), "reflect"),
    ])  # fmt: skip


def drawn(m: Any, x: Tensor) -> Any:
    kind = m.kind(x)
    if isinstance(kind, Rows) and (kind.ids is not None or kind.slots is not None):
        raise ValueError("random numbers of each place go to samples by their order, with the same law")
    seed = m.rng.randrange(1 << 20)
    return seeded(seed, m.rng.choice([
        lambda t: F.dropout(t, 0.5), lambda t: t * torch.rand_like(t), lambda t: t + torch.randn(t.shape[-1:]),
        lambda t: t * torch.bernoulli(t.detach().sigmoid()),
        lambda t: t * torch.empty_like(t).bernoulli_(t.detach().sigmoid()),
        lambda t: t * torch.empty_like(t[:1]).bernoulli_(t.detach().sum(0, keepdim=True).sigmoid()),
        lambda t: t * torch.bernoulli(t.detach().sum(0, keepdim=True).sigmoid()),
        lambda t: torch.normal(t.detach(), 1.0), lambda t: t[torch.randperm(len(t))], lambda t: F.dropout1d(t, 0.5),
    ]))  # fmt: skip


def transformed(m: Any, x: Tensor) -> Any:
    axis = m.axis(x)
    return m.rng.choice([
        lambda t: torch.fft.rfft(t, dim=axis).abs(), lambda t: torch.fft.fft(t, dim=axis).real,
        lambda t: torch.view_as_real(torch.complex(t, t * 2)).flatten(-2),
        lambda t: torch.view_as_complex(torch.stack([t, t], -1)).imag,
    ])  # fmt: skip


def looked_up(m: Any, x: Tensor) -> Any:
    table = m.const(4, 3)
    mixed = m.rng.random() < 0.2

    def run(t: Tensor) -> Tensor:
        ids = (t.detach() * 2).long().clamp(0, 3)
        if mixed:
            ids = ids.amax(0)
        return m_choice(ids)

    m_choice = m.rng.choice([lambda ids: F.embedding(ids, table), lambda ids: F.one_hot(ids, 4).double(),
                             lambda ids: table[ids], lambda ids: table.index_select(0, ids.reshape(-1))])  # fmt: skip
    return run


def losses(m: Any, x: Tensor) -> Any:
    """Losses of the rows of a matrix, some of which know of the others."""
    way = m.rng.choice(["cross", "mean", "weights", "bce", "mse", "margin", "kl"])

    def run(t: Tensor) -> Tensor:
        t = t.reshape(len(t), -1)
        target = t.detach().argmin(1)
        if way == "cross":
            return F.cross_entropy(t, target, reduction="none")
        if way == "mean":
            return F.cross_entropy(t, target)
        if way == "weights":
            return F.cross_entropy(t, target, weight=t.detach().abs().mean(0), reduction="none")
        if way == "bce":
            return F.binary_cross_entropy_with_logits(
                t, t.detach().sigmoid(), pos_weight=t.detach().abs().mean(0), reduction="none"
            )
        if way == "mse":
            return F.mse_loss(t, t.roll(1, 1), reduction="none")
        if way == "kl":
            return F.kl_div(t.log_softmax(1), t.softmax(1), reduction="none")
        return F.multi_margin_loss(t, target, reduction="none")

    return run


def solved(m: Any, x: Tensor) -> Any:
    way = m.rng.choice(["rows", "vector", "matrix"])
    size = x.shape[0] if way == "vector" else x.shape[-2] if x.ndim > 1 else 1
    matrix = m.const(size, size)

    def run(t: Tensor) -> Tensor:
        if way == "vector":
            return torch.linalg.solve(matrix, t.reshape(len(t), -1)[:, 0])
        if way == "rows":
            return torch.linalg.solve(matrix, t)
        return torch.linalg.inv(t @ t.transpose(-1, -2) + torch.eye(t.shape[-2]))

    return run


def topk(m: Any, x: Tensor) -> Any:
    axis = m.axis(x)
    return lambda t: t.topk(min(2, t.shape[axis]), axis).values


def kthvalue(m: Any, x: Tensor) -> Any:
    axis, keep = m.axis(x), m.rng.random() < 0.4
    return lambda t: t.kthvalue(1, axis, keepdim=keep).values


def first_of(function: Callable[..., Any]) -> Callable[..., Any]:
    def make(m: Any, x: Tensor) -> Any:
        axis = m.axis(x)
        return lambda t: function(t, axis)[0]

    return make


def embedded(m: Any, x: Tensor) -> Any:
    place = m.rng.choice([(-2, -1), (0, 1), (0, -1)])
    return then(torch.diag_embed, 0, *place)


def kept_or_not(m: Any, x: Tensor) -> Any:
    """Truth values of all rows, as numbers."""
    way = m.rng.choice(["all", "any"])
    table = m.const(3)
    return lambda t: t * table[getattr(t > -9, way)(0).flatten()[0].long()]


def under_inference(m: Any, x: Tensor) -> Any:
    way = m.rng.choice(["reshape", "contiguous", "copied", "linear", "var"])

    def run(t: Tensor) -> Tensor:
        with torch.inference_mode():
            flipped = t.transpose(0, -1)
            if way == "reshape":
                y = flipped.reshape(-1)
            elif way == "contiguous":
                y = flipped.contiguous()
            elif way == "copied":
                y = t.to(torch.float32).to(torch.float64)
            elif way == "linear":
                y = F.softmax(t, -1)
            else:
                y = t.var(0, keepdim=True)
            return y * 1.0

    return run


UNARY: dict[str, Callable[[Any, Tensor], Any]] = {
    "narrow": narrow, "strided slice": strided_slice, "flatten": merged, "unflatten": unflattened, "reshape": reshaped,
    "permute": permuted, "transpose": swapped, "expand": expanded, "as_strided": strided, "unfold": windows,
    "diagonal": diagonal, "unsqueeze": lambda m, x: then(torch.unsqueeze, m.size(0, x.ndim)),
    "select": lambda m, x: then(torch.select, (axis := m.axis(x)), m.size(0, x.shape[axis] - 1)),
    "chunk": lambda m, x: then(torch.chunk, 2, m.axis(x)), "unbind": lambda m, x: then(torch.unbind, m.axis(x)),
    "movedim": lambda m, x: then(torch.movedim, m.any_axis(x), m.any_axis(x)),
    "squeeze": plain(torch.squeeze), "T": plain(lambda t: t.mT if t.ndim > 1 else t), "clone": plain(torch.clone),
    "contiguous": plain(Tensor.contiguous), "detach": plain(Tensor.detach), "cast": plain(lambda t: t.float().double()),
    "sin": plain(torch.sin), "tanh": plain(torch.tanh), "abs": plain(torch.abs), "sigmoid": plain(torch.sigmoid),
    "relu": plain(torch.relu), "gelu": plain(F.gelu), "square": plain(lambda t: t.clamp(-3, 3).square()),
    "add number": lambda m, x: then(torch.add, m.number()), "mul number": lambda m, x: then(torch.mul, m.number()),
    "mul constant": lambda m, x: then(torch.mul, m.const(*x.shape[m.size(0, x.ndim) :])),
    "add made": plain(lambda t: t + torch.ones(t.shape).double()),
    "add arange": by_features(plain(lambda t: t + torch.arange(t.shape[-1]))),
    "sum": over(torch.sum), "mean": over(torch.mean), "amax": over(torch.amax), "logsumexp": over(torch.logsumexp),
    "var": over(torch.var), "std": over(torch.std), "norm": lambda m, x: then(torch.linalg.vector_norm, 2, axes(m, x)),
    "sum of all": plain(torch.sum), "prod": over_one(torch.prod), "argmax": over_one(torch.argmax),
    "max": lambda m, x: (lambda axis: lambda t: t.max(axis).values)(m.axis(x)), "median": first_of(torch.median),
    "mode": first_of(torch.mode), "kthvalue": kthvalue, "topk": topk, "sort": first_of(torch.sort),
    "argsort": along(torch.argsort), "softmax": along(torch.softmax), "log_softmax": along(torch.log_softmax),
    "cumsum": along(torch.cumsum), "cumprod": along(torch.cumprod), "cummax": first_of(torch.cummax),
    "logcumsumexp": along(torch.logcumsumexp), "flip": lambda m, x: then(torch.flip, axes(m, x)),
    "roll": along(torch.roll, 1), "renorm": lambda m, x: then(torch.renorm, 2, m.axis(x), 1.0),
    "glu": lambda m, x: then(F.glu, m.axis(x)), "index_select": selected_by_constants, "gather": gathered_by_constants,
    "gather sorted": along(lambda t, axis: t.gather(axis, t.argsort(axis))), "gather own": gathered_by_own, "scatter": scattered, "order": permutation_and_back, "inverse": inverse_as_numbers,
    "tokens": tokens_permuted, "one of all": one_of_all, "put": put, "put zeros": put_into_zeros, "own column": own_column,
    "put own column": put_own_column, "index_add": index_added, "mask": masked, "count": counted, "nonzero": nonzero_back,
    "masked_scatter": scattered_by_mask, "write": written_slice, "write samples": written_samples,
    "apart": apart_and_together, "double": doubled, "repeat": repeated, "pad": padded,
    "repeat_interleave": lambda m, x: then(torch.repeat_interleave, 2, m.any_axis(x)), "linear": by_features(multiplied),
    "conv": convolved, "norms": normed, "pool": pooled, "draw": drawn, "fft": transformed, "lookup": looked_up,
    "loss": losses, "solve": solved, "tril": plain(torch.tril), "diag_embed": embedded, "truth": kept_or_not,
    "through": plain(Through.apply), "mixed forward": plain(MixedForward.apply), "mixed backward": plain(MixedBackward.apply),
    "hook": plain(hooked(lambda g: g * 2)), "mixed hook": plain(hooked(lambda g: g - g.mean(0))),
    "outer": plain(lambda t: t[:, None] - t[None]), "inference": under_inference,
    "center": plain(lambda t: t - t.mean(0)), "gt": plain(lambda t: (t > 0).double()),
    "bucketize": plain(lambda t: torch.bucketize(t, torch.tensor([-1.0, 0.0, 1.0]).double()).double()),
    "searchsorted": plain(lambda t: torch.searchsorted(t.sort(-1).values, t).double()),
    "shape": plain(lambda t: t * measured(t, 0)), "batch axis": plain(lambda t: t * torch.arange(measured(t, 0)).sum()),
}  # fmt: skip
BINARY: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "add": plain(torch.add), "mul": plain(torch.mul), "sub": plain(torch.sub), "maximum": plain(torch.maximum),
    "where": wheres, "add_": plain(lambda a, b: (a * 1.0).add_(b)), "mul_": plain(lambda a, b: a.mul_(b)),
    "copy_": plain(lambda a, b: torch.zeros_like(a).copy_(b)), "out": out_into, "lerp": plain(lambda a, b: torch.lerp(a, b, 0.3)),
    "addcmul": plain(lambda a, b: torch.addcmul(a, b, b)), "matmul": plain(torch.matmul),
    "clamp": plain(lambda a, b: a.clamp(max=b)), "atan2": plain(torch.atan2),
}  # fmt: skip
TERNARY: dict[str, Callable[..., Any]] = {
    "cat": joined,
    "stack": stacked,
    "products": squared,
    "attention": attention,
    "cat two": lambda m, x: (lambda axis: lambda a, b, c: torch.cat([a, b], axis))(m.axis(x)),
}
ANY_DTYPE = frozenset(("narrow", "transpose", "permute", "flatten", "reshape", "select", "clone", "unsqueeze", "gt"))
POOL = [*UNARY, *BINARY, *BINARY, *TERNARY, *TERNARY]
HONEST = [
    "narrow", "strided slice", "select", "unsqueeze", "clone", "cast", "sin", "tanh", "abs", "sigmoid", "relu", "gelu",
    "square", "add number", "mul number", "mul constant", "add arange", "sum", "mean", "amax", "logsumexp", "var", "norm",
    "softmax", "log_softmax", "cumsum", "sort", "topk", "flip", "roll", "index_select", "gather sorted", "linear", "through",
    "pad", "transpose", "permute",
]  # fmt: skip
