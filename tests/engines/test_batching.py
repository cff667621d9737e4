"""Batching rules of torch: those that were seen right are used; other functions run row by row, or each row alone."""

from __future__ import annotations

import json
import random

import pages
import pytest
import torch
from batching_rules import TABLES, Calls, name_of_each, of_torch, own_samples, swept
from torch.nn import functional as F

from dpfunc import engines
from dpfunc.engines import _batching, _row_pass
from dpfunc.engines._batching import VERSION, named

pytestmark = pytest.mark.filterwarnings("ignore:.*")  # of torch, about samples

DOUBLE = torch.float64
POINTS = torch.tensor([[0.5, -1.0], [1.0, 2.0], [-1.5, 0.3]], dtype=DOUBLE)
SLOT = torch.tensor([1])
SINGLE = torch.float32


def filled(p, b):
    """A row's value on a tensor without rows."""
    return (torch.zeros(3, dtype=DOUBLE).index_fill(0, SLOT, b.sum()) * p["w"][:, 0]).sum()


def solved(p, b):
    """LU rows of lu_factor's strides."""
    lu, pivots = torch.linalg.lu_factor(torch.eye(2, dtype=DOUBLE) + b[:, None] * b / 9)
    return torch.linalg.lu_solve(lu, pivots, p["w"][:2]).sum()


def quantized(p, b):
    return (
        torch.quantize_per_tensor_dynamic(b.to(SINGLE), torch.qint8, False).dequantize().to(DOUBLE) * p["w"][0]
    ).sum()


def quantized_by(p, b):
    x, zero = b.to(SINGLE), torch.zeros((), dtype=torch.long)
    return (
        torch.quantize_per_tensor(x, x.abs().max() / 99, zero, torch.qint8).dequantize().to(DOUBLE) * p["w"][0]
    ).sum()


def in_place(p, b):
    return ((b * p["w"]).index_fill_(0, SLOT, b.sum()) ** 2).sum()


WRONG = {
    "distances of parameters": (lambda p, b: torch.cdist(p["w"], POINTS).sum() * b.sum(), "one pass"),
    "distances, and a matrix of the row": (lambda p, b: (torch.cdist(p["w"], POINTS) @ POINTS @ b).sum(), "one pass"),
    "distances of a row": (lambda p, b: torch.cdist(p["w"] * b, POINTS).square().sum(), "one pass"),
    "distances, p = 1": (lambda p, b: torch.cdist(POINTS, p["w"], p=1.0).sum() * b[0], "one pass"),
    "a row's value into constants": (filled, "one pass"),
    "a row's value in place": (in_place, None),
    "lu_solve": (solved, None),
    "quantized by a row's numbers": (quantized, "loop"),
    "quantized by a scale": (quantized_by, "loop"),
    "distances under no_grad": (lambda p, b: (p["w"] * b).sum() * _quietly(lambda: torch.cdist(b[None], POINTS).sum()), "one pass"),
    "distances in a transform": (lambda p, b: (torch.func.grad(lambda q: torch.cdist(q * b, POINTS).sum())(POINTS) * p["w"]).sum(), "loop"),
    "gradients of distances": (lambda p, b: (torch.autograd.grad(torch.cdist(p["w"] * b, POINTS).sum(), p["w"], retain_graph=True)[0] * p["w"]).sum(), "loop"),
    "distances with a hook": (lambda p, b: F.softplus(torch.cdist(p["w"], POINTS)).sum() * b.prod(), "one pass"),
}  # fmt: skip


def _quietly(run):
    with torch.no_grad():
        return run()


@pytest.mark.parametrize("engine", ["auto", "vmap", "ghost"])
@pytest.mark.parametrize("case", WRONG)
def test_rows_of_a_wrong_rule_are_those_alone(case, engine):
    row_loss, way = WRONG[case]

    def loss_fn(p, batch):
        return torch.stack([row_loss(p, b) for b in batch])

    batch = torch.tensor([[1.0, 2.0], [0.3, -0.4], [70.0, 70.0], [2.0, 1.0]], dtype=DOUBLE)
    params = {"w": torch.tensor([[0.3, 0.2], [-1.0, 0.7], [0.1, 0.9]], dtype=DOUBLE)}
    expected = engines.loop()(loss_fn, params, batch)
    made = getattr(engines, engine)()
    found = made(loss_fn, params, batch)
    torch.testing.assert_close(found.losses_B, expected.losses_B)
    torch.testing.assert_close(found.sq_norms(), expected.sq_norms())
    decision = made.decision(loss_fn)
    assert way in (None, decision.engine)
    if decision.engine != "loop" or way == "loop":
        assert (
            way is None
            or "row by row" in decision.reason
            or "torch's rule" in decision.reason
            or "backward pass" in decision.reason
        )


# The tables, and the sweep that writes them.


def table():
    return json.loads((TABLES / f"{VERSION}.json").read_text())


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_tables_name_functions_and_no_wrong_one_is_right(path):
    found = json.loads(path.read_text())
    assert len(found["right"]) > 700
    assert not set(found["right"]) & set(found["wrong"])
    assert {"_C._VariableFunctions.cdist", "index_fill", "linalg.lu_solve"} <= set(found["wrong"])
    if path.stem == VERSION:
        assert not [name for name in (*found["right"], *found["wrong"]) if named(name) is None]


def test_known_faults_are_those_of_the_table():
    """Own samples, each place of rows: no function of the table is wrong, and those it calls wrong are wrong."""
    calls, names = Calls(2), name_of_each()
    own_samples(calls)
    calls.found = {func: own for func, own in calls.found.items() if not names.get(func, "").startswith("ops.")}
    wrong = {name for name in map(names.get, calls.found) if name in table()["wrong"]}
    chosen = [func for number, func in enumerate(calls.found) if number % 8 == 0 or names.get(func) in wrong]
    calls.found = {func: calls.found[func] for func in chosen}
    found = swept(calls)
    assert {"_C._VariableFunctions.cdist", "linalg.lu_solve"} <= wrong
    assert {name for name, verdict in found.items() if verdict.wrong} == wrong


@pytest.mark.slow
def test_samples_of_torch_are_those_of_the_table():
    calls, known = Calls(1), table()
    of_torch(calls, 2, slice(random.Random(VERSION).randrange(8), None, 8))
    found = swept(calls)
    assert len(found) > 60
    assert not {name for name, verdict in found.items() if verdict.wrong} - set(known["wrong"])


def test_a_function_that_is_not_in_the_table_runs_row_by_row(monkeypatch):
    """Also its gradient; a view, which cannot be copied, ends in the loop."""

    def loss_fn(p, batch):
        return (torch.erf(batch * p["w"][0]) * batch).sum(1)

    batch, params = torch.randn(3, 2, dtype=DOUBLE), {"w": POINTS}
    expected = engines.loop()(loss_fn, params, batch).sq_norms()["w"]
    for func, way in ((torch.erf, "one pass"), (torch.Tensor.__getitem__, "loop")):
        with monkeypatch.context() as patch:
            for handlers in (_row_pass._HANDLERS_WITH_RULES, _row_pass._HANDLERS_WITHOUT_RULES):
                last = tuple(_batching.by_rows if each is _row_pass._as_it_is else each for each in handlers[func])
                patch.setitem(handlers, func, last)
            engine = engines.auto()
            torch.testing.assert_close(engine(loss_fn, params, batch).sq_norms()["w"], expected)
            assert engine.decision(loss_fn).engine == way
            assert engine.decision(loss_fn).by_row == (("erf",) if way == "one pass" else ())


def test_a_version_without_a_table_uses_no_rule_and_says_so(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(_batching, "_TABLE", tmp_path / "0.0.json")
    assert not _batching.verified()
    assert "nobody has compared its batching rules" in caplog.text


def test_the_pass_ends_where_rows_cannot_be_joined():
    for loss, told in ((quantized, "shares memory"), (quantized_by, "shares memory")):
        engine = engines.auto()
        loss_fn = lambda p, batch, loss=loss: torch.stack([loss(p, b) for b in batch])
        engine(loss_fn, {"w": POINTS}, POINTS)
        assert told in engine.decision(loss_fn).reason, engine.decision(loss_fn)


def test_the_faults_of_the_decision_are_there():
    """Each line for torch's issue tracker is still wrong; one that is mended leaves the page and the table."""
    (code,) = pages.blocks("decisions/0019-verified-batching-rules.md")
    pages.run(code)


class Fills(torch.autograd.Function):
    """Its generated rule would call `index_fill`, whose batching rule gives each row the value of the last one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.index_fill(torch.zeros(3, dtype=x.dtype), 0, torch.tensor([1]), x.sum())

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx, grad):
        return grad[1].expand(ctx.shape)


def test_operations_inside_of_a_function_with_a_generated_rule_are_seen():
    loss_fn = lambda p, x: Fills.apply(p["w"] * x).square().sum()[None]
    params, rows = {"w": torch.ones(4)}, torch.arange(12.0).reshape(3, 4)
    found, alone = (engine()(loss_fn, params, rows) for engine in (engines.auto, engines.loop))
    torch.testing.assert_close(found.losses_B, alone.losses_B)
    torch.testing.assert_close(found.sq_norms(), alone.sq_norms())
