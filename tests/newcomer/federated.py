"""Federated rounds: a client is the unit, and its update is clipped."""

import torch
from torch.func import functional_call, grad
from torch.nn import functional as F

import dpfunc
from dpfunc.clipping import Flat
from dpfunc.sampling import Poisson

x = torch.randn(600, 20, 5)  # 20 records of each of 600 clients, on its device
y = (x[..., 0] > x[..., 1]).long()
model = torch.nn.Linear(5, 2)
_, params = dpfunc.functionalize(model)


def trained_by(client):  # what a client sends: how its own training moves the model
    own = {name: p.clone() for name, p in params.items()}
    for _ in range(5):
        slope = grad(
            lambda own: F.cross_entropy(
                functional_call(model, own, x[client]), y[client]
            )
        )(own)
        own = {name: p - 0.3 * slope[name] for name, p in own.items()}
    return {name: own[name] - params[name] for name in params}


# its gradient for a client is minus the client's update
def loss_fn(params, updates):
    return -sum((p * updates[name]).flatten(1).sum(1) for name, p in params.items())


ledger, costs = None, []
for _ in range(3):
    plan = dpfunc.Plan(
        Poisson(len(x), 0.1),
        Flat(1.0),
        noise_multiplier=1.5,
        num_steps=5,
        delta=1e-4,
        spent=ledger,
    )
    dp_step = dpfunc.make_dp_step(loss_fn, plan)
    # begins with what was spent
    state = dp_step.init(params, key=dpfunc.secure_key())
    for clients in plan.batches(state):
        sent = [trained_by(client) for client in clients.tolist()] or [
            {name: 0 * p for name, p in params.items()}
        ]
        updates = {
            name: torch.stack([one[name] for one in sent])[: len(clients)]
            for name in params
        }
        grads, state, unreleased = dp_step(params, updates, state)
        params = {name: p - grads[name] for name, p in params.items()}
    ledger = state.ledger
    costs.append(ledger.epsilon(plan.delta).epsilon)
