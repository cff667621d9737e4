"""Operations that are made of others: they are decomposed, so that the rules of their parts apply."""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines.rules.bags import embedding_bag
from dpfunc.engines.rules.distances import DISTANCES
from dpfunc.engines.rules.recurrent import CELLS, RECURRENT
from dpfunc.errors import InvalidArgument


@functools.cache
def without_dispatch(function: Any) -> Callable[..., Any]:
    """A private copy of a torch function written in Python that does not dispatch, so that modes get its parts.

    torch's own function is not touched.
    """
    quiet = {
        name: (lambda *args, **kwargs: False) for name in function.__globals__ if name.startswith("has_torch_function")
    }
    inside = {**function.__globals__, **quiet}
    copy = FunctionType(function.__code__, inside, function.__name__, function.__defaults__, function.__closure__)
    return functools.partial(copy, **(function.__kwdefaults__ or {}))


def _grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """The same as `F.grid_sample`; of one image, as a table of positions is, the product with a matrix of weights.

    The grid gives the weight of each number of that image.
    """
    plain = without_dispatch(F.grid_sample)
    if input.ndim != 4 or input.shape[0] != 1:
        sampled: Tensor = plain(input, grid, mode=mode, padding_mode=padding_mode, align_corners=align_corners)
        return sampled
    _, channels, height, width = input.shape
    count = height * width
    each = torch.eye(count, dtype=input.dtype, device=input.device).view(1, count, height, width)
    parts = plain(each, grid, mode=mode, padding_mode=padding_mode, align_corners=align_corners)
    return F.linear(parts.movedim(1, -1), input.reshape(channels, count)).movedim(-1, 1)


def _tensordot(a: Tensor, b: Tensor, dims: int | Sequence[Sequence[int]] | Tensor = 2, out: None = None) -> Tensor:
    """The sum over pairs of axes of a and b, as an einsum: its rule knows which axes are summed.

    The result has the other axes of a, then those of b.
    """
    first, second = _paired_axes(a, b, dims)
    if len(first) != len(second) or any(len({*axes}) < len(axes) for axes in (first, second)):
        raise InvalidArgument(f"Expected tensordot to pair different axes, got dims={dims!r}.")
    of_a = list(string.ascii_lowercase[: a.ndim])
    of_b = list(string.ascii_uppercase[: b.ndim])
    for i, j in zip(first, second, strict=True):
        of_b[j] = of_a[i]
    kept_a = [letter for letter in of_a if letter not in of_b]
    kept_b = [letter for letter in of_b if letter not in of_a]
    return torch.einsum(f"{''.join(of_a)},{''.join(of_b)}->{''.join(kept_a + kept_b)}", a, b)


def _paired_axes(a: Tensor, b: Tensor, dims: int | Sequence[Sequence[int]] | Tensor) -> tuple[list[int], list[int]]:
    """Pairs of axes: one number n is the last n of a with the first n of b."""
    given = dims.tolist() if isinstance(dims, Tensor) else dims
    if isinstance(given, int):
        return list(range(a.ndim - given, a.ndim)), list(range(given))
    first, second = given
    return [axis % a.ndim for axis in first], [axis % b.ndim for axis in second]


COMPOSITES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multi_head_attention_forward: without_dispatch(F.multi_head_attention_forward),
    F.embedding_bag: embedding_bag,
    F.grid_sample: _grid_sample,
    torch.tensordot: _tensordot,
    **DISTANCES,
    **RECURRENT,
    **CELLS,
}
