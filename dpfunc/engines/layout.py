"""Where the samples are in a tensor: which axis, and whether it is shared with other positions. Found out, not guessed.

Two samples (and three) run through the model, and each loss is differentiated alone: loss 0 must not reach the entries
of sample 1. Only a layout with which that holds is taken; if there is none, the samples influence each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfunc.errors import UnsupportedModel


@dataclass(frozen=True)
class Layout:
    """The samples are on `axis`, which has size B * m; `minor` says that the sample is the faster index of the two.

    It is None where only m = 1 was seen, so that the order of the two is not known.
    """

    axis: int
    minor: bool | None = None

    def fits(self, shape: Sequence[int], num_samples: int) -> bool:
        """Whether a tensor of this shape can have this layout."""
        if len(shape) <= self.axis or not shape[self.axis] or shape[self.axis] % num_samples:
            return False
        return self.minor is not None or num_samples == 1 or shape[self.axis] == num_samples

    def split(self, tensor: Tensor, num_samples: int) -> Tensor:
        """(..., B * m, ...) -> (B, ..., m, ...): what belongs to one sample becomes one row. A view."""
        other = tensor.shape[self.axis] // num_samples
        if self.minor:
            return torch.unflatten(tensor, self.axis, (other, num_samples)).movedim(self.axis + 1, 0)
        return torch.unflatten(tensor, self.axis, (num_samples, other)).movedim(self.axis, 0)

    def join(self, tensor_B: Tensor) -> Tensor:
        """The inverse of split."""
        if self.minor:
            return tensor_B.movedim(0, self.axis + 1).flatten(self.axis, self.axis + 1)
        return tensor_B.movedim(0, self.axis).flatten(self.axis, self.axis + 1)


SHARED = None
"""The layout of a value that all samples share, e.g. a table of positions."""

UNUSED = Layout(-1)
"""Of a value that no loss depends on and that has no layout."""


def candidates(shape: Sequence[int], num_samples: int) -> list[Layout]:
    """All layouts that a shape allows."""
    return [
        Layout(axis, minor)
        for axis, size in enumerate(shape)
        if size and size % num_samples == 0
        for minor in ((False, True) if size > num_samples else (None,))
    ]


def separates(layout: Layout, grads: Sequence[Tensor | None], num_samples: int) -> bool:
    """Whether loss i reaches the entries of sample i only, for each i."""
    for sample, grad in enumerate(grads):
        if grad is None:
            continue
        rows_B = layout.split(grad, num_samples)
        others = torch.cat([rows_B[:sample], rows_B[sample + 1 :]])
        if bool(((others != 0) & ~others.isnan()).any()):  # 0 * inf in a row that is not finite says nothing
            return False
    return True


def find(
    name: str, op: str, shapes: tuple[Sequence[int], Sequence[int]], grads: tuple[Sequence[Tensor | None], ...]
) -> list[Layout | None]:
    """The layouts that one value can have, from its shapes and its gradients with two and with three samples.

    Args:
        name: of the parameter that is used. op: the operation. shapes: of its result, for two and three samples.
        grads: its gradient of each loss, for two and three samples; None is zero.

    Returns:
        Usually one; several where too little gradient flows. SHARED where the shape does not depend on the number of
        samples.

    Raises:
        UnsupportedModel: the samples influence each other.
    """
    two, three = shapes
    if tuple(two) == tuple(three):
        return [SHARED]
    possible = [
        layout
        for layout in candidates(two, 2)
        if len(three) == len(two)
        and 3 * two[layout.axis] == 2 * three[layout.axis]
        and all(size == three[axis] for axis, size in enumerate(two) if axis != layout.axis)
    ]
    if not possible and not any(grad is not None and bool((grad != 0).any()) for row in grads for grad in row):
        return [UNUSED]
    consistent: list[Layout | None] = [
        layout for layout in possible if separates(layout, grads[0], 2) and separates(layout, grads[1], 3)
    ]
    if not consistent:
        raise UnsupportedModel(
            f"The samples of a batch influence each other at {op} of parameter {name!r}, which gives {tuple(two)} for "
            f"2 samples and {tuple(three)} for 3: the loss of row 0 depends on row 1, or no axis holds the samples. "
            "Likely causes: BatchNorm, attention or normalisation over the axis of the batch, routing over the whole "
            "batch, in-batch negatives. Every loss must depend on its own row alone."
        )
    return consistent
