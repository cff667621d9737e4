"""docs/extending.md: its blocks run in order, and each part does what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dpfunc import clipping
from dpfunc.accounting import Ledger
from dpfunc.accounting.events import KINDS
from dpfunc.engines import register
from dpfunc.engines._rules import RULES
from dpfunc.errors import InvalidArgument
from dpfunc.plan import Plan
from dpfunc.types import Event

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()


def test_the_page_adds_one_of_each(capsys):
    page = ModuleType("extending")  # dataclasses look for the module of a class
    sys.modules["extending"], names = page, vars(page)
    try:
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(block, "extending.md", "exec"), names)
        assert "epsilon" in capsys.readouterr().out
        assert names["ledger"].epsilon(1e-3) == Ledger((Event(0.5, 2.0, 40),), "zero_out").epsilon(1e-3)
        _, state = names["one_step"](clip=names["Squared"](1.0))
        assert state.step == 1
        _, state = names["one_step"](sampler=names["Halves"](100))
        assert state.ledger.events == (Event(1.0, 1.0, 1),)
        grads, state = names["one_step"](noise=names["Rounded"]())
        assert state.noise_state == {"count": 1}
        assert state.ledger.events == (Event(0.5, 1.0, 1),)
        assert bool((grads["w"].remainder(2.0**-14) == 0).all())
        with pytest.raises(InvalidArgument, match="adjacency"):
            Plan(names["Halves"](100), clipping.Flat(1.0), 1.0, num_steps=3, delta=1e-3)
        assert torch.linalg.vecdot in register.REGISTERED
    finally:
        del sys.modules["extending"]
        KINDS.pop("several", None)
        register.REGISTERED.pop(torch.linalg.vecdot, None)
        RULES.pop(torch.linalg.vecdot, None)


def test_a_task_of_the_page():
    names = {"torch": torch}
    block = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def quantile" in block)
    exec(compile(block, "extending.md", "exec"), names)

    class Output:
        logits = torch.tensor([[1.0], [3.0]])

    found = names["quantile"](lambda params, **inputs: Output, {}, {"labels": torch.tensor([2.0, 2.0]), "x": None})
    assert torch.allclose(found, torch.tensor([0.9, 0.1]))
