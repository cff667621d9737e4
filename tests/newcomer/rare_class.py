"""A table, one in twelve positive: columns scaled by public ranges, and a head."""

import torch
from torch.nn import functional as F

import dpfunc

# public: what the form allows
LOW = torch.tensor([18.0, 0.0, 0.0, 0.0])
HIGH = torch.tensor([100.0, 60.0, 20.0, 1.0])


def table(n):
    rows = LOW + (HIGH - LOW) * torch.rand(n, 4)
    return rows, (
        rows[:, 1] / 60 + rows[:, 2] / 20 + 0.1 * torch.randn(n) > 1.6
    ).long()


rows, y = table(6000)
data = {"x": 2 * (rows - LOW) / (HIGH - LOW) - 1, "y": y}
model = dpfunc.recipes.Head(4, 2)
forward, params = dpfunc.functionalize(model)


def loss_fn(params, batch):
    return F.cross_entropy(
        forward(params, batch["x"]), batch["y"], reduction="none"
    )


recipe = dpfunc.recipes.recipe(
    "head",
    dataset_size=6000,
    epsilon=3.0,
    delta=1e-5,
    num_classes=2,
    num_parameters=10,
)
plan = recipe.plan()
dp_step = dpfunc.make_dp_step(loss_fn, plan)
state = dp_step.init(params, key=dpfunc.secure_key())
optimizer = recipe.optimizer(params.values())
scheduler = recipe.scheduler(optimizer)
for indices in plan.batches(state):
    grads, state, unreleased = dp_step(params, dpfunc.take(data, indices), state)
    dpfunc.set_grads(params, grads)
    optimizer.step()
    scheduler.step()
test_rows, test_y = table(3000)
logits = forward(params, 2 * (test_rows - LOW) / (HIGH - LOW) - 1).detach()
epsilon = state.ledger.epsilon(plan.delta).epsilon
