"""Rules for the per-sample gradients of one operation's use of a parameter, and the table of all rules."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpfunc.engines.cost import Choice, Costs, summed
from dpfunc.engines.per_sample import PerSampleGrad
from dpfunc.engines.uses.sample_axis import SampleAxis
from dpfunc.errors import UnsupportedModel

Grads = Mapping[str, PerSampleGrad]


@dataclass(frozen=True)
class Use:
    """One use of parameters by one operation: all facts but the tensors, the same in each step with the same shapes.

    Args:
        rule: what applies. name: of the operation. num_samples: B.
        wanted: argument of the operation -> name of the parameter. shapes: -> shape of the parameter there.
        sample_axis: axis of the samples in the operation's result, and in its inputs.
        options: the operation's other arguments, without the tensors that the rule does not need.
        output: shape of the result.
    """

    rule: Rule
    name: str
    num_samples: int
    wanted: Mapping[str, str]
    shapes: Mapping[str, torch.Size]
    sample_axis: SampleAxis
    options: Mapping[str, Any]
    output: torch.Size
    _chosen: list[tuple[Costs, Choice, Choice]] = field(default_factory=list, repr=False, compare=False)

    @property
    def key(self) -> tuple[object, ...]:
        """Key of uses that get the same representation."""
        return (*self.wanted.values(), self.name, *self.output)

    def choose(self, budget: float = math.inf, *, groupwise: bool = False) -> Choice:
        """The representation of its gradients by the cost model; see `Costs.choose`."""
        if not self._chosen:
            numbers = sum(math.prod(shape) for shape in self.shapes.values())
            costs = summed(numbers) if self.rule.costs is None else self.rule.costs(self)
            first, early = (costs.choose(self.num_samples, groupwise=each) for each in (False, True))
            self._chosen.append((costs, first, early))
        costs, first, early = self._chosen[0]
        choice = early if groupwise else first
        if choice.representation == "formed" and choice.num_bytes > budget:
            return costs.choose(self.num_samples, budget, groupwise=groupwise)
        return choice

    def split(self, tensor: Tensor) -> Tensor:
        """(..., B * m, ...) -> (B, ..., m, ...)."""
        return self.sample_axis.split(tensor, self.num_samples)

    def positions(self, tensor: Tensor, features: int = 1) -> Tensor:
        """-> (B, T, *features): all axes but the last `features` become positions of one sample."""
        if self.sample_axis.axis >= tensor.ndim - features:
            raise self.refuse("the samples are on an axis of the parameter.")
        one = self.sample_axis.is_plain() and tensor.ndim - features
        if one == 1 or one == 2:  # (B, *features) and (B, T, *features)
            return tensor.unsqueeze(1) if one == 1 else tensor
        rows_B = self.split(tensor)
        return rows_B.reshape(self.num_samples, -1, *rows_B.shape[rows_B.ndim - features :])

    def refuse(self, reason: str) -> UnsupportedModel:
        """An error that names parameter, operation and shapes."""
        names = ", ".join(f"{name!r} {tuple(self.shapes[arg])}" for arg, name in self.wanted.items())
        return UnsupportedModel(
            f"{self.name} of parameter {names}, result {tuple(self.output)}: {reason} "
            'Use engine="vmap" or "loop", or leave the parameter out.'
        )


@dataclass(frozen=True)
class Rule:
    """Rule that computes per-sample gradients from the gradient of an operation's result.

    Args:
        ops: the functions it is for, as torch calls them.
        grads: `(use, grad, **arguments) -> {argument: PerSampleGrad}`, with the arguments named as in the operation
            and in its order. Tensors that `needs` does not name are None there.
        needs: argument that may be a parameter -> arguments whose tensors its gradient needs.
        costs: of a use, by its shapes: they decide whether gradients are formed or kept as factors. None where the
            gradients of the rule are formed already.
        names: of the arguments; None reads them from the signature of `grads`.
    """

    ops: tuple[Callable[..., Any], ...]
    grads: Callable[..., Grads]
    needs: Mapping[str, tuple[str, ...]]
    costs: Callable[[Use], Costs] | None = None
    names: tuple[str, ...] | None = None

    _defaults: Mapping[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        own = list(inspect.signature(self.grads).parameters.values())[2:]
        if self.names is None:
            positional = tuple(p.name for p in own if p.kind is not inspect.Parameter.KEYWORD_ONLY)
            object.__setattr__(self, "names", positional)
        defaults = {p.name: p.default for p in own if p.default is not inspect.Parameter.empty}
        object.__setattr__(self, "_defaults", defaults)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The operation's arguments by name, defaults included."""
        return {**self._defaults, **dict(zip(self.names or (), args, strict=False)), **kwargs}
