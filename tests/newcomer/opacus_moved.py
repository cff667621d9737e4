"""A script of Opacus, and the same training without it."""

import torch
from opacus import PrivacyEngine
from torch.nn import functional as F

import dpfunc
from dpfunc import clipping

x = torch.randn(2000, 10)
dataset = torch.utils.data.TensorDataset(x, (x[:, :3].sum(1) > 0).long())
model = torch.nn.Linear(10, 2)
theirs = torch.nn.Linear(10, 2)
optimizer = torch.optim.SGD(theirs.parameters(), lr=1.0)
theirs, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
    module=theirs,
    optimizer=optimizer,
    data_loader=torch.utils.data.DataLoader(dataset, batch_size=200),
    target_epsilon=3.0,
    target_delta=1e-5,
    epochs=4,
    max_grad_norm=1.0,
)
for _ in range(4):
    for features, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(theirs(features), labels).backward()
        optimizer.step()
forward, params = dpfunc.functionalize(model)


def loss_fn(params, batch):
    return F.cross_entropy(forward(params, batch[0]), batch[1], reduction="none")


plan = dpfunc.Plan.for_budget(
    epsilon=3.0,
    delta=1e-5,
    dataset_size=2000,
    expected_batch_size=200,
    num_steps=40,
    clip=clipping.Flat(clip_norm=1.0),
)
dp_step = dpfunc.make_dp_step(loss_fn, plan)
state = dp_step.init(params, key=dpfunc.secure_key())
ours = torch.optim.SGD(params.values(), lr=1.0)
for batch in plan.loader(dataset, state):
    grads, state, unreleased = dp_step(params, batch, state)
    dpfunc.set_grads(params, grads)
    ours.step()
epsilon = state.ledger.epsilon(plan.delta).epsilon
