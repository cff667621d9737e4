"""The script that counts what a reader of the source meets."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

from dpfunc.engines._guards.audit import Audits

house = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "house.py"))


def test_complexity_counts_branches_of_a_function_alone():
    source = "def f(x):\n    if x and x > 1:\n        return [y for y in x if y]\n    def g(z):\n        if z:\n            pass\n"
    tree = ast.parse(source)
    assert [house["complexity"](function) for function in house["functions"](tree)] == [5, 2]


def test_the_way_of_a_batch_begins_in_the_step(monkeypatch):
    monkeypatch.setattr(Audits, "due", lambda *_: 0)  # by time and chance, a later step compares a row
    way = house["way_of_a_batch"]()
    assert "step.py" in way[:2]
    assert "engines/vmap_grad.py" in way
    # where another test has imported FSDP, each call looks for it
    assert len(set(way) - {"functional/_fsdp.py"}) <= 25, way
    house["numbers"].__globals__["AROUND"] = ()  # to read all tests takes longer than all else
    assert int(house["numbers"](way)["files on the way of a batch, after the first step"]) == len(way)
