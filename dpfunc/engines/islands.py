"""Operations that run as their native kernels below both levels, joined by one node of level 2.

Two kinds: an operation on a parameter, whose rule gets the gradients of its results and its inputs (book-keeping, Bu et
al. 2023, Differentially Private Optimization on Large Model at Small Cost); and a large operation of a short list,
which is as fast so as in a plain step. Neither is needed for what is right: without them, vmap and grad do the same.
Axis letters: B rows, m images of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from dpfunc.engines.levels import Below, Levels, apply_node, inside, of_rows
from dpfunc.engines.numerics import exact
from dpfunc.engines.per_sample import Dense, PerSampleGrad
from dpfunc.engines.rules import RULES
from dpfunc.engines.rules.table import Rule, Use
from dpfunc.engines.uses.sample_axis import SampleAxis

_Bound = dict[str, Any]

# A cheaper operation costs less under vmap than the node around its native kernel.
_LARGE = 1 << 16
_NO_GRAD = torch.no_grad


class Pass(Protocol):
    """One pass over rows, as islands see it."""

    levels: Levels
    anchor: Tensor
    credited: dict[str, list[PerSampleGrad]]
    uses: dict[object, Use]
    budget: int

    def plain(self, leaf: Tensor) -> tuple[str, Tensor] | None:
        """Name and value of a parameter, if this is one."""
        ...

    def backward_node(self) -> None:
        """End the pass where a node runs in a backward pass that is not that of the losses."""
        ...


@dataclass(frozen=True)
class Form:
    """An operation as a function of one input: its kernel, and the gradient of that input in closed form.

    Args:
        input: name of the argument that differs from row to row. run: of the arguments, below both levels; the result,
            and what `input_grad` gets of it. input_grad: `(arguments, gradient, what run left)` -> gradient; None for
            inputs of whole numbers. takes: false for calls that it does not cover. images: axes of the input without
            that of images, where the kernel has one; None where it takes any axes before its own.
        reads_input: `input_grad` needs the input itself, not its shape only.
    """

    input: str
    run: Callable[[_Bound], tuple[Tensor, Any]]
    input_grad: Callable[[_Bound, Tensor, Any], Tensor] | None
    takes: Callable[[_Bound], bool] = lambda bound: True
    images: Callable[[_Bound], int] | None = None
    reads_input: bool = False


def _linear(bound: _Bound) -> tuple[Tensor, Any]:
    return F.linear(bound["input"], bound["weight"], bound["bias"]), None


def _linear_input(bound: _Bound, grad: Tensor, left: Any) -> Tensor:
    return grad @ bound["weight"].to(grad.dtype)


def _matmul(bound: _Bound) -> tuple[Tensor, Any]:
    return bound["input"] @ bound["other"], None


def _matmul_input(bound: _Bound, grad: Tensor, left: Any) -> Tensor:
    return grad @ bound["other"].to(grad.dtype).T


def _addmm(bound: _Bound) -> tuple[Tensor, Any]:
    x = bound["mat1"]
    return torch.addmm(bound["input"], x.flatten(0, -2), bound["mat2"]).unflatten(0, x.shape[:-1]), None


def _addmm_input(bound: _Bound, grad: Tensor, left: Any) -> Tensor:
    return grad @ bound["mat2"].to(grad.dtype).T


def _convolution(bound: _Bound, run: Callable[..., Tensor]) -> tuple[Tensor, Any]:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    return run(*(bound[name] for name in names)), None


def _convolution_input(bound: _Bound, grad: Tensor, left: Any) -> Tensor:
    weight = bound["weight"].to(grad.dtype)
    axes = weight.ndim - 2
    sizes = [[value] * axes if isinstance(value, int) else list(value) * (axes if len(value) == 1 else 1)
             for value in (bound["stride"], bound["padding"], bound["dilation"])]  # fmt: skip
    like = grad.new_empty(1).expand(bound["shape"])
    found: Tensor = torch.ops.aten.convolution_backward(
        grad, like, weight, None, *sizes, False, [0] * axes, bound["groups"], [True, False, False]
    )[0]
    return found


def _layer_norm(bound: _Bound) -> tuple[Tensor, Any]:
    shape = list(bound["normalized_shape"])
    out, *statistics = torch.native_layer_norm(bound["input"], shape, bound["weight"], bound["bias"], bound["eps"])
    return out, statistics


def _layer_norm_input(bound: _Bound, grad: Tensor, left: Any) -> Tensor:
    shape, arguments = list(bound["normalized_shape"]), (bound["weight"], bound["bias"], [True, False, False])
    found: Tensor = torch.ops.aten.native_layer_norm_backward(grad, bound["input"], shape, *left, *arguments)[0]
    return found


def _sizes(bound: _Bound) -> tuple[int, int, int, int]:
    x = bound["input"]
    return len(x), x.shape[1], x[0, 0].numel(), bound["num_groups"]


def _group_norm(bound: _Bound) -> tuple[Tensor, Any]:
    bound["input"] = bound["input"].contiguous()
    out, *statistics = torch.native_group_norm(
        bound["input"], bound["weight"], bound["bias"], *_sizes(bound), bound["eps"]
    )
    return out, statistics


def _group_norm_input(bound: _Bound, grad: Tensor, left: Any) -> Tensor:
    found: Tensor = torch.ops.aten.native_group_norm_backward(
        grad.contiguous(), bound["input"].contiguous(), *left, bound["weight"], *_sizes(bound), [True, False, False]
    )[0]
    return found


def _embedding(bound: _Bound) -> tuple[Tensor, Any]:
    return F.embedding(bound["input"], bound["weight"], bound["padding_idx"]), None


def _matrix(name: str) -> Callable[[_Bound], bool]:
    return lambda bound: isinstance(bound[name], Tensor) and bound[name].ndim == 2


def _convolution_form(run: Callable[..., Tensor], axes: int) -> Form:
    return Form(
        "input", lambda bound: _convolution(bound, run), _convolution_input,
        lambda bound: not isinstance(bound["padding"], str), lambda bound: axes + 1,
    )  # fmt: skip


def _same_dtype(bound: _Bound) -> bool:
    weight = bound["weight"]
    return weight is None or weight.dtype == bound["input"].dtype


FORMS: Mapping[Callable[..., Any], Form] = {
    F.linear: Form("input", _linear, _linear_input, _matrix("weight")),
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm),
        Form("input", _matmul, _matmul_input, _matrix("other")),
    ),
    **dict.fromkeys(
        (torch.addmm, Tensor.addmm),
        Form(
            "mat1",
            _addmm,
            _addmm_input,
            lambda bound: bound["input"].ndim == 1 and bound["beta"] == bound["alpha"] == 1 and bound["mat2"].ndim == 2,
        ),
    ),
    F.conv1d: _convolution_form(F.conv1d, 1),
    F.conv2d: _convolution_form(F.conv2d, 2),
    F.conv3d: _convolution_form(F.conv3d, 3),
    F.layer_norm: Form("input", _layer_norm, _layer_norm_input, _same_dtype, reads_input=True),
    F.group_norm: Form(
        "input", _group_norm, _group_norm_input, _same_dtype, lambda bound: bound["input"].ndim - 1, reads_input=True
    ),
    F.embedding: Form(
        "input", _embedding, None, lambda bound: bound["max_norm"] is None and not bound["scale_grad_by_freq"]
    ),
}


@dataclass
class _Call:
    """One call of an operation: what its node needs to run it, and to credit its gradients."""

    owner: Pass
    func: Callable[..., Any]
    rule: Rule
    form: Form
    bound: _Bound
    wanted: Mapping[str, tuple[str, Tensor]]
    row_shape: torch.Size = field(default_factory=torch.Size)
    images: int = 1
    left: Any = None
    dtype: torch.dtype = torch.float32

    @property
    def keeps_input(self) -> bool:
        """True if the backward pass needs the input itself."""
        return self.form.reads_input or any(self.form.input in self.rule.needs[name] for name in self.wanted)

    def merged(self, values_B: Tensor) -> Tensor:
        """(B, m, ...) -> (B * m, ...) where the kernel has an axis of images."""
        return values_B.flatten(0, 1) if self.images else values_B

    def run(self, values_B: Tensor) -> Tensor:
        """The results of all rows, (B, ...)."""
        if self.form.images is not None:
            features = self.form.images({**self.bound, self.form.input: values_B[0]})
            self.images = values_B.shape[1] if values_B.ndim - 1 > features else 0
        else:
            self.images = 0
        x = self.merged(values_B)
        self.row_shape, self.dtype = values_B.shape, x.dtype
        self.bound["shape"] = x.shape
        self.bound[self.form.input] = x
        out, self.left = self.form.run(self.bound)
        self.bound[self.form.input] = None
        return out.unflatten(0, values_B.shape[:2]) if self.images else out

    def credit(self, grad_B: Tensor, x: Tensor | None) -> None:
        """Per-sample gradients of the parameters of this call, by the rule."""
        use = self._use(grad_B.shape, None if x is None else x.shape)
        needed = {n for argument in use.wanted for n in self.rule.needs[argument]}
        tensors = {n: x if n == self.form.input else self.bound[n] for n in needed}
        found = self.rule.grads(use, grad_B, **{**use.options, **tensors})
        formed = use.choose(self.owner.budget).representation == "formed"
        for argument, name in use.wanted.items():
            made = Dense(found[argument].dense()) if formed else found[argument]
            self.owner.credited.setdefault(name, []).append(made)

    def _use(self, output: torch.Size, given: torch.Size | None) -> Use:
        options = {
            name: value
            for name, value in self.bound.items()
            if name not in ("shape", self.form.input) and not isinstance(value, Tensor)
        }
        plain = tuple(tuple(value) if isinstance(value, list) else value for value in options.values())
        names = tuple((argument, name) for argument, (name, _) in self.wanted.items())
        key = (self.func, names, output, given, plain, self.images)
        use = self.owner.uses.get(key)
        if use is None:
            tensors = {name: None for name, value in self.bound.items() if isinstance(value, Tensor)}
            use = Use(
                self.rule,
                self.func.__name__,
                self.owner.levels.rows,
                dict(names),
                {argument: value.shape for argument, (_, value) in self.wanted.items()},
                SampleAxis(0, 1, self.images) if self.images > 1 else SampleAxis(0),
                {**options, **tensors, self.form.input: None},
                output,
            )
            self.owner.uses[key] = use
        return use


class _Credited(torch.autograd.Function):
    """The node of an operation with a rule, or with a gradient in closed form."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, given: Tensor) -> Tensor:  # type: ignore[override]  # fixed arguments
        ctx.call = call
        ctx.kept = call.keeps_input
        if ctx.kept:
            ctx.save_for_backward(given)
        values_B = of_rows(given)
        with Below(), _NO_GRAD():
            out = call.run(values_B)  # type: ignore[arg-type]  # a row, by `operation`
        return call.owner.levels.row(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]  # one result
        call: _Call = ctx.call
        owner = call.owner
        owner.backward_node()
        grad_B, input_grad = of_rows(grad), None
        x = of_rows(ctx.saved_tensors[0]) if ctx.kept else None
        with Below(), _NO_GRAD():
            grad_B = inside(grad).expand(owner.levels.rows, *grad.shape) if grad_B is None else grad_B
            grad_B, x = call.merged(grad_B), None if x is None else call.merged(x)
            if call.wanted:
                with exact(grad_B.device):
                    call.credit(grad_B, x)
            if ctx.needs_input_grad[2] and call.form.input_grad is not None:
                bound = {**call.bound, call.form.input: x}
                input_grad = call.form.input_grad(bound, grad_B, call.left).to(call.dtype).reshape(call.row_shape)
        return None, None, None if input_grad is None else owner.levels.row(input_grad)


def operation(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operation with a closed form; NotImplemented where vmap and grad are to do it."""
    rule, form = RULES[func], FORMS[func]
    if not owner.levels.on_top() or not torch.is_grad_enabled():
        return NotImplemented
    bound = rule.bind(args, kwargs)
    given = bound[form.input]
    wanted: dict[str, tuple[str, Tensor]] = {}
    if not isinstance(given, Tensor) or of_rows(given) is None:
        return NotImplemented
    for name, value in bound.items():
        if name == form.input or not isinstance(value, Tensor):
            continue
        known = owner.plain(value)
        if known is not None:
            if name not in rule.needs:
                return NotImplemented
            wanted[name] = known
            bound[name] = known[1]
        elif value.requires_grad or of_rows(value) is not None:
            return NotImplemented
        else:
            bound[name] = inside(value)
    if not form.takes({**bound, form.input: given}):
        return NotImplemented
    if not wanted and not given.requires_grad:
        return NotImplemented
    return apply_node(_Credited, _Call(owner, func, rule, form, bound, wanted), owner.anchor, given)


class _Source(torch.autograd.Function):
    """The start of a native graph that does not hold its value: a leaf would keep the input of each layer alive."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]  # fixed arguments
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]  # one result
        return None, None


_ANCHOR = torch.zeros((), requires_grad=True)


@dataclass
class _Kernel:
    """A native operation and its graph, below both levels."""

    owner: Pass
    call: Callable[..., Tensor] | None
    wanted: Sequence[bool]
    starts: Sequence[Any] = ()
    end: Any = None
    shape: torch.Size = field(default_factory=torch.Size)

    def build(self, values: Sequence[Tensor]) -> Tensor:
        """The result with its graph, which is held by its edges, not by its values."""
        assert_call = self.call
        given = [
            apply_node(_Source, _ANCHOR, value.detach()) if wanted else value.detach()
            for value, wanted in zip(values, self.wanted, strict=True)
        ]
        out: Tensor = assert_call(*given)  # type: ignore[misc]  # released after the backward pass only
        self.starts = [get_gradient_edge(t) if wanted else None for t, wanted in zip(given, self.wanted, strict=True)]
        self.end, self.shape = get_gradient_edge(out), out.shape
        return out.detach()


class _Native(torch.autograd.Function):
    """The node around a native graph."""

    @staticmethod
    def forward(ctx: Any, kernel: _Kernel, *inputs: Tensor) -> Tensor:  # type: ignore[override]  # fixed arguments
        ctx.kernel = kernel
        # checkpointing, offloading: save inputs where their hooks hold, and build the native graph in the backward pass
        ctx.again = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        values = [_batch(value) for value in inputs]
        with Below():
            if ctx.again:
                ctx.save_for_backward(*inputs)
                with _NO_GRAD():
                    out = kernel.call(*values)  # type: ignore[misc]  # released after the backward pass only
                    kernel.shape = out.shape
            else:
                out = kernel.build(values)
            out = out.unsqueeze(1)
        return kernel.owner.levels.row(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]  # one result
        kernel: _Kernel = ctx.kernel
        kernel.owner.backward_node()
        grad_B = of_rows(grad)
        values = [_batch(value) for value in ctx.saved_tensors] if ctx.again else ()
        with Below():
            if ctx.again:
                with torch.enable_grad():
                    kernel.build(values)
            grad_B = inside(grad).expand(kernel.shape) if grad_B is None else grad_B[:, 0]
            starts = [edge for edge in kernel.starts if edge is not None]
            found = iter(torch.autograd.grad([kernel.end], starts, [grad_B]))
            grads = [None if edge is None else next(found).unsqueeze(1) for edge in kernel.starts]
        kernel.call = kernel.starts = kernel.end = None  # type: ignore[assignment]  # circles keep memory until they are collected
        return None, *[None if value is None else kernel.owner.levels.row(value) for value in grads]


def _batch(value: Tensor) -> Tensor:
    """(B, ...) of rows that are batches of one."""
    values_B = of_rows(value)
    with Below():
        return values_B[:, 0]  # type: ignore[index]  # a row, by `native`


NATIVE = frozenset((F.scaled_dot_product_attention, F.max_pool2d, torch.max_pool2d, F.rms_norm, F.gelu, F.silu))


def native(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a large operation by its native kernel; NotImplemented where vmap and grad are to do it.

    Each tensor that is given must be a batch of one, and the operation must keep axis 0 apart.
    """
    if not owner.levels.on_top() or not torch.is_grad_enabled():
        return NotImplemented
    places: list[int] = []
    values = [*args, *kwargs.values()]
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            values_B = of_rows(value)
            if values_B is None or values_B.ndim < 3 or values_B.shape[1] != 1:
                return NotImplemented
            if not places and values_B.numel() < _LARGE:
                return NotImplemented
            places.append(place)
    inputs = [values[place] for place in places]
    wanted = [value.requires_grad for value in inputs]
    if not any(wanted):
        return NotImplemented
    names = tuple(kwargs)

    def call(*given: Tensor) -> Tensor:
        filled = list(values)
        for place, value in zip(places, given, strict=True):
            filled[place] = value
        return func(*filled[: len(args)], **dict(zip(names, filled[len(args) :], strict=True)))  # type: ignore[no-any-return]

    return apply_node(_Native, _Kernel(owner, call, wanted), *inputs)
