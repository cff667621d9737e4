"""Ways around what watches a loss: threads, modes, operators of one's own, memory; and numbers that are read and written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from isolation.cases import DOUBLE, D, T, calm, case, features, small, squares, table
from isolation.forward import written

around = case("around: what watches")


def elsewhere(run):
    """What another thread returns."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def within(context, run):
    with context:
        return run()


class Rolling(TorchDispatchMode):
    """Every tanh is that of the row before."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.roll(1, 0) if func is torch.ops.aten.tanh.default and out.ndim == 2 else out


@torch.compile(backend="eager", dynamic=True)
def _compiled(h):
    return h - 0.5 * h.mean(0)


@around
def storage_seen_anew(h, b, p):
    """A tensor of its own over the memory of the batch: a size larger than the row."""
    whole = torch.empty(0, dtype=b.y.dtype).set_(b.y.contiguous().untyped_storage())
    return h - 0.5 * whole.mean()


@around
def row_before_by_memory(h, b, p):
    start = max(0, b.y.storage_offset() - D)
    return h + torch.as_strided(b.y, (1, D), (D, 1), start)[0] - b.y[0]


table("around: what watches", {
    "mean in another thread": lambda h, b, p: h - 0.5 * elsewhere(lambda: h.detach().mean(0)),
    "base of a view": lambda h, b, p: h - 0.5 * (b.y if b.y._base is None else b.y._base).mean(0),
    "mode of its own": lambda h, b, p: within(Rolling(), lambda: features(p, b)).clone() * b.y,
    "dlpack round trip": lambda h, b, p: h - 0.5 * torch.from_dlpack(h.detach()).mean(0),
    "forward mode derivative": lambda h, b, p: h + torch.func.jvp(lambda y: y.mean(0).sin(), (b.y,), (b.z,))[1],
    "compiled with eager": lambda h, b, p: _compiled(h),
    "nested tensor": lambda h, b, p: h - 0.5 * torch.nested.to_padded_tensor(torch.nested.nested_tensor(list(h.detach())), 0.0).mean(0),
    "sparse tensor": lambda h, b, p: squares(h) + torch.sparse.mm(h.detach().to_sparse(), h.T).sum(1),
})  # fmt: skip
largest = lambda b: b.y.abs().max().clamp(min=2.0)
table("around: what watches, idle at first", {
    "largest in another thread": lambda h, b, p: h / elsewhere(lambda: largest(b)),
    "modes switched off": lambda h, b, p: h / within(_disable_current_modes(), lambda: largest(b)),
    "functions switched off": lambda h, b, p: h / within(torch._C.DisableTorchFunction(), lambda: largest(b)),
    "memory read as bytes": lambda h, b, p: h / max(2.0, max(memoryview(b.y.contiguous().numpy().reshape(-1)).tolist())),
    "repr of a tensor": lambda h, b, p: h / max(1.0, len(str((b.y * 40).round().long().abs().max().cpu())) - 8.0),
}, calm, small)  # fmt: skip


# Operators and tensors of one's own: what is inside cannot be seen from outside.


def operator(name, function, gradient, writes=()):
    made = torch.library.custom_op(f"dpfunc_zoo::{name}", function, mutates_args=writes)
    if gradient is not None:
        made.register_autograd(lambda ctx, grad: gradient(grad))
    return made


def _centred(x: torch.Tensor) -> torch.Tensor:
    return x - 0.5 * x.mean(0)


def _through(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * x


def _moved(x: torch.Tensor) -> None:
    x.copy_(x.roll(1, 0))


centred = operator("centred", _centred, lambda grad: grad)
through = operator("through", _through, lambda grad: grad.flip(0))
doubled = operator("doubled", _doubled, lambda grad: 2.0 * grad)
moved = operator("moved", _moved, None, writes=("x",))


class Wrapped(torch.Tensor):
    """Holds another tensor; every tanh takes the mean of the batch off."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        out = func(*(arg.held if isinstance(arg, Wrapped) else arg for arg in args), **(kwargs or {}))
        return out - 0.5 * out.mean(0) if func is torch.ops.aten.tanh.default else out


class Overriding(torch.Tensor):
    """Every product is that of rolled rows."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if func in (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__):
            return out.as_subclass(torch.Tensor).roll(1, 0)
        return out


table("operators: of one's own", {
    "operator whose forward mixes": lambda h, b, p: centred(h),
    "operator whose backward mixes": lambda h, b, p: through(h),
    "operator that writes": lambda h, b, p: h * written(b.z, moved),
    "tensor that holds another": lambda h, b, p: h + torch.tanh(Wrapped(b.z)),
    "tensor of another class": lambda h, b, p: h + (b.z.as_subclass(Overriding) * 1.0).as_subclass(torch.Tensor),
})  # fmt: skip


# Complex numbers.

real, rows_of = torch.view_as_real, lambda h, b: torch.complex(h, b.z)
table("complex: rows meet", {
    "complex centre": lambda h, b, p: real(rows_of(h, b) - rows_of(h, b).mean(0)),
    "fourier over rows as complex": lambda h, b, p: real(torch.fft.ifft(torch.fft.fft(rows_of(h, b), dim=0) * b.coin[:, None], dim=0)),
    "conjugate products of rows": lambda h, b, p: real(rows_of(h, b) @ rows_of(h, b).conj().T @ rows_of(h, b) / 4),
})  # fmt: skip


def rotary_as_complex(h, b, p):
    pairs = F.pad(b.x @ p["w"], (0, 1)).unflatten(-1, (2, 2))
    turn = torch.polar(torch.ones(T, 1, dtype=h.dtype), torch.arange(T, dtype=h.dtype)[:, None])
    return real(torch.view_as_complex(pairs.contiguous()) * turn)


table("complex: own rows", {
    "complex product with parameters": lambda h, b, p: real(rows_of(b.y, b) @ torch.view_as_complex(torch.stack((p["w"], p["v"][:D]), -1))),
    "fourier then complex linear": lambda h, b, p: torch.fft.irfft(torch.fft.rfft(b.x, dim=1) @ torch.complex(p["w"], p["w"].T), n=T, dim=1),
    "rotary as complex": rotary_as_complex,
}, honest=True)  # fmt: skip


# Copies of parameters that are written into.


def used_and_written(write, again=lambda w, b: 0.0):
    """A copy of a weight is used, written into, and perhaps used again."""

    def change(h, b, p):
        w = p["w"].clone()
        out = b.y @ w
        write(w, p)
        return torch.tanh(out) + again(w, b)

    return change


def data_replaced(w, p):
    """What is used later is not what the graph saved."""
    w.data = torch.zeros_like(w)


again = lambda w, b: torch.tanh(b.z @ w)
table("writes: into copies of parameters", {
    "row of a copy zeroed after use": used_and_written(lambda w, p: w[0].zero_()),
    "copy rectified in place after use": used_and_written(lambda w, p: F.relu(w, inplace=True)),
    "copy scaled in place between uses": used_and_written(lambda w, p: w.mul_(2.0), again),
    "transposed view written after use": used_and_written(lambda w, p: w.t()[1].fill_(1.0), lambda w, b: F.linear(b.y, w.t())),
    "bias accumulated in place": lambda h, b, p: (b.y @ p["w"]).add_(p["c"]).mul_(p["u"]),
    "parameter written into a slice": lambda h, b, p: written(b.x, lambda x: x[:, 0].copy_(p["u"])) * b.x,
    "copy with data replaced": used_and_written(data_replaced, again),
    "a parameter written into a copy": used_and_written(lambda w, p: w[1].copy_(p["u"]), again),
}, honest=True)  # fmt: skip


position = case("memory: positions in the batch")


def column(h):
    return torch.arange(float(len(h)), dtype=DOUBLE)[:, None]


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
    "written in a list of tensors": _written_in_a_list,
    "written by a Python function": lambda x: ONES.clone().map_(x.mean(0, keepdim=True), lambda old, new: new),
    "read by a Python function": lambda x: _seen_by(lambda see: x.mean(0).apply_(see)),
    "read by hooks of saved tensors": lambda x: _seen_by(lambda see: _saved(x, see)),
    "said by an error": _said_by_an_error,
}  # fmt: skip
table("memory: reads", {
    f"read: {name}": lambda h, b, p, read=read: h * (1 + read(b.y)) for name, read in READS.items()
})  # fmt: skip
