"""Users as the unit: a row of a batch is a person with up to four records."""

import functools

import torch
from torch.nn import functional as F

import dpfunc
from dpfunc.sampling.users import group_by_person, mean_over_texts

USERS = 1500
names = [f"user {i}" for i in range(USERS)] + [
    f"user {int(i)}" for i in torch.randint(USERS // 3, (4000,))
]
x = torch.randn(len(names), 10)
records = {"x": x, "y": (x[:, :2].sum(1) > 0).long()}
people = group_by_person(names, max_texts=4, key=dpfunc.secure_key())
forward, params = dpfunc.functionalize(dpfunc.recipes.Head(10, 2))


def loss_of_records(forward, params, batch):
    return F.cross_entropy(
        forward(params, batch["x"]), batch["y"], reduction="none"
    )


loss_fn = functools.partial(mean_over_texts(loss_of_records), forward)
n, d = len(people), sum(p.numel() for p in params.values())
recipe = dpfunc.recipes.recipe(
    "head", dataset_size=n, epsilon=3.0, delta=1e-5, num_classes=2, num_parameters=d
)
plan = recipe.plan()
dp_step = dpfunc.make_dp_step(loss_fn, plan)
state = dp_step.init(params, key=dpfunc.secure_key())
optimizer = recipe.optimizer(params.values())
for persons in plan.batches(state):
    grads, state, unreleased = dp_step(
        params, people.batch(records, persons), state
    )
    dpfunc.set_grads(params, grads)
    optimizer.step()
accuracy = float(
    (forward(params, records["x"]).argmax(1) == records["y"]).float().mean()
)
epsilon = state.ledger.epsilon(plan.delta).epsilon
