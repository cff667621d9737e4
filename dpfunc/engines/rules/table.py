"""Rules for the per-sample gradients of one operation's use of a parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dpfunc.engines.cost import BUDGET, Choice, Costs, summed
from dpfunc.engines.per_sample import PerSampleGrad

Grads = Mapping[str, PerSampleGrad]

REQUIRED = object()
"""Default of an argument that has none."""


@dataclass(frozen=True)
class Use:
    """One use of parameters by one operation: all facts but the tensors, the same in each step with the same shapes.

    Args:
        rule: what applies. name: of the operation. num_samples: B.
        wanted: argument of the operation -> name of the parameter. shapes: -> shape of the parameter there.
        options: the operation's other arguments, without the tensors that the rule does not need.
        output: shape of the result. axis: of the samples, in the result and in the inputs.
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
        """Costs of its gradients, by shapes."""
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
class Rule:
    """Rule that computes per-sample gradients from the gradient of an operation's result.

    Args:
        ops: the functions it is for, as torch calls them.
        arguments: of the operation, in its order: name -> default, or REQUIRED.
        grads: `(use, grad, **arguments) -> {argument: PerSampleGrad}`. Tensors that `needs` does not name are None
            there.
        needs: argument that may be a parameter -> arguments whose tensors its gradient needs.
        costs: of a use, by its shapes: they decide whether gradients are formed or kept as factors. None where the
            gradients of the rule are formed already.
    """

    ops: tuple[Callable[..., Any], ...]
    arguments: Mapping[str, Any]
    grads: Callable[..., Grads]
    needs: Mapping[str, tuple[str, ...]]
    costs: Callable[[Use], Costs] | None = None

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        return {name: default for name, default in self.arguments.items() if default is not REQUIRED}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The operation's arguments by name, defaults included."""
        return {**self._defaults, **dict(zip(self.arguments, args, strict=False)), **kwargs}
