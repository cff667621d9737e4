"""AdamW that knows its noise: torch's own without noise, the formulas, and what it takes out."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cases import GROUPINGS, as_batch, linear_loss, params, random_rows
from noise_cases import Lagged
from scipy import stats

import dpfunc
from dpfunc import checkpoint, clipping, sampling
from dpfunc.errors import InvalidArgument
from dpfunc.rng import insecure_key
from dpfunc.state import allow_repeat
from dpfunc.types import Schedule
from dpfunc.updates import AdamWBC


def gradients(count, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=generator) * scale for _ in range(count)]


def steps(optimizer, w, grads, noise=None):
    for number, grad in enumerate(grads):
        w.grad = grad.clone()
        if noise is not None:
            for group in optimizer.param_groups:
                group["noise_std"] = noise[number]
        optimizer.step()
    return w.detach().clone()


def fresh():
    return torch.ones(3, 4, requires_grad=True)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_without_noise_it_is_adamw(weight_decay):
    settings = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    one, two = fresh(), fresh()
    found = steps(AdamWBC([one], **settings), one, gradients(20))
    expected = steps(torch.optim.AdamW([two], **settings), two, gradients(20))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_formulas_of_the_paper():
    """Number by number in float64, with noise that changes: some coordinates are above it, some below."""
    grads, noises = gradients(15), [0.5, 1.5, 0.9] * 5
    w = fresh()
    found = steps(AdamWBC([w], lr=0.05, betas=(0.8, 0.9), weight_decay=0.1), w, grads, noises)
    below = 0
    for place in range(12):
        value, m, v, phi = 1.0, 0.0, 0.0, 0.0
        for number, grad in enumerate(grads, 1):
            g = float(grad.flatten()[place])
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
            phi = 0.9 * phi + 0.1 * noises[number - 1] ** 2
            below += v <= phi
            u = v - phi if v - phi > 0 else v
            value -= 0.05 * 0.1 * value
            value -= 0.05 * m / (1 - 0.8**number) / (math.sqrt(u / (1 - 0.9**number)) + 1e-8)
        assert float(found.flatten()[place]) == pytest.approx(value, rel=1e-4)
    assert 0 < below < 12 * 15


def test_the_noise_is_taken_out():
    """Of gradients 2 and noise 3, u comes to 4 and v to 13; two-sided."""
    generator = torch.Generator().manual_seed(1)
    w = torch.zeros(4000, requires_grad=True)
    optimizer = AdamWBC([w], lr=1e-9, betas=(0.0, 0.999), noise_std=3.0)
    for _ in range(300):
        w.grad = 2.0 + 3.0 * torch.randn(4000, generator=generator)
        optimizer.step()
    state = optimizer.state[w]
    held = 1 - 0.999**300
    assert float(state["exp_avg_sq"].mean() / held) == pytest.approx(13.0, rel=0.02)
    assert float((state["exp_avg_sq"].mean() - state["phi"]) / held) == pytest.approx(4.0, rel=0.05)


def test_a_misspelt_setting_of_a_group_is_refused():
    """Also one that is written between steps, or comes of a checkpoint; what schedules write is none."""
    w = fresh()
    optimizer = AdamWBC([w], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
    steps(optimizer, w, gradients(2))
    schedule.step()
    before = w.detach().clone()
    optimizer.param_groups[0]["noise_sdt"] = 0.5
    again = AdamWBC([fresh()])
    again.load_state_dict(optimizer.state_dict())
    for each in (optimizer, again):
        with pytest.raises(InvalidArgument, match=r"got setting='noise_sdt'. Did you mean 'noise_std'"):
            steps(each, w, gradients(1))
    assert torch.equal(w, before)


def test_its_state_goes_on():
    """By `state_dict`, as for any optimizer of torch; groups have noise of their own."""
    grads = gradients(10)
    one, two = fresh(), fresh()
    expected = steps(AdamWBC([one], lr=0.05, noise_std=0.7), one, grads)
    first = AdamWBC([two], lr=0.05, noise_std=0.7)
    steps(first, two, grads[:4])
    second = AdamWBC([two], lr=1.0)
    second.load_state_dict(first.state_dict())
    assert torch.equal(steps(second, two, grads[4:]), expected)
    groups = AdamWBC([{"params": [fresh()], "noise_std": 0.1}, {"params": [fresh()]}], noise_std=0.2).param_groups
    assert [group["noise_std"] for group in groups] == [0.1, 0.2]
    assert two.grad is not None
    assert second.step(lambda: 3.0) == 3.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moments_of_16_bits_are_kept_in_float32(dtype):
    """v of gradients 1 is 1 - b2^t, where bfloat16 stops at 0.5; also after a checkpoint."""
    w, optimizers = torch.zeros(3, requires_grad=True, dtype=dtype), []
    for _ in range(2):
        optimizers.append(AdamWBC([w], lr=1e-3, betas=(0.9, 0.999)))
        if len(optimizers) == 2:
            optimizers[1].load_state_dict(optimizers[0].state_dict())
        steps(optimizers[-1], w, [torch.ones(3, dtype=dtype)] * 1000)
    state = optimizers[1].state[w]
    assert state["exp_avg_sq"].dtype == state["exp_avg"].dtype == torch.float32
    assert float(state["exp_avg_sq"][0]) == pytest.approx(1 - 0.999**2000, rel=1e-4)
    assert w.dtype == dtype
    begun = AdamWBC([w])
    begun.load_state_dict(AdamWBC([w]).state_dict())
    assert not begun.state


def test_a_small_step_of_16_bits_is_that_of_float32():
    """eps of 1e-8 is zero in float16: a gradient of zero, as of a token that was not drawn, was 0 / 0."""
    w = torch.ones(2, requires_grad=True, dtype=torch.float16)
    steps(AdamWBC([w], lr=0.1), w, [torch.tensor([0.0, 1.0], dtype=torch.float16)])
    assert torch.equal(w.detach(), torch.tensor([1.0, 0.9], dtype=torch.float16))


def test_a_run_with_a_checkpoint(tmp_path):
    """Gradients of steps in, and noise that the step says; `save` and `load` keep its state."""
    plan = dpfunc.Plan(sampling.Poisson(20, 0.5), clipping.Adaptive(1.0), 1.0, num_steps=4, delta=1e-3)
    path, current = tmp_path / "journal.jsonl", {name: value.requires_grad_() for name, value in params().items()}
    dp_step = dpfunc.make_dp_step(linear_loss, plan, journal=checkpoint.Journal(path, plan))
    state, optimizer, seen = dp_step.init(current, dpfunc.secure_key()), AdamWBC(current.values(), lr=0.1), []
    for indices in plan.batches(state):
        seen.append(dp_step.gradient_noise(current, state)["head.weight"])
        for group in optimizer.param_groups:
            group["noise_std"] = seen[-1]
        detached = {name: value.detach() for name, value in current.items()}
        grads, state, _ = dp_step(detached, dpfunc.take(as_batch(random_rows(0, 20)), indices), state)
        for name, value in current.items():
            value.grad = grads[name]
        optimizer.step()
    assert len(set(seen)) == 4
    run = {"params": current, "plan": plan, "data": "these", "journal": path}
    checkpoint.save(tmp_path / "run", state=state, optimizer_state=optimizer.state_dict(), **run)
    found = checkpoint.load(tmp_path / "run", **run).optimizer_state
    assert found["state"][0]["phi"] == optimizer.state_dict()["state"][0]["phi"] > 0
    assert found["param_groups"][0]["noise_std"] == seen[-1]


CASES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "units": {"unit": "clip_norm"},
    "replaced": {"adjacency": "replace_one"},
    "optimal": {"allocation": "optimal", "clip": clipping.Flat(1.0, GROUPINGS["layer"])},
    "schedules": {
        "clip": clipping.Scheduled(clipping.Flat(3.0), Schedule(((1, 1.0), (1, 0.5)))),
        "noise_multiplier": Schedule(((1, 1.0), (1, 4.0))),
    },
    "adaptive": {"clip": clipping.Adaptive(2.0, share=0.2, groups=GROUPINGS["layer"])},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_noise_of_a_step(case):
    """What is said is what is there, in each parameter and step; and neither 0.7 nor 1.4 of it."""
    wide = {"a.w": torch.zeros(400), "b.w": torch.zeros(800)}
    grouping = clipping.PerLayer()
    given = dict(CASES[case])
    if "groups" in vars(given.get("clip", object)) and not isinstance(given["clip"].groups, clipping.AllParameters):
        given["clip"] = dataclasses.replace(given["clip"], groups=grouping)
    options = {name: given.pop(name) for name in ("reduction", "unit") if name in given}
    values = {"sampler": sampling.Poisson(10, 0.5), "clip": clipping.Flat(1.0), "noise_multiplier": 2.0, **given}
    plan = dpfunc.Plan(num_steps=2, delta=1e-2, **values)
    zero = {name: torch.zeros(10, *value.shape) for name, value in wide.items()}
    loss = lambda p, batch: sum((p[name] * batch[name]).sum(1) for name in p)
    dp_step = dpfunc.make_dp_step(loss, plan, **options)
    state = allow_repeat(dp_step.init(wide, insecure_key(5)))
    for indices in plan.batches(state):
        said = dp_step.gradient_noise(wide, state)
        grads, state, _ = dp_step(wide, {name: 1e-15 + value[indices] for name, value in zero.items()}, state)
        for name, grad in grads.items():
            tails = [
                stats.chi2.cdf(float(grad.double().square().sum()) / (scale * said[name]) ** 2, grad.numel())
                for scale in (1.0, 0.7, 1.4)
            ]
            assert 1e-6 < tails[0] < 1 - 1e-6
            assert tails[1] > 1 - 1e-6
            assert tails[2] < 1e-6


def test_other_noise_does_not_say_its_scale():
    plan = dpfunc.Plan(sampling.Poisson(12, 1.0), clipping.Flat(1.0), 1.0, 2, 1e-3, noise=Lagged())
    dp_step = dpfunc.make_dp_step(linear_loss, plan)
    state = dp_step.init(params(), insecure_key(1))
    with pytest.raises(InvalidArgument, match="noise that says its weights"):
        dp_step.gradient_noise(params(), state)


@pytest.mark.parametrize(
    "bad", [{"lr": 0.0}, {"betas": (1.0, 0.9)}, {"eps": -1.0}, {"weight_decay": -1}, {"noise_std": -1}]
)
def test_refused(bad):
    with pytest.raises(InvalidArgument, match=next(iter(bad))):
        AdamWBC([torch.zeros(1)], **bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"noise": 0.1}, "settings of AdamWBC in a group, got setting='noise'. Did you mean 'noise_std'"),
        ({"noise_std": -0.1}, "0 <= noise_std < inf, got noise_std=-0.1"),
        ({"lr": "fast"}, "0 < lr < inf, got lr='fast'"),
        ({"betas": (0.9,)}, r"betas \(b1, b2\), got betas=\(0.9,\)"),
        ({"amsgrad": True}, "got setting='amsgrad'. Known: betas, eps"),
    ],
)
def test_settings_of_groups_are_checked(bad, message):
    with pytest.raises(InvalidArgument, match=message):
        AdamWBC([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], **bad}])


def test_a_scheduler_goes_on():
    """Schedulers write their settings into groups, and need the first rate of a run in them."""
    optimizer = AdamWBC([{"params": [("w", torch.zeros(1))], "initial_lr": 0.5}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5, last_epoch=2)
    assert scheduler.base_lrs == [0.5]
    assert optimizer.param_groups[0]["param_names"] == ["w"]
