"""Operations that run as their native kernels below both levels, joined by one node of level 2.

Two kinds: an operation on a parameter, whose rule gets the gradients of its results and its inputs (book-keeping, Bu et
al. 2023, Differentially Private Optimization on Large Model at Small Cost); and a large operation of a short list,
which is as fast so as in a plain step. Neither is needed for what is right: without them, vmap and grad do the same.
Axis letters: B rows, m images of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpfunc.engines.levels import Below, Levels, apply_node, below_both, inside, of_rows
from dpfunc.engines.numerics import exact
from dpfunc.engines.per_sample import Dense, PerSampleGrad
from dpfunc.engines.rules import RULES
from dpfunc.engines.rules.composite import without_dispatch
from dpfunc.engines.rules.gates import gates
from dpfunc.engines.rules.recurrent import RECURRENT
from dpfunc.engines.rules.table import Rule, Use
from dpfunc.engines.uses.sample_axis import SampleAxis

_Bound = dict[str, Any]

# A cheaper operation costs less under vmap than the node around its native kernel.
_LARGE = 1 << 16
_EXACT = nullcontext()


class Pass(Protocol):
    """One pass over rows, as islands see it."""

    levels: Levels
    anchor: Tensor
    credited: dict[str, list[PerSampleGrad]]
    uses: dict[object, Use]
    budget: int
    is_exact: bool

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
        positions: every axis between that of rows and the last one is one of positions.
    """

    input: str
    run: Callable[[_Bound], tuple[Tensor, Any]]
    input_grad: Callable[[_Bound, Tensor, Any], Tensor] | None
    takes: Callable[[_Bound], bool] = lambda bound: True
    images: Callable[[_Bound], int] | None = None
    reads_input: bool = False
    positions: bool = False


def _linear(bound: _Bound) -> tuple[Tensor, Any]:
    return F.linear(bound["input"], bound["weight"], bound["bias"]), None


def _linear_input(bound: _Bound, grad: Tensor, left: Any) -> Tensor:
    found: Tensor = grad @ bound["weight"].to(grad.dtype)
    return found


def _matmul(bound: _Bound) -> tuple[Tensor, Any]:
    return bound["input"] @ bound["other"], None


def _matmul_input(bound: _Bound, grad: Tensor, left: Any) -> Tensor:
    found: Tensor = grad @ bound["other"].to(grad.dtype).T
    return found


def _addmm(bound: _Bound) -> tuple[Tensor, Any]:
    x = bound["mat1"]
    return torch.addmm(bound["input"], x.flatten(0, -2), bound["mat2"]).unflatten(0, x.shape[:-1]), None


def _addmm_input(bound: _Bound, grad: Tensor, left: Any) -> Tensor:
    found: Tensor = grad @ bound["mat2"].to(grad.dtype).T
    return found


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
    F.linear: Form("input", _linear, _linear_input, _matrix("weight"), positions=True),
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm),
        Form("input", _matmul, _matmul_input, _matrix("other"), positions=True),
    ),
    **dict.fromkeys(
        (torch.addmm, Tensor.addmm),
        Form(
            "mat1",
            _addmm,
            _addmm_input,
            lambda bound: bound["input"].ndim == 1 and bound["beta"] == bound["alpha"] == 1 and bound["mat2"].ndim == 2,
            positions=True,
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


def _credit(owner: Pass, use: Use, grad: Tensor, tensors: Mapping[str, Any]) -> None:
    """Credit the per-sample gradients of a use to its parameters, formed or as factors."""
    found = use.rule.grads(use, grad, **{**use.options, **tensors})
    formed = use.choose(owner.budget).representation == "formed"
    for argument, name in use.wanted.items():
        made = Dense(found[argument].dense()) if formed else found[argument]
        owner.credited.setdefault(name, []).append(made)


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
        """(B, m, ...) -> (B * m, ...) for a kernel with an axis of images; (B, ..., d) -> (B, T, d) for matrices."""
        if self.form.positions and values_B.ndim > 3:
            return values_B.flatten(1, -2)
        return values_B.flatten(0, 1) if self.images else values_B

    def run(self, values_B: Tensor) -> Tensor:
        """The results of all rows, (B, ...)."""
        if self.form.images is not None:
            features = self.form.images({**self.bound, self.form.input: values_B[0]})
            self.images = values_B.shape[1] if values_B.ndim - 1 > features else 0
        else:
            self.images = 0
        x = values_B.flatten(0, 1) if self.images else values_B
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
        _credit(self.owner, use, grad_B, tensors)

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
    def forward(ctx: Any, call: _Call, anchor: Tensor, given: Tensor) -> Tensor:
        ctx.call = call
        ctx.kept = call.keeps_input
        if ctx.kept:
            ctx.save_for_backward(given)
        values_B = of_rows(given)
        with Below():
            out = call.run(values_B)  # type: ignore[arg-type]  # a row, by `operation`
        return call.owner.levels.row(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        call: _Call = ctx.call
        owner = call.owner
        owner.backward_node()
        grad_B, input_grad = of_rows(grad), None
        x = of_rows(ctx.saved_tensors[0]) if ctx.kept else None
        with Below():
            grad_B = inside(grad).expand(owner.levels.rows, *grad.shape) if grad_B is None else grad_B
            grad_B, x = call.merged(grad_B), None if x is None else call.merged(x)
            if call.wanted:
                with _EXACT if owner.is_exact else exact(grad_B.device):
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
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None


_ANCHOR = torch.zeros((), requires_grad=True)
_Results = tuple[Tensor, ...]


@dataclass
class _Kernel:
    """Native operations and their graph, below both levels.

    Args:
        call: of the tensors of all rows, (B, ...); gives those of its results. wanted: inputs that need a gradient.
    """

    owner: Pass
    call: Callable[..., _Results]
    wanted: Sequence[bool]
    starts: Sequence[Any] = ()
    ends: Sequence[Any] = ()
    shapes: Sequence[torch.Size] = ()

    def build(self, values: Sequence[Tensor]) -> _Results:
        """The results with their graph, which is held by its edges, not by its values."""
        given = [
            apply_node(_Source, _ANCHOR, value.detach()) if wanted else value.detach()
            for value, wanted in zip(values, self.wanted, strict=True)
        ]
        found = self.call(*given)
        self.starts = [get_gradient_edge(value) if value.requires_grad else None for value in given]
        self.ends = [get_gradient_edge(value) if value.requires_grad else None for value in found]
        self.shapes = [value.shape for value in found]
        return tuple(value.detach() for value in found)

    def back(self, grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Gradients of the inputs; those that go to rules are credited on the way. The graph is released."""
        starts = [edge for edge in self.starts if edge is not None]
        pairs = [(end, grad) for end, grad in zip(self.ends, grads, strict=True) if end is not None]
        ends, given = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(ends, [*starts, _ANCHOR], given, allow_unused=True))
        wanted = [None if edge is None else next(found) for edge in self.starts]
        self.starts = self.ends = ()
        del self.call  # circles would keep memory until they are collected
        return wanted


class _Native(torch.autograd.Function):
    """The node around a native graph."""

    @staticmethod
    def forward(ctx: Any, kernel: _Kernel, anchor: Tensor, *inputs: Tensor) -> Any:
        ctx.kernel = kernel
        # checkpointing, offloading: save inputs where their hooks hold, and build the native graph in the backward pass
        ctx.again = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        values = [of_rows(value) for value in inputs]
        if ctx.again:
            ctx.save_for_backward(*inputs)
        with below_both(), torch.set_grad_enabled(not ctx.again):
            found = kernel.build(values)  # type: ignore[arg-type]  # rows
        made = tuple(kernel.owner.levels.row(value) for value in found)
        return made if len(made) > 1 else made[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        kernel: _Kernel = ctx.kernel
        kernel.owner.backward_node()
        values = [of_rows(value) for value in ctx.saved_tensors] if ctx.again else []
        grads_B = [of_rows(grad) for grad in grads]
        with below_both():
            if ctx.again:
                with torch.enable_grad():
                    kernel.build(values)  # type: ignore[arg-type]  # rows
            given = [
                inside(grad).expand(shape) if grad_B is None else grad_B
                for grad, grad_B, shape in zip(grads, grads_B, kernel.shapes, strict=True)
            ]
            found = kernel.back(given)
        return None, None, *[None if value is None else kernel.owner.levels.row(value) for value in found]


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

    def call(*given: Tensor) -> _Results:
        filled = list(values)
        for place, value in zip(places, given, strict=True):
            filled[place] = value[:, 0]
        found: Tensor = func(*filled[: len(args)], **dict(zip(names, filled[len(args) :], strict=True)))
        return (found.unsqueeze(1),)

    return apply_node(_Native, _Kernel(owner, call, wanted), owner.anchor, *inputs)


class _Tap(torch.autograd.Function):
    """A value below both levels, whose gradient goes to the rule of the operation that gave it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, credit: Callable[[Tensor], None]) -> Tensor:
        ctx.credit = credit
        ctx.mark_dirty(value)  # no view: steps of a layer are written into
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.credit(grad)
        return grad, None, None


class _Taps(TorchFunctionMode):
    """Below both levels, the operations of a composite on parameters go to their rules.

    Args:
        names: id of a plain parameter -> its name. axis: of the rows, in what the operations give.
    """

    def __init__(self, owner: Pass, names: Mapping[int, str], axis: int) -> None:
        super().__init__()
        self.owner, self.names, self.axis = owner, names, axis

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        bound = {} if rule is None else rule.bind(args, kwargs)
        wanted = {name: value for name, value in bound.items() if id(value) in self.names}
        if rule is None or not wanted:
            return func(*args, **kwargs)
        out: Tensor = F.linear(*args, **kwargs) if func is F.linear else _plain_gates(*args, **kwargs)
        use = Use(
            rule,
            func.__name__,
            self.owner.levels.rows,
            {name: self.names[id(value)] for name, value in wanted.items()},
            {name: value.shape for name, value in wanted.items()},
            SampleAxis(self.axis),
            {name: None if isinstance(value, Tensor) else value for name, value in bound.items()},
            out.shape,
        )
        needed = {n: bound[n].detach() for name in wanted for n in rule.needs[name]}

        def credit(grad: Tensor) -> None:
            with torch.no_grad(), exact(grad.device):
                _credit(self.owner, use, grad, needed)

        return apply_node(_Tap, out, _ANCHOR, credit)


_plain_gates = without_dispatch(gates)


def recurrent(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A recurrent layer over time: torch's own kernel and its derivatives below both levels, its gates by their rule.

    A row is a batch of one, on the axis of the batch. NotImplemented for packed rows.
    """
    names = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
    bound = dict(zip(names, args, strict=False), **kwargs)
    given = bound["input"]
    packed = isinstance(bound.get("params"), bool) or "batch_sizes" in bound
    if packed or not owner.levels.on_top() or not torch.is_grad_enabled() or not isinstance(given, Tensor):
        return NotImplemented
    axis = 0 if bound["batch_first"] else 1
    given_B = of_rows(given)
    if given_B is None or given.ndim != 3 or given.shape[axis] != 1 or (bound["train"] and bound["dropout"]):
        return NotImplemented
    plain: list[Tensor] = []
    credited: dict[int, str] = {}
    for value in bound["params"]:
        known = owner.plain(value)
        if known is None and (value.requires_grad or of_rows(value) is not None):
            return NotImplemented
        plain.append(inside(value) if known is None else known[1].detach())
        if known is not None:
            credited[id(plain[-1])] = known[0]
    single = isinstance(bound["hx"], Tensor)
    states = [bound["hx"]] if single else list(bound["hx"])
    if any(state.ndim != 3 for state in states):
        return NotImplemented
    with Below():
        rows = owner.levels.rows
        own = [
            inside(state).unsqueeze(0).expand(rows, *state.shape) if of_rows(state) is None else None
            for state in states
        ]
    states = [state if value is None else owner.levels.row(value) for state, value in zip(states, own, strict=True)]
    options = {name: bound[name] for name in names[3:]}

    def call(x_B: Tensor, *states_B: Tensor) -> _Results:
        x = x_B.squeeze(1 + axis)  # (B, T, d)
        first = [state_B.squeeze(2).transpose(0, 1).contiguous() for state_B in states_B]  # (L, B, H)
        with _Taps(owner, credited, 1):
            out, *lasts = RECURRENT[func](
                x if axis == 0 else x.transpose(0, 1), first[0] if single else first, plain, **options
            )
        out = out if axis == 0 else out.transpose(0, 1)
        return (out.unsqueeze(1 + axis), *(last.transpose(0, 1).unsqueeze(2) for last in lasts))

    wanted = [value.requires_grad for value in (given, *states)]
    return apply_node(_Native, _Kernel(owner, call, wanted), owner.anchor, given, *states)
