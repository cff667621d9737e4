"""A run as JSON values: what differs from the run that is resumed is refused, and named."""

from __future__ import annotations

import pytest
import torch
from cases import params
from run_cases import DATA, PLAN, start, steps, store

from dpfunc import Plan, clipping, load, sampling, take
from dpfunc.errors import CheckpointError


def other_plan(sampling_prob, noise_multiplier):
    return {"plan": Plan(sampling.Poisson(60, sampling_prob), clipping.Flat(1.0), noise_multiplier, 8, 1e-3)}


def changed_data():
    data = {name: value.clone() for name, value in DATA.items()}
    data["head.weight"][59, 3] += 1e-3
    return data


REFUSALS = {
    "plan": (other_plan(0.3, 0.9), r"another plan: plan.noise_multiplier: saved 1.0, now 0.9"),
    "sampler": (other_plan(0.2, 1.0), r"plan.sampler.sampling_prob: saved 0.3, now 0.2"),
    "data": ({"data": changed_data()}, r"another data set"),
    "fewer data": ({"data": take(DATA, torch.arange(59))}, r"another data set"),
    "parameters": (
        {"params": {**params(), "head.weight": torch.zeros(5)}},
        r"another parameter set: head.weight: saved float32 \(4,\), now float32 \(5,\)",
    ),
    "missing parameter": (
        {"params": {"head.weight": torch.zeros(4)}},
        r"body.a.bias: saved float32 \(3,\), now absent",
    ),
    "dtype": ({"params": params(torch.float64)}, r"saved float32 \(3,\), now float64 \(3,\)"),
    "optimizer": ({"optimizer_state": {"state": {}, "param_groups": []}}, "Expected optimizer_state to have"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_another_run_is_refused_with_the_difference(tmp_path, name):
    state, values, optimizer = start()
    store(tmp_path, steps(state, values, optimizer, 1), values, optimizer)
    changes, message = REFUSALS[name]
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, **{"plan": PLAN, "params": values, "data": DATA, "without_journal": "new_key", **changes})
