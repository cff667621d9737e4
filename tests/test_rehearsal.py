"""A rehearsal of a loop: what one record, an evaluation or a saved file can do is found before the first step."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

import dpfunc
from dpfunc import clipping, sampling
from dpfunc.errors import InvalidArgument
from dpfunc.state import allow_repeat

PARAMS = {"table": torch.linspace(-1, 1, 24).reshape(8, 3), "w": torch.zeros(3, 2)}


def loss_fn(params, batch):
    hidden = F.embedding(batch["ids"], params["table"]).mean(1)
    return F.cross_entropy(hidden @ params["w"], batch["label"], reduction="none")


def records(count=50):
    return [{"ids": torch.tensor([i % 8, 3]), "label": i % 2} for i in range(count)]


def step(loss=loss_fn, count=50, **options):
    plan = dpfunc.Plan(sampling.Poisson(count, 0.2), clipping.Flat(1.0), 1.0, 4, 1e-3)
    return dpfunc.make_dp_step(loss, plan, **options)


def raising(message):
    def raised(params):
        raise ValueError(message)

    return raised


FAULTS = {  # change of the record 37 -> kind of the error
    "a token beyond the table": ({"ids": torch.tensor([8, 3])}, "IndexError"),
    "a class beyond those of the model": ({"label": 2}, "IndexError"),
    "a label of another kind": ({"label": "secret"}, "TypeError|RuntimeError"),
    "another length": ({"ids": torch.tensor([1, 2, 3])}, "RuntimeError"),
    "no label": ({"label": None}, "TypeError"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_record_in_the_midst_of_many(name):
    change, kind = FAULTS[name]
    data = records()
    data[37] |= change
    place = r"dataset\[32\] to dataset\[39\] together" if name == "another length" else r"dataset\[37\]"
    with pytest.raises(InvalidArgument, match=f"({kind}) from {place}.* Nothing was spent"):
        dpfunc.rehearse(step(), PARAMS, data, records_at_once=8)


def test_nothing_of_a_record_is_told():
    """Nor in what the error was raised from."""

    def loss(params, batch):
        if bool((batch["ids"] == 7).any()):
            raise ValueError("my secret")
        return loss_fn(params, batch)

    with pytest.raises(InvalidArgument) as caught:
        dpfunc.rehearse(step(loss), PARAMS, records())
    assert "ValueError from dataset[7]" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_losses_that_are_not_finite_are_warned_of():
    def loss(params, batch):
        return torch.where(batch["ids"][:, 0] == 5, math.inf, loss_fn(params, batch))

    (warning,) = dpfunc.rehearse(step(loss), PARAMS, records())
    assert "is not finite" in warning
    assert dpfunc.rehearse(step(), PARAMS, records()) == ()


REST = {  # options -> message
    "an evaluation": ({"evaluate": raising("no such metric")}, "evaluate that works, got ValueError: no such metric"),
    "a reload": ({"reload": raising("no such file")}, "reload that works, got ValueError: no such file"),
    "a reload of nothing": ({"reload": lambda params: None}, "reload that works, got AttributeError"),
    "a parameter that is not saved": ({"reload": lambda params: {"table": params["table"]}}, "got others for w"),
    "a parameter that begins anew": ({"reload": lambda params: {**params, "w": PARAMS["w"]}}, "got others for w"),
    "another digit": ({"reload": lambda params: {n: p.bfloat16() for n, p in params.items()}}, "got others for table"),
}


@pytest.mark.parametrize("name", REST)
def test_what_follows_a_step_fails_before_it(name):
    options, message = REST[name]
    with pytest.raises(InvalidArgument, match=f"{message}.* Nothing was spent"):
        dpfunc.rehearse(step(), PARAMS, records(), **options)


@pytest.mark.parametrize(
    ("start", "dtype", "read"),
    [
        *((start, torch.float32, lambda made_up: made_up.bfloat16()) for start in (0.0, 1.0, -1.0, 1 / 128)),
        *((start, torch.float32, lambda made_up: made_up.half()) for start in (0.0, 1.0, -1.0, 1 / 128)),
        (4.0, torch.bfloat16, lambda made_up: torch.full((3,), 4.0)),
        (0.0, torch.float64, lambda made_up: made_up.float()),
    ],
)
def test_lost_digits_are_missed_wherever_a_parameter_begins(start, dtype, read):
    params = {**PARAMS, "other": torch.full((3,), start, dtype=dtype)}
    with pytest.raises(InvalidArgument, match="got others for other"):
        dpfunc.rehearse(step(), params, records(), reload=lambda made_up: {**made_up, "other": read(made_up["other"])})


def test_other_names_may_be_read_back():
    """As of constants: the file of a model has them."""
    assert dpfunc.rehearse(step(), PARAMS, records(), reload=lambda params: {**params, "kept": torch.ones(1)}) == ()


def test_a_loss_that_cannot_be_differentiated():
    def loss(params, batch):
        return loss_fn({name: value.detach() for name, value in params.items()}, batch).round().long()

    with pytest.raises(InvalidArgument, match="a step that works.* Nothing was spent"):
        dpfunc.rehearse(step(loss), PARAMS, records())


def test_a_data_set_that_no_loader_takes():
    with pytest.raises(InvalidArgument, match="a stream: a plan draws the records"):
        dpfunc.rehearse(step(), PARAMS, iter(records()))


def test_a_run_after_it_is_the_same(tmp_path):
    """Its parameters, its journal and its random numbers."""
    key, found = dpfunc.rng.insecure_key(8), []
    for rehearsed in (False, True):
        torch.manual_seed(0)
        plan = step().plan
        journal = dpfunc.Journal(tmp_path / f"{rehearsed}.jsonl", plan)
        dp_step = step(lambda params, batch: F.dropout(loss_fn(params, batch), 0.5), journal=journal)
        data = records()
        if rehearsed:
            dpfunc.rehearse(dp_step, PARAMS, data, evaluate=lambda params: torch.rand(1), reload=dict)
        allow_repeat(dpfunc.state.StepState(0, 10, 0, key, (), dpfunc.Ledger()))
        state, params = dp_step.init(PARAMS, key), PARAMS
        for batch in plan.loader(data, state):
            grads, state, _ = dp_step(params, batch, state)
            params = {name: value - grads[name] for name, value in params.items()}
        found.append((*params.values(), torch.rand(3)))
        assert state.ledger.num_steps == 4
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
