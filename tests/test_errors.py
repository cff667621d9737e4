"""Messages say what is true: types as types, numbers of rows as they were passed, and nothing about lists that are empty."""

from __future__ import annotations

import pytest
import torch
from cases import linear_loss, params
from run_cases import DATA, PLAN

import dpfunc
from dpfunc import clipping, make_dp_step, take
from dpfunc.errors import InvalidArgument

STATE = make_dp_step(linear_loss, PLAN).init(params(), dpfunc.secure_key())
RUN = {"params": params(), "state": STATE, "plan": PLAN, "data": "mails"}


def mean_of_batch(values, batch):
    return linear_loss(values, batch).mean()


def called(engine):
    """With 42 rows; some engines call the loss with fewer."""
    rows = take({name: torch.cat([value, value]) for name, value in DATA.items()}, torch.arange(42))
    make_dp_step(mean_of_batch, PLAN, engine=engine, verify_batch=False)(params(), rows, STATE)


TRUE = {
    "key": (lambda: make_dp_step(linear_loss, PLAN).init(params(), 3), "got key of type int. Use dpfunc.secure_key"),
    "state": (lambda: make_dp_step(linear_loss, PLAN)(params(), DATA, 7), "got state of type int. Start with"),
    "plan": (lambda: make_dp_step(linear_loss, "x"), r"got plan of type str\.$"),
    "data": (lambda: dpfunc.save("nowhere", **{**RUN, "data": 5}), r"got data of type int\.$"),
    "saved plan": (lambda: dpfunc.save("nowhere", **{**RUN, "plan": 5}), r"got plan of type int\.$"),
    "saved state": (lambda: dpfunc.save("nowhere", **{**RUN, "state": 5}), r"got state of type int\.$"),
    "saved params": (lambda: dpfunc.save("nowhere", **{**RUN, "params": 5}), r"got params of type int\.$"),
    "optimizer": (lambda: dpfunc.save("nowhere", **RUN, optimizer_state=[1]), r"got optimizer_state of type list\.$"),
    "rows": (lambda: called("auto"), r"return shape \(1,\), got \(\) where it was called with 1 row, all of the batch or"),
    "rows alone": (lambda: called("loop"), r"return shape \(1,\), got \(\) where it was called with 1 row, all of the batch or"),
    "groups": (
        lambda: clipping.ByName({"a": "x"}).assign(("a", "b")), r"name each parameter once, got it without b\.$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRUE)
def test_messages_are_true(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    call, message = TRUE[name]
    with pytest.raises(InvalidArgument, match=message):
        call()
    assert not list(tmp_path.rglob("*.*"))
