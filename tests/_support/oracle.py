"""What the type of a tensor claims, compared with numbers: the same program on a batch in which one row is another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from programs import Program, Ran, run
from torch import Tensor

from dpfunc.engines.tracing.rows import ONE_SAMPLE, Rows, samples_by_position
from dpfunc.errors import UnsupportedModel

FAILS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, UnsupportedModel)


def clean(kind: object) -> bool:
    return kind is None or (isinstance(kind, Rows) and not kind.doubt)


def numbers_of(value: Tensor, kind: Rows | None, sample: int) -> Tensor:
    """The numbers that belong to a sample, in their order; those of a constant belong to each."""
    if kind is None:
        return value
    if kind.axis == ONE_SAMPLE:
        own = 0 if kind.ids is None else int(kind.ids[0])
        return value.reshape(-1) if own == sample else value.reshape(-1)[:0]
    positions = (samples_by_position(kind) == sample).nonzero().flatten()
    if kind.slots is not None:  # in an order that several samples decide: in the order of their positions before
        slots = kind.slots.repeat_interleave(kind.post)
        positions = positions[slots[positions].argsort(stable=True)]
    return value.index_select(kind.axis, positions)


def same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    return bool(torch.isclose(one, other, rtol=1e-9, atol=1e-9, equal_nan=True).all())


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # of torch, about drawn programs: only results are compared
        yield


def replaced(batch: tuple[Tensor, ...], row: int, way: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(77 + way)
    found = []
    for leaf in batch:
        leaf = leaf.clone()
        leaf[row] = torch.randn(leaf.shape[1:], generator=generator, dtype=leaf.dtype) * (30.0 if way == 1 else 1.0)
        found.append(leaf)
    return tuple(found)


def differences(
    program: Program,
    batch: tuple[Tensor, ...],
    first: Ran,
    other: tuple[Tensor, ...],
    sample_of: Callable[[int], int | None],
) -> list[str]:
    """What the types claim to be of a sample, and is not the same on another batch.

    Args:
        sample_of: where a sample is in the other batch; None if it is not there, or another.
    """
    try:
        second = run(program, other)
    except FAILS:  # a shape that follows from values did not fit
        return []
    if second.doubts or len(second.values) != len(first.values):
        return []
    found = []
    for place, (value, kind) in enumerate(zip(first.values, first.kinds, strict=True)):
        there, its = second.values[place], second.kinds[place]
        if not clean(kind) or not clean(its) or not value.numel() or not there.numel():
            continue
        if (kind is None) != (its is None):  # nothing was selected in one of them
            kind = its = kind or its
            if value.shape != there.shape:
                continue
        for sample in range(len(batch[0])):
            moved = sample_of(sample)
            if moved is None:
                continue
            if not same(numbers_of(value, kind, sample), numbers_of(there, its, moved)):
                found.append(f"value {place} of {first.names[place]} {tuple(value.shape)}: {kind}: sample {sample}")
    return found
