"""Functions of torch with drawn arguments: rows beside others have what each row alone has, whatever torch's rules do."""

from __future__ import annotations

import pytest
import torch
from sweep import functions, swept

from dpfunc.engines import _row_pass as row_pass

# warnings of torch about drawn arguments: only results are compared
pytestmark = pytest.mark.filterwarnings("ignore:.*")


def check(seed, count):
    found = swept(seed, count, functions())
    assert not found.wrong
    assert found.outcomes["one pass"] > 0.9 * count  # it is not all refused, or left to the loop
    return found


def test_rows_of_drawn_calls():
    check(0, 120)


@pytest.mark.slow
def test_rows_of_many_drawn_calls():
    assert len(check(10, 1000).names) > 650


def test_a_wrong_rule_of_torch_is_found(monkeypatch):
    """`solve` under vmap takes the rows for an axis of its matrices, where the two sides have different axes."""
    table = {"torch.linalg.solve": torch.linalg.solve}
    assert not swept(0, 30, table).wrong
    monkeypatch.delitem(row_pass._HANDLERS_WITH_RULES, torch.linalg.solve)
    assert swept(0, 30, table).wrong
