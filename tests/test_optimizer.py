"""The loop of the README: parameters go straight into optimizers of torch, and back into the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import dpfunc
from dpfunc import Ledger, StepState, clipping, sampling
from dpfunc.state import replay

KEY = dpfunc.insecure_key(31)
STEPS = 8


def dataset():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, generator=generator), i % 3) for i in range(60)]


def model():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


PLAN = dpfunc.Plan(sampling.Poisson(60, 0.2), clipping.Flat(1.0), 1.0, STEPS, delta=1e-3)


def made(module, journal=None):
    """What a loop needs: parameters, step, state."""
    forward, params = dpfunc.functionalize(module)
    loss_fn = lambda params, batch: nn.functional.cross_entropy(forward(params, batch[0]), batch[1], reduction="none")
    dp_step = dpfunc.make_dp_step(loss_fn, PLAN, engine="auto", journal=journal)
    return params, dp_step, replay(dp_step.init(params, KEY))


OPTIMIZERS = {
    "groups": lambda params: torch.optim.Adam([{"params": params[:2], "lr": 0.01}, {"params": params[2:], "lr": 0.1}]),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path, kind):
    """State of the optimizer and of the schedule are saved with the parameters; the last two steps are repeated."""

    def run(folder, stop, resume=False):
        journal = folder / "journal.jsonl"
        files = {"plan": PLAN, "data": "60", "journal": journal}
        params, dp_step, state = made(model(), dpfunc.Journal(journal, PLAN))
        saved = dpfunc.load(folder, params=params, **files) if resume else None
        if saved:
            params, state = dict(saved.params), saved.state
        optimizer = OPTIMIZERS[kind](list(params.values()))
        rates = [group["lr"] for group in optimizer.param_groups]
        scheduler = OneCycleLR(optimizer, rates, total_steps=STEPS, cycle_momentum=False)
        if saved:
            optimizer.load_state_dict(saved.optimizer_state)
            scheduler.load_state_dict(saved.extra["scheduler"])
        for batch in PLAN.loader(dataset(), state):
            grads, state, _ = dp_step(params, batch, state)
            for name, p in params.items():
                p.grad = grads[name]
            optimizer.step()
            scheduler.step()
            if state.step == 3:
                states = {"optimizer_state": optimizer.state_dict(), "extra": {"scheduler": scheduler.state_dict()}}
                dpfunc.save(folder, params=params, state=state, **files, **states)
            if state.step == stop:
                break
        return params, state.ledger

    whole, ledger = run(tmp_path / "whole", STEPS)
    replay(StepState(0, STEPS, 0, KEY, (), Ledger()))
    run(tmp_path / "cut", 5)
    resumed, again = run(tmp_path / "cut", STEPS, resume=True)
    assert all(torch.equal(resumed[name], p) for name, p in whole.items())
    assert again == ledger


def by_optimizer(tensors_of):
    """An update by Adam over the tensors that `tensors_of(module, params)` gives."""

    def start(module, params):
        optimizer = torch.optim.Adam(tensors_of(module, params), lr=0.1)

        def update(params, grads):
            for name, p in params.items():
                p.grad = grads[name]
            optimizer.step()
            return params

        return update

    return start


def written(params, grads):
    """An update through `.data`, which torch does not count."""
    for name, p in params.items():
        p.data -= 0.1 * grads[name]
    return params


def made_anew(params, grads):
    """A functional update: the old tensors may be freed, and the new ones may lie in their memory."""
    return {name: p.detach() - 0.1 * grads[name] for name, p in params.items()}


UPDATES = {
    "an optimizer of the module": (by_optimizer(lambda module, params: module.parameters()), 1),
    "an optimizer of the parameters": (by_optimizer(lambda module, params: params.values()), 0),
    "an optimizer of one parameter": (by_optimizer(lambda module, params: [params["0.bias"]]), 0),
    "written": (lambda module, params: written, 0),
    "made anew": (lambda module, params: made_anew, 0),
}


@pytest.mark.parametrize("retried", [False, True])
@pytest.mark.parametrize("name", UPDATES)
def test_updates_that_change_nothing_are_warned_of_once(caplog, name, retried):
    """A call that was refused changes nothing and means nothing."""
    start, count = UPDATES[name]
    module, data = model(), dataset()
    params, dp_step, state = made(module)
    update = start(module, params)
    with caplog.at_level("WARNING", logger="dpfunc.step"):
        for _ in range(4):
            indices = dp_step.plan.draw(state, state.step).tolist()
            batch = torch.stack([data[i][0] for i in indices]), torch.tensor([data[i][1] for i in indices])
            if retried:
                with pytest.raises(dpfunc.DPFuncError):
                    dp_step(params, (batch[0][:0], batch[1][:0]), state)
            grads, state, _ = dp_step(params, batch, state)
            params = update(params, grads)
    said = [record.message for record in caplog.records]
    assert len(said) == count
    assert all("An optimizer takes params.values(), not model.parameters()" in each for each in said)
