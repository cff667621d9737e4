"""Each step by two: `torchrun --nproc-per-node 2 two_processes.py`."""

import json
from pathlib import Path

import torch
from torch.nn import functional as F

import dpfunc
from dpfunc import clipping, distributed

ranks = distributed.from_environment()
torch.manual_seed(0)  # the same data and starting point everywhere
x = torch.randn(2000, 8)
data = {"x": x, "y": (x[:, :2].sum(1) > 0).long()}
forward, params = dpfunc.functionalize(torch.nn.Linear(8, 2))


def loss_fn(params, batch):
    return F.cross_entropy(
        forward(params, batch["x"]), batch["y"], reduction="none"
    )


plan = dpfunc.Plan.for_budget(
    epsilon=3.0,
    delta=1e-5,
    dataset_size=2000,
    expected_batch_size=400,
    num_steps=20,
    clip=clipping.Automatic(),
)
dp_step = dpfunc.make_dp_step(loss_fn, plan, ranks=ranks)
state = dp_step.init(params, distributed.shared_key(ranks))
optimizer = torch.optim.Adam(params.values(), lr=0.05)
rows = 0
for indices in plan.batches(state, ranks):
    rows += len(indices)
    grads, state, unreleased = dp_step(params, dpfunc.take(data, indices), state)
    dpfunc.set_grads(params, grads)
    optimizer.step()
accuracy = float((forward(params, data["x"]).argmax(1) == data["y"]).float().mean())
weights = {name: p.tolist() for name, p in params.items()}
epsilon = state.ledger.epsilon(plan.delta).epsilon
found = {"rows": rows, "accuracy": accuracy, "epsilon": epsilon, "weights": weights}
Path(f"rank{ranks.rank}.json").write_text(json.dumps(found))
