"""No row writes into a parameter, and none sees what another has written."""

from __future__ import annotations

import pytest
import torch
from rows_alone import W, X
from zoo.parity import ENGINES

from dpfunc.errors import UnsupportedModel

WRITES = {
    "data": lambda w: w.data.mul_(2),
    "a list": lambda w: torch._foreach_mul_([w], 2.0),
    "out": lambda w: torch.mul(w, 2.0, out=w),
    "without gradients": lambda w: torch.no_grad()(w.mul_)(2.0),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", WRITES)
def test_no_row_sees_what_another_has_written_into_a_parameter(way, engine):
    """Refused, or each row has its own: the last of several rows has what it has alone."""

    def loss_fn(p, x):
        WRITES[way](p["w"])
        return (p["w"] * x).square().sum(1)

    def last(rows):
        given = {"w": W["w"].clone()}
        try:
            found = ENGINES[engine]()(loss_fn, given, rows).sq_norms()["w"][-1]
        except (UnsupportedModel, RuntimeError):
            found = torch.zeros(())
        assert torch.equal(given["w"], W["w"])
        return found

    torch.testing.assert_close(last(X), last(X[-1:]))
