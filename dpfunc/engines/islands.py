"""Operations that run as their native kernels below both levels, joined by one node of level 2.

Two kinds: an operation on a parameter, whose rule gets the gradients of its results and its inputs (book-keeping, Bu et
al. 2023, Differentially Private Optimization on Large Model at Small Cost); and a large operation of a short list,
which is as fast so as in a plain step. Neither is needed for what is right: without them, vmap and grad do the same.
Axis letters: B rows, m images of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpfunc.engines.levels import Below, Levels, apply_node, below_both, inside, is_row, of_rows
from dpfunc.engines.numerics import exact
from dpfunc.engines.opened import without_dispatch
from dpfunc.engines.per_sample import Dense, PerSampleGrad
from dpfunc.engines.rules import REGISTERED, RULES
from dpfunc.engines.rules.convolution import CONVOLUTIONS, TRANSPOSED, per_axis
from dpfunc.engines.rules.linear import MATMULS
from dpfunc.engines.rules.recurrent import RECURRENT, gates
from dpfunc.engines.rules.table import Rule, Use

_Bound = dict[str, Any]

# A cheaper operation costs less under vmap than the node around its native kernel.
_LARGE = 1 << 16
_EXACT = nullcontext()


class Pass(Protocol):
    """One pass over rows, as islands see it."""

    levels: Levels
    anchor: Tensor
    uses: dict[object, Use]
    noted: list[Use]
    turned: dict[int, tuple[Tensor, Tensor]]
    is_exact: bool

    def plain(self, leaf: Tensor) -> tuple[str, Tensor] | None:
        """Name and value of a parameter, if this is one."""
        ...

    def expect(self, names: Iterable[str]) -> None:
        """Count uses of parameters whose gradients will come."""
        ...

    def take(self, name: str, grad: PerSampleGrad) -> None:
        """Take the gradients of one use of a parameter."""
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
    return F.linear(bound["input"], bound["weight"].flatten(1), bound["bias"]), None


def _linear_input(bound: _Bound, grad: Tensor, left: Any) -> Tensor:
    found: Tensor = grad @ bound["weight"].to(grad.dtype).flatten(1)
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
    return run(**{name: value for name, value in bound.items() if name != "shape"}), None


def _convolution_input(bound: _Bound, grad: Tensor, left: Any) -> Tensor:
    weight, further = bound["weight"].to(grad.dtype), bound.get("output_padding")
    axes = weight.ndim - 2
    stride, padding, dilation, beyond = (
        per_axis(value, axes) for value in (bound["stride"], bound["padding"], bound["dilation"], further or 0)
    )
    given = bound["input"]  # only its shape counts: no copy where there is none
    like = grad.new_empty(1).expand(bound["shape"]) if given is None else given
    options = (stride, padding, dilation, further is not None, beyond, bound["groups"], [True, False, False])
    found: Tensor = torch.ops.aten.convolution_backward(grad, like, weight, None, *options)[0]
    return found


def _same(bound: _Bound) -> bool:
    """True for a padding in numbers; those of "same" are found where it is symmetric."""
    padding, weight = bound["padding"], bound["weight"]
    if not isinstance(padding, str):
        return True
    dilation = per_axis(bound["dilation"], weight.ndim - 2)
    totals = [step * (taps - 1) for step, taps in zip(dilation, weight.shape[2:], strict=True)]
    bound["padding"] = [0] * len(totals) if padding == "valid" else [total // 2 for total in totals]
    return padding == "valid" or not any(total % 2 for total in totals)


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
    return Form("input", lambda bound: _convolution(bound, run), _convolution_input, _same, lambda bound: axes + 1)


def _same_dtype(bound: _Bound) -> bool:
    weight = bound["weight"]
    return weight is None or weight.dtype == bound["input"].dtype


FORMS: Mapping[Callable[..., Any], Form] = {
    F.linear: Form("input", _linear, _linear_input, lambda bound: bound["weight"].ndim > 1, positions=True),
    **dict.fromkeys(
        MATMULS,
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
    **{
        run: _convolution_form(run, axes) for family in (CONVOLUTIONS, TRANSPOSED) for axes, run in enumerate(family, 1)
    },
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
    owner.noted.append(use)
    found = use.rule.grads(use, grad, **{**use.options, **tensors})
    formed = use.choice.representation == "formed"
    for argument, name in use.wanted.items():
        owner.take(name, Dense(found[argument].dense()) if formed else found[argument])


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
        plain = tuple(
            tuple(value) if isinstance(value, list) else value
            for name, value in self.bound.items()
            if not isinstance(value, Tensor) and name not in ("shape", self.form.input)
        )
        names = tuple((argument, name) for argument, (name, _) in self.wanted.items())
        key = (self.func, names, output, given, plain, self.images)
        use = self.owner.uses.get(key)
        if use is None:
            options = {
                name: None if isinstance(value, Tensor) else value
                for name, value in self.bound.items()
                if name not in ("shape", self.form.input)
            }
            use = Use(
                self.rule,
                self.func.__name__,
                self.owner.levels.rows,
                dict(names),
                {argument: value.shape for argument, (_, value) in self.wanted.items()},
                {**options, self.form.input: None},
                output,
                images=max(1, self.images),
            )
            self.owner.uses[key] = use
        return use


class _Credited(torch.autograd.Function):
    """The node of an operation with a rule, or with a gradient in closed form."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, given: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # torch would keep the output, to know its shape
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
        with Below(), torch._C.DisableTorchFunction():
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
    if owner.turned and len(args) == 2 and (func in MATMULS or func is F.linear):
        _, leaf = owner.turned.get(id(args[1]), (None, None))
        if leaf is not None:  # `x @ W.T` is a linear, and the reverse
            func, args = (torch.matmul if func is F.linear else F.linear), (args[0], leaf)
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
    bound[form.input] = given
    if not form.takes(bound):
        return NotImplemented
    if not wanted and not given.requires_grad:
        return NotImplemented
    owner.expect(name for name, _ in wanted.values())
    return apply_node(_Credited, _Call(owner, func, rule, form, bound, wanted), owner.anchor, given)


def other_form(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operation that is another one with a closed form, e.g. a look-up; else NotImplemented."""
    names, form = OTHER_FORMS[func]
    bound = dict(zip(names, args, strict=False), **kwargs)
    found = form(owner, bound)
    if found is NotImplemented:
        return found
    other, given = found
    return operation(owner, other, given, {})


def _look_up(owner: Pass, bound: _Bound) -> Any:
    """`table[ids]` as an embedding."""
    table, ids = bound["table"], bound["index"]
    whole = isinstance(ids, Tensor) and ids.dtype in (torch.int64, torch.int32) and ids.ndim and is_row(ids)
    if not whole or owner.plain(table) is None or table.ndim != 2 or bound.get("dim", 0) != 0:
        return NotImplemented
    return F.embedding, (torch.where(ids < 0, ids + len(table), ids), table)


def _products(owner: Pass, bound: _Bound) -> Any:
    """A bilinear layer as a linear one of all products of two inputs; vmap would take row after row."""
    weight = bound["weight"]
    if owner.plain(weight) is None:
        return NotImplemented
    products = (bound["input1"].unsqueeze(-1) * bound["input2"].unsqueeze(-2)).flatten(-2)
    return F.linear, (products, weight, bound.get("bias"))


_BILINEAR = (("input1", "input2", "weight", "bias"), _products)
_SELECT = (("table", "dim", "index"), _look_up)
OTHER_FORMS: Mapping[Callable[..., Any], tuple[Sequence[str], Callable[[Pass, _Bound], Any]]] = {
    F.bilinear: _BILINEAR,
    torch.bilinear: _BILINEAR,
    torch.index_select: _SELECT,
    Tensor.index_select: _SELECT,
    Tensor.__getitem__: (("table", "index"), _look_up),
}


def turned(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Transpose a matrix, and note it if it is a parameter."""
    found = func(*args, **kwargs)
    plain = not kwargs and args[0].ndim == 2 and owner.plain(args[0]) is not None
    if plain and (len(args) == 1 or (args[1] - args[2]) % 2):
        owner.turned[id(found)] = (found, args[0])
    return found


TURNING = (Tensor.T.__get__, Tensor.mT.__get__, Tensor.t, torch.t, Tensor.transpose, torch.transpose)  # type: ignore[attr-defined]  # of C


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

    def back(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients of the inputs; those that go to rules are credited on the way. The graph is released."""
        starts = [edge for edge in self.starts if edge is not None]
        both = zip(self.ends, grads, strict=True)
        pairs = [(end, grad) for end, grad in both if end is not None and grad is not None]
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
        ctx.set_materialize_grads(False)
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
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        kernel: _Kernel = ctx.kernel
        kernel.owner.backward_node()
        values = [of_rows(value) for value in ctx.saved_tensors] if ctx.again else []
        given = [None if grad is None else (inside(grad), of_rows(grad)) for grad in grads]
        with below_both():
            if ctx.again:
                with torch.enable_grad():
                    kernel.build(values)  # type: ignore[arg-type]  # rows
            grads_B = [
                None if grad is None else grad[0].expand(shape) if grad[1] is None else grad[1]
                for grad, shape in zip(given, kernel.shapes, strict=True)
            ]
            with torch._C.DisableTorchFunction():
                found = kernel.back(grads_B)
        return None, None, *[None if value is None else kernel.owner.levels.row(value) for value in found]


NATIVE = frozenset((F.scaled_dot_product_attention, F.max_pool2d, torch.max_pool2d, F.rms_norm, F.gelu, F.silu))


def native(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a large operation by its native kernel; NotImplemented where vmap and grad are to do it.

    Each tensor that is given must be a batch of one, and the operation must keep axis 0 apart.
    """
    if not owner.levels.on_top() or not torch.is_grad_enabled():
        return NotImplemented
    least = 4 if func is F.scaled_dot_product_attention else 3  # attention needs an axis of positions besides
    places: list[int] = []
    values = [*args, *kwargs.values()]
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            values_B = of_rows(value)
            if values_B is None or values_B.ndim < least or values_B.shape[1] != 1:
                return NotImplemented
            if places and values_B.ndim != values[places[0]].ndim + 1:
                return NotImplemented  # broadcast axes: the first one is not that of rows
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
            filled[place] = value.squeeze(1)  # its gradient is a view, and that of an index a copy
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
        names: id of a plain parameter -> its name. Rows are on axis 1 of what the operations give.
    """

    def __init__(self, owner: Pass, names: Mapping[int, str]) -> None:
        super().__init__()
        self.owner, self.names = owner, names

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
            {name: None if isinstance(value, Tensor) else value for name, value in bound.items()},
            out.shape,
            axis=1,
        )
        needed = {n: bound[n].detach() for name in wanted for n in rule.needs[name]}
        self.owner.expect(use.wanted.values())

        def credit(grad: Tensor) -> None:
            with torch.no_grad(), exact(grad.device):
                _credit(self.owner, use, grad.reshape(use.output), needed)

        # the result of a product is a view of one with two axes: a node of that one copies nothing
        whole = out._base
        same = whole is not None and whole.numel() == out.numel() and whole.is_contiguous() and out.is_contiguous()
        base = whole if whole is not None and same else out
        return apply_node(_Tap, base, _ANCHOR, credit).view(out.shape)


def _of_samples(owner: Pass, value: Any) -> Tensor | None:
    """The tensor of all rows (B, ...) where that of each is a batch of one; None where it is not."""
    values_B = of_rows(value)
    if values_B is not None:
        return values_B[:, 0] if values_B.shape[1:2] == (1,) else None
    plain: Tensor = inside(value)
    return plain.expand(owner.levels.rows, *plain.shape[1:]) if plain.shape[:1] == (1,) else None


def registered(
    owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[..., Any]
) -> Any:
    """An operation with a rule of a user: vmap and grad do all of it but the gradient of its parameter.

    NotImplemented where a row is no batch of one, as the rule takes its tensors.

    Args:
        run: of the operation and its arguments, with its parts seen.
    """
    rule = REGISTERED[func]
    bound = rule.bind(args, kwargs)
    ((argument, needs),) = rule.needs.items()
    leaf = bound.get(argument)
    known = owner.plain(leaf) if isinstance(leaf, Tensor) else None
    if known is None or not owner.levels.on_top() or not torch.is_grad_enabled():
        return NotImplemented
    name, value = known
    with Below():
        needed = {need: _of_samples(owner, bound[need]) for need in needs}
    fixed = owner.levels.constant(value)
    out = run(
        func,
        [fixed if each is leaf else each for each in args],
        {key: fixed if each is leaf else each for key, each in kwargs.items()},
    )
    out_B = of_rows(out) if isinstance(out, Tensor) else None
    if out_B is None or out_B.shape[1:2] != (1,) or any(each is None for each in needed.values()):
        return NotImplemented
    options = {key: None if isinstance(each, Tensor) else each for key, each in bound.items()}
    shape = torch.Size((len(out_B), *out_B.shape[2:]))
    use = Use(rule, func.__name__, owner.levels.rows, {argument: name}, {argument: value.shape}, options, shape)

    owner.expect((name,))

    def credit(grad: Tensor) -> None:
        owner.backward_node()
        grad_B = of_rows(grad)
        with Below(), torch.no_grad(), exact(value.device):
            grad_B = inside(grad).expand(owner.levels.rows, *grad.shape) if grad_B is None else grad_B
            _credit(owner, use, grad_B[:, 0], needed)

    return apply_node(_Tap, out, owner.anchor, credit)


_plain_gates = without_dispatch(gates)


def recurrent(owner: Pass, func: Callable[..., Any], bound: Mapping[str, Any]) -> Any:
    """A recurrent layer over time: torch's own kernel and its derivatives below both levels, its gates by their rule.

    A row is a batch of one, on the axis of the batch. NotImplemented for packed rows, and for dropout between layers.

    Args:
        bound: arguments by name.
    """
    given = bound["input"]
    if (
        "batch_sizes" in bound
        or not owner.levels.on_top()
        or not torch.is_grad_enabled()
        or not isinstance(given, Tensor)
    ):
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
        zeros_B = given_B.new_zeros(owner.levels.rows, 1)
    # states that are the same for all rows, trained ones among them, get an axis of rows
    states = [
        state + owner.levels.row(zeros_B).to(state.dtype) if of_rows(state) is None else state for state in states
    ]
    options = (bound["has_biases"], bound["num_layers"], bound["bidirectional"])

    def call(x_B: Tensor, *states_B: Tensor) -> _Results:
        x = x_B.squeeze(1 + axis)  # (B, T, d)
        first = [state_B.squeeze(2).transpose(0, 1).contiguous() for state_B in states_B]  # (L, B, H)
        with _Taps(owner, credited):
            out, *lasts = RECURRENT[func](x.transpose(0, 1), first[0] if single else first, plain, *options)
        out = out.transpose(0, 1)
        return (out.unsqueeze(1 + axis), *(last.transpose(0, 1).unsqueeze(2) for last in lasts))

    wanted = [value.requires_grad for value in (given, *states)]
    return apply_node(_Native, _Kernel(owner, call, wanted), owner.anchor, given, *states)
