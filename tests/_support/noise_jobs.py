"""What worker processes run in test_mechanisms.py: a run of each mechanism, in several layouts."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_jobs import placed, whole
from jobs import data, loss_fn
from noise_cases import MECHANISMS, NUM_RECORDS, STEPS

from dpfunc import Journal, load, make_dp_step, save, take
from dpfunc.errors import DPFuncError
from dpfunc.rng import insecure_key
from dpfunc.state import allow_repeat

RECORDS = take(data(), torch.arange(NUM_RECORDS))
RESUMED = ("BISR", "BandMF, buffers", "BLT, buffers")


def stepped(name, kind, *, first=0, stop=STEPS, folder=None, load_from=None):
    """Releases of steps of a run, each as one vector; saved in a folder before the last of them."""
    values, ranks = placed(kind)
    plan = MECHANISMS[name].plan()
    place = folder or load_from
    journal = None if place is None else Journal(Path(place) / f"{name}.jsonl", plan)
    dp_step = make_dp_step(loss_fn, plan, reduction="sum", ranks=ranks, journal=journal)
    state, found = allow_repeat(dp_step.init(values, insecure_key(4))), []
    saved = {"params": values, "plan": plan, "data": "rows", "ranks": ranks}
    saved |= {} if place is None else {"journal": journal.path}
    if load_from is not None:
        state = load(Path(load_from) / name, **saved).state
    assert state.step == first
    for indices in plan.batches(state, ranks):
        if state.step == stop:
            break
        grads, state, _ = dp_step(values, take(RECORDS, indices), state)
        found.append(torch.cat([whole(grads[name]).flatten() for name in values]))
    if folder is not None:
        save(Path(folder) / name, state=state, **saved)
    return torch.stack(found)


def all_stepped(kind):
    return {name: stepped(name, kind) for name in MECHANISMS}


def stopped(kind, folder, stop):
    return {name: stepped(name, kind, stop=stop, folder=folder) for name in RESUMED}


def resumed(kind, folder, first):
    return {name: stepped(name, kind, first=first, load_from=folder) for name in RESUMED}


def other_buffers():
    """One process has other buffers than the rest: how the step ends on each."""
    values, ranks = placed("replicas")
    plan = MECHANISMS["BandMF, buffers"].plan()
    dp_step = make_dp_step(loss_fn, plan, ranks=ranks)
    state = allow_repeat(dp_step.init(values, insecure_key(4)))
    if dist.get_rank() == 1:
        (buffer,) = state.noise_state["buffers"]
        state = state._replace(noise_state={"buffers": [{**buffer, "in.bias": buffer["in.bias"] + 1e-6}]})
    try:
        dp_step(values, take(RECORDS, plan.draw(state, 0, ranks)), state)
    except DPFuncError as error:
        return type(error).__name__
    return "nothing"
