"""Records that occur several times: refused where indices and objects show it, said where contents do."""

import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from dpfunc import Plan, clipping, sampling, secure_key
from dpfunc.errors import InvalidArgument, RecordsWarning
from dpfunc.sampling.loader import check_readable
from dpfunc.state import first_state

X = torch.arange(120.0).view(40, 3)
DATA = TensorDataset(X)
RECORDS = [{"x": row} for row in X]


class Own(Dataset):
    """A data set of a user's class, which says nothing about its parts."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


REPEATED = {
    "indices": Subset(DATA, [*range(40), 3]),
    "indices as an array": Subset(DATA, np.array([0, 1, 1])),
    "indices as a tensor": Subset(DATA, torch.tensor([5, 5])),
    "from the end": Subset(DATA, [-1, 39]),
    "twice the same": ConcatDataset([DATA, DATA]),
    "a part again": ConcatDataset([DATA, Subset(DATA, [7])]),
    "nested": Subset(ConcatDataset([Subset(DATA, [1, 2]), Subset(Subset(DATA, [4, 2]), [1])]), [0, 1, 2]),
    "ten copies": ConcatDataset([Own(X)] * 10),
    "a list times two": RECORDS * 2,
    "one object in a list": [*RECORDS, RECORDS[5]],
    "lists joined": ConcatDataset([RECORDS, RECORDS[3:5]]),
}
ONCE = {
    "tensors": DATA,
    "a list": RECORDS,
    "numbers": [1, 1, 2, 2],
    "parts": ConcatDataset(random_split(DATA, [10, 30], torch.Generator().manual_seed(0))),
    "equal, of different sets": ConcatDataset([TensorDataset(X), TensorDataset(X)]),
    "different parts, nested": Subset(ConcatDataset([Subset(DATA, [1, 2]), Subset(DATA, [3])]), [2, 0]),
    "a permutation": Subset(DATA, torch.randperm(40, generator=torch.Generator().manual_seed(0))),
    "many, not read": range(10**12),
}


@pytest.mark.parametrize("name", REPEATED)
def test_what_repeats_records_is_refused(name):
    with pytest.raises(
        InvalidArgument, match=r"Expected dataset with each record once.*sampling.users.*Nothing was spent"
    ):
        check_readable(REPEATED[name])


@pytest.mark.parametrize("name", ONCE)
def test_what_has_each_record_once_passes(name):
    assert check_readable(ONCE[name]) == len(ONCE[name])


def tables():
    """Data sets of Hugging Face: of rows 0..9."""
    datasets, pa = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    table = pa.table({"text": [str(i) for i in range(10)], "label": list(range(10))})
    return datasets, datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="rows")


def test_tables_of_hugging_face():
    datasets, table = tables()
    join = datasets.concatenate_datasets
    half, other = table.select(range(5)), table.select(range(5, 10))
    for once in (table, half, table.select([3, 1, 7]), join([half, other]), join([other, half]).select([9, 0])):
        assert check_readable(once) == len(once)
    for repeated in (
        table.select([0, 0, 1]), join([table, table]), join([half, table.select(range(4, 6))]),
        join([table.select([1, 3]), table.select([3, 5])]), Subset(table, [1, 1]), ConcatDataset([half, table]),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match="Expected dataset with each record once"):
            check_readable(repeated)


def rows(count, kinds):
    """Rows of features, of which only so many are different."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(kinds, 4, generator=generator).repeat(-(-count // kinds), 1)[:count]


EQUAL = {  # rows, and the warning
    "ten copies": (rows(1000, 100), True),
    "two copies": (rows(400, 200), True),
    "a rare class ten times": (torch.cat([rows(400, 400), rows(400, 400)[:40].repeat(10, 1)]), True),
    "all different": (rows(1000, 1000), False),
    "one in fifty is there twice": (torch.cat([rows(500, 500), rows(500, 500)[:10]]), False),
    "a table of few cells": (rows(1000, 8), False),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_records_are_said(name):
    """In the first batch, before a step is taken; whatever class the data set is of."""
    own, said = EQUAL[name]
    plan = Plan(sampling.Poisson(len(own), 0.3), clipping.Flat(1.0), 1.0, 5, 1e-5)
    state = first_state(plan, {"w": torch.zeros(1)}, secure_key(), None, None)
    for dataset in (TensorDataset(own), Own(own)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            next(iter(plan.loader(dataset, state)))
        assert [each.category for each in caught] == [RecordsWarning] * said
