"""The rows of a view, read off its strides, are those that the same views of a tensor of sample numbers have."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfunc.engines.tracing.rows import ONE_SAMPLE, Rows, located, samples_by_position, stored


def owner(rng):
    """A tensor that owns its memory, its rows, and the sample of each of its numbers."""
    count, pre, post = rng.randint(2, 4), rng.choice([1, 1, 2]), rng.choice([1, 1, 2, 3])
    shape = [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
    axis = rng.randint(0, len(shape))
    shape.insert(axis, pre * count * post)
    order = list(range(len(shape)))
    rng.shuffle(order)  # dense in any order of axes
    tensor = torch.zeros([shape[k] for k in order]).permute(sorted(range(len(order)), key=order.__getitem__))
    rows = Rows(axis, count, pre, post)
    samples = samples_by_position(rows).reshape([-1 if k == axis else 1 for k in range(len(shape))]).expand(shape)
    numbers = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.int64)
    return tensor, rows, numbers.copy_(samples)


def a_view(rng, x):
    """One more view, as a function."""
    axis = rng.randrange(x.ndim) if x.ndim else None
    kinds = ["unsqueeze"] if axis is None else ["unsqueeze", "transpose", "narrow", "step", "select", "unflatten", "view",
                                               "diagonal", "expand", "unfold", "movedim", "strided"]  # fmt: skip
    kind = rng.choice(kinds)
    if kind == "unsqueeze":
        place = rng.randint(0, x.ndim)
        return lambda t: t.unsqueeze(place)
    other = rng.randrange(x.ndim)
    if kind == "transpose":
        return lambda t: t.transpose(axis, other)
    if kind == "movedim":
        return lambda t: t.movedim(axis, other)
    length = x.shape[axis]
    start = rng.randrange(length)
    if kind == "narrow":
        size = rng.randint(1, length - start)
        return lambda t: t.narrow(axis, start, size)
    if kind == "step":
        index = (*[slice(None)] * axis, slice(start, None, rng.randint(1, 3)))
        return lambda t: t[index]
    if kind == "select":
        return lambda t: t.select(axis, start)
    if kind == "unflatten":
        inner = rng.choice([n for n in range(1, length + 1) if length % n == 0])
        return lambda t: t.unflatten(axis, (length // inner, inner))
    if kind == "view":
        return lambda t: t.view(-1, *t.shape[2:]) if t.ndim > 1 else t
    if kind == "diagonal":
        return lambda t: t.diagonal(0, axis, other) if axis != other else t
    if kind == "expand":
        return lambda t: t.unsqueeze(axis).expand(*t.shape[:axis], 2, *t.shape[axis:])
    if kind == "unfold":
        return lambda t: t.unfold(axis, min(2, length), 1)
    sizes, strides = [rng.randint(1, 4) for _ in range(2)], [rng.choice([0, 1, 2, *x.stride()]) for _ in range(2)]
    return lambda t: t.as_strided(sizes, strides, t.storage_offset())


def check_views(seed):
    """The number of views whose rows were found."""
    rng = random.Random(seed)
    tensor, rows, numbers = owner(rng)
    memory = stored(rows, tensor)
    found = 0
    for _ in range(rng.randint(0, 5)):
        view = a_view(rng, tensor)
        try:
            tensor, numbers = view(tensor), view(numbers)
        except RuntimeError:  # not a view, or beyond the memory
            continue
        if tensor.numel() > 2000 or tensor.ndim > 6:
            break
        there = located(memory, tensor, rows.count)
        assert tensor.stride() == numbers.stride()
        if there is None:
            continue
        found += 1
        if there.axis == ONE_SAMPLE:
            expected = torch.full_like(numbers, 0 if there.ids is None else int(there.ids[0]))
        else:
            assert tensor.shape[there.axis] == there.pre * there.count * there.post
            shape = [-1 if k == there.axis else 1 for k in range(tensor.ndim)]
            expected = samples_by_position(there).reshape(shape).expand(tensor.shape)
        assert torch.equal(expected, numbers), (seed, there, tensor.shape, tensor.stride())
    return found


@settings(max_examples=1000)
@given(st.integers(0, 2**30))
def test_rows_of_views(seed):
    check_views(seed)


def regular(numbers):
    """Whether the samples change along at most one axis."""
    changing = [k for k in range(numbers.ndim) if not bool((numbers == numbers.narrow(k, 0, 1)).all())]
    return len(changing) <= 1


def test_rows_are_found():
    """None is for irregular views only: nearly all others are found."""
    assert sum(check_views(seed) for seed in range(1000)) > 1700


def test_rows_of_the_owner():
    for seed in range(300):
        tensor, rows, numbers = owner(random.Random(seed))
        there = located(stored(rows, tensor), tensor, rows.count)
        assert there is not None
        assert torch.equal(samples_by_position(there), samples_by_position(rows))
        assert regular(numbers)
