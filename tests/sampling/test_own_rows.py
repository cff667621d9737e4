"""A batch whose rows are not made of their own records alone is refused."""

import copy
import random
import threading
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import pad
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate
from transformers import BatchEncoding

import dpfunc
from dpfunc import clipping, sampling
from dpfunc.errors import InvalidArgument
from dpfunc.rng import insecure_key
from dpfunc.sampling._own_rows import check_reading, check_rows, same
from dpfunc.sampling.loader import CHECKED_IN

KEY = insecure_key(0)
IMAGES = [{"x": torch.randn(3, generator=torch.Generator().manual_seed(i)), "y": torch.eye(4)[i % 4]} for i in range(6)]
TEXTS = [{"ids": list(range(i + 1, i + 2 + i % 4)), "label": i} for i in range(6)]


def of_batch(change):
    return lambda records: (lambda batch: {**batch, **change(batch)})(default_collate(records))


def mixup(draw):
    """Images and labels mixed with those of a neighbour, by a share that is drawn for the batch."""

    def mixed(batch):
        share = draw()
        return {name: share * value + (1 - share) * value.roll(1, 0) for name, value in batch.items()}

    return of_batch(mixed)


def typed_by_the_first(records):
    kind = torch.int64 if isinstance(records[0]["label"], int) else torch.float32
    return {"label": torch.tensor([record["label"] for record in records], dtype=kind)}


def sorted_rows(records):
    return default_collate(sorted(records, key=lambda record: float(record["x"][0])))


def padded(records, side="right"):
    length = max(len(record["ids"]) for record in records)
    short = [length - len(record["ids"]) for record in records]
    sides = [(n, 0) if side == "left" else (0, n) for n in short]
    ids = [pad(torch.tensor(record["ids"]), s) for record, s in zip(records, sides, strict=True)]
    mask = [pad(torch.ones(length - n), s) for n, s in zip(short, sides, strict=True)]
    return {"ids": torch.stack(ids), "mask": torch.stack(mask)}


def padded_by_a_neighbour(records):
    batch = padded(records)
    return {**batch, "ids": torch.where(batch["mask"].bool(), batch["ids"] + batch["ids"][:1, :1], 0)}


def padded_with_a_neighbour(records):
    length, behind = max(len(record["ids"]) for record in records), [*records[1:], records[0]]
    rows = zip(records, behind, strict=True)
    return {"ids": torch.tensor([(one["ids"] + 9 * other["ids"])[:length] for one, other in rows])}


def cut_to_the_shortest(records):
    length = min(len(record["ids"]) for record in records)
    return {"ids": torch.tensor([record["ids"][:length] for record in records])}


def masked(records, mix=False):
    """As for masked language models: random positions, by one draw for the batch. Mixed rows have the same masks again."""
    batch = padded(records)
    ids = torch.where(torch.rand(batch["ids"].shape) < 0.3, 99, batch["ids"])
    return {**batch, "ids": ids + ids.roll(1, 0) if mix else ids}


def cropped(records):
    """Random numbers for each record, more for some than for others."""
    return torch.stack([r["x"] + torch.rand(3 if r["x"][0] > 0 else 4)[:3] for r in records])


def taking_out(records):
    """Changes its records, as collators do that pop the labels, and what is in them."""
    parts = [record.get("facts", record) for record in records]
    labels = [part.pop("y") for part in parts]
    return {"x": default_collate([part["x"] for part in parts]), "y": default_collate(labels)}


def halved(records):
    for record in records:
        record["x"].mul_(0.5)
    return default_collate(records)


standardised = of_batch(lambda batch: {"x": (batch["x"] - batch["x"].mean(0)) / (batch["x"].std(0) + 0.1)})
ONE_LENGTH = [{"ids": [1, 2, i]} for i in range(6)]
MIXING = {
    "mixup": (mixup(lambda: torch.distributions.Beta(1.0, 1.0).sample()), IMAGES),
    "NumPy's mixup": (mixup(lambda: np.random.beta(1.0, 1.0)), IMAGES), "Python's mixup": (mixup(random.random), IMAGES),
    "standardised": (standardised, IMAGES), "sorted": (sorted_rows, IMAGES),
    "typed": (typed_by_the_first, [{"label": 1}, *({"label": 0.5},) * 5]),
    "neighbour": (padded_by_a_neighbour, TEXTS), "padding": (padded_with_a_neighbour, TEXTS),
    "cut": (cut_to_the_shortest, TEXTS), "masked": (partial(masked, mix=True), ONE_LENGTH),
    "of 200": (sorted_rows, [{"x": torch.tensor([float((i * 37) % 200)])} for i in range(200)]),
}  # fmt: skip
APART = {
    "default": (default_collate, IMAGES), "padded": (padded, TEXTS), "left": (partial(padded, side="left"), TEXTS),
    "masked": (masked, TEXTS), "masked, one length": (masked, ONE_LENGTH),
    "cropped": (cropped, IMAGES), "taking out": (taking_out, IMAGES),
    "numpy": (lambda records: default_collate(records)["x"] + np.random.default_rng().normal(), IMAGES),
    "in place": (halved, IMAGES), "nested": (taking_out, [{"facts": {"x": i, "y": i}} for i in range(6)]),
    "encodings": (taking_out, [BatchEncoding({"x": i, "y": i}) for i in range(6)]),
    "in turn": (lambda records: torch.stack([torch.rand(2 + i).sum() for i in records]), [i % 3 for i in range(6)]),
    "not to be copied": (lambda records: default_collate([record["x"] for record in records]),
                         [{"x": image["x"], "lock": threading.Lock()} for image in IMAGES]),
}  # fmt: skip


def check_all(collate, records):
    for row in range(len(records)):
        check_rows(collate, records, KEY, row)


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_is_refused(name):
    collate, records = MIXING[name]
    with pytest.raises(InvalidArgument, match="row of a record of this record alone"):
        check_all(collate, records)


@pytest.mark.parametrize("name", APART)
def test_what_keeps_rows_apart_passes(name):
    collate, records = APART[name]
    check_all(collate, records)


@pytest.mark.parametrize("name", ["in place", "taking out", "nested"])
def test_records_stay_as_they_are(name):
    """The batch is made of them afterwards: what a check changed would be another batch."""
    collate, records = APART[name]
    records = copy.deepcopy(records)
    expected = collate(copy.deepcopy(records))
    check_all(collate, records)
    torch.testing.assert_close(collate(records), expected, rtol=0, atol=0)


@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.PCG64])
def test_generators_go_on_as_they_were(generator):
    """Those of Python and NumPy, also one of NumPy that cannot be seeded."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(generator(1))
    try:
        state, legacy = random.getstate(), str(np.random.get_state(legacy=False))
        check_all(lambda records: default_collate(records)["x"] * random.random() * np.random.random(), IMAGES)
        assert random.getstate() == state
        assert str(np.random.get_state(legacy=False)) == legacy
    finally:
        np.random.set_bit_generator(before)


class Transformed(list):
    def __init__(self, records, transform):
        super().__init__(records)
        self.transform = transform

    def __getitems__(self, indices):
        return self.transform([list.__getitem__(self, index) for index in indices])


def filled_as(kind, records):
    length = max(len(record["ids"]) for record in records)
    return [{**record, "ids": kind(record["ids"] + [0] * (length - len(record["ids"])))} for record in records]


def test_reading_that_mixes_records_is_refused():
    def centred(records):
        mean = torch.stack([record["x"] for record in records]).mean(0)
        return [{**record, "x": record["x"] - mean} for record in records]

    mixing = Transformed(IMAGES, centred)
    with pytest.raises(InvalidArgument, match="alone and with others"):
        check_reading(mixing, 2, mixing.__getitems__([1, 2, 3])[1], KEY)
    for apart in (lambda rs: rs, lambda rs: [{**r, "x": r["x"] + torch.rand(3)} for r in rs]):
        reading = Transformed(IMAGES, apart)
        check_reading(reading, 2, reading.__getitems__([1, 2, 3])[1], KEY)
    for kind in (list, torch.tensor, np.array):
        reading = Transformed(TEXTS, partial(filled_as, kind))
        assert [len(reading.__getitems__(some)[0]["ids"]) for some in ([4], [4, 3])] == [1, 4]
        check_reading(reading, 4, reading.__getitems__([4, 3])[0], KEY)
        with pytest.raises(InvalidArgument, match="alone and with others"):
            check_reading(reading, 3, reading.__getitems__([4])[0], KEY)


def run_of(num_steps):
    plan = dpfunc.Plan(sampling.Poisson(6, 0.9), clipping.Flat(1.0), 1.0, num_steps=num_steps, delta=1e-3)
    dp_step = dpfunc.make_dp_step(lambda params, batch: (params["w"] * batch["x"]).sum(1), plan)
    return plan, dp_step.init({"w": torch.zeros(3)}, KEY)


def test_a_loader_refuses_before_a_step():
    plan, state = run_of(3)
    assert len(list(plan.loader(IMAGES, state))) == 3
    with pytest.raises(InvalidArgument, match="row of a record"):
        next(iter(plan.loader(IMAGES, state, collate_fn=standardised)))
    mixing = Transformed(IMAGES, lambda rs: [{**r, "x": r["x"] - rs[0]["x"] - rs[-1]["x"]} for r in rs])
    with pytest.raises(InvalidArgument, match="alone and with others"):
        next(iter(plan.loader(mixing, state)))


def test_one_step_in_some_is_checked():
    plan, state = run_of(2 * CHECKED_IN + 1)
    calls = []

    def counting(records):
        calls.append(len(records))
        return default_collate(records)

    list(plan.loader(IMAGES, state, collate_fn=counting))
    assert len(calls) == plan.num_steps + 3 * 3  # three more collations in three of the steps


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.00001, float("nan")]), True),
        (torch.tensor([1.0]), torch.tensor([1.01]), False),
        (torch.tensor([1]), torch.tensor([1.0]), False),
        (np.array([1.0, 2.0]), np.array([1.0, 2.0]), True),
        ({"a": [1, "b"]}, {"a": [1, "c"]}, False),
        ({"a": 1}, {"b": 1}, False),
        ([2**63, 1], [2**63, 1], True), ([2**63, 1], [2**63, 2], False),
        (np.array([1, 2], ">i4"), np.array([1, 2], "<i4"), True), (np.array([1.0], "g"), np.array([1.0], "g"), True),
        (0.5, 0.5, True), (1, True, False), ([1], [1, 2], False), (object(), object(), True), (None, 1, False),
    ],
)  # fmt: skip
def test_same(one, other, equal):
    assert same(one, other) is equal
    assert same(one, other, filled=True) is equal


@dataclass
class Holding:
    """A record of a class that nobody knows."""

    x: torch.Tensor


VIEWS = {
    "tensors": lambda data, i: (data[i], i), "arrays": lambda data, i: [data.numpy()[i]],
    "nested": lambda data, i: {"facts": {"parts": [(data[i, :2], "a")]}},
    "objects": lambda data, i: Holding(data[i]), "encodings": lambda data, i: BatchEncoding({"x": data[i]}),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_copies_hold_what_the_record_holds(name):
    """Not all that it is a view of: a check of 64 records would copy the data set 256 times."""
    data = torch.arange(4000.0).reshape(1000, 4)
    made = []

    def noting(records):
        parts = [record.x if isinstance(record, Holding) else record for record in records]
        leaves = pytree.tree_leaves(list(map(dict, parts)) if name == "encodings" else parts)
        made.extend(leaf for leaf in leaves if isinstance(leaf, (torch.Tensor, np.ndarray)))
        return torch.zeros(len(records))

    check_rows(noting, [VIEWS[name](data, i) for i in range(8)], KEY, 3)
    assert len(made) == 3 * 8
    held = [leaf.untyped_storage().nbytes() if isinstance(leaf, torch.Tensor) else leaf.nbytes for leaf in made]
    assert max(held) <= 16
    assert all(leaf.base is None for leaf in made if isinstance(leaf, np.ndarray))
    own = [torch.as_tensor(leaf) for leaf in made[:8]]
    torch.testing.assert_close(torch.stack(own), data[:8, : len(own[0])], rtol=0, atol=0)
    assert len({leaf.data_ptr() for leaf in own} | {data[i].data_ptr() for i in range(8)}) == 16
