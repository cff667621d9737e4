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
    assert all(grads[name].num_bytes == num_bytes for name, num_bytes in formed.items())


def test_a_budget_changes_the_representation_and_not_the_result():
    case = build("transformer full")
    free, tight = explain(case.loss_fn, case.params, case.batch), explain(case.loss_fn, case.params, case.batch, 0)
    assert tight.num_bytes < free.num_bytes
    norms = [engines.bookkeeping(b)(case.loss_fn, case.params, case.batch).sq_norms() for b in (None, 0)]
    assert all(torch.allclose(norms[0][name], norms[1][name], rtol=1e-4, atol=1e-10) for name in case.params)


def test_a_parameter_that_is_not_used_is_said_so():
    loss_fn = lambda p, b: (b * p["w"]).sum(1)  # noqa: E731
    table = explain(loss_fn, {"w": torch.ones(3), "idle": torch.ones(2)}, torch.ones(2, 3))
    assert [use.representation for use in table.uses if use.parameter == "idle"] == ["unused"]


def test_one_sample_is_not_enough():
    with pytest.raises(InvalidArgument, match="at least 2 samples"):
        explain(lambda p, b: (b * p["w"]).sum(1), {"w": torch.ones(3)}, torch.ones(1, 3))
