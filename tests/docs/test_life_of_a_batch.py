"""The page "The life of a batch": each function that it names is called in a step, in the order of the page."""

import re
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import dpfunc

PAGE = Path(__file__).parents[2] / "docs" / "life_of_a_batch.md"
MOST_LINES = 60


def called(run):
    """Functions of dpfunc that are called, in the order of their first calls."""
    found = {}

    def note(frame, event, arg):
        package, _, module = frame.f_globals.get("__name__", "").partition(".")
        if event == "call" and package == "dpfunc":
            found.setdefault(f"{module.replace('.', '/')}.py: {frame.f_code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return list(found)


def test_a_row_goes_the_way_of_the_page():
    forward, params = dpfunc.functionalize(nn.Linear(3, 2))
    data = {"x": torch.randn(40, 3), "y": torch.randint(2, (40,))}  # a batch of all of them is improbable
    plan = dpfunc.Plan(dpfunc.sampling.Poisson(40, 0.5), dpfunc.clipping.Flat(1.0), 1.0, 10, 1e-2)
    dp_step = dpfunc.make_dp_step(
        lambda params, batch: F.cross_entropy(forward(params, batch["x"]), batch["y"], reduction="none"), plan
    )

    def step(params, state):
        batch = dpfunc.take(data, next(iter(plan.batches(state))))
        grads, state, _ = dp_step(params, batch, state)
        return {name: param - grads[name] for name, param in params.items()}, state

    params, state = step(params, dp_step.init(params, dpfunc.secure_key()))
    text = PAGE.read_text()
    named = re.findall(r"`([\w/]+\.py: [\w.]+)`", text)
    found = called(lambda: step(params, state))
    assert len(named) > 30
    assert not set(named) - set(found)
    assert named == sorted(named, key=found.index)
    assert len(text.splitlines()) <= MOST_LINES
