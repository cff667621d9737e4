"""What types claim holds in numbers: random programs, run again with a row replaced, removed, or with rows permuted."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import clean, differences, quiet, replaced
from programs import Program, Rows, made, run

from dpfunc.engines import bookkeeping

LENGTHS = st.integers(1, 30)
SEEDS = st.integers(0, 2**30)


def check_replaced(seed: int, length: int) -> None:
    with quiet():
        program, batch = made(seed, length)
        first = run(program, batch)
        if first.doubts:
            return
        row = seed % len(batch[0])
        for way in (0, 1):
            other = replaced(batch, row, way)
            found = differences(program, batch, first, other, lambda sample: None if sample == row else sample)
            assert not found, f"row {row} reaches others: {found[0]}\nseed {seed}, length {length}:\n{program}"


@pytest.mark.parametrize("part", range(4))
def test_a_row_reaches_no_number_of_others(part):
    @settings(max_examples=150)
    @given(SEEDS, LENGTHS)
    def check(seed, length):
        check_replaced(4 * seed + part, length)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_a_row_reaches_no_number_of_others_in_many_programs(part):
    for seed in range(500):
        check_replaced(500 * part + seed, random.Random(seed).randint(1, 30))


def honest(seed: int, length: int) -> tuple[Program, tuple[torch.Tensor, ...]]:
    return made(seed, length, honest=True)


@settings(max_examples=100)
@given(SEEDS, st.integers(1, 15))
def test_honest_programs_do_not_depend_on_positions(seed, length):
    """Rows permuted, and one row removed: each that is left has the same numbers, where the program still runs."""
    with quiet():
        program, batch = honest(seed, length)
        first = run(program, batch)
        count = len(batch[0])
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        positions = order.argsort().tolist()
        found = differences(
            program, batch, first, tuple(leaf[order] for leaf in batch), lambda sample: positions[sample]
        )
        assert not found, f"positions: {found[0]}\nseed {seed}, length {length}:\n{program}"
        gone = seed % count
        left = [sample for sample in range(count) if sample != gone]
        if len(left) > 1:
            without = tuple(leaf[left] for leaf in batch)
            found = differences(program, batch, first, without, lambda s: None if s == gone else s - (s > gone))
            assert not found, f"without {gone}: {found[0]}\nseed {seed}, length {length}:\n{program}"


def test_honest_programs_are_typed():
    """The typing is not vacuous: nearly all values of honest programs have clean rows, and their gradients too."""
    counts = Counter()
    with quiet():
        for seed in range(150):
            program, batch = honest(seed, 12)
            ran = run(program, batch)
            own = [
                kind for kind, name in zip(ran.kinds, ran.names, strict=True) if name != "leaf" and "leaf" not in name
            ]
            counts["programs"] += 1
            counts["clean"] += all(map(clean, own)) and not ran.doubts
            counts["rows"] += any(isinstance(kind, Rows) for kind in own)
            counts["gradients"] += program.loss is not None
    assert counts["clean"] >= 0.9 * counts["programs"], counts
    assert counts["rows"] >= 0.9 * counts["programs"], counts
    assert counts["gradients"] >= 0.8 * counts["programs"], counts


def test_programs_that_mix_rows_are_seen():
    """The pool does mix rows, and the trace says so."""
    counts = Counter()
    with quiet():
        for seed in range(100):
            program, batch = made(seed, 15)
            counts[all(map(clean, run(program, batch).kinds))] += 1
    assert counts[False] > 50


def test_an_empty_tensor_is_no_untraced_memory():
    """A cache of keys begins with tensors without numbers, new ones in each step; a tensor with numbers is noted."""

    def loss_of(numbers):
        def loss_fn(params, batch):
            made = torch.tensor(numbers, dtype=batch.dtype)
            return torch.cat([batch @ params["w"], made])[: len(batch)]

        return loss_fn

    for numbers, noted in (([], False), ([1.0], True)):
        engine, loss_fn, params = bookkeeping(unproven="audit"), loss_of(numbers), {"w": torch.ones(3)}
        steps = [engine(loss_fn, params, torch.randn(4, 3)) for _ in range(3)]
        assert [step.evidence.untraced for step in steps] == [False, noted, noted]


def test_a_copy_of_constants_counts_for_one_write_only():
    """Constants that were alike for each row before they were written into do not vouch for others, which differ."""

    def loss_fn(params, batch):
        alike, differing = torch.zeros(4, 3).add(0.0).abs().cumsum(0), torch.arange(12.0).view(4, 3).sin()
        alike.add_(batch)  # all of it: nothing is left of what it was
        differing[:, 0].copy_(batch[:, 0])
        return (differing * params["w"]).sum(1) + alike.sum(1)

    with quiet():
        result = bookkeeping(unproven="audit")(loss_fn, {"w": torch.ones(3)}, torch.randn(4, 3))
    assert "other values differ between positions" in result.evidence.doubts[0]


def test_positions_of_different_samples_are_mixed():
    table, order = torch.randn(5, 5), torch.tensor([1, 0, 3, 2])

    def loss_fn(params, batch):
        rows, columns = batch[:, 0].long(), batch[:, 1].long()
        return (batch @ params["w"]) * table[rows, columns[order]]

    with quiet():
        result = bookkeeping(unproven="audit")(loss_fn, {"w": torch.ones(2)}, torch.randint(5, (4, 2)).float())
    assert "at positions of different samples" in result.evidence.doubts[0]
