"""Batches as pytrees: their length, rows and chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpfunc._utils.validation import shorten
from dpfunc.errors import InvalidArgument
from dpfunc.types import Batch


def batch_size(batch: Batch) -> int:
    """The length B of axis 0, on which all leaves agree.

    Raises:
        InvalidArgument: no tensors, a leaf that is not a tensor, is sparse, nested or 0-d, or leaves that disagree.

    >>> batch_size({"x": torch.zeros(4, 3), "y": torch.zeros(4)})
    4
    """
    values = pytree.tree_leaves(batch)
    sizes = {value.shape[0] if isinstance(value, Tensor) and value.ndim and _dense(value) else None for value in values}
    if len(sizes) != 1 or None in sizes:
        _refuse(batch)
    return int(values[0].shape[0])


def _dense(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_nested


def _refuse(batch: Batch) -> NoReturn:
    """Raise the error of a batch whose leaves are not tensors that agree."""
    leaves = pytree.tree_leaves_with_path(batch)
    if not leaves:
        raise InvalidArgument("Expected a batch with at least one tensor, got an empty pytree.")
    sizes: dict[str, int] = {}
    for path, leaf in leaves:
        name = "batch" + pytree.keystr(path)
        if not isinstance(leaf, Tensor):
            advice = (
                "Make tensors of texts in the collate_fn of plan.loader."
                if isinstance(leaf, str)
                else "Keep what is the same for all samples out of the batch: close over it in loss_fn."
            )
            raise InvalidArgument(
                f"Expected every leaf of the batch to be a tensor, got {name} of type {type(leaf).__name__}. {advice}"
            )
        if not _dense(leaf):
            kind = "a nested tensor" if leaf.is_nested else f"one of layout {leaf.layout}"
            raise InvalidArgument(
                f"Expected every leaf of the batch to be a dense tensor, got {name}, {kind}. Fill rows up to one "
                "length in the collate_fn, with a mask; or call .to_dense()."
            )
        if leaf.ndim == 0:
            raise InvalidArgument(
                f"Expected axis 0 of {name} to be the samples, got a 0-dimensional tensor. "
                "Keep what is the same for all samples out of the batch: close over it in loss_fn."
            )
        sizes[name] = leaf.shape[0]
    listed = shorten([f"{name} has {size}" for name, size in sizes.items()])
    raise InvalidArgument(
        f"Expected the same number of samples on axis 0 of all leaves of the batch: {listed}. Where a processor puts "
        "the images of all samples into one tensor, give each sample rows of its own, as image_text_collator does."
    )


def tree_map(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """The batch with a function applied to every leaf."""
    return pytree.tree_map(function, batch)


def take(batch: Batch, indices: Tensor) -> Batch:
    """The rows of a pytree of tensors at the given indices (none is fine).

    Args:
        batch: the data set, a pytree of tensors. indices: int64, (B,).

    >>> take({"x": torch.arange(5)}, torch.tensor([3, 1]))
    {'x': tensor([3, 1])}

    Raises:
        InvalidArgument: something else than tensors.
    """

    def chosen(leaf: Tensor) -> Tensor:
        if not isinstance(leaf, Tensor):
            raise InvalidArgument(
                f"Expected data to be a pytree of tensors, got a {type(leaf).__name__} in it. Take the rows of other "
                "data sets by a loader: plan.loader(dataset, state)."
            )
        return leaf.index_select(0, indices.to(leaf.device))

    return tree_map(chosen, batch)


def rows(batch: Batch, start: int, stop: int) -> Batch:
    """Rows start..stop of every leaf, without a copy."""
    return tree_map(lambda leaf: leaf[start:stop], batch)


def row_alone(batch: Batch, row: int) -> Batch:
    """A copy of one row: no other row is in its memory."""
    return tree_map(lambda leaf: leaf[row : row + 1].clone(), batch)


def pad_rows(batch: Batch, size: int) -> Batch:
    """The batch with its first row repeated at the end up to `size` rows (give those rows weight 0)."""

    def pad(leaf: Tensor) -> Tensor:
        missing = size - leaf.shape[0]
        return leaf if missing <= 0 else torch.cat([leaf, leaf[:1].expand(missing, *leaf.shape[1:])])

    return tree_map(pad, batch)


def signature(batch: Batch) -> tuple[object, ...]:
    """Shapes without their first axis, and dtypes, of all leaves: a key for what was learnt from such batches."""
    return tuple((tuple(leaf.shape[1:]), leaf.dtype) for leaf in pytree.tree_leaves(batch))
