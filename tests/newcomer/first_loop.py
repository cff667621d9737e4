"""A small classifier on rows of numbers, in the loop of the README."""

import torch
from torch.nn import functional as F

import dpfunc


def made(n):
    x = torch.randn(n, 20)
    return x, (x[:, :3].sum(1) > 0).long()


dataset = torch.utils.data.TensorDataset(*made(1000))
model = dpfunc.recipes.Head(20, 2)
forward, params = dpfunc.functionalize(model)


def loss_fn(params, batch):
    x, y = batch
    return F.cross_entropy(forward(params, x), y, reduction="none")


d = sum(p.numel() for p in params.values())
recipe = dpfunc.recipes.recipe(
    "head",
    dataset_size=1000,
    epsilon=3.0,
    delta=1e-5,
    num_classes=2,
    num_parameters=d,
)
plan = recipe.plan()
dp_step = dpfunc.make_dp_step(
    loss_fn, plan, journal=dpfunc.Journal("journal.jsonl", plan)
)
state = dp_step.init(params, key=dpfunc.secure_key())
optimizer = recipe.optimizer(params.values())
scheduler = recipe.scheduler(optimizer)
for batch in plan.loader(dataset, state):
    grads, state, unreleased = dp_step(params, batch, state)
    dpfunc.set_grads(params, grads)
    optimizer.step()
    scheduler.step()
trained = dpfunc.with_params(model, params)
x, y = made(2000)
accuracy = float((trained(x).argmax(1) == y).float().mean())
epsilon = state.ledger.epsilon(plan.delta).epsilon
