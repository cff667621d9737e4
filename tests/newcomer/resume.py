"""Ctrl-C in a run, which goes on from its newest checkpoint with the same bits."""

from signal import SIGINT, raise_signal

import torch
from torch.nn import functional as F

import dpfunc
from dpfunc import clipping

rule, seen = clipping.Automatic(), {}
files = {"data": "made up", "journal": "run/journal.jsonl"}
dataset = [(torch.randn(8), i % 2) for i in range(500)]
forward, start = dpfunc.functionalize(torch.nn.Linear(8, 2))


def loss_fn(params, batch):
    return F.cross_entropy(forward(params, batch[0]), batch[1], reduction="none")


plan = dpfunc.Plan.for_budget(
    epsilon=3,
    delta=1e-5,
    dataset_size=500,
    expected_batch_size=50,
    num_steps=20,
    clip=rule,
)
dp_step = dpfunc.make_dp_step(
    loss_fn, plan, journal=dpfunc.Journal("run/journal.jsonl", plan)
)


def train(params, state, stop_at=None):
    for batch in plan.loader(dataset, state):
        if state.step % 5 == 0:
            dpfunc.save("run", params=params, state=state, plan=plan, **files)
        grads, state, _ = dp_step(params, batch, state)
        params = {name: p - 0.1 * grads[name] for name, p in params.items()}
        seen[state.step] = [*seen.get(state.step, []), params]
        if state.step == stop_at:
            raise_signal(SIGINT)
    return state


try:
    train(start, dp_step.init(start, key=dpfunc.secure_key()), stop_at=13)
except KeyboardInterrupt:
    saved = dpfunc.load("run", plan=plan, params=start, **files)
    state = train(dict(saved.params), saved.state)
