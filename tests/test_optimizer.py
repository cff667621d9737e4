"""The loop of the README: parameters go straight into optimizers of torch, and back into the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import dpfunc
from dpfunc import Ledger, clipping, sampling
from dpfunc._utils.memory import objects_of
from dpfunc.errors import InvalidArgument, RunWarning
from dpfunc.state import StepState, allow_repeat

KEY = dpfunc.rng.insecure_key(31)
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
    return params, dp_step, allow_repeat(dp_step.init(params, KEY))


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
    allow_repeat(StepState(0, STEPS, 0, KEY, (), Ledger()))
    run(tmp_path / "cut", 5)
    resumed, again = run(tmp_path / "cut", STEPS, resume=True)
    assert all(torch.equal(resumed[name], p) for name, p in whole.items())
    assert again == ledger


def by_optimizer(tensors_of, then=lambda params: params):
    """An update by Adam over the tensors that `tensors_of(module, params)` gives."""

    def start(module, params):
        optimizer = torch.optim.Adam(tensors_of(module, params), lr=0.1)

        def update(params, grads):
            for name, p in params.items():
                p.grad = grads[name]
            optimizer.step()
            return then(params)

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


def forgotten(params, grads):
    """Nothing is written: gradients are looked at, or a new name is bound."""
    return params


def in_place(params, grads):
    """Views of the same memory are written, as those that wrappers hand over."""
    with torch.no_grad():
        for name, p in params.items():
            p.view(-1).sub_(0.1 * grads[name].view(-1))
    return params


def copies_of_the_module(module, params):
    """The module is trained, and each step gets copies of its parameters: at the first one nothing tells it apart."""
    update = by_optimizer(lambda module, params: module.parameters())(module, dict(module.named_parameters()))

    def step(params, grads):
        update(dict(module.named_parameters()), grads)
        return {name: p.detach().clone() for name, p in module.named_parameters()}

    return step


THE_LOOP, SOME = "An optimizer takes params.values(), of functionalize", "0.weight, .*which no optimizer has"
UPDATES = {  # how parameters are updated, what is said, and how often
    "an optimizer of the module": (by_optimizer(lambda module, params: module.parameters()), SOME, "refused"),
    "an optimizer of other tensors": (by_optimizer(lambda module, params: [torch.zeros(3)]), SOME, "refused"),
    "an optimizer of copies": (
        by_optimizer(lambda module, params: [p.clone() for p in params.values()]), r"\(Adam\)", "refused",
    ),
    "an optimizer of one parameter": (by_optimizer(lambda module, params: [params["0.bias"]]), SOME, "warned"),
    "an optimizer of the module, copies of it": (copies_of_the_module, "", ""),
    "an optimizer of the parameters": (by_optimizer(lambda module, params: params.values()), "", ""),
    "an optimizer of views": (by_optimizer(lambda module, params: [p.detach() for p in params.values()]), THE_LOOP, "logged"),
    "nothing written": (lambda module, params: forgotten, THE_LOOP, "logged"),
    "written": (lambda module, params: written, "", ""),
    "written in place": (lambda module, params: in_place, "", ""),
    "one made anew, an optimizer of something else": (
        by_optimizer(lambda module, params: [torch.zeros(3)], lambda p: {**p, "0.bias": p["0.bias"] + 1}), "", "",
    ),
    "made anew": (lambda module, params: made_anew, "", ""),
    "copies": (lambda module, params: lambda p, grads: {n: v.clone() for n, v in p.items()}, "", ""),
}  # fmt: skip


def taken(name, retried=False, steps=4, view=False):
    """Steps of a loop; what it raised."""
    module, data = model(), dataset()
    params, dp_step, state = made(module)
    update = UPDATES[name][0](module, params)
    for _ in range(steps):
        indices = dp_step.plan.draw(state, state.step).tolist()
        batch = torch.stack([data[i][0] for i in indices]), torch.tensor([data[i][1] for i in indices])
        if retried:
            with pytest.raises(dpfunc.errors.DPFuncError):
                dp_step(params, (batch[0][:0], batch[1][:0]), state)
        grads, state, _ = dp_step({n: p.detach() for n, p in params.items()} if view else params, batch, state)
        params = update(params, grads)


@pytest.fixture
def only_own_optimizers(monkeypatch):
    """Optimizers that other tests have left in this process are none of this one."""
    earlier = objects_of(torch.optim.Optimizer)
    monkeypatch.setattr(
        "dpfunc.calls.objects_of", lambda kind: [o for o in objects_of(kind) if all(o is not e for e in earlier)]
    )


@pytest.mark.usefixtures("only_own_optimizers")
@pytest.mark.parametrize("how", ["once", "retried", "view"])
@pytest.mark.parametrize("name", UPDATES)
def test_an_optimizer_of_other_parameters_is_refused(caplog, name, how):
    """In its second step; without one the steps are logged. A call that was refused changes nothing and means nothing."""
    _, said, what = UPDATES[name]
    take = lambda: taken(name, retried=how == "retried", view=how == "view")
    with caplog.at_level("WARNING", logger="dpfunc.step"):
        if what == "refused":
            with pytest.raises(InvalidArgument, match=said):
                take()
        elif what == "warned":
            with pytest.warns(RunWarning, match=said):
                take()
        else:
            take()
    logged = [record.message for record in caplog.records]
    assert len(logged) == (what == "logged")
    assert all(said in each for each in logged)
