"""Draws through torch's DataLoader: the batches of each step, the empty ones too, whatever the workers do."""

import pickle
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

import dpfunc
from dpfunc import clipping, sampling
from dpfunc.accounting import Ledger
from dpfunc.batches import batch_size
from dpfunc.errors import InvalidArgument, RunWarning
from dpfunc.rng import insecure_key
from dpfunc.sampling.loader import Collate, Drawn, Draws, Once, Records, without_rows
from dpfunc.sampling.records import batches_name
from dpfunc.state import StepState, allow_repeat

N = 40
KEY = insecure_key(0)
SAMPLERS = {
    "poisson": sampling.Poisson(N, 0.05),
    "fixed size": sampling.FixedSize(N, 7),
    "shuffled": sampling.Shuffled(N, 7),
    "in order": sampling.InOrder(N, 7),
}


def plan_of(kind="poisson", **changes):
    values = {
        "sampler": SAMPLERS[kind], "clip": clipping.Flat(1.0), "noise_multiplier": 1.0, "num_steps": 15, "delta": 1e-3,
        "adjacency": "add_remove" if kind == "poisson" else "zero_out",
    }  # fmt: skip
    return dpfunc.Plan(**{**values, **changes})


def at(step):
    return StepState(step, 15, 0, KEY, (), Ledger())


def begun(plan, **options):
    dp_step = dpfunc.make_dp_step(lambda params, batch: batch["inputs"][0] @ params["w"], plan)
    params = {"w": torch.zeros(3)}
    return dp_step, params, allow_repeat(dp_step.init(params, insecure_key(8), **options))


class Dicts:
    """Records of a dictionary of tensors and a number; record i holds i."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return {"inputs": (torch.full((3,), float(index)), torch.full((2, 2), index)), "label": index}


class AtOnce(Dicts):
    """A data set that reads several records at once, as those of Hugging Face do, and no single one."""

    def __getitems__(self, indices):
        assert indices
        return [Dicts.__getitem__(self, index) for index in indices]

    def __getitem__(self, index):
        raise AssertionError("one by one")


class Augmented(Dicts):
    def __getitem__(self, index):
        return {"label": index, "noisy": index + torch.rand(3)}


def augmented_collate(records):
    batch = default_collate(records)
    return {**batch, "masked": torch.rand(len(records), 5)}


DATASETS = {
    "dictionaries": Dicts(),
    "at once": AtOnce(),
    "subset": Subset(Dicts(), range(N)),
    "list": [Dicts()[i] for i in range(N)],
}


@pytest.mark.parametrize(
    ("kind", "dataset", "num_workers"),
    [("poisson", "dictionaries", 0), ("poisson", "at once", 2), ("poisson", "subset", 0), ("poisson", "list", 0),
     ("fixed size", "dictionaries", 0), ("shuffled", "dictionaries", 1), ("in order", "at once", 0)],
)  # fmt: skip
def test_batches_are_the_draws(kind, dataset, num_workers):
    """Of each step, in order, from the step of the state; the empty ones have the structure of the others."""
    plan = plan_of(kind)
    loader = plan.loader(DATASETS[dataset], at(3), num_workers=num_workers)
    expected = [plan.sampler.indices(KEY, step).tolist() for step in range(3, 15)]
    assert len(loader) == 12
    assert ([] in expected) == (kind == "poisson")
    batches = list(loader)
    assert [batch["label"].tolist() for batch in batches] == expected
    for batch, drawn in zip(batches, expected, strict=True):
        assert batch_size(batch) == len(drawn)
        assert batch["inputs"][0].shape == (len(drawn), 3)
        assert batch["inputs"][1].shape == (len(drawn), 2, 2)
        assert [leaf.dtype for leaf in batch["inputs"]] == [torch.float32, torch.int64]
        assert batch["label"].dtype == torch.int64


def test_a_resumed_run_reads_the_same():
    """Also random augmentation and masking, with any number of workers, whatever the state of torch's generator, which
    is left alone."""
    plan = plan_of()

    def batches(step, workers):
        torch.manual_seed(step + workers)
        before = torch.random.get_rng_state()
        more = {"collate_fn": augmented_collate, "num_workers": workers, "prefetch_factor": workers or None}
        found = list(plan.loader(Augmented(), at(step), **more))
        assert torch.equal(torch.random.get_rng_state(), before)
        return found

    whole = batches(0, 0)
    assert len(whole) == 15
    assert any(not len(batch["label"]) for batch in whole)
    assert len({float(batch["masked"].sum()) for batch in whole if len(batch["label"])}) > 5  # not one number for all
    for step, workers in ((6, 0), (6, 2)):
        for ours, theirs in zip(batches(step, workers), whole[step:], strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_second_iteration_is_refused(num_workers):
    """Its first batch would be that of the first step, while the run is at a later one."""
    plan = plan_of()
    loader = plan.loader(Dicts(), at(3), num_workers=num_workers)
    iterator = iter(loader)
    first = next(iterator)
    with pytest.raises(InvalidArgument, match=r"batch of step 3\. Make a loader from the present state"):
        next(iter(loader))
    assert torch.equal(next(iter(plan.loader(Dicts(), at(3))))["label"], first["label"])
    assert len(list(iterator)) == 11
    with pytest.warns(RunWarning, match="No step is left after step 15"):
        assert list(plan.loader(Dicts(), at(15))) == []


def pad_collate(records):
    longest = max(len(record) for record in records)
    return UserDict(ids=torch.tensor([[*record, *[0] * (longest - len(record))] for record in records]))


def test_dictionaries_of_tokenizers_become_plain_ones():
    """BatchEncoding is a mapping that no pytree knows."""
    plan = plan_of()
    records = [[i] * (i + 1) for i in range(N)]
    batches = list(plan.loader(records, at(3), collate_fn=pad_collate))
    assert all(type(batch) is dict and batch["ids"].dtype == torch.int64 for batch in batches)
    assert {batch["ids"].shape for batch in batches if not len(batch["ids"])} == {(0, 1)}


def test_nothing_of_a_record_is_in_an_empty_batch():
    """Not even in memory behind a view; and taking one apart does not spoil the next."""
    empty = without_rows({"x": torch.ones(1, 1000)})["x"]
    assert empty.untyped_storage().nbytes() == 0
    assert b"\x00\x00\x80?" * 10 not in pickle.dumps(empty)
    loader = plan_of(sampler=sampling.Poisson(N, 1e-9)).loader(Dicts(), at(0))
    for batch in loader:
        assert batch.pop("label").shape == (0,)
        batch["inputs"][0].resize_(5, 3)


def test_workers_do_not_get_the_key():
    draws = Draws(SAMPLERS["poisson"], KEY, Once(3, 15), 12)
    sent = pickle.dumps((Records([1]), Collate(default_collate), list(draws)))
    assert KEY.secret not in sent
    assert KEY.secret not in pickle.dumps(plan_of().loader(Dicts(), at(0)).generator.get_state())
    assert KEY.secret.hex()[:8] not in repr(draws)
    assert "hidden" in repr(Drawn(KEY, 0))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(N))

    def __len__(self):
        return N


BAD = {
    "a stream": (lambda p: p.loader(Stream(), at(0)), r"got dataset of type Stream, a stream.*sampling.InOrder"),
    "a loader": (lambda p: p.loader(DataLoader(range(N)), at(0)), "a data set, got a DataLoader.*loader.dataset"),
    "a generator": (lambda p: p.loader(iter([1]), at(0)), "got dataset of type list_iterator"),
    "too short": (
        lambda p: p.loader(range(39), at(0)),
        r"dataset_size=40, got fewer records.*make the plan.*Nothing was spent",
    ),
    "too long": (lambda p: p.loader(range(41), at(0)), r"got more records"),
    "tensors": (lambda p: p.loader({"x": torch.zeros(N)}, at(0)), r"type dict with the names \['x'\].*dpfunc.take"),
    "collate": (lambda p: p.loader(range(N), at(0), collate_fn=3), "a function of a list of records, got collate_fn=3"),
    "workers": (lambda p: p.loader(range(N), at(0), num_workers=-1), "integer num_workers >= 0, got num_workers=-1"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_data_set_of_the_plan_is_refused(name):
    call, message = BAD[name]
    with pytest.raises(InvalidArgument, match=message):
        call(plan_of())


def test_what_changes_no_draw_is_passed_on():
    options = {"num_workers": 1, "persistent_workers": True, "timeout": 60.0, "worker_init_fn": torch.manual_seed}
    loader = plan_of().loader(Dicts(), at(3), **options)
    assert {name: getattr(loader, name) for name in options} == options


JAGGED = torch.nested.nested_tensor_from_jagged


def test_batches_that_are_not_dense_are_named_by_the_step():
    """Sparse and nested batches, and sparse records, pass the check of rows; the step says what to do."""
    made = {
        "sparse": lambda records: torch.stack(records).to_sparse(),
        "a nested tensor": lambda records: JAGGED(torch.cat(records), lengths=torch.full((len(records),), 3)),
    }
    records = Subset([torch.ones(3).mul(i + 1.0).to_sparse() for i in range(N)], range(N))
    plan = plan_of(sampler=sampling.Poisson(N, 0.5))
    dp_step, params, state = begun(plan)
    for name, collate in made.items():
        batch = next(
            iter(plan.loader(records, state, collate_fn=lambda r, make=collate: make([x.to_dense() for x in r])))
        )
        with pytest.raises(InvalidArgument, match=f"dense tensor, got batch, .*{name}"):
            dp_step(params, batch, state)


def test_an_empty_draw_needs_a_batch_of_rows():
    nobody = plan_of(sampler=sampling.Poisson(N, 1e-9))
    with pytest.raises(InvalidArgument, match=r"batch\['text'\]\[0\] of type str.*collate_fn"):
        next(iter(nobody.loader(range(N), at(0), collate_fn=lambda records: {"text": [str(r) for r in records]})))
    with pytest.raises(InvalidArgument, match="one row from one record, got 2 rows"):
        next(iter(nobody.loader([torch.zeros(2, 3) for _ in range(N)], at(0), collate_fn=torch.cat)))


def test_another_order_has_another_name():
    """The order counts, in small and in large data sets, for records of any type; random augmentation does not."""

    def name(numbers):
        records = [SimpleNamespace(number=i) for i in numbers]  # of which only its batch tells anything
        return batches_name(records, lambda records: torch.tensor([r.number for r in records]))

    assert name(range(100)) == name(range(100))
    swapped = [*range(50), 51, 50, *range(52, 100)]
    names = [range(100), swapped, range(99, -1, -1), range(101), range(5000), range(4999, -1, -1)]
    assert len({name(numbers) for numbers in names}) == len(names)
    assert batches_name(Augmented(), augmented_collate) == batches_name(Augmented(), augmented_collate)


# A public bound on the number of records


class Fewer(Dicts):
    def __len__(self):
        return 31


@pytest.mark.parametrize("kind", ["poisson", "fixed size"])
def test_a_public_bound_hides_the_number_of_records(kind):
    """The plan is that of the bound; draws are those of the bound, without the records that are not there."""
    plan = plan_of(kind)
    dp_step, params, state = begun(plan, num_records=31)
    every = [plan.sampler.indices(state.key, step) for step in range(15)]
    drawn = [indices[indices < 31].tolist() for indices in every]
    assert sum(map(len, drawn)) < sum(map(len, every))
    assert [indices.tolist() for indices in plan.batches(state)] == drawn
    read = []
    for batch in plan.loader(Fewer(), state):
        read.append(batch["label"].tolist())
        _, state, _ = dp_step(params, batch, state)
    assert read == drawn
    assert state.ledger == plan.ledger(), "what was spent does not depend on the number of records"
    with pytest.raises(InvalidArgument, match="the num_records with which the run began"):
        plan.loader(Dicts(), state)


def test_a_bound_that_is_none_is_refused():
    with pytest.raises(InvalidArgument, match="num_records <= 40, the plan's dataset_size, got more"):
        begun(plan_of(), num_records=41)
    with pytest.raises(InvalidArgument, match="to be the plan's dataset_size=40, .* public bound"):
        plan_of().loader(Fewer(), at(0))
