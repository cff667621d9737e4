"""A loss that also returns what it saw of a sample: right or not, how sure."""

import torch
from torch.nn import functional as F

import dpfunc
from dpfunc import clipping

x = torch.randn(2000, 6)
# made up: of private records these numbers would not be for printing
data = {"x": x, "y": (x[:, 0] > 0).long()}
forward, params = dpfunc.functionalize(dpfunc.recipes.Head(6, 2))


def loss_fn(params, batch):
    logits = forward(params, batch["x"])
    losses = F.cross_entropy(logits, batch["y"], reduction="none")
    return losses, {
        "correct": (logits.argmax(1) == batch["y"]).float(),
        "sure": logits.softmax(1).amax(1),
    }


plan = dpfunc.Plan.for_budget(
    epsilon=3.0,
    delta=1e-5,
    dataset_size=2000,
    expected_batch_size=400,
    num_steps=30,
    clip=clipping.Flat(clip_norm=1.0),
)
dp_step = dpfunc.make_dp_step(loss_fn, plan)
state = dp_step.init(params, key=dpfunc.secure_key())
optimizer = torch.optim.Adam(params.values(), lr=0.2)
curve, sizes = [], []
for indices in plan.batches(state):
    grads, state, unreleased = dp_step(params, dpfunc.take(data, indices), state)
    dpfunc.set_grads(params, grads)
    optimizer.step()
    curve.append(float(unreleased.aux["correct"].mean()))
    sizes.append((len(indices), len(unreleased.aux["sure"])))
epsilon = state.ledger.epsilon(plan.delta).epsilon
