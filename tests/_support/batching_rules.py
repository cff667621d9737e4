"""Calls of torch's functions, as a step sees them, with rows in any of their arguments: rows beside others, and alone.

`python tests/_support/batching_rules.py` writes the table of functions whose rows were right on this version of torch,
`dpfunc/engines/_verified/<version>.json`. The samples are torch's own (op_db, module_db), and calls that models of the
tests make.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
import random
import re
import sys
import time
import types
import unittest
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._ops import OpOverloadPacket
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpfunc.engines import _row_pass as row_pass
from dpfunc.engines._batching import VERSION
from dpfunc.engines._draws import RANDOM
from dpfunc.engines._levels import (
    Levels,
    OutsideTransforms,
    Stop,
    inside,
    levels,
    parts_of,
    run_backward,
    seen_as_compiling,
)
from dpfunc.engines._per_sample import Kept

TABLES = Path(row_pass.__file__).parent / "_verified"
ROWS = 3
MOST_NUMBERS = 1000
PATIENCE = 3.0
"""Seconds for one function."""
DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)


def name_of_each() -> dict[Any, str]:
    """Function -> its path below `torch`, for all that a mode of torch functions can be told."""
    found: dict[Any, str] = {}
    spaces = ("", "functional", "nn.functional", "special", "linalg", "fft", "_C._nn", "_C._linalg", "_C._special",
              "_C._fft", "_C._sparse", "_C._nested", "_C._VariableFunctions")  # fmt: skip
    for name in dir(torch.Tensor):
        value = getattr(torch.Tensor, name, None)
        if callable(value):
            found.setdefault(value, f"Tensor.{name}")
        elif hasattr(value, "__get__"):
            found.setdefault(value.__get__, f"Tensor.{name}.__get__")
    for space in spaces:
        module = torch
        for part in filter(None, space.split(".")):
            module = getattr(module, part)
        for name in dir(module):
            value = getattr(module, name, None)
            if callable(value) and not isinstance(value, type):
                with contextlib.suppress(TypeError):
                    found.setdefault(value, f"{space}.{name}".lstrip("."))
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if isinstance(packet, OpOverloadPacket):
            found.setdefault(packet, f"ops.aten.{name}")
            for overload in packet.overloads():
                found.setdefault(getattr(packet, overload), f"ops.aten.{name}.{overload}")
    return found


class Call(NamedTuple):
    """One call of a function, with plain tensors."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def signature(self) -> str:
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        told = [f"{tuple(v.shape)}{v.dtype}" if isinstance(v, Tensor) else repr(v)[:40] for v in leaves]
        return f"{told} {spec}"

    def form(self) -> str:
        """The signature without numbers of shapes."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        told = [f"{v.ndim}{v.dtype}" if isinstance(v, Tensor) else type(v).__name__ for v in leaves]
        return f"{told} {spec}"


def kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) and value.layout is torch.strided else value


class Recorder(TorchFunctionMode):
    """Functions of torch that a loss calls, as a step sees them: those that are written in Python by their parts."""

    def __init__(self, take: Callable[[Call], None]) -> None:
        super().__init__()
        self.take = take

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parts = parts_of(func)
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        call = Call(func, *pytree.tree_map(kept, (tuple(args), dict(kwargs))))
        found = func(*args, **kwargs)
        self.take(call)
        return found


class Operations(TorchDispatchMode):
    """Operations of `torch.ops.aten` below the functions, which some code calls by themselves."""

    def __init__(self, take: Callable[[Call], None]) -> None:
        super().__init__()
        self.take = take

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and "out" not in kwargs:
            given = pytree.tree_map(kept, (tuple(args), dict(kwargs)))
            self.take(Call(func, *given))
            self.take(Call(func.overloadpacket, *given))
        return func(*args, **kwargs)


@dataclass
class Calls:
    """Different calls of each function, at most so many."""

    most: int
    found: dict[Any, dict[str, Call]] = field(default_factory=lambda: defaultdict(dict))
    forms: dict[Any, set[str]] = field(default_factory=lambda: defaultdict(set))

    def take(self, call: Call) -> None:
        tensors = [v for v in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(v, Tensor)]
        known, forms = self.found[call.function], self.forms[call.function]
        if not tensors or len(tensors) > 8 or any(v.numel() > MOST_NUMBERS for v in tensors):
            return
        if (call.form() in forms and len(known) >= self.most) or len(forms) >= 2 * self.most:
            return
        forms.add(call.form())
        known.setdefault(call.signature(), call)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        with Operations(self.take), Recorder(self.take):
            yield


def of_torch(calls: Calls, each: int, part: slice = slice(None)) -> None:
    """Samples of torch's own tests, op_db and module_db."""
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stub)
    with mock.patch("torch.backends.disable_global_flags"):  # later code of this process may set TF32
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db

    for op in op_db[part]:
        for dtype in DTYPES:
            if dtype not in op.dtypes or (dtype is torch.float32 and torch.float64 in op.dtypes):
                continue
            most = each if dtype.is_floating_point else max(1, each // 3)
            with contextlib.suppress(Exception):
                for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), most):
                    ways = [op.op, op.operator_variant, op.inplace_operator_variant]
                    for info in (op, *op.aliases):
                        ways += [info.op, info.method_variant, info.inplace_variant]
                    for way in dict.fromkeys(filter(None, ways)):
                        given = pytree.tree_map(kept, (sample.input, sample.args, sample.kwargs))
                        with contextlib.suppress(Exception), calls.noted():
                            way(given[0], *given[1], **given[2])
    for info in module_db[part]:
        with contextlib.suppress(Exception):
            for made in itertools.islice(info.module_inputs_func(info, "cpu", torch.float64, False, True), each):
                module = info.module_cls(*made.constructor_input.args, **made.constructor_input.kwargs).double()
                given = made.forward_input
                with contextlib.suppress(Exception), torch.no_grad(), calls.noted():
                    module(*given.args, **given.kwargs)


# What models write beside the functions of op_db: x (3, 4), y (3, 4), s (3, 3), z complex (3, 4), m a mask (3, 4),
# i whole numbers (3,).
OWN: tuple[Callable[..., Any], ...] = (
    lambda x, y, s, z, m, i: [x[0], x[:, 1:], x[None], x[..., 0], x[i], x[i, i], x[i, 0], x[:, i], x[[0, 1]], x[-1, 2], x[None, :, None], x[::2], x[..., None, 1], x[0, 1:3]],
    lambda x, y, s, z, m, i: [x[m], x[m[:, 0]], x[:, m[0]], x[i.unsqueeze(1), i], x[i[:2], :], x[torch.tensor(1)], m[0], i[1], m[:, None], z[0], z[i], i[i], i[None], m[i]],
    lambda x, y, s, z, m, i: [-x, x + 1, 1 - x, x - y, 2 / x, x / y, x**2, 2.0**x, x**y, x // 2, x % 2, ~m, m & m, m | m, m ^ m, x > 0, x < 1, x == y, x != y, x <= y, abs(x), x @ y.T, x.T @ y, x @ y[0], 3 // (1 + i), 5 % (1 + i), i << 1, i >> 1, 1 << i, +x, i + 1, i * x[0, 0], m * x, x * m],
    lambda x, y, s, z, m, i: [x.T, x.mT, z.H, z.mH, z.real, z.imag, x.real, x.data, x.t(), x.view(4, 3), x.view(-1), x.reshape(2, 6), x.permute(1, 0), x.swapaxes(0, 1), x.contiguous(), x.flatten(), x.unsqueeze(1).expand(3, 2, 4), x.expand_as(x), x.view_as(y), x.reshape_as(y), x.view(torch.int64)],
    lambda x, y, s, z, m, i: [x.to(torch.float32), x.to("cpu"), x.to(y), x.float(), x.double(), x.half(), x.bfloat16(), x.long(), x.int(), x.bool(), x.type(torch.float32), x.type_as(i), x.cpu(), x.clone(), x.detach(), m.float(), m.long(), i.double(), i.to(torch.float64), i.bool(), x.to(torch.device("cpu"), torch.float32), x.to(dtype=torch.float32), x.to(torch.float32, copy=True), x.char(), x.short(), z.to(torch.complex64), x.requires_grad_(False), x.type("torch.FloatTensor")],
    lambda x, y, s, z, m, i: [x.add_(y), x.mul_(2), x.sub_(y[0]), x.div_(2), x.clamp_(-1, 1), x.masked_fill_(m, 0.0), x.fill_(1.0), x.zero_(), x.copy_(y), x.exp_(), x.relu_(), x.sigmoid_(), x.tanh_(), x.neg_(), x.sqrt_(), x.unsqueeze(0), x.index_add_(0, i, y), x.scatter_(1, i[:, None], 1.0), x.scatter_add_(1, i[:, None], y), x.index_copy_(0, i, y), x.addcmul_(y, y), x.addcdiv_(y, y), x.lerp_(y, 0.5), x.pow_(2), x.clamp_min_(0), x.abs_(), x.add_(1), x.squeeze_(), x.fill_diagonal_(0.0), x.tril_(), x.triu_()],
    lambda x, y, s, z, m, i: [set_item(x, 0, 1.0), set_item(x, (slice(None), 1), 2.0), set_item(x, m, 0.0), set_item(x, i, y), set_item(x, (Ellipsis, 0), y[:, 0]), set_item(x, 0, y[0]), set_item(x, (slice(0, 2), slice(1, 3)), y[:2, :2]), set_item(x, (i, i), 1.0), set_item(x, (i, i), y[:, 0]), set_item(x, (slice(None), i), y[:, :3]), set_item(x, slice(1, None), y[:2]), set_item(i, 0, 1), set_item(m, 0, True), set_item(x, m[:, 0], 0.0), set_item(x, (0, m[0]), 0.0), set_item(x, (Ellipsis, i), y[:, :3]), set_item(s, (slice(None), [0, 1]), 1.0), set_item(z, (slice(None), i), z[:, :1] * 2)],
    lambda x, y, s, z, m, i: [operator.iadd(x, y), operator.isub(x, 1), operator.imul(x, y), operator.itruediv(x, 2), operator.iand(m, m), operator.ior(m, m), operator.ixor(m, m), operator.ipow(x, 2), operator.iadd(i, 1), operator.ifloordiv(i, 2), operator.imod(i, 2)],
    lambda x, y, s, z, m, i: [*x, *x.unbind(1), *x.chunk(2, 1), *x.split(2), *x.split([1, 3], 1), *x.tensor_split(2), x.norm(), x.norm(dim=1), x.norm(1, -1), torch.norm(x, 2, 0), x.std(), x.std(0), x.var(1, unbiased=False), x.max(), x.min(1), x.amax(0), x.argmax(-1), x.topk(2), x.sort(-1), x.argsort(), x.median(), x.logsumexp(-1), x.cumsum(0), x.prod(1), x.all(), m.any(), m.all(1), x.mean((0, 1), keepdim=True), x.sum(), x.nanmean(), x.quantile(0.5)],
    lambda x, y, s, z, m, i: [F.softmax(x, -1), F.log_softmax(x, 1), F.softmax(x, -1, dtype=torch.float32), F.one_hot(i, 3), F.pad(x, (1, 1)), F.pad(x[None], (1, 1), mode="reflect"), F.pad(x[None], (1, 1), mode="replicate"), F.pad(x[None], (1, 1), mode="circular"), F.normalize(x), F.cosine_similarity(x, y), F.pairwise_distance(x, y), F.glu(x), F.gumbel_softmax(x), F.embedding(i, y), F.linear(x, y, y[:, 0]), F.layer_norm(x, (4,)), F.group_norm(x, 2), F.cross_entropy(x, i), F.nll_loss(x, i, reduction="none"), F.cross_entropy(x, i, label_smoothing=0.1, reduction="none"), F.cross_entropy(x, x.softmax(1)), F.binary_cross_entropy_with_logits(x, m.double(), reduction="none"), F.kl_div(x, y, reduction="batchmean")],
    lambda x, y, s, z, m, i: [F.interpolate(x[None, None], scale_factor=2, mode=mode) for mode in ("nearest", "bilinear", "bicubic", "area", "nearest-exact")] + [F.interpolate(x[None], size=7, mode="linear"), F.adaptive_avg_pool2d(x[None], (1, 1)), F.avg_pool2d(x[None], 2), F.max_pool2d(x[None], 2), F.unfold(x[None, None], 2), F.fold(x.repeat(1, 3)[None, :, :], (4, 5), (1, 3)), F.pixel_shuffle(x.reshape(1, 4, 3, 1), 2), F.grid_sample(x[None, None], y[None, :, :2, None].tanh().expand(1, 3, 2, 2)), F.affine_grid(x[None, :2, :3], (1, 1, 2, 2))],
    lambda x, y, s, z, m, i: [F.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None]), F.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None], is_causal=True), F.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None], attn_mask=s[None, None]), F.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None], attn_mask=s[None, None] > 0)],
    lambda x, y, s, z, m, i: [torch.einsum(e, x, y) for e in ("ij,kj->ik", "ij,ij->i", "ij,ij->", "ij,kl->ijkl", "ij,ik->ijk")] + [torch.cat([x, y]), torch.cat([x, y], -1), torch.stack([x, y], 1), torch.where(m, x, y), torch.where(m, x, 0.0), torch.where(m, 0.0, x), torch.meshgrid(x[0], y[0], indexing="ij"), torch.outer(x[0], y[0]), torch.bmm(x[None], y.T[None]), torch.baddbmm(s[None], x[None], y.T[None]), torch.addmm(s, x, y.T), torch.tensordot(x, y, 2), torch.gather(x, 1, i[:, None]), torch.index_select(x, 0, i), torch.isin(i, i), torch.searchsorted(x[0].sort().values, y[0]), torch.bucketize(x, y[0].sort().values), torch.cdist(x, y), torch.cdist(x, y, p=1), torch.roll(x, 1, 1), torch.flip(x, (0,)), torch.tril(x), torch.triu(x, 1), torch.diag(s), torch.diagonal(s), torch.trace(s), torch.block_diag(x, y), torch.kron(x, y)],
    lambda x, y, s, z, m, i: [torch.view_as_complex(x.view(3, 2, 2)), torch.view_as_real(z), torch.polar(x.abs(), y), torch.complex(x, y), z.abs(), z.angle(), z.conj(), torch.fft.rfft(x), torch.fft.irfft(torch.fft.rfft(x), n=4), torch.fft.fft2(x), torch.fft.ifft(z), torch.stft(x.flatten(), 4, return_complex=True, window=y[0]), torch.fft.fftshift(x)],
    lambda x, y, s, z, m, i: [x.new_tensor(1.0), x.is_contiguous(), x.is_complex(), len(x), x.get_device(), x.nelement(), x.element_size(), x.is_floating_point(), x.ndimension(), x.is_signed(), x.is_conj(), x.is_neg(), x.is_inference(), x.is_same_size(y), x.resolve_conj(), x.resolve_neg(), torch.is_tensor(x), torch.is_complex(x), torch.is_floating_point(x), torch.numel(x), torch.result_type(x, i), torch.promote_types(x.dtype, i.dtype), torch.broadcast_tensors(x, y[:1]), torch.atleast_2d(x[0]), torch.can_cast(x.dtype, i.dtype), x.size(), x.dim(), torch.is_nonzero(i[1])],
    lambda x, y, s, z, m, i: [torch.linalg.norm(x), torch.linalg.vector_norm(x, dim=-1), torch.linalg.inv(s), torch.linalg.solve(s, x), torch.linalg.det(s), torch.linalg.slogdet(s), torch.linalg.qr(s), torch.linalg.svd(s), torch.linalg.eigh(s + s.T), torch.linalg.cholesky(s @ s.T + torch.eye(3, dtype=s.dtype)), torch.linalg.matrix_norm(s), torch.linalg.matrix_exp(s), torch.linalg.lu_factor(s), torch.linalg.cross(x[:, :3], y[:, :3]), torch.linalg.multi_dot([x, y.T, x])],
    lambda x, y, s, z, m, i: lu_solves(s, x),
    lambda x, y, s, z, m, i: [torch.zeros(4, dtype=x.dtype).index_fill(0, i[:2], x[0, 0]), x.index_fill(0, i, 1.0), x.index_fill(0, i, y[0, 0]), x.index_fill_(0, i[:1], y[0, 0]), x.masked_fill(m, y[0, 0]), x.fill_(y[0, 0]), torch.full_like(x, 2.0), x.new_zeros(2), torch.zeros_like(x), x.new_full((2,), 1.0), x.select_scatter(y[0], 0, 1), x.slice_scatter(y[:1], 0, 0, 1), x.diagonal_scatter(y[:, 0])],
    lambda x, y, s, z, m, i: [F.conv1d(x[None], y[None, :2, :3].repeat(2, 1, 1)[:, :1].expand(2, 3, 3)), F.conv2d(x[None, None], s[None, None]), F.conv_transpose1d(x[None], y[:, None, :3]), F.conv2d(x[None, None].expand(1, 3, 3, 4), s[:, None, :2, None], groups=3), F.bilinear(x, y, torch.stack([x.T @ x, y.T @ y]))],
    lambda x, y, s, z, m, i: [F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.relu(x), F.leaky_relu(x), F.elu(x), F.softplus(x), F.hardswish(x), F.hardtanh(x), F.relu6(x), F.mish(x), F.selu(x), F.celu(x), F.logsigmoid(x), F.tanhshrink(x), F.prelu(x, y[0, :1]), F.prelu(x, y[0]), F.threshold(x, 0.1, 0.0), F.hardsigmoid(x), F.relu(x, inplace=True), F.silu(x, inplace=True), F.rms_norm(x, (4,), y[0]), F.dropout(x, 0.0), F.batch_norm(x, y[0], y[1].abs()), F.instance_norm(x[None]), F.local_response_norm(x[None], 2)],
    lambda x, y, s, z, m, i: [torch.detach(x), torch._weight_norm(x, y[:, :1].abs(), 0), torch._weight_norm(x, y[:1].abs(), 1), torch.as_tensor(x), torch.is_same_size(x, y), x.is_pinned(), m._is_all_true(), m._is_any_true(), x.adjoint(), torch.adjoint(x), torch.is_neg(x), torch.tanh_(x.clone()), torch.cos_(x.clone()), torch.relu_(x.clone()), torch.sigmoid_(x.clone()), torch.exp_(x.clone()), torch.conv_tbc(x[:, None], s[:, None, :1].expand(3, 4, 2), y[0, :2])],
    lambda x, y, s, z, m, i: [F.ctc_loss(x[:, None].log_softmax(-1), i[None, :2] + 1, torch.tensor([3]), torch.tensor([2]), reduction=how) for how in ("none", "mean", "sum")] + [F.ctc_loss(x[:, None].log_softmax(-1), i[None, :1] + 1, (3,), (1,), reduction="none"), F.ctc_loss(x.log_softmax(-1), i[:1] + 1, torch.tensor(3), torch.tensor(1), zero_infinity=True)],
)  # fmt: skip
# Facts of the layout in memory, which is not that of a row alone.
OF_LAYOUT = (
    "Tensor.is_contiguous",
    "Tensor.stride",
    "Tensor.storage_offset",
    "Tensor._version.__get__",
    "Tensor.__len__",
)
# Memory that nobody has written; an address.
UNWRITTEN = re.compile(r".*(empty|resize_|_cdata).*")


def set_item(target: Tensor, place: Any, value: Any) -> None:
    target[place] = value


def lu_solves(square: Tensor, right: Tensor) -> list[Tensor]:
    """By the factors as they are, and by those of another memory."""
    lu, pivots = torch.linalg.lu_factor(square)
    rights = (right, torch.stack([right, right + 1]))
    return [torch.linalg.lu_solve(made, pivots, each) for made in (lu, lu.contiguous()) for each in rights]


def own_samples(calls: Calls) -> None:
    """The calls of `OWN`, and the attributes of tensors."""
    torch.manual_seed(0)
    for case in OWN:
        x, y = (torch.randn(3, 4, dtype=torch.float64) for _ in range(2))
        s, z = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.complex128)
        with calls.noted():
            case(x, y, s, z, torch.arange(12).view(3, 4) % 3 != 0, torch.tensor([1, 0, 2]))
    for name in dir(Tensor):
        getter = getattr(getattr(Tensor, name, None), "__get__", None)
        for value in (torch.randn(3, 4, dtype=torch.float64), torch.arange(3)):
            with contextlib.suppress(Exception), calls.noted():
                getattr(value, name) if getter is not None else None


class Plan(NamedTuple):
    """Places of arguments that have rows; those that get gradients; the layout of rows; if cotangents have rows."""

    rows: tuple[int, ...]
    wanted: tuple[int, ...]
    layout: str
    cotangent: bool
    rolled: bool = True

    def __str__(self) -> str:
        return f"rows {self.rows}, gradients {self.wanted}, {self.layout}, cotangent {'of rows' if self.cotangent else 'alike'}"


def varied(value: Tensor, rolled: bool) -> Tensor:
    """Rows (B, ...) made of one value."""
    each = []
    for row in range(ROWS):
        other = value.flatten().roll(row).view(value.shape) if rolled and value.numel() else value
        numbers = value.is_floating_point() or value.is_complex()
        each.append(other * (1.0, 1.15, 0.85)[row] if numbers else other)
    return torch.stack(each)


LAYOUTS = ("plain", "turned", "axis last", "strided")


def laid_out(values_B: Tensor, layout: str) -> Tensor:
    """The same numbers in other memory."""
    if layout == "turned" and values_B.ndim > 2:
        return values_B.mT.contiguous().mT
    if layout == "axis last":
        return values_B.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "strided" and values_B.ndim > 1:
        return values_B.repeat_interleave(2, -1)[..., ::2]
    return values_B


def _row(over: Levels, values_B: Tensor, layout: str) -> Tensor:
    if layout != "axis last":
        return over.row(values_B)
    with OutsideTransforms():
        moved = values_B.movedim(0, -1)
    batched = functorch._add_batch_dim(moved, moved.ndim - 1, over.vmap)
    return functorch._wrap_for_grad(batched, over.grad)


def in_place(call: Call) -> bool:
    name = getattr(call.function, "__name__", "").split(".")[0]
    return (name.endswith("_") and not name.endswith("__")) or name in (
        "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ior__", "__iand__",
        "__ixor__", "__ipow__", "__ilshift__", "__irshift__")  # fmt: skip


def places_of(call: Call) -> tuple[list[Any], Any, list[int]]:
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    return leaves, spec, [place for place, value in enumerate(leaves) if isinstance(value, Tensor)]


def differentiable(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _called(call: Call, leaves: list[Any], spec: Any) -> list[Any]:
    """Results, and what was written in place."""
    if in_place(call) and isinstance(leaves[0], Tensor):
        leaves = [leaves[0].clone(), *leaves[1:]]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    found = pytree.tree_leaves(call.function(*args, **kwargs))
    return [*found, leaves[0]] if in_place(call) else found


def _loss(found: list[Any], weights: list[Any]) -> Any:
    total: Any = None
    for value, weight in zip(found, weights, strict=True):
        if isinstance(value, Tensor) and differentiable(value) and value.requires_grad:
            product = (value * weight).sum()
            product = product.real + product.imag if product.is_complex() else product
            total = product if total is None else total + product
    return total


Results = list[tuple[list[Any], list[Any]]]


def alone(call: Call, plan: Plan, rows: dict[int, Tensor], weigh: Callable[[int, int, Tensor], Any]) -> Results:
    """Results and gradients of each row alone."""
    leaves, spec, _places = places_of(call)
    found = []
    for row in range(ROWS):
        own = [rows[p][row].clone() if p in rows else kept(v) for p, v in enumerate(leaves)]
        for place in plan.wanted:
            own[place] = own[place].detach().requires_grad_()
        result = _called(call, own, spec)
        loss = _loss(result, [weigh(row, n, v) for n, v in enumerate(result)])
        wanted = [own[place] for place in plan.wanted]
        grads = [None] * len(wanted)
        if loss is not None and loss.requires_grad:
            grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        found.append(([v.detach() if isinstance(v, Tensor) else v for v in result], list(grads)))
    return found


def beside(call: Call, plan: Plan, rows: dict[int, Tensor], weigh: Callable[[int, int, Tensor], Any]) -> Results:
    """Results and gradients of rows in one pass of the engine."""
    leaves, spec, _ = places_of(call)
    given = row_pass.Rows(None, {}, torch.zeros(ROWS), range(ROWS))  # type: ignore[arg-type]  # no loss
    with levels(ROWS) as over:
        mode = row_pass._RowPass(given, over, {}, row_pass.Settings(rules=False), {}, Kept(), True)
        own = []
        with OutsideTransforms():
            values = {p: laid_out(rows[p], plan.layout) for p in rows}
            plain = [kept(v) for v in leaves]
        for place, value in enumerate(plain):
            if place in rows:
                value = _row(over, values[place], plan.layout)
                value = value.requires_grad_() if place in plan.wanted else value
            elif place in plan.wanted:
                value = over.leaf(value)
            own.append(value)
        with seen_as_compiling(), mode:
            result = _called(call, own, spec)
            weights = []
            for n, value in enumerate(result):
                with OutsideTransforms():
                    shape = inside(value) if isinstance(value, Tensor) else value
                    each = [weigh(row, n, value) for row in range(ROWS)] if isinstance(shape, Tensor) else []
                    stacked = torch.stack(each) if each and each[0] is not None else None
                if stacked is None or plan.cotangent:
                    weights.append(None if stacked is None else over.row(stacked))
                else:
                    weights.append(stacked[0])
            loss = _loss(result, weights)
            mode.in_backward = True
            wanted = [own[place] for place in plan.wanted]
            grads: Any = [None] * len(wanted)
            if loss is not None and loss.requires_grad:
                grads = run_backward(loss, wanted)
        if mode.stopped is not None:
            raise mode.stopped
        found = []
        results_B = [over.all_rows(v).detach() if isinstance(v, Tensor) else [v] * ROWS for v in result]
        grads_B = [None if g is None else over.all_rows(g).detach() for g in grads]
        with OutsideTransforms():
            for row in range(ROWS):
                found.append(([v[row] for v in results_B], [None if g is None else g[row] for g in grads_B]))
    return found


def _weights(plan: Plan) -> Callable[[int, int, Tensor], Any]:
    def weigh(row: int, number: int, value: Any) -> Any:
        if not isinstance(value, Tensor) or not differentiable(value):
            return None
        count = value.numel()
        line = torch.linspace(0.5, 1.5 + number, max(1, count), dtype=torch.float64, device="cpu")[:count]
        return (line.view(value.shape) * (1.0 + (row * 1.7 if plan.cotangent else 0.0))).to(value.real.dtype)

    return weigh


def _same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        value = other if one is None else one
        return value is None or (isinstance(value, Tensor) and not bool(value.any()))
    if not isinstance(one, Tensor):
        return bool(one == other) or one != one
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not differentiable(one):
        return torch.equal(one, other)
    rough = 1e-3 if one.real.dtype in (torch.float32, torch.float16, torch.bfloat16) else 1e-7
    scale = float(one.abs().nan_to_num(0.0, 0.0, 0.0).max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=rough, atol=rough * max(1e-3, scale), equal_nan=True)


def judged(call: Call, plan: Plan) -> str:
    """ "right", "wrong: ...", "stopped: ..."; empty where a row alone says nothing."""
    leaves, _, _ = places_of(call)
    state = torch.get_rng_state()
    weigh = _weights(plan)
    truth = None
    for rolled in (True, False):
        rows = {p: varied(leaves[p], rolled) for p in plan.rows}
        try:
            truth = alone(call, plan, rows, weigh)
            if any(isinstance(v, Tensor) and (v.layout is not torch.strided or v.is_quantized) for v in truth[0][0]):
                return ""
        except Exception:  # noqa: BLE001  (torch refuses the row)
            continue
        if not any(isinstance(v, Tensor) and differentiable(v) and v.numel() and v.isnan().all() for v in truth[0][0]):
            break
    if not torch.equal(state, torch.get_rng_state()):
        return "drawn"
    if truth is None:
        return ""
    try:
        found = beside(call, plan, rows, weigh)
    except (Stop, Exception) as error:  # noqa: BLE001  (none of these is a silent mixture)
        return f"stopped: {type(error).__name__}: {error}"[:150]
    for row, (own, other) in enumerate(zip(truth, found, strict=True)):
        for what, ones, others in zip(("result", "gradient"), own, other, strict=True):
            for number, (one, two) in enumerate(zip(ones, others, strict=True)):
                if not _same(one, two):
                    near = [
                        alone(
                            call, plan, {p: v * (1 + 1e-13) if differentiable(v) else v for p, v in rows.items()}, weigh
                        )
                    ]
                    if not _same(one, near[0][row][what == "gradient"][number]):
                        return ""  # rounding decides
                    return f"wrong: {what} {number} of row {row}"
    return "right"


def plans_of(call: Call, rng: random.Random) -> Iterable[Plan]:
    leaves, _, places = places_of(call)
    floats = [p for p in places if differentiable(leaves[p])]
    most = len(places) if len(places) <= 3 else 1
    subsets = [s for size in range(most + 1) for s in itertools.combinations(places, size)]
    subsets += [] if most == len(places) else [tuple(places)]
    if any(leaves[p].layout is not torch.strided for p in places):
        return
    for rows in subsets:
        others = tuple(p for p in floats if p not in rows)
        own = tuple(p for p in floats if p in rows)
        if not rows:
            if floats:
                yield Plan((), tuple(floats), "plain", True)
            continue
        for wanted, cotangent in dict.fromkeys(
            [(tuple(floats), True), (tuple(floats), False), (own, True), (others, True), ((), True)]
        ):
            yield Plan(rows, wanted, rng.choice(LAYOUTS), cotangent)
        yield Plan(rows, tuple(floats), "turned", True)
        yield Plan(rows, tuple(floats), "axis last", True)


@dataclass
class Verdict:
    """Outcomes of one function."""

    right: int = 0
    stopped: int = 0
    wrong: list[str] = field(default_factory=list)
    why: str = ""
    drawn: bool = False


@contextlib.contextmanager
def all_trusted() -> Iterator[None]:
    """Inside, the engine takes each rule of torch for right."""
    plain = row_pass._as_it_is
    table = {
        func: tuple(plain if h is row_pass.by_rows else h for h in own)
        for func, own in row_pass._HANDLERS_WITHOUT_RULES.items()
    }
    with mock.patch.object(row_pass, "by_rows", plain), mock.patch.object(row_pass, "_HANDLERS_WITHOUT_RULES", table):
        yield


@all_trusted()
def swept(calls: Calls, seed: int = 0, part: slice = slice(None)) -> dict[str, Verdict]:
    """Name -> outcomes of its calls."""
    names, found = name_of_each(), dict[str, Verdict]()
    by_name = {names[function]: own for function, own in calls.found.items() if function in names and own}
    for name in sorted(name for name in by_name if not UNWRITTEN.fullmatch(name))[part]:
        own, verdict = by_name[name], found.setdefault(name, Verdict())
        start = time.process_time()
        for number, call in enumerate(own.values()):
            if time.process_time() - start > PATIENCE:
                break
            for plan in plans_of(call, random.Random(f"{seed} {name} {number}")):
                try:
                    outcome = judged(call, plan)
                except Exception as error:  # noqa: BLE001  (what cannot be compared was not seen right)
                    outcome = f"stopped: {type(error).__name__}: {error}"[:150]
                if outcome == "right":
                    verdict.right += 1
                elif outcome.startswith("wrong"):
                    verdict.wrong.append(f"{outcome}; {plan}; {call.signature()[:300]}")
                    print(name, verdict.wrong[-1], flush=True)
                elif outcome == "drawn":
                    verdict.drawn = True
                elif outcome:
                    verdict.stopped += 1
                    verdict.why = outcome
    return found


def write(found: dict[str, Verdict]) -> None:
    """The table of this version of torch: names of right functions, and the first fault of each wrong one."""
    wrong = {n: " ".join(v.wrong[0].split())[:200] for n, v in found.items() if v.wrong and n not in OF_LAYOUT}
    drawing = {name for function, name in name_of_each().items() if function in RANDOM}  # which the engine answers
    seen = (n for n, v in found.items() if v.right and not v.wrong and (not v.drawn or n in drawing))
    right = sorted({*OF_LAYOUT, *seen})
    TABLES.mkdir(exist_ok=True)
    path = TABLES / f"{VERSION}.json"
    path.write_text(json.dumps({"right": right, "wrong": dict(sorted(wrong.items()))}, indent=0) + "\n")


def main() -> None:
    warnings.simplefilter("ignore")  # of torch, about samples
    torch.manual_seed(0)
    calls = Calls(int(sys.argv[4]) if len(sys.argv) > 4 else 4)
    of_torch(calls, 12)
    own_samples(calls)
    if len(sys.argv) > 1:  # a part, into a file
        found = swept(calls, part=slice(int(sys.argv[2]), None, int(sys.argv[3])))
        Path(sys.argv[1]).write_text(json.dumps({name: vars(verdict) for name, verdict in found.items()}))
    else:
        write(swept(calls))


if __name__ == "__main__":
    main()
