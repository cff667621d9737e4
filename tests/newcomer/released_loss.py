"""Training, then the mean loss of private records, under one budget."""

import torch
from torch.nn import functional as F

import dpfunc
from dpfunc import clipping

x = torch.randn(4000, 6)
data = {"x": x, "y": (x[:, 0] > 0).long()}
forward, params = dpfunc.functionalize(dpfunc.recipes.Head(6, 2))


def loss_fn(params, batch):
    return F.cross_entropy(
        forward(params, batch["x"]), batch["y"], reduction="none"
    )


plan = dpfunc.Plan.for_budget(
    epsilon=2.5,
    delta=1e-5,
    dataset_size=4000,
    expected_batch_size=800,
    num_steps=50,
    clip=clipping.Flat(clip_norm=1.0),
)
journal = dpfunc.Journal("journal.jsonl", plan)
dp_step = dpfunc.make_dp_step(loss_fn, plan, journal=journal)
state = dp_step.init(params, key=dpfunc.secure_key())
optimizer = torch.optim.Adam(params.values(), lr=0.2)
for indices in plan.batches(state):
    grads, state, unreleased = dp_step(params, dpfunc.take(data, indices), state)
    dpfunc.set_grads(params, grads)
    optimizer.step()
losses = loss_fn(params, data).detach()
released = dpfunc.release_mean(
    losses,
    bound=2.0,
    noise_multiplier=8.0,
    dataset_size=4000,
    delta=1e-5,
    epsilon=3.0,
    key=dpfunc.secure_key(),
    ledger=state.ledger,
    journal=journal.path,
)
truth = float(losses.clamp(max=2.0).mean())
trained = state.ledger.epsilon(plan.delta).epsilon
epsilon = released.ledger.epsilon(plan.delta).epsilon
