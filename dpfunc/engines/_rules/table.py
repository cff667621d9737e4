"""Rules: one entry for each operation that takes a parameter: per-sample gradients, kernel, gradient of its input.

And those of matrices, `grad_i = sum_t g_t x_t^T`, bias `sum_t g_t`: linear, addmm (Hugging Face Conv1D), matmul; of
tables of rows: embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines._numerics import BUDGET, Choice, Costs, matrix, summed, table, to_accumulation_dtype
from dpfunc.engines._per_sample import Dense, Gather, Outer, PerSampleGrad

Bound = dict[str, Any]
"""Arguments of an operation by name."""

Grads = Mapping[str, PerSampleGrad]

REQUIRED = object()
"""Default of an argument that has none."""


@dataclass(frozen=True)
class Use:
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
        return summed(numbers) if self.rule.costs is None else self.rule.costs(self)

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
        run: of the arguments, into which it may write; the result, and what `input_grad` gets of it, which is None for
            inputs of whole numbers. takes: false for calls that it does not cover: they take vmap(grad), as unequal
            dtypes do. images: axes of the input without that of images, where the kernel has one; None where it takes
            any axes before its own.
        reads_input: `input_grad` needs the input. positions: each axis between rows and the last is one of positions.
    """

    input: str
    run: Callable[[Bound], tuple[Tensor, Any]]
    input_grad: Callable[[Bound, Tensor, Any], Tensor] | None
    takes: Callable[[Bound], bool] = lambda bound: True
    images: Callable[[Bound], int] | None = None
    reads_input: bool = False
    positions: bool = False


@dataclass(frozen=True)
class Rule:
    """All that is known of an operation that takes a parameter.

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
    costs: Callable[[Use], Costs] | None = None
    form: Form | None = None

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        return {name: default for name, default in self.arguments.items() if default is not REQUIRED}

    @cached_property
    def reading(self) -> frozenset[str]:
        """Arguments whose gradient, as parameters, needs the input."""
        return frozenset(name for name, needed in self.needs.items() if self.form and self.form.input in needed)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound:
        """The operation's arguments by name, defaults included."""
        return {**self._defaults, **dict(zip(self.arguments, args, strict=False)), **kwargs}

    def use(
        self, name: str, num_samples: int, wanted: Mapping[str, tuple[str, Tensor]], bound: Bound, output: torch.Size,
        *, axis: int = 0, images: int = 1,
    ) -> Use:  # fmt: skip
        """One use, from its arguments; `wanted`: argument -> name and value of the parameter."""
        names = {argument: parameter for argument, (parameter, _) in wanted.items()}
        shapes = {argument: value.shape for argument, (_, value) in wanted.items()}
        options = {argument: None if isinstance(value, Tensor) else value for argument, value in bound.items()}
        return Use(self, name, num_samples, names, shapes, options, output, axis, images)


def _is_matrix(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2


def _costs(use: Use) -> Costs:
    """Costs of the matrix; the gradient of a bias is formed."""
    shape = max(use.shapes.values(), key=len)
    positions = use.output.numel() // max(1, use.num_samples * use.output[-1])
    return matrix(positions, shape[0], shape[1:].numel()) if len(shape) > 1 else summed(shape.numel(), positions)


def column_sum(use: Use, grad: Tensor) -> Dense:
    """The sum over the positions of each sample: the gradient of a bias."""
    return Dense(to_accumulation_dtype(use.positions(grad)).sum(1))


@dataclass(frozen=True)
class _Product:
    """`y = x W^T + b` or `y = x W + b`: names of x, W and b among the arguments of an operation."""

    x: str
    matrix: str
    bias: str = ""
    turned: bool = False  # x W^T; W may have more axes after the first one

    def _grads(self, use: Use, grad: Tensor, **tensors: Any) -> Grads:
        found: dict[str, PerSampleGrad] = {}
        if self.matrix in use.wanted:
            x, g, shape = use.positions(tensors[self.x]), use.positions(grad), tuple(use.shapes[self.matrix])
            found[self.matrix] = Outer(g, x, shape) if self.turned else Outer(x, g, shape)
        if self.bias in use.wanted:
            found[self.bias] = column_sum(use, grad)
        return found

    def input_grad(self, bound: Bound, grad: Tensor, left: Any) -> Tensor:
        weight = bound[self.matrix].to(grad.dtype)
        found: Tensor = grad @ (weight.flatten(1) if self.turned else weight.T)
        return found

    def rule(
        self, ops: tuple[Callable[..., Any], ...], arguments: Mapping[str, Any], run: Callable[[Bound], Tensor],
        takes: Callable[[Bound], bool],
    ) -> Rule:  # fmt: skip
        needs: dict[str, tuple[str, ...]] = {self.matrix: (self.x,), **({self.bias: ()} if self.bias else {})}
        form = Form(self.x, lambda bound: (run(bound), None), self.input_grad, takes, positions=True)
        return Rule(ops, arguments, self._grads, needs, _costs, form)


def _run_addmm(bound: Bound) -> Tensor:
    x: Tensor = bound["mat1"]
    return torch.unflatten(torch.addmm(bound["input"], x.flatten(0, -2), bound["mat2"]), 0, x.shape[:-1])


def _embedding(use: Use, grad: Tensor, input: Tensor, padding_idx: int | None, **_: Any) -> Grads:
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
RULES: Sequence[Rule] = (
    _Product("input", "weight", "bias", turned=True).rule(
        (F.linear,),
        {"input": REQUIRED, "weight": REQUIRED, "bias": None},
        lambda bound: F.linear(bound["input"], bound["weight"].flatten(1), bound["bias"]),
        lambda bound: bound["weight"].ndim > 1,
    ),
    _Product("mat1", "mat2", "input").rule(
        (torch.addmm, Tensor.addmm),
        {"input": REQUIRED, "mat1": REQUIRED, "mat2": REQUIRED, "beta": 1, "alpha": 1},
        _run_addmm,
        lambda bound: _is_matrix(bound["mat2"]) and bound["input"].ndim == 1 and bound["beta"] == bound["alpha"] == 1,
    ),
    _Product("input", "other").rule(
        MATMULS,
        {"input": REQUIRED, "other": REQUIRED},
        lambda bound: bound["input"] @ bound["other"],
        lambda bound: _is_matrix(bound["other"]),
    ),
    Rule(
        (F.embedding,),
        _EMBEDDING,
        _embedding,
        {"weight": ("input",)},
        lambda use: table(use.output.numel() // max(1, use.num_samples * use.output[-1]), *use.shapes["weight"]),
        Form(
            "input",
            lambda bound: (F.embedding(bound["input"], bound["weight"], bound["padding_idx"]), None),
            None,
            lambda bound: bound["max_norm"] is None and not bound["scale_grad_by_freq"],
        ),
    ),
)
