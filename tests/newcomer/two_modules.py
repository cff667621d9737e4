"""A variational autoencoder, and a criterion that has a parameter: one loss."""

import torch
from torch import nn

import dpfunc


class Likelihood(nn.Module):  # a criterion that learns the deviation of errors
    def __init__(self):
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(1))

    def forward(self, error):
        return (0.5 * (error / self.log_std.exp()) ** 2 + self.log_std).mean(1)


# two numbers behind eight
x = torch.randn(3000, 2) @ torch.randn(2, 8) / 2 + 0.1 * torch.randn(3000, 8)
modules = {
    "encoder": nn.Linear(8, 4),
    "decoder": nn.Linear(2, 8),
    "likelihood": Likelihood(),
}
# names: encoder.weight, ..., decoder.bias, likelihood.log_std
forward, params = dpfunc.functionalize(modules)


def loss_fn(params, x):
    mean, log_var = forward(params, "encoder", x).chunk(2, dim=1)
    divergence = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).mean(1)
    found = forward(
        params, "decoder", mean + torch.randn_like(mean) * (log_var / 2).exp()
    )
    return forward(params, "likelihood", found - x) + 0.25 * divergence


plan = dpfunc.Plan.for_budget(
    epsilon=8.0,
    delta=1e-5,
    dataset_size=3000,
    expected_batch_size=300,
    num_steps=60,
    clip=dpfunc.clipping.Automatic(),
)
dp_step = dpfunc.make_dp_step(loss_fn, plan)
state = dp_step.init(params, key=dpfunc.secure_key())
optimizer = torch.optim.Adam(params.values(), lr=0.03)
for indices in plan.batches(state):
    grads, state, unreleased = dp_step(params, dpfunc.take(x, indices), state)
    dpfunc.set_grads(params, grads)
    optimizer.step()
trained = dpfunc.with_params(modules, params)  # copies of all three
epsilon = state.ledger.epsilon(plan.delta).epsilon
