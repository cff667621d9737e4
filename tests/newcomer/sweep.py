"""Five learning rates under one budget: all runs may be published."""

import torch
from torch.nn import functional as F

import dpfunc
from dpfunc import clipping

x, public_x = torch.randn(3000, 10), torch.randn(1000, 10)
data = {"x": x, "y": (x[:, 0] > 0).long()}
model = dpfunc.recipes.Head(10, 2)


def loss_fn(params, batch):
    return F.cross_entropy(
        forward(params, batch["x"]), batch["y"], reduction="none"
    )


plan = dpfunc.Plan.for_budget(
    epsilon=3.0,
    delta=1e-5,
    dataset_size=3000,
    expected_batch_size=600,
    num_steps=30,
    clip=clipping.Flat(clip_norm=1.0),
    runs=5,
)
ledger, ledgers, accuracies = None, [], {}
for rate in (0.01, 0.03, 0.1, 0.3, 1.0):
    forward, params = dpfunc.functionalize(model)
    dp_step = dpfunc.make_dp_step(loss_fn, plan)
    state = dp_step.init(params, dpfunc.secure_key(), ledger=ledger)
    optimizer = torch.optim.Adam(params.values(), lr=rate)
    for indices in plan.batches(state):
        grads, state, unreleased = dp_step(
            params, dpfunc.take(data, indices), state
        )
        dpfunc.set_grads(params, grads)
        optimizer.step()
    ledger = state.ledger
    ledgers.append(plan.ledger())
    accuracies[rate] = float(
        (forward(params, public_x).argmax(1) == (public_x[:, 0] > 0)).float().mean()
    )
together = ledgers[0] + ledgers[1] + ledgers[2] + ledgers[3] + ledgers[4]
epsilon = ledger.epsilon(plan.delta).epsilon
