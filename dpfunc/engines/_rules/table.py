"""Rules: one entry for each operation that takes a parameter: per-sample gradients, kernel, gradient of its input.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

And those of matrices, `grad_i = sum_t g_t x_t^T`, bias `sum_t g_t`: linear, addmm (Hugging Face Conv1D), matmul; of
tables of rows: embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines._numerics import BUDGET, Choice, Costs, matrix_cost, sum_cost, table_cost, to_accumulation_dtype
from dpfunc.engines._per_sample import Dense, Gather, Outer, PerSampleGrad

Bound = dict[str, Any]
"""Arguments of an operation by name."""

Grads = Mapping[str, PerSampleGrad]

Takes = Callable[[Any, Bound], bool]
"""True for a value of an argument that a rule covers, from the value and all arguments."""

REQUIRED = object()
"""Default of an argument that has none."""

LEFT = "left"
"""Name, among the arguments that `grads` needs, of what `Form.run` gives beside the result."""


@dataclass(frozen=True)
class ParameterUse:
    """One use of parameters by one operation: all facts but the tensors, the same in each step with the same shapes.

    Args:
        wanted: argument of the operation -> name of the parameter. shapes: -> its shape there. options: the other
            arguments, None for tensors. output: shape of the result. axis: of the samples, in result and inputs.
        images: positions of each sample on axis 0, of operations that have an axis of images.
    """

    rule: Rule
    name: str
    num_samples: int
    wanted: Mapping[str, str]
    shapes: Mapping[str, torch.Size]
    options: Mapping[str, Any]
    output: torch.Size
    axis: int = 0
    images: int = 1

    @cached_property
    def costs(self) -> Costs:
        numbers = sum(math.prod(shape) for shape in self.shapes.values())
        return sum_cost(numbers) if self.rule.costs is None else self.rule.costs(self)

    @cached_property
    def choice(self) -> Choice:
        """The representation of its gradients by the cost model; see `Costs.choose`."""
        return self.costs.choose(self.num_samples, BUDGET)

    def split(self, tensor: Tensor) -> Tensor:
        """(B * m, ...) -> (B, m, ...), m images of each sample."""
        return torch.unflatten(tensor, 0, (self.num_samples, self.images))

    def positions(self, tensor: Tensor, features: int = 1) -> Tensor:
        """-> (B, T, *features): all axes but the last `features` become positions of one sample."""
        if self.axis:
            tensor = tensor.movedim(self.axis, 0)
        between = tensor.ndim - features - 1
        return tensor.flatten(1, between) if between > 1 else tensor if between else tensor.unsqueeze(1)


@dataclass(frozen=True)
class Form:
    """An operation as a function of one input, which differs from row to row, with its gradient in closed form.

    `takes` and `images` see the arguments of one row: the input as the loss has it, a batch of one. `run`,
    `input_grad` and the rule's `grads` see all rows, merged into the first axis: (B * m, ...) for m images of a row.

    Args:
        run: of the arguments, into which it may write; the result, and what `input_grad` gets of it, after `grads` if
            it needs LEFT. `input_grad` is None for inputs of whole numbers.
        takes: argument -> true for the values that the rule covers, from the value and all arguments; an argument that
            has no entry must have its default. Other calls take vmap(grad).
        images: axes of the input without that of images, where the kernel has one; None where it takes any axes before
            its own.
        reads_input: `input_grad` needs the input. positions: each axis between rows and the last is one of positions.
    """

    input: str
    run: Callable[[Bound], tuple[Tensor, Any]]
    input_grad: Callable[[Bound, Tensor, Any], Tensor] | None
    takes: Mapping[str, Takes]
    images: Callable[[Bound], int] | None = None
    reads_input: bool = False
    positions: bool = False


@dataclass(frozen=True)
class Rule:
    """All that is known of an operation that takes a parameter, or of one with a gradient in closed form.

    Args:
        ops: the functions it is for, as torch calls them. arguments: in their order: name -> default, or REQUIRED.
        grads: `(use, grad, **arguments) -> {argument: PerSampleGrad}`, from the gradient of the result; tensors that
            `needs` (parameter -> arguments) does not name are None. costs: of a use; None where gradients are formed.
        form: how the operation runs; None where its caller runs it.
    """

    ops: tuple[Callable[..., Any], ...]
    arguments: Mapping[str, Any]
    grads: Callable[..., Grads]
    needs: Mapping[str, tuple[str, ...]]
    costs: Callable[[ParameterUse], Costs] | None = None
    form: Form | None = None

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        return {name: default for name, default in self.arguments.items() if default is not REQUIRED}

    @cached_property
    def _reading(self) -> frozenset[str]:
        return frozenset(name for name, needed in self.needs.items() if self.form and self.form.input in needed)

    def keeps_input(self, wanted: Iterable[str]) -> bool:
        """True if gradients of these arguments, or of the input, need the input."""
        return bool(self.form and self.form.reads_input) or not self._reading.isdisjoint(wanted)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound | None:
        """The operation's arguments by name, defaults included; None for a call with others."""
        if len(args) > len(self.arguments):
            return None
        bound = {**self._defaults, **dict(zip(self.arguments, args, strict=False)), **kwargs}
        return bound if bound.keys() == self.arguments.keys() else None

    def covers(self, bound: Bound) -> bool:
        """True for a call whose arguments are all of a kind that the rule names."""
        for name, value in bound.items():
            default = self.arguments[name]
            if value is default or (type(value) is type(default) and value == default):
                continue
            if self.form is None or name not in self.form.takes or not self.form.takes[name](value, bound):
                return False
        return True

    def use(
        self, name: str, num_samples: int, wanted: Mapping[str, tuple[str, Tensor]], bound: Bound, output: torch.Size,
        *, axis: int = 0, images: int = 1,
    ) -> ParameterUse:  # fmt: skip
        """One use, from its arguments; `wanted`: argument -> name and value of the parameter."""
        names = {argument: parameter for argument, (parameter, _) in wanted.items()}
        shapes = {argument: value.shape for argument, (_, value) in wanted.items()}
        options = {argument: None if isinstance(value, Tensor) else value for argument, value in bound.items()}
        return ParameterUse(self, name, num_samples, names, shapes, options, output, axis, images)


def anything(value: Any, bound: Bound) -> bool:
    """True for each value: the operation itself refuses those that it does not take."""
    return True


def shaped(like: Callable[[Bound], Sequence[int]]) -> Takes:
    """True for a tensor of this shape, which does not broadcast."""
    return lambda value, bound: isinstance(value, Tensor) and value.shape == torch.Size(like(bound))


def of_axes(*allowed: int) -> Takes:
    """True for a tensor with one of these numbers of axes."""
    return lambda value, bound: isinstance(value, Tensor) and value.ndim in allowed


def _costs(use: ParameterUse) -> Costs:
    """Costs of the matrix; the gradient of a bias is formed."""
    shape = max(use.shapes.values(), key=len)
    positions = use.output.numel() // max(1, use.num_samples * use.output[-1])
    return matrix_cost(positions, shape[0], shape[1:].numel()) if len(shape) > 1 else sum_cost(shape.numel(), positions)


def over_positions(values_BT: Tensor) -> Tensor:
    """Sum over the positions of each sample; without a copy where there is one."""
    return values_BT[:, 0] if values_BT.shape[1] == 1 else values_BT.sum(1)


@dataclass(frozen=True)
class _Product:
    """`y = x W^T + b` or `y = x W + b`: names of x, W and b among the arguments of an operation."""

    x: str
    matrix: str
    bias: str = ""
    turned: bool = False  # x W^T; W may have more axes after the first one

    def _grads(self, use: ParameterUse, grad: Tensor, **tensors: Any) -> Grads:
        found: dict[str, PerSampleGrad] = {}
        if self.matrix in use.wanted:
            x, g, shape = use.positions(tensors[self.x]), use.positions(grad), tuple(use.shapes[self.matrix])
            found[self.matrix] = Outer(g, x, shape) if self.turned else Outer(x, g, shape)
        if self.bias in use.wanted:
            found[self.bias] = Dense(over_positions(to_accumulation_dtype(use.positions(grad))))
        return found

    def input_grad(self, bound: Bound, grad: Tensor, left: Any) -> Tensor:
        weight = bound[self.matrix].to(grad.dtype)
        found = torch.mm(grad.flatten(0, -2), weight.flatten(1) if self.turned else weight.T)
        return torch.unflatten(found, 0, grad.shape[:-1])

    def rule(
        self, ops: tuple[Callable[..., Any], ...], arguments: Mapping[str, Any], run: Callable[[Bound], Tensor],
        *, x: Takes = anything, axes: int = 2,
    ) -> Rule:  # fmt: skip
        needs: dict[str, tuple[str, ...]] = {self.matrix: (self.x,), **({self.bias: ()} if self.bias else {})}
        width = 0 if self.turned else 1
        bias = shaped(lambda bound: (bound[self.matrix].shape[width],))
        takes = {self.x: x, self.matrix: of_axes(axes), self.bias: bias}
        form = Form(self.x, lambda bound: (run(bound), None), self.input_grad, takes, positions=True)
        return Rule(ops, arguments, self._grads, needs, _costs, form)


def _run_linear(bound: Bound) -> Tensor:
    """A matrix of all positions: torch's own function has one operation more for inputs of several axes."""
    x: Tensor = bound["input"]
    return torch.unflatten(F.linear(x.flatten(0, -2), bound["weight"], bound["bias"]), 0, x.shape[:-1])


def _run_addmm(bound: Bound) -> Tensor:
    x: Tensor = bound["mat1"]
    return torch.unflatten(torch.addmm(bound["input"], x.flatten(0, -2), bound["mat2"]), 0, x.shape[:-1])


def _embedding(use: ParameterUse, grad: Tensor, input: Tensor, padding_idx: int | None, **_: Any) -> Grads:
    """Table: `grad_i = sum_t e_{id_t} g_t^T`; the padding row gets nothing. `sparse` gives the same gradient, dense."""
    ids_BT, g_BTd = input.reshape(use.num_samples, -1).long(), use.positions(grad)
    if padding_idx is not None:
        padding = padding_idx % use.shapes["weight"][0]
        g_BTd = torch.where((ids_BT == padding)[:, :, None], torch.zeros_like(g_BTd), g_BTd)
    return {"weight": Gather(ids_BT, g_BTd, tuple(use.shapes["weight"]))}


MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_EMBEDDING = {
    "input": REQUIRED, "weight": REQUIRED, "padding_idx": None, "max_norm": None, "norm_type": 2.0,
    "scale_grad_by_freq": False, "sparse": False,
}  # fmt: skip


def of_products(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.bilinear` of all products of its two inputs."""
    return F.linear(input, weight.flatten(1), bias)


RULES: Sequence[Rule] = (
    _Product("input", "weight", "bias", turned=True).rule(
        (F.linear,), {"input": REQUIRED, "weight": REQUIRED, "bias": None}, _run_linear
    ),
    _Product("input", "weight", "bias", turned=True).rule(
        (of_products,),
        {"input": REQUIRED, "weight": REQUIRED, "bias": None},
        lambda bound: of_products(**bound),
        axes=3,
    ),
    _Product("mat1", "mat2", "input").rule(
        (torch.addmm, Tensor.addmm),
        {"input": REQUIRED, "mat1": REQUIRED, "mat2": REQUIRED, "beta": 1, "alpha": 1},
        _run_addmm,
        x=of_axes(2),
    ),
    _Product("input", "other").rule(
        MATMULS[:3], {"input": REQUIRED, "other": REQUIRED}, lambda bound: bound["input"] @ bound["other"]
    ),
    _Product("input", "mat2").rule(
        MATMULS[3:], {"input": REQUIRED, "mat2": REQUIRED}, lambda bound: bound["input"] @ bound["mat2"], x=of_axes(2)
    ),
    Rule(
        (F.embedding,),
        _EMBEDDING,
        _embedding,
        {"weight": ("input",)},
        lambda use: table_cost(use.output.numel() // max(1, use.num_samples * use.output[-1]), *use.shapes["weight"]),
        Form(
            "input",
            lambda bound: (F.embedding(bound["input"], bound["weight"], bound["padding_idx"]), None),
            None,
            {"input": anything, "weight": of_axes(2), "padding_idx": anything, "sparse": anything},
        ),
    ),
)
