"""`tensordot` as the einsum that it is: the rule of einsum knows which axes are summed."""

from __future__ import annotations

import string
from collections.abc import Sequence

import torch
from torch import Tensor

from dpfunc.errors import InvalidArgument


def tensordot(a: Tensor, b: Tensor, dims: int | Sequence[Sequence[int]] | Tensor = 2, out: None = None) -> Tensor:
    """The sum over pairs of axes of a and b; the result has the other axes of a, then those of b."""
    first, second = _axes(a, b, dims)
    if len(first) != len(second) or any(len({*axes}) < len(axes) for axes in (first, second)):
        raise InvalidArgument(f"Expected tensordot to pair different axes, got dims={dims!r}.")
    of_a = list(string.ascii_lowercase[: a.ndim])
    of_b = list(string.ascii_uppercase[: b.ndim])
    for i, j in zip(first, second, strict=True):
        of_b[j] = of_a[i]
    kept_a = [letter for letter in of_a if letter not in of_b]
    kept_b = [letter for letter in of_b if letter not in of_a]
    return torch.einsum(f"{''.join(of_a)},{''.join(of_b)}->{''.join(kept_a + kept_b)}", a, b)


def _axes(a: Tensor, b: Tensor, dims: int | Sequence[Sequence[int]] | Tensor) -> tuple[list[int], list[int]]:
    """Pairs of axes: one number n is the last n of a with the first n of b."""
    given = dims.tolist() if isinstance(dims, Tensor) else dims
    if isinstance(given, int):
        return list(range(a.ndim - given, a.ndim)), list(range(given))
    first, second = given
    return [axis % a.ndim for axis in first], [axis % b.ndim for axis in second]
