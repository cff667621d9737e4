"""The table of what book-keeping does."""

from __future__ import annotations

import pytest
import torch
from models import CASES, build

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
    grads = engines.bookkeeping()(case.loss_fn, case.params, case.batch).grads
    formed = {use.parameter: use.num_bytes for use in table.uses if use.representation == "formed"}
    assert formed
    assert all(grads[name].grads_B.nbytes == num_bytes for name, num_bytes in formed.items())


def test_a_budget_changes_the_representation_and_not_the_result():
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(512, 512, generator=generator)}
    batch = torch.randn(2, 200, 512, generator=generator)
    loss_fn = lambda p, b: torch.tanh(torch.nn.functional.linear(b, p["w"]) / 30).square().sum((1, 2))
    tables = [explain(loss_fn, params, batch, budget) for budget in (None, 0)]
    assert [table.uses[0].representation for table in tables] == ["formed", "ghost"]
    assert tables[1].num_bytes < tables[0].num_bytes
    found = [engines.bookkeeping(budget)(loss_fn, params, batch) for budget in (None, 0)]
    assert torch.allclose(found[0].sq_norms()["w"], found[1].sq_norms()["w"], rtol=1e-4)
    sums = [grads.weighted_sum({"w": torch.tensor([1.0, 0.3])})["w"] for grads in found]
    assert (sums[0] - sums[1]).norm() < 1e-5 * sums[0].norm()


def test_a_parameter_that_is_not_used_is_said_so():
    loss_fn = lambda p, b: (b * p["w"]).sum(1)
    table = explain(loss_fn, {"w": torch.ones(3), "idle": torch.ones(2)}, torch.ones(2, 3))
    assert [use.representation for use in table.uses if use.parameter == "idle"] == ["unused"]


def test_one_sample_is_not_enough():
    with pytest.raises(InvalidArgument, match="at least 2 samples"):
        explain(lambda p, b: (b * p["w"]).sum(1), {"w": torch.ones(3)}, torch.ones(1, 3))
