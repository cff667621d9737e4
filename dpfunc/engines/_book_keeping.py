"""Operations on parameters: native kernels below both levels, and per-sample gradients by a rule (book-keeping).

May import: its folder, batches, rng and below. Privacy depends on it: yes.

A rule gets the gradients of results and the inputs: Bu et al. 2023, Differentially Private Optimization on Large Model
at Small Cost. Axis letters: B rows, m images of one row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines._levels import Handler, Node, NoRules, OutsideTransforms, Pass, apply_node, inside, is_row, of_rows
from dpfunc.engines._numerics import exact
from dpfunc.engines._per_sample import DeferredGrad, Dense
from dpfunc.engines._rules import REGISTERED, RULES
from dpfunc.engines._rules.table import LEFT, MATMULS, Bound, Form, ParameterUse, Rule, of_products


def credit_use(owner: Pass, use: ParameterUse, grad: Tensor, tensors: Mapping[str, Any]) -> None:
    """Credit the per-sample gradients of a use to its parameters, formed or as factors."""
    owner.credited.append(use)
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
        given = {**self.bound, self.form.input: x, LEFT: self.left}
        credit_use(self.owner, use, grad_B, {name: given[name] for name in needed})

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
    wanted = None if of_rows(given) is None else made_plain(owner, rule, form.input, bound)
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


def made_plain(owner: Pass, rule: Rule, given: str, bound: Bound) -> dict[str, tuple[str, Tensor]] | None:
    """Put plain tensors in place of all but the input; the parameters among them. None where one is of a row.

    Others than parameters, such as classes, may be of a row; (B, ...) is put in place of them.
    """
    wanted: dict[str, tuple[str, Tensor]] = {}
    for name, value in bound.items():
        if name == given or not isinstance(value, Tensor):
            continue
        known = owner.plain(value)
        values_B = of_rows(value)
        if known is None and not value.requires_grad and (values_B is None or name not in rule.needs):
            bound[name] = inside(value) if values_B is None else values_B
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


_REDUCTIONS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "none": lambda losses, target, ignored: losses,
    "sum": lambda losses, target, ignored: losses.sum(),
    "mean": lambda losses, target, ignored: losses.sum() / (target != ignored).sum(),
}


def cross_entropy(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`F.cross_entropy` of a row by losses of its samples; NotImplemented where vmap and grad are to do it."""
    bound = RULES[func].bind(args, kwargs)
    if bound is None or bound["reduction"] not in _REDUCTIONS or not is_row(bound["target"]):
        return NotImplemented
    losses = operation(owner, func, (), {**bound, "reduction": "none"})
    if losses is NotImplemented:
        return losses
    return _REDUCTIONS[bound["reduction"]](losses, bound["target"], bound["ignore_index"])


def turned(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Transpose a matrix, and note it if it is a parameter."""
    found = func(*args, **kwargs)
    plain = not kwargs and args[0].ndim == 2 and owner.plain(args[0]) is not None
    if plain and owner.is_open() and (len(args) == 1 or (args[1] - args[2]) % 2):
        owner.turned[id(found)] = (found, args[0])
    return found


_TURNING = (Tensor.T.__get__, Tensor.mT.__get__, Tensor.t, torch.t, Tensor.transpose, torch.transpose)  # type: ignore[attr-defined]  # of C


class Tap(Node):
    """A value whose gradient, with tensors that are kept for it, goes to the rule of the operation that gave it."""

    @staticmethod
    def forward(value: Tensor, anchor: Tensor, credit: Callable[..., None], *kept: Tensor) -> Tensor:
        return value.detach()  # no view, which could not be written into

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, ctx.credit, *kept = inputs
        ctx.save_for_backward(*kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.credit(grad, *ctx.saved_tensors)
        return grad, None, None, *(None for _ in ctx.saved_tensors)


def _of_samples(owner: Pass, value: Any) -> Tensor | None:
    """The tensor of all rows (B, ...) where that of each is a batch of one; None where it is not."""
    values_B = of_rows(value)
    if values_B is not None:
        return values_B[:, 0] if values_B.shape[1:2] == (1,) else None
    plain: Tensor = inside(value)
    return plain.expand(owner.levels.rows, *plain.shape[1:]) if plain.shape[:1] == (1,) else None


def registered(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation with a rule of a user, of its parameter only; NotImplemented where a row is no batch of one."""
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
    given = {**bound, argument: owner.levels.constant(value)}
    out = owner.seen(func, [given[name] for name in rule.arguments], {})
    out_B = of_rows(out)
    if out_B is None or out_B.shape[1:2] != (1,) or any(each is None for each in needed.values()):
        return NotImplemented
    shape = torch.Size((len(out_B), *out_B.shape[2:]))
    use = rule.use(func.__name__, owner.levels.rows, {argument: known}, bound, shape)
    owner.expect((name,))

    def credit(grad: Tensor, *tensors: Tensor) -> None:
        owner.backward_node()
        grad_B = owner.levels.all_rows(grad)
        with OutsideTransforms(), torch.no_grad(), exact(value.device):
            credit_use(owner, use, grad_B[:, 0], dict(zip(needed, tensors, strict=True)))

    return apply_node(Tap, out, owner.anchor, credit, *needed.values())


WITH_PARAMETERS: Mapping[Any, Handler] = {
    **{func: operation for func, rule in RULES.items() if rule.form is not None},
    **dict.fromkeys(OTHER_FORMS, _other_form),
    **dict.fromkeys(_TURNING, turned),
    F.cross_entropy: cross_entropy,
}
