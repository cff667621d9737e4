"""Draws through torch's DataLoader, with the empty ones."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Subset, default_collate

from dpfunc.errors import InvalidArgument
from dpfunc.rng import insecure_key
from dpfunc.sampling import FixedSize, Poisson, Shuffled, batch_sampler, collate_or_empty
from dpfunc.tree import batch_size

KEY = insecure_key(0)
SAMPLERS = {"poisson": Poisson(40, 0.05), "fixed size": FixedSize(40, 7), "shuffled": Shuffled(40, 7)}


class Records:
    """Records of a dictionary of tensors and a number; record i holds i."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"inputs": (torch.full((3,), float(index)), torch.full((2, 2), index)), "label": index}


COLLATE = collate_or_empty(default_collate, Records()[0])


@pytest.mark.parametrize(
    ("kind", "num_workers", "subset"),
    [
        ("poisson", 0, False),
        ("poisson", 2, False),
        ("poisson", 0, True),
        ("fixed size", 0, False),
        ("shuffled", 1, False),
    ],
)
def test_data_loader(kind, num_workers, subset):
    """Each step's draw, in order, also with worker processes, and the same again in a second pass."""
    sampler = SAMPLERS[kind]
    records = Subset(Records(), range(40)) if subset else Records()
    draws = batch_sampler(sampler, KEY, 3, 15)
    loader = DataLoader(records, batch_sampler=draws, collate_fn=COLLATE, num_workers=num_workers)
    assert len(loader) == len(draws) == 12
    expected = [sampler.indices(KEY, step).tolist() for step in range(3, 15)]
    assert ([] in expected) == (kind == "poisson")
    for _ in range(2):
        batches = list(loader)
        assert [batch["label"].tolist() for batch in batches] == expected
        for batch, drawn in zip(batches, expected, strict=True):
            assert batch_size(batch) == len(drawn)
            assert batch["inputs"][0].shape == (len(drawn), 3)
            assert batch["inputs"][1].shape == (len(drawn), 2, 2)
            assert (batch["inputs"][0].dtype, batch["inputs"][1].dtype) == (torch.float32, torch.int64)


def test_draws_are_lists_and_can_be_iterated_again():
    draws = batch_sampler(Poisson(10, 0.5), KEY, 0, 5)
    first = list(draws)
    assert all(isinstance(index, int) for batch in first for index in batch)
    assert list(draws) == first
    assert len(draws) == 5


def test_an_empty_stretch():
    assert list(batch_sampler(Poisson(10, 0.5), KEY, 5, 5)) == []


def test_the_key_is_not_printed():
    assert KEY.secret.hex()[:8] not in repr(batch_sampler(Poisson(10, 0.5), KEY, 0, 5))
    assert "hidden" in repr(batch_sampler(Poisson(10, 0.5), KEY, 0, 5))


def test_samples_go_through_unchanged():
    samples = [Records()[i] for i in (3, 1)]
    ours, theirs = COLLATE(samples), default_collate(samples)
    assert torch.equal(ours["inputs"][0], theirs["inputs"][0])
    assert torch.equal(ours["label"], theirs["label"])


def test_taking_a_batch_apart_does_not_spoil_the_next_empty_one():
    batch = COLLATE([])
    batch.pop("label")
    batch["inputs"][0].resize_(5, 3)
    assert COLLATE([])["label"].shape == (0,)
    assert COLLATE([])["inputs"][0].shape == (0, 3)


def test_nothing_of_the_example_is_kept():
    """Not even in memory behind a view."""
    collate = collate_or_empty(default_collate, torch.ones(1000))
    assert collate.empty.untyped_storage().nbytes() == 0
    assert b"\x00\x00\x80?" * 10 not in pickle.dumps(collate.empty)


def text_collate(samples):
    return {"text": [str(sample) for sample in samples]}


def test_refused():
    with pytest.raises(InvalidArgument, match="collate to be a function"):
        collate_or_empty(None, torch.zeros(3))
    with pytest.raises(InvalidArgument, match=r"batch\['text'\]\[0\] of type str"):
        collate_or_empty(text_collate, 1)
    with pytest.raises(InvalidArgument, match="batch of one from one sample, got 2 rows"):
        collate_or_empty(torch.cat, torch.zeros(2, 3))
    with pytest.raises(InvalidArgument, match="integer stop >= 7, got stop=3"):
        batch_sampler(Poisson(10, 0.5), KEY, 7, 3)
    with pytest.raises(InvalidArgument, match="integer start >= 0"):
        batch_sampler(Poisson(10, 0.5), KEY, -1, 3)
