"""Tracked values: parameters, and what is computed from parameters alone; and the protocol for noting their uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from dpfunc.engines.rules.table import Use
from dpfunc.engines.tracing.python_values import name_of
from dpfunc.engines.uses.sample_axis import SampleAxis
from dpfunc.errors import UnsupportedModel


@dataclass(frozen=True)
class Tracked:
    """A parameter, or a value computed from parameters alone. The tensor requires a gradient.

    Args:
        name: of the parameter. tensor: the value. parent: the identity of the tensor of which this one is the
            transpose or a reshaping.
    """

    name: str
    tensor: Tensor
    parent: int | None = None
    transposed: bool = False
    used: list[int] = field(default_factory=list)
    """Version of the tensor at each use: what is written into after it was used gives other gradients."""

    @cached_property
    def plain(self) -> Tensor:
        """The value without its graph."""
        return self.tensor.detach()


class Recorder(Protocol):
    """Receiver of the uses of parameters: the part of an engine that a tracker calls."""

    def use(self, use: Use, targets: Mapping[str, int], output: Tensor, needed: Mapping[str, Tensor | None]) -> Tensor:
        """Note a use by a rule; return the output that the model goes on with.

        Args:
            targets: argument -> identity of the tracked tensor there. needed: tensors that the rule needs, by argument.
        """
        ...

    def copies(self, tracked: Tracked, copies: Tensor, sample_axis: SampleAxis) -> None:
        """Note a leaf that holds a private copy of a parameter for each sample, on a sample axis."""
        ...

    def derived(self, sources: Sequence[Tracked]) -> None:
        """Note that a value was computed from these parameters or values."""
        ...


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, also inside of lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found


def version(tensor: Tensor) -> int:
    """Number of writes into a tensor, or into what shares its memory; 0 where dynamo traces."""
    return 0 if torch.compiler.is_compiling() else tensor._version


def no_rule(func: Callable[..., Any], tensors: Sequence[Tensor], found: Sequence[Tracked]) -> UnsupportedModel:
    """An error that names the parameter, the operation, the shapes and the way out."""
    names = ", ".join(f"{tracked.name!r} {tuple(tracked.tensor.shape)}" for tracked in found)
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    return UnsupportedModel(
        f"No rule gives per-sample gradients for {name_of(func)} of parameter {names}; its tensors have shapes "
        f'{shapes}. Use engine="vmap" or "loop", leave the parameter out, or add a rule with '
        "dpfunc.engines.register_rule."
    )
