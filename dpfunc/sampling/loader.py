"""Draws as batches of a `torch.utils.data.DataLoader`, the empty ones included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dpfunc.errors import InvalidArgument
from dpfunc.rng import Key
from dpfunc.sampling.base import Sampler, check_span, deal
from dpfunc.tree import batch_size, rows, tree_map
from dpfunc.types import Batch


@dataclass(frozen=True)
class BatchSampler:
    """The draws of steps start..stop-1 as lists, for `torch.utils.data.DataLoader(batch_sampler=...)`."""

    sampler: Sampler
    key: Key
    start: int
    stop: int
    rank: int = 0
    size: int = 1

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start, self.stop):
            yield deal(self.sampler.indices(self.key, step), self.rank, self.size).tolist()


def batch_sampler(sampler: Sampler, key: Key, start: int, stop: int, rank: int = 0, size: int = 1) -> BatchSampler:
    """The draws of a run as lists of indices; iterate as often as you like, the draws are the same.

    Args:
        sampler: who is in each batch.
        key: the root key of the run, as `dp_step.init` got it.
        start: first step, >= 0.
        stop: the step after the last, >= start.
        rank, size: of several processes, which of them this is; each draw is dealt out in turn.

    Returns:
        One list of indices for each step; unreleased. An empty list is a step with an empty batch: give the loader a
        `collate_fn` that takes it (`collate_or_empty`).

    Guarantees:
        the draws of the sampler, in order, also with workers (tests/test_sampling_loader.py::test_data_loader).

    >>> from dpfunc.rng import insecure_key
    >>> from dpfunc.sampling import Poisson
    >>> len(batch_sampler(Poisson(10, 0.5), insecure_key(0), 3, 8))
    5
    """
    return BatchSampler(sampler, key, *check_span(start, stop), rank, size)


@dataclass(frozen=True)
class CollateOrEmpty:
    """A collate function that also takes the empty list; see `collate_or_empty`."""

    collate: Callable[[list[Any]], Batch]
    empty: Batch

    def __call__(self, samples: Sequence[Any]) -> Batch:
        """The batch of the samples, or one with no rows."""
        # A copy, because training loops take parts out of a batch (`batch.pop("labels")`).
        return self.collate(list(samples)) if samples else tree_map(lambda leaf: leaf.clone(), self.empty)


def collate_or_empty(collate: Callable[[list[Any]], Batch], public_example: Any) -> CollateOrEmpty:  # noqa: ANN401
    """A collate function that gives a batch with no rows for an empty Poisson draw, instead of an error.

    Args:
        collate: list of samples -> pytree of tensors, e.g. `torch.utils.data.default_collate`.
        public_example: one sample of the right form; only shapes and dtypes of its batch are kept.

    Returns:
        `collate` for all lists but the empty one, for which it is the batch of the example without its row.

    Raises:
        InvalidArgument: collate is no function, or gives something else than tensors that agree on axis 0.

    >>> import torch
    >>> from torch.utils.data import default_collate
    >>> collate = collate_or_empty(default_collate, (torch.zeros(3), 1))
    >>> [leaf.shape for leaf in collate([])]
    [torch.Size([0, 3]), torch.Size([0])]
    """
    if not callable(collate):
        raise InvalidArgument(f"Expected collate to be a function of a list of samples, got collate={collate!r}.")
    example = collate([public_example])
    if batch_size(example) != 1:
        raise InvalidArgument(
            f"Expected collate to make a batch of one from one sample, got {batch_size(example)} rows."
        )
    return CollateOrEmpty(collate, tree_map(lambda leaf: leaf.clone(), rows(example, 0, 0)))
