"""Groups of parameters that are clipped together: groupings as values, resolved against names into a Partition."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfunc._utils.validation import apart, integer, shorten
from dpfunc.errors import InvalidArgument
from dpfunc.types import Groups


@dataclass(frozen=True)
class AllParameters:
    """One group: the norm is that of the whole gradient (flat clipping).

    >>> AllParameters().assign(("a.weight", "a.bias"))
    ('all', 'all')
    """

    def assign(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple("all" for _ in names)


ALL = AllParameters()


@dataclass(frozen=True)
class PerLayer:
    """One group a layer: the name up to its last dot, so that weight and bias (or lora_A and lora_B) go together.

    >>> PerLayer().assign(("a.weight", "a.bias", "b.weight"))
    ('a', 'a', 'b')
    """

    def assign(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.rpartition(".")[0] or name for name in names)


@dataclass(frozen=True)
class PerParameter:
    """Each parameter is a group of its own.

    >>> PerParameter().assign(("a.weight", "a.bias"))
    ('a.weight', 'a.bias')
    """

    def assign(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return names


@dataclass(frozen=True)
class Blocks:
    """`num_blocks` runs of parameters of (nearly) equal count, in the order of the parameters.

    >>> Blocks(2).assign(("a", "b", "c", "d", "e"))
    ('block0', 'block0', 'block0', 'block1', 'block1')
    """

    num_blocks: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_blocks", integer("num_blocks", self.num_blocks, minimum=1))

    def assign(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Group of each name. More blocks than parameters is an error: a block would be empty."""
        if self.num_blocks > len(names):
            raise InvalidArgument(
                f"Expected num_blocks <= the number of parameters, got num_blocks={self.num_blocks} "
                f"for {len(names)} parameters. Use PerParameter() for one group a parameter."
            )
        size, larger = divmod(len(names), self.num_blocks)
        counts = [size + 1] * larger + [size] * (self.num_blocks - larger)
        return tuple(f"block{block}" for block, count in enumerate(counts) for _ in range(count))


@dataclass(frozen=True)
class ByName:
    """Any mapping from parameter name to group name; every parameter needs an entry and no entry may be left over.

    >>> ByName({"a.weight": "body", "head.weight": "head"}).assign(("head.weight", "a.weight"))
    ('head', 'body')
    """

    group_of: Mapping[str, str]

    def assign(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if self.group_of.keys() != set(names):
            missing = [name for name in names if name not in self.group_of]
            unknown = [name for name in self.group_of if name not in names]
            close = [match for name in unknown for match in difflib.get_close_matches(name, names, n=1)]
            raise InvalidArgument(
                f"Expected ByName to name each parameter once, got it {apart(missing, unknown)}."
                + (f" Did you mean {shorten(close)}?" if close else "")
            )
        return tuple(self.group_of[name] for name in names)


@dataclass(frozen=True)
class Partition:
    """A grouping resolved against parameter names: G groups in order of first appearance."""

    group_of: Mapping[str, str]
    group_names: tuple[str, ...]
    bounds: tuple[float, ...] = ()  # of each group

    def norms(self, sq_norms: Mapping[str, Tensor]) -> Tensor:
        """Norms of each sample in each group, (B, G), from squared norms name -> (B,)."""
        columns: dict[str, Tensor] = {}
        for name, sq_norms_B in sq_norms.items():
            group = self.group_of[name]
            columns[group] = columns[group] + sq_norms_B if group in columns else sq_norms_B
        return torch.stack([columns[group] for group in self.group_names], dim=1).sqrt()

    def spread(self, factors_BG: Tensor) -> dict[str, Tensor]:
        """The factors (B,) of each parameter, from factors (B, G)."""
        column = {group: factors_BG[:, index] for index, group in enumerate(self.group_names)}
        return {name: column[group] for name, group in self.group_of.items()}


def partition(groups: Groups, names: tuple[str, ...]) -> Partition:
    """Resolve a grouping against the parameter names."""
    assigned = groups.assign(names)
    return Partition(dict(zip(names, assigned, strict=True)), tuple(dict.fromkeys(assigned)))
