"""The sample axis of a tensor: the samples that its positions belong to, and tensors with one row a sample from it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class SampleAxis:
    """An axis whose positions belong to samples: `axis` has `pre * rows * post` positions.

    Args:
        axis: of the tensor; -1 if all of it belongs to one sample, the first of `ids`. pre, post: how often all rows
            repeat, and how many positions each row has.
        ids: the sample of each row, int64; None if row r is sample r. slots, of: see `Rows`.
        guess: identifies a guess by shape, which the gradient confirms or refutes; None if it is none.
    """

    axis: int
    pre: int = 1
    post: int = 1
    ids: Tensor | None = field(default=None, compare=False)
    slots: Tensor | None = field(default=None, compare=False)
    of: int = 0
    guess: object = field(default=None, compare=False)

    def is_one_sample(self) -> bool:
        """True if all of the tensor belongs to one sample."""
        return self.axis < 0

    def is_plain(self) -> bool:
        """True if row r of axis 0 is sample r."""
        return self.axis == 0 and self.pre == self.post == 1 and self.ids is None

    def with_zeros_for_others(self, grad: Tensor, num_samples: int) -> Tensor:
        """The gradient of one sample, and zeros for the others, (B, ...)."""
        grads_B = grad.new_zeros(num_samples, *grad.shape)
        grads_B[0 if self.ids is None else int(self.ids[0])] = grad  # None is sample 0
        return grads_B

    def split(self, tensor: Tensor, num_samples: int) -> Tensor:
        """(..., pre * B * post, ...) -> (B, ..., pre * post, ...): all rows of a sample become one.

        A view, unless rows are permuted. Where samples have different numbers of rows, the shorter ones are filled up
        with zeros.
        """
        if self.is_plain():
            return tensor.unsqueeze(1)
        count = tensor.shape[self.axis] // (self.pre * self.post)
        rows = torch.unflatten(tensor, self.axis, (self.pre, count, self.post)).movedim(self.axis + 1, 0)
        rows = rows.flatten(self.axis + 1, self.axis + 2)
        if self.ids is None:
            return rows
        indices_Bm = self._rows_of_samples(num_samples).to(tensor.device)
        filled = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        rows_Bm = filled[indices_Bm].movedim(1, self.axis + 1)  # (B, ..., m, pre * post, ...)
        return rows_Bm.flatten(self.axis + 1, self.axis + 2)

    def _rows_of_samples(self, num_samples: int) -> Tensor:
        """The rows of each sample (B, m); the number of all rows where it has fewer."""
        ids = torch.empty(0) if self.ids is None else self.ids
        counts_B = torch.bincount(ids, minlength=num_samples)
        order = ids.argsort(stable=True)
        starts_B = counts_B.cumsum(0) - counts_B
        within = torch.arange(len(ids)) - starts_B[ids[order]]
        indices = torch.full((num_samples, int(counts_B.max())), len(ids))
        indices[ids[order], within] = order
        return indices

    def expand_copies(self, copies: Tensor, num_samples: int) -> Tensor:
        """Private copies (..., B, ...), one a sample on `axis`, as an axis of `pre * rows * post` positions."""
        if self.ids is not None:
            copies = copies.index_select(self.axis, self.ids.to(copies.device))
        if self.pre == 1 and self.post == 1:
            return copies
        count = copies.shape[self.axis]
        expanded = copies.unsqueeze(self.axis).unsqueeze(self.axis + 2)
        sizes = list(expanded.shape)
        sizes[self.axis], sizes[self.axis + 1], sizes[self.axis + 2] = self.pre, count, self.post
        return expanded.expand(sizes).flatten(self.axis, self.axis + 2)
