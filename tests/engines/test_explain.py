"""The table of how per-sample gradients are found."""

from __future__ import annotations

import pytest
import torch
from models import CASES, build
from torch.nn import functional as F

from dpfunc import engines
from dpfunc.engines import explain
from dpfunc.errors import InvalidArgument


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_in_the_table(name):
    case = build(name)
    table = explain(case.loss_fn, case.params, case.batch)
    assert {use.parameter for use in table.uses} == set(case.params)
    assert all(name in str(table) for name in case.params)


def test_the_bytes_are_those_of_the_engine():
    case = build("mlp")
    table = explain(case.loss_fn, case.params, case.batch)
    grads = engines.auto()(case.loss_fn, case.params, case.batch).grads
    formed = {use.parameter: use.num_bytes for use in table.uses if use.representation == "formed"}
    assert formed
    assert all(grads[name].grads_B.nbytes == num_bytes for name, num_bytes in formed.items())


def test_positions_decide_the_representation():
    loss_fn = lambda p, b: torch.tanh(F.linear(b, p["w"])).square().sum((1, 2))
    found = {}
    for positions in (8, 400):
        batch = torch.ones(2, positions, 256)
        table = explain(loss_fn, {"w": torch.ones(256, 256)}, batch)
        found[positions] = table.uses[0].representation
        kept = engines.auto()(loss_fn, {"w": torch.ones(256, 256)}, batch).grads["w"]
        assert hasattr(kept, "grads_B") is (found[positions] == "formed")
    assert found == {8: "ghost", 400: "formed"}


def test_the_order_is_that_of_the_forward_pass():
    params = {"b": torch.ones(3, 3), "a": torch.ones(3, 3)}
    table = explain(lambda p, x: F.linear(F.linear(x, p["a"]).sin(), p["b"]).sum(1), params, torch.ones(2, 3))
    assert [(use.parameter, use.op) for use in table.uses] == [("a", "linear"), ("b", "linear")]


WITH_RULES = {
    "x @ W.transpose": (lambda w, x: x @ w.transpose(-1, 0), (4, 3), "linear"),
    "linear of W.t()": (lambda w, x: F.linear(x, w.t()), (3, 4), "matmul"),
    "bilinear": (lambda w, x: F.bilinear(x, x.sin(), w), (2, 3, 3), "of_products"),
    "table[ids]": (lambda w, x: w[x.round().long().clamp(-5, 4)], (5, 2), "embedding"),
    "same padding": (lambda w, x: F.conv1d(x[:, None], w, padding="same"), (2, 1, 3), "conv1d"),
}


@pytest.mark.parametrize("name", WITH_RULES)
def test_large_parameters_go_to_rules(name):
    run, shape, op = WITH_RULES[name]
    loss_fn = lambda p, x: run(p["w"], x).square().reshape(len(x), -1).sum(1)
    params, batch = {"w": torch.randn(shape, dtype=torch.float64)}, 3 * torch.randn(2, 3, dtype=torch.float64)
    assert [use.op for use in explain(loss_fn, params, batch).uses] == [op]
    found, wanted = (engine(loss_fn, params, batch).sq_norms()["w"] for engine in (engines.auto(), engines.loop()))
    assert torch.allclose(found, wanted)


def test_parameters_without_a_rule_are_said_so():
    params = {"scale": torch.ones(3), "w": torch.ones(3, 3), "idle": torch.ones(2)}
    table = explain(lambda p, b: (F.linear(b, p["w"]) * p["scale"]).sum(1), params, torch.ones(2, 3))
    assert [(use.parameter, use.op, use.representation) for use in table.uses[1:]] == [
        ("scale", "vmap(grad)", "formed"), ("idle", "", "unused"),
    ]  # fmt: skip
    assert table.uses[1].num_bytes == 2 * 3 * 4


def test_rows_that_are_computed_alone_are_said_so():
    loss_fn = lambda p, b: (b.detach().clone().apply_(float) * p["w"]).sum(1)  # torch's vmap has no `apply_`
    table = explain(loss_fn, {"w": torch.ones(3)}, torch.ones(2, 3))
    assert [(use.parameter, use.op, use.representation) for use in table.uses] == [("w", "loop", "formed")]


def test_an_empty_batch_is_refused():
    with pytest.raises(InvalidArgument, match="at least 1 sample"):
        explain(lambda p, b: (b * p["w"]).sum(1), {"w": torch.ones(3)}, torch.ones(0, 3))
