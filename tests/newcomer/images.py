"""Pictures, and a small convolutional network that had batch normalisation."""

import torch
from torch import nn
from torch.nn import functional as F

import dpfunc


def pictures(n):
    y, shift = torch.randint(3, (n,)), torch.randint(2, 6, (n, 1, 1))
    row, column = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    bars = torch.stack([row, column, (row + column) // 2])[y] == shift
    return (bars + 0.5 * torch.randn(n, 8, 8)).unsqueeze(1), y


dataset = torch.utils.data.TensorDataset(*pictures(2000))
layers = [
    nn.Conv2d(1, 8, 3, padding=1),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(128, 3),
]
model = dpfunc.functional.replace_batchnorm(nn.Sequential(*layers))
forward, params = dpfunc.functionalize(model)


def loss_fn(params, batch):
    return F.cross_entropy(forward(params, batch[0]), batch[1], reduction="none")


d = sum(p.numel() for p in params.values())
recipe = dpfunc.recipes.recipe(
    "full", dataset_size=len(dataset), epsilon=8.0, delta=1e-5, num_parameters=d
)
plan = recipe.plan()
dp_step = dpfunc.make_dp_step(loss_fn, plan, microbatch_size=256)
state = dp_step.init(params, key=dpfunc.secure_key())
optimizer = recipe.optimizer(params.values())
for batch in plan.loader(dataset, state):
    grads, state, unreleased = dp_step(params, batch, state)
    dpfunc.set_grads(params, grads)
    optimizer.step()
x, y = pictures(1000)
accuracy = float((forward(params, x).argmax(1) == y).float().mean())
epsilon = state.ledger.epsilon(plan.delta).epsilon
