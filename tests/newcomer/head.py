"""A head on the features of a frozen encoder, which are computed once."""

import torch
from torch.nn import functional as F

import dpfunc

CLASSES, N = 5, 3000
encoder = torch.nn.Sequential(
    torch.nn.Linear(30, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)
).requires_grad_(False)
centres = 2 * torch.randn(CLASSES, 30)


def features(n):
    y = torch.randint(CLASSES, (n,))
    return {"x": encoder(centres[y] + torch.randn(n, 30)), "y": y}


data, public = features(N), features(1000)
model = dpfunc.recipes.Head(32, CLASSES)
forward, params = dpfunc.functionalize(model)


def loss_fn(params, batch):
    return F.cross_entropy(
        forward(params, batch["x"]), batch["y"], reduction="none"
    )


d = sum(p.numel() for p in params.values())
recipe = dpfunc.recipes.recipe(
    "head",
    dataset_size=N,
    epsilon=3.0,
    delta=1e-5,
    num_classes=CLASSES,
    num_parameters=d,
)
plan = recipe.plan()
dp_step = dpfunc.make_dp_step(loss_fn, plan)
state = dp_step.init(params, key=dpfunc.secure_key())
optimizer = recipe.optimizer(params.values())
for indices in plan.batches(state):
    grads, state, unreleased = dp_step(params, dpfunc.take(data, indices), state)
    dpfunc.set_grads(params, grads)
    optimizer.step()
accuracy = float(
    (forward(params, public["x"]).argmax(1) == public["y"]).float().mean()
)
epsilon = state.ledger.epsilon(plan.delta).epsilon
