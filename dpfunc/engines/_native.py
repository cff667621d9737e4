"""Operations that run as their native kernels below both levels, joined by one node of level 2: speed alone.

May import: its folder, batches, rng and below. Trusted: yes.

An operation on a parameter, whose rule gets the gradients of its results and its inputs (book-keeping, Bu et al. 2023,
Differentially Private Optimization on Large Model at Small Cost); or a large operation of a short list.
Axis letters: B rows, m images of one row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from dpfunc.engines._levels import (
    Levels,
    Node,
    NoRules,
    OutsideTransforms,
    Pass,
    apply_node,
    gradients,
    inside,
    is_row,
    of_rows,
    outside_levels,
)
from dpfunc.engines._numerics import exact
from dpfunc.engines._per_sample import DeferredGrad, Dense
from dpfunc.engines._reads import Handler, any_row
from dpfunc.engines._rules import REGISTERED, RULES
from dpfunc.engines._rules.table import MATMULS, Bound, Form, ParameterUse, Rule, of_products
from dpfunc.errors import UnsupportedModel

# A cheaper operation costs less under vmap than the node around its native kernel.
_LARGE = 1 << 16


def credit_use(owner: Pass, use: ParameterUse, grad: Tensor, tensors: Mapping[str, Any]) -> None:
    """Credit the per-sample gradients of a use to its parameters, formed or as factors."""
    owner.noted.append(use)
    found = use.rule.grads(use, grad, **{**use.options, **tensors})
    formed = use.choice.representation == "formed"
    late = formed and use.costs.numbers > use.costs.factors
    for argument, name in use.wanted.items():
        own = found[argument]
        if tuple(own.shape) != tuple(use.shapes[argument]):  # an argument that broadcasts, which no rule has
            owner.stop(NoRules(f"{use.name} has another shape than {argument} of its rule"))
        owner.take(name, own if not formed else DeferredGrad(own) if late else Dense(own.dense()))


@dataclass
class _Call:
    """One call of an operation: what its node needs to run it, and to credit its gradients."""

    owner: Pass
    func: Callable[..., Any]
    rule: Rule
    form: Form
    bound: Bound
    wanted: Mapping[str, tuple[str, Tensor]]
    keeps_input: bool
    row_shape: torch.Size = field(default_factory=torch.Size)
    images: int = 0
    left: Any = None
    dtype: torch.dtype = torch.float32

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
        x = values_B.flatten(0, 1) if self.images else values_B
        self.row_shape, self.dtype = values_B.shape, x.dtype
        self.bound[self.form.input] = x
        out, self.left = self.form.run(self.bound)
        self.bound[self.form.input] = None
        return out.unflatten(0, values_B.shape[:2]) if self.images else out

    def credit(self, grad_B: Tensor, x: Tensor | None) -> None:
        """Per-sample gradients of the parameters of this call, by the rule."""
        use = self._use(grad_B.shape, None if x is None else x.shape)
        needed = {n for argument in use.wanted for n in self.rule.needs[argument]}
        credit_use(self.owner, use, grad_B, {n: x if n == self.form.input else self.bound[n] for n in needed})

    def _use(self, output: torch.Size, given: torch.Size | None) -> ParameterUse:
        """The use, which is the same in each step with the same shapes."""
        values = [value for value in self.bound.values() if not isinstance(value, Tensor)]
        plain = tuple([tuple(value) if isinstance(value, list) else value for value in values])
        names = tuple([(argument, name, value.shape) for argument, (name, value) in self.wanted.items()])
        key = (self.func, names, output, given, plain, self.images)
        use = self.owner.uses.get(key)
        if use is None:
            name, rows = self.func.__name__, self.owner.levels.rows
            use = self.rule.use(name, rows, self.wanted, self.bound, output, images=max(1, self.images))
            self.owner.uses[key] = use
        return use


class _Credited(Node):
    """The node of an operation with a rule, or with a gradient in closed form."""

    @staticmethod
    def forward(call: _Call, anchor: Tensor, given: Tensor) -> Tensor:
        values_B = of_rows(given)
        with OutsideTransforms():
            out = call.run(values_B)  # type: ignore[arg-type]  # a row, by `operation`
        return call.owner.levels.row(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.set_materialize_grads(False)  # torch would keep the output, to know its shape
        ctx.call, _, given = inputs
        if ctx.call.keeps_input:
            ctx.save_for_backward(given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        call: _Call = ctx.call
        owner = call.owner
        owner.backward_node()
        grad_B, input_grad = owner.levels.all_rows(grad), None
        x = of_rows(ctx.saved_tensors[0]) if call.keeps_input else None
        with OutsideTransforms(), torch._C.DisableTorchFunction():
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
    if owner.turned:
        func, args = _turned_back(owner, func, args)
    rule = RULES[func]
    form, bound = rule.form, rule.bind(args, kwargs)
    if form is None or bound is None or not owner.is_open() or not rule.covers(bound):
        return NotImplemented
    given = bound[form.input]
    wanted = None if of_rows(given) is None else _made_plain(owner, rule, form.input, bound)
    if wanted is None or not (wanted or given.requires_grad):
        return NotImplemented
    owner.expect([name for name, _ in wanted.values()])
    call = _Call(owner, func, rule, form, bound, wanted, rule.keeps_input(wanted))
    return apply_node(_Credited, call, owner.anchor, given)


def _turned_back(owner: Pass, func: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """`x @ W.T` is a linear, and the reverse."""
    if len(args) != 2 or id(args[1]) not in owner.turned or not (func is F.linear or func in MATMULS):
        return func, args
    return (torch.matmul if func is F.linear else F.linear), (args[0], owner.turned[id(args[1])][1])


def _made_plain(owner: Pass, rule: Rule, given: str, bound: Bound) -> dict[str, tuple[str, Tensor]] | None:
    """Put plain tensors in place of all but the input; the parameters among them. None where one is of a row."""
    wanted: dict[str, tuple[str, Tensor]] = {}
    for name, value in bound.items():
        if name == given or not isinstance(value, Tensor):
            continue
        known = owner.plain(value)
        if known is None and not value.requires_grad and of_rows(value) is None:
            bound[name] = inside(value)
        elif known is not None and name in rule.needs:
            wanted[name], bound[name] = known, known[1]
        else:
            return None
    return wanted


def _other_form(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operation that is another one with a closed form, e.g. a look-up; else NotImplemented."""
    names, form = OTHER_FORMS[func]
    found = NotImplemented
    if len(args) <= len(names) and kwargs.keys() <= set(names):
        found = form(owner, **dict(zip(names, args, strict=False)), **kwargs)
    if found is NotImplemented:
        return found
    other, given = found
    return operation(owner, other, given, {})


def _look_up(owner: Pass, input: Any, index: Any, dim: Any = 0) -> Any:
    """`table[ids]` as an embedding."""
    whole = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32) and index.ndim and is_row(index)
    if not whole or owner.plain(input) is None or input.ndim != 2 or dim != 0:
        return NotImplemented
    return F.embedding, (torch.where(index < 0, index + len(input), index), input)


def _selected(owner: Pass, input: Any, dim: Any, index: Any) -> Any:
    """`index_select` of rows of a table, none of them counted from its end."""
    found = _look_up(owner, input, index, dim) if getattr(index, "ndim", 0) == 1 else NotImplemented
    return found if found is NotImplemented else (F.embedding, (index, input))


def _products(owner: Pass, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A bilinear layer as a linear one of all products of two inputs; vmap would take row after row."""
    sizes = (*input1.shape[:-1], input1.shape[-1:] + input2.shape[-1:])
    if owner.plain(weight) is None or sizes != (*input2.shape[:-1], weight.shape[1:]):
        return NotImplemented
    return of_products, ((input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2), weight, bias)


_BILINEAR = (("input1", "input2", "weight", "bias"), _products)
_SELECT = (("input", "dim", "index"), _selected)
OTHER_FORMS: Mapping[Callable[..., Any], tuple[Sequence[str], Callable[..., Any]]] = {
    F.bilinear: _BILINEAR,
    torch.bilinear: _BILINEAR,
    torch.index_select: _SELECT,
    Tensor.index_select: _SELECT,
    Tensor.__getitem__: (("input", "index"), _look_up),
}


def turned(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Transpose a matrix, and note it if it is a parameter."""
    found = func(*args, **kwargs)
    plain = not kwargs and args[0].ndim == 2 and owner.plain(args[0]) is not None
    if plain and owner.is_open() and (len(args) == 1 or (args[1] - args[2]) % 2):
        owner.turned[id(found)] = (found, args[0])
    return found


_TURNING = (Tensor.T.__get__, Tensor.mT.__get__, Tensor.t, torch.t, Tensor.transpose, torch.transpose)  # type: ignore[attr-defined]  # of C


class _Source(Node):
    """The start of a native graph. It holds no values: leaves would keep the input of each layer in memory."""

    @staticmethod
    def forward(anchor: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """The backward pass needs no value."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *(None for _ in grads)


ANCHOR = torch.zeros((), requires_grad=True, device="cpu")
Results = tuple[Tensor, ...]


@dataclass
class Kernel:
    """Native operations and their graph, below both levels."""

    owner: Pass
    call: Callable[..., Results]
    wanted: Sequence[bool]
    starts: Sequence[Any] = ()
    ends: Sequence[Any] = ()
    again: bool = False

    def build(self, values: Sequence[Tensor], again: bool) -> Results:
        """The results with their graph, which is held by its edges, not by its values; `again` in the backward pass."""
        self.again = again
        given = [value.detach() for value in values]
        places = [place for place, wanted in enumerate(self.wanted) if wanted]
        for place, value in zip(places, apply_node(_Source, ANCHOR, *(given[place] for place in places)), strict=True):
            given[place] = value
        found = self.call(*given)
        self.starts = [get_gradient_edge(value) if value.requires_grad else None for value in given]
        self.ends = [get_gradient_edge(value) if value.requires_grad else None for value in found]
        return tuple(value.detach() for value in found)

    def back(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients of the inputs; those that go to rules are credited on the way. The graph is released."""
        starts = [edge for edge in self.starts if edge is not None]
        both = zip(self.ends, grads, strict=True)
        pairs = [(end, grad) for end, grad in both if end is not None and grad is not None]
        ends, given = zip(*pairs, strict=True)
        found = iter(gradients(ends, given, (*starts, ANCHOR)))
        wanted = [None if edge is None else next(found) for edge in self.starts]
        self.starts = self.ends = ()
        del self.call  # circles would keep memory until they are collected
        return wanted


class Native(Node):
    """The node around a native graph."""

    @staticmethod
    def forward(kernel: Kernel, anchor: Tensor, *inputs: Tensor) -> Any:
        # checkpointing, offloading: save inputs where their hooks hold, and build the native graph in the backward pass
        again = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        values = [kernel.owner.levels.all_rows(value) for value in inputs]
        with outside_levels(), torch.set_grad_enabled(not again):
            found = kernel.build(values, again)
        made = tuple(kernel.owner.levels.row(value) for value in found)
        return made if len(made) > 1 else made[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        made = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*(value for value in made if not (value.is_floating_point() or value.is_complex())))
        ctx.kernel, _, *given = inputs
        if ctx.kernel.again:
            ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        kernel: Kernel = ctx.kernel
        kernel.owner.backward_node()
        values = [kernel.owner.levels.all_rows(value) for value in ctx.saved_tensors]
        grads_B = [None if grad is None else kernel.owner.levels.all_rows(grad) for grad in grads]
        with outside_levels():
            if kernel.again:
                with torch.enable_grad():
                    kernel.build(values, True)
            with torch._C.DisableTorchFunction():
                found = kernel.back(grads_B)
        return None, None, *[None if value is None else kernel.owner.levels.row(value) for value in found]


def joined(
    owner: Pass, call: Callable[..., Results], inputs: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """The results of a function of all rows, as those of a row; one node where gradients of inputs are wanted."""
    if any(wanted):
        made = apply_node(Native, Kernel(owner, call, wanted), owner.anchor, *inputs)
        return made if isinstance(made, tuple) else (made,)
    values = [owner.levels.all_rows(value) for value in inputs]
    with outside_levels(), torch.no_grad():
        found = call(*values)
    return tuple(map(owner.levels.row, found))


def _are_large(inputs: Sequence[Tensor | None]) -> bool:
    """True for many numbers of rows that are batches of one, with as many axes; others are broadcast, the first too."""
    first = inputs[0]
    if first is None or first.numel() < _LARGE or first.ndim < 3:
        return False
    return all(each is not None and each.ndim == first.ndim and each.shape[1] == 1 for each in inputs)


NATIVE = frozenset((F.max_pool2d, torch.max_pool2d, F.rms_norm, F.gelu, F.silu))


def native(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a large operation of batches of one by its native kernel; NotImplemented where vmap is to do it."""
    if not owner.is_open():
        return NotImplemented
    values, names = [*args, *kwargs.values()], tuple(kwargs)
    places = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
    inputs = [values[place] for place in places]
    wanted = [value.requires_grad for value in inputs]
    if not any(wanted) or not _are_large([of_rows(value) for value in inputs]):
        return NotImplemented

    def call(*given: Tensor) -> Results:
        filled = list(values)
        for place, value in zip(places, given, strict=True):
            filled[place] = value.squeeze(1)  # its gradient is a view, and that of an index a copy
        found: Tensor = func(*filled[: len(args)], **dict(zip(names, filled[len(args) :], strict=True)))
        return (found.unsqueeze(1),)

    return joined(owner, call, inputs, wanted)[0]


_OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _merged(value: Tensor, images: torch.Size, rows: int) -> Tensor:
    """(B, ..., heads, positions, features) with these axes of images -> (B * images, heads, positions, features)."""
    given, own = value.shape[1:-3], (1, *value.shape[1:])[-3:]
    count = rows if images.numel() > 1 else len(value)
    if len(value) * given.numel() != count * images.numel():
        value = value.reshape(len(value), *[1] * (len(images) - len(given)), *given, *own).expand(count, *images, *own)
    return value.reshape(count * images.numel(), *own)


def attention(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Attention of all rows at once: rows are one more axis of its batch, and torch chooses the kernel.

    vmap would call the kernels of a CPU row by row. NotImplemented inside of a transform of the loss, and without rows.
    """
    bound = {**dict(zip(_OF_ATTENTION, args, strict=False)), **kwargs}
    names = [name for name in _OF_ATTENTION[:4] if isinstance(bound.get(name), Tensor)]
    axes = [bound[name].ndim for name in names]
    if not owner.at_levels() or not any(is_row(bound[name]) for name in names) or min(axes) < 2:
        return NotImplemented
    own, alike = max(axes), {}  # a mask that is the same for all rows is not repeated
    if "attn_mask" in names and not is_row(bound["attn_mask"]) and not bound["attn_mask"].requires_grad:
        alike["attn_mask"] = inside(bound["attn_mask"]).unsqueeze(0)
        names.remove("attn_mask")

    def call(*given: Tensor) -> Results:
        whole = {**dict(zip(names, given, strict=True)), **alike}
        shapes = {value.shape[1:-3] for value in whole.values()}
        images = torch.broadcast_shapes(*shapes) if len(shapes) > 1 else shapes.pop()
        merged = {name: _merged(value, images, owner.levels.rows) for name, value in whole.items()}
        found: Tensor = func(**{**bound, **merged})
        return (found.reshape(owner.levels.rows, *images, *found.shape[-min(own, 3) :]),)

    inputs = [bound[name] for name in names]
    return joined(owner, call, inputs, [value.requires_grad and torch.is_grad_enabled() for value in inputs])[0]


class Tap(Node):
    """A value below both levels, whose gradient goes to the rule of the operation that gave it."""

    @staticmethod
    def forward(value: Tensor, anchor: Tensor, credit: Callable[[Tensor], None]) -> Tensor:
        return value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        value, _, ctx.credit = inputs
        ctx.mark_dirty(value)  # no view: steps of a layer are written into

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.credit(grad)
        return grad, None, None


def _of_samples(owner: Pass, value: Any) -> Tensor | None:
    """The tensor of all rows (B, ...) where that of each is a batch of one; None where it is not."""
    values_B = of_rows(value)
    if values_B is not None:
        return values_B[:, 0] if values_B.shape[1:2] == (1,) else None
    plain: Tensor = inside(value)
    return plain.expand(owner.levels.rows, *plain.shape[1:]) if plain.shape[:1] == (1,) else None


def registered(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation with a rule of a user, of its parameter alone; NotImplemented where a row is no batch of one."""
    rule = REGISTERED[func]
    bound = rule.bind(args, kwargs)
    ((argument, needs),) = rule.needs.items()
    leaf = None if bound is None else bound.get(argument)
    known = owner.plain(leaf)
    if bound is None or known is None or not owner.is_open():
        return NotImplemented
    name, value = known
    with OutsideTransforms():
        needed = {need: _of_samples(owner, bound[need]) for need in needs}
    fixed = owner.levels.constant(value)
    put = {id(leaf): fixed}
    own = {key: put.get(id(each), each) for key, each in kwargs.items()}
    out = owner.seen(func, [put.get(id(each), each) for each in args], own)
    out_B = of_rows(out)
    if out_B is None or out_B.shape[1:2] != (1,) or any(each is None for each in needed.values()):
        return NotImplemented
    shape = torch.Size((len(out_B), *out_B.shape[2:]))
    use = rule.use(func.__name__, owner.levels.rows, {argument: known}, bound, shape)
    owner.expect((name,))

    def credit(grad: Tensor) -> None:
        owner.backward_node()
        grad_B = owner.levels.all_rows(grad)
        with OutsideTransforms(), torch.no_grad(), exact(value.device):
            credit_use(owner, use, grad_B[:, 0], needed)

    return apply_node(Tap, out, owner.anchor, credit)


_ENTROPY = (
    "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing",
)  # fmt: skip
_WITHOUT = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0}
_REDUCTIONS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "none": lambda losses, target, ignored: losses,
    "sum": lambda losses, target, ignored: losses.sum(),
    "mean": lambda losses, target, ignored: losses.sum() / (target != ignored).sum(),
}
_NONE = 0  # torch's number of the reduction "none"


class _CrossEntropy(Node):
    """Losses of all positions, (B, n, ...) of logits (B, n, C, ...)."""

    @staticmethod
    def forward(over: Levels, ignored: int, kept: list[Any], logits: Tensor, target: Tensor) -> Tensor:
        logits_B, target_B = of_rows(logits), of_rows(target)
        with OutsideTransforms():
            x, classes = logits_B.flatten(0, 1), target_B.flatten(0, 1)  # type: ignore[union-attr]  # rows
            if x.ndim > 2:
                x, classes = x.reshape(*x.shape[:2], 1, -1), classes.reshape(len(x), 1, -1)
            log_probs = x.log_softmax(1)
            run = torch.ops.aten.nll_loss_forward if x.ndim == 2 else torch.ops.aten.nll_loss2d_forward
            losses, weight = run(log_probs, classes, None, _NONE, ignored)
            losses = losses.reshape(target_B.shape)  # type: ignore[union-attr]  # rows
        kept += (log_probs, classes, None, _NONE, ignored, weight)
        return over.row(losses)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.set_materialize_grads(False)
        ctx.over, _, ctx.kept, logits, _ = inputs
        ctx.shape, ctx.dtype = logits.shape, logits.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        log_probs, classes, *_ = ctx.kept
        grad_B = ctx.over.all_rows(grad)
        with OutsideTransforms(), torch._C.DisableTorchFunction():
            run = torch.ops.aten.nll_loss_backward if log_probs.ndim == 2 else torch.ops.aten.nll_loss2d_backward
            of_log = run(grad_B.reshape(classes.shape), *ctx.kept)
            found = torch.ops.aten._log_softmax_backward_data(of_log, log_probs, 1, log_probs.dtype)
            found = found.to(ctx.dtype).reshape(len(grad_B), *ctx.shape)
        return None, None, None, ctx.over.row(found), None


def cross_entropy(owner: Pass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`F.cross_entropy` of classes in whole numbers; NotImplemented where vmap and grad are to do it."""
    over, bound = owner.levels, {**dict(zip(_ENTROPY, args, strict=False)), **kwargs}
    logits, target, ignored = bound["input"], bound["target"], bound.get("ignore_index", -100)
    if not owner.is_open() or not (is_row(logits) and is_row(target)) or bound.keys() - set(_ENTROPY):
        return NotImplemented
    if any(bound.get(name, plain) != plain for name, plain in _WITHOUT.items()):
        return NotImplemented
    of_classes = target.dtype == torch.int64 and logits.ndim > 1 and target.shape == logits.shape[:1] + logits.shape[2:]
    if not of_classes or not logits.requires_grad:
        return NotImplemented
    losses = apply_node(_CrossEntropy, over, ignored, [], logits, target)
    return _REDUCTIONS[bound.get("reduction", "mean")](losses, target, ignored)


# Products with weights in 4 bits, of bitsandbytes: frozen layers of a base on which adapters are trained (QLoRA).
_PRODUCTS = ("gemm_4bit", "gemv_4bit")


def _product_of_4_bits(owner: Pass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`x W^T + b` with any leading axes, of all rows; NotImplemented for other operations."""
    run: Callable[..., Any] = func
    if func.__name__.split(".")[0] not in _PRODUCTS or any_row((args[1:], dict(kwargs))):
        return NotImplemented
    if torch.is_grad_enabled() and args[0].requires_grad:
        raise UnsupportedModel(
            "Expected weights in 4 bits that gradients pass through, got weights that bitsandbytes has packed for "
            "inference: on this CPU it does so when the model runs in evaluation mode. Load the model again, and "
            "evaluate only after training; or train on an accelerator, where nothing is packed."
        )
    values_B = of_rows(args[0])
    with OutsideTransforms():
        out = run(values_B, *args[1:], **kwargs)
    return owner.levels.row(out)


def _experts(owner: Pass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The products of experts of Transformers where code is transformed, by torch's own operation."""
    if func.__name__.split(".")[0] != "grouped_mm_fallback":
        return NotImplemented
    bound = dict(zip(("input", "weight", "offs"), args, strict=False), **kwargs)
    return F.grouped_mm(bound["input"], bound["weight"], offs=bound["offs"])


OF_LIBRARIES = {"bitsandbytes": _product_of_4_bits, "transformers": _experts}
"""Operations of other libraries that keep rows apart, by namespace; NotImplemented for others."""

NATIVE_OPERATIONS: Mapping[Any, Handler] = {
    **dict.fromkeys(NATIVE, native),
    **{func: operation for func, rule in RULES.items() if rule.form is not None},
    **dict.fromkeys(OTHER_FORMS, _other_form),
    **dict.fromkeys(_TURNING, turned),
    F.cross_entropy: cross_entropy,
    F.scaled_dot_product_attention: attention,
}
