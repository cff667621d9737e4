"""Averages of parameters over steps: the sums that they are, in checkpoints, and less noise than the last step."""

from __future__ import annotations

import pytest
import torch
from cases import as_batch, linear_loss, params, random_rows

import dpfunc
from dpfunc import checkpoint, clipping, sampling
from dpfunc.errors import InvalidArgument
from dpfunc.updates import Ema, LastSteps

T = 12


def series(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [{"w": torch.randn(3, 2, generator=generator).to(dtype)} for _ in range(T)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_sum_of_each_average(dtype):
    """Against the sums of the definitions, in float64; what goes in stays as it is."""
    values = series(dtype)
    wide = torch.stack([value["w"].double() for value in values])
    ema, last = Ema(0.8), LastSteps(5, T)
    states = {ema: ema.begin(), last: last.begin()}
    for step in range(1, T + 1):
        before = values[step - 1]["w"].clone()
        states = {kind: kind.add(state, values[step - 1]) for kind, state in states.items()}
        weights = 0.8 ** torch.arange(step - 1, -1, -1).double()
        own = {
            ema: (weights[:, None, None] * wide[:step]).sum(0) / weights.sum(),
            last: wide[max(T - 5, 0) if step > T - 5 else step - 1 : step].mean(0),
        }
        for kind, state in states.items():
            assert state["step"] == step
            found = state["params"]["w"]
            assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            torch.testing.assert_close(found.double(), own[kind], rtol=1e-5, atol=1e-5)
        assert torch.equal(values[step - 1]["w"], before)


def test_states_are_values():
    """Adding changes no earlier state, and no memory is shared with the parameters."""
    one, two = series()[:2]
    first = Ema(0.5).add(Ema(0.5).begin(), one)
    kept = first["params"]["w"].clone()
    Ema(0.5).add(first, two)
    one["w"].zero_()
    assert torch.equal(first["params"]["w"], kept)


def test_a_checkpoint_has_the_average(tmp_path):
    plan = dpfunc.Plan(sampling.Poisson(20, 0.5), clipping.Flat(1.0), 1.0, num_steps=3, delta=1e-3)
    path, average, current = tmp_path / "journal.jsonl", Ema(0.9), params()
    dp_step = dpfunc.make_dp_step(linear_loss, plan, journal=checkpoint.Journal(path, plan))
    state, averaged = dp_step.init(current, dpfunc.secure_key()), average.begin()
    for indices in plan.batches(state):
        grads, state, _ = dp_step(current, dpfunc.take(as_batch(random_rows(0, 20)), indices), state)
        current = {name: value - grads[name] for name, value in current.items()}
        averaged = average.add(averaged, current)
    run = {"params": current, "plan": plan, "data": "these", "journal": path}
    checkpoint.save(tmp_path / "run", state=state, optimizer_state={"average": averaged}, **run)
    found = checkpoint.load(tmp_path / "run", **run).optimizer_state["average"]
    assert found["step"] == 3
    assert all(torch.equal(found["params"][name], value) for name, value in averaged["params"].items())
    after = {name: value + 1 for name, value in current.items()}
    once, again = average.add(averaged, after), average.add(found, after)
    assert all(torch.equal(value, again["params"][name]) for name, value in once["params"].items())


def test_noise_of_an_average_is_smaller():
    """Around a minimum, where steps only move the parameters about; two-sided."""
    generator = torch.Generator().manual_seed(1)
    value, average, steps = torch.zeros(2000), LastSteps(100, 200), 200
    averaged = average.begin()
    for _ in range(steps):
        value = 0.5 * value + torch.randn(2000, generator=generator)
        averaged = average.add(averaged, {"w": value})
    assert float(value.var()) == pytest.approx(1 / (1 - 0.25), rel=0.15)
    assert float(averaged["params"]["w"].var()) == pytest.approx(1 / (0.5**2 * 100), rel=0.15)


BAD = {
    "decay": (lambda: Ema(1.0), "decay"),
    "count": (lambda: LastSteps(0, 5), "count"),
    "steps": (lambda: LastSteps(6, 5), "num_steps"),
    "params": (
        lambda: Ema(0.5).add(Ema(0.5).add(Ema(0.5).begin(), {"w": torch.zeros(1)}), {"v": torch.zeros(1)}),
        "the parameters of the average",
    ),
    "a shape that would broadcast": (
        lambda: Ema(0.5).add(Ema(0.5).add(Ema(0.5).begin(), {"w": torch.zeros(3)}), {"w": torch.zeros(1)}),
        r"in their shapes, got params=\{'w': \(1,\)\}. Of the average: \('w', \(3,\)\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    make, message = BAD[case]
    with pytest.raises(InvalidArgument, match=message):
        make()
