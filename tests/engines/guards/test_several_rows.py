"""Losses that are another one for several rows, or read records beside the batch: said in the first step, once."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from dpfunc import Plan, clipping, functionalize, make_dp_step, sampling, secure_key
from dpfunc.errors import RecordsWarning
from dpfunc.rng import insecure_key
from dpfunc.state import allow_repeat

N, D, CLASSES = 40, 6, 3
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, D, generator=GENERATOR), torch.arange(N) % CLASSES
GRAPH = torch.rand(N, N, generator=GENERATOR).softmax(1)
IDS = torch.arange(N)
TABLE, PRIOR = torch.randn(1000, D, generator=GENERATOR), torch.ones(CLASSES)
MODEL = torch.nn.Sequential(torch.nn.Linear(D, 8), torch.nn.Tanh(), torch.nn.Linear(8, CLASSES))
DROPS = torch.nn.Sequential(MODEL, torch.nn.Dropout(0.5))
WORDS = torch.nn.Sequential(torch.nn.Embedding(1000, D), MODEL)
FORWARD = {model: functionalize(model).forward for model in (MODEL, DROPS, WORDS)}


def run(loss_fn, batch, model=MODEL, rows=20):
    """Messages of two steps; nothing was spent where the first one is an error."""
    plan = Plan(sampling.FixedSize(N, rows), clipping.Flat(1.0), 1.0, 3, 1e-3, adjacency="zero_out")
    dp_step, params = make_dp_step(loss_fn, plan), functionalize(model).params
    state, said = allow_repeat(dp_step.init(params, insecure_key(3))), []
    for indices in list(plan.batches(state))[:2]:
        own = {name: leaf[indices] for name, leaf in batch.items()}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = dp_step(params, own, state).state
        said.append([str(each.message) for each in caught if each.category is RecordsWarning])
    assert not said[1]
    return said[0]


BATCH = {"x": X, "y": Y, "id": IDS}


def ce(params, b):
    return F.cross_entropy(FORWARD[MODEL](params, b["x"]), b["y"], reduction="none")


def simclr(params, b):
    z = F.normalize(FORWARD[MODEL](params, b["x"]), dim=1)
    return F.cross_entropy(z @ z.mT / 0.1, torch.arange(len(z)), reduction="none")


def dice(params, b):
    p = FORWARD[MODEL](params, b["x"]).softmax(1)[:, 0]
    return (1 - 2 * (p * (b["y"] == 0)).sum() / (p.sum() + (b["y"] == 0).sum())).expand(len(p))


def class_weights(params, b):
    counts = F.one_hot(b["y"], CLASSES).sum(0)
    return ce(params, b) * (len(b["y"]) / counts.clamp(min=1))[b["y"]]


def relativistic(params, b):
    score = FORWARD[MODEL](params, b["x"])[:, 0]
    return F.softplus(-(score - score.mean()))


COMPARED = {
    "SimCLR": simclr,
    "dice over the batch": dice,
    "class weights of the batch": class_weights,
    "relativistic": relativistic,
    "a mean that is expanded": lambda p, b: ce(p, b).mean().expand(len(b["x"])),
    "centred on the mean": lambda p, b: ce(p, b) - ce(p, b).mean().detach(),
    "divided by the mean": lambda p, b: ce(p, b) / ce(p, b).mean().detach(),
    "a mean over tokens of the batch": lambda p, b: ce(p, b) / (b["y"] > 0).sum().clamp(min=1),
    "sorted": lambda p, b: ce(p, b).sort().values,
    "its position": lambda p, b: ce(p, b) * torch.arange(1.0, len(b["x"]) + 1),
}
APART = {
    "cross-entropy": (ce, MODEL),
    "with aux": (lambda p, b: (ce(p, b), b["y"]), MODEL),
    "a mean of one number": (lambda p, b: ce(p, b).mean()[None], MODEL),
    "a sum of one number": (lambda p, b: ce(p, b).sum()[None], MODEL),
    "dropout": (lambda p, b: F.cross_entropy(FORWARD[DROPS](p, b["x"]), b["y"], reduction="none"), DROPS),
    "random numbers": (lambda p, b: ce(p, b) * torch.rand(len(b["x"])), MODEL),
    "one row only": (lambda p, b: ce(p, {"x": b["x"].view(1, D), "y": b["y"]}), MODEL),
    "NaN of some rows": (lambda p, b: ce(p, b) / (b["y"] != 0), MODEL),
    "far from 0": (lambda p, b: ce(p, b) + 1e4, MODEL),
    "words": (lambda p, b: F.cross_entropy(FORWARD[WORDS](p, b["id"]), b["y"], reduction="none"), WORDS),
    "a frozen table": (lambda p, b: ce(p, {"x": F.embedding(b["id"], TABLE), "y": b["y"]}), MODEL),
    "weights of classes": (lambda p, b: ce(p, b) * PRIOR[b["y"]], MODEL),
    "tokens in a table": (lambda p, b: ce(p, {"x": TABLE[b["id"][:, None] // torch.tensor([1, 2])].mean(1), "y": b["y"]}), MODEL),
}  # fmt: skip
BESIDE = {
    "labels": lambda p, b: F.cross_entropy(FORWARD[MODEL](p, b["x"]), Y[b["id"]], reduction="none"),
    "a graph": lambda p, b: F.cross_entropy(FORWARD[MODEL](p, GRAPH @ X)[b["id"]], b["y"], reduction="none"),
    "index_select": lambda p, b: ce(p, {"x": X.index_select(0, b["id"]), "y": b["y"]}),
    "gather": lambda p, b: ce(p, {"x": X.gather(0, b["id"][:, None].expand(-1, D)), "y": b["y"]}),
    "on another axis": lambda p, b: ce(p, {"x": X.mT[:, b["id"]].mT, "y": b["y"]}),
    "a number made of it": lambda p, b: ce(p, {"x": X[(b["id"] + 1) % N], "y": b["y"]}),
    "similarities": lambda p, b: ce(p, b) * GRAPH[b["id"]].sum(1),
}


@pytest.mark.parametrize("name", COMPARED)
def test_losses_that_compare_rows_are_said(name):
    """With both figures: that of the loss as it is written, and that of the rows, which is trained."""
    (said,) = run(COMPARED[name], BATCH)
    assert "8 rows in one call" in said
    assert "not the one that was written" in said
    if name == "SimCLR":
        assert "of 0 for each row" in said


@pytest.mark.parametrize("name", BESIDE)
def test_records_beside_the_batch_are_said(name):
    (said,) = run(BESIDE[name], BATCH)
    assert "entries of a tensor of shape" in said
    assert ("Y" if name == "labels" else "GRAPH" if name in ("a graph", "similarities") else "X") in said


@pytest.mark.parametrize("name", APART)
def test_other_losses_say_nothing(name):
    loss_fn, model = APART[name]
    assert run(loss_fn, BATCH, model) == []


def test_as_an_error_it_costs_nothing():
    plan = Plan(sampling.Poisson(N, 1.0), clipping.Flat(1.0), 1.0, 3, 1e-3)
    dp_step, params = make_dp_step(simclr, plan), functionalize(MODEL).params
    state = dp_step.init(params, secure_key())
    with pytest.raises(RecordsWarning):  # warnings of tests are errors
        dp_step(params, BATCH, state)
    assert dp_step(params, BATCH, state).state.ledger.num_steps == 1
