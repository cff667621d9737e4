"""`torch.set_default_device`: what dpfunc makes for itself names its device, so that a run is the same on any default.

The default here is a device without numbers: what is made there by mistake cannot be read. On a GPU, a generator of the
CPU that meets a tensor made on the default device is an error.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from devices import GPU
from torch import nn
from torch.nn import functional as F

import dpfunc
from dpfunc import Journal, Plan, clipping, engines, sampling, take
from dpfunc.engines.audit import rounded_params
from dpfunc.rng import insecure_key
from dpfunc.state import allow_repeat

IDS, LABELS = torch.randint(11, (12, 6)), torch.randint(3, (12,))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.wide, self.drop = nn.Embedding(11, 16), nn.Linear(16, 16), nn.Dropout(0.3)
        self.conv, self.lstm, self.head = nn.Conv1d(16, 4, 3), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, ids):
        hidden = self.conv(self.drop(self.wide(self.table(ids))).transpose(1, 2)).transpose(1, 2)
        return self.head(F.rrelu(self.lstm(hidden)[0].mean(1), training=True))


def released(default, engine, lora, folder):
    """Three steps with a loader and a journal; a LoRA is made on the default device, too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net()
    with nullcontext() if default is None else torch.device(default):
        if lora:
            adapter = dpfunc.lora.attach(model, insecure_key(0), targets="wide|head", rank=2, alpha=2.0)
            forward, params = adapter.forward, adapter.params
        else:
            forward, params = dpfunc.functionalize(model)
        rule = clipping.Flat(1.0, groups=clipping.PerLayer())
        plan = Plan(sampling.Poisson(12, 0.5), rule, noise_multiplier=1.0, num_steps=3, delta=1e-3)
        loss_fn = lambda p, batch: F.cross_entropy(forward(p, batch[0]), batch[1], reduction="none")
        step = dpfunc.make_dp_step(loss_fn, plan, engine=engine(), journal=Journal(folder / f"{default}", plan))
        state, found = allow_repeat(step.init(params, key=insecure_key(3))), []
        loader = plan.loader(torch.utils.data.TensorDataset(IDS, LABELS), state)
        # torch's own loader reads a number of the default device
        for batch in (take((IDS, LABELS), rows) for rows in plan.batches(state)) if default == "meta" else loader:
            grads, state, _ = step(params, batch, state)
            found.append(grads)
            with torch.no_grad():
                for name, param in params.items():
                    param -= 0.1 * grads[name]
    return found


@pytest.mark.parametrize("lora", [False, True], ids=["all", "LoRA"])
@pytest.mark.parametrize("engine", ["auto", "ghost", "loop"])
@pytest.mark.parametrize("default", ["meta", *GPU])
def test_a_run_is_the_same_on_any_default_device(default, engine, lora, tmp_path):
    plain, other = (released(each, getattr(engines, engine), lora, tmp_path) for each in (None, default))
    assert len(plain) == len(other) == 3
    for one, two in zip(plain, other, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_what_an_audit_draws_is_of_the_cpu():
    params = {"w": torch.ones(4)}
    with torch.device("meta"):
        moved = rounded_params(params, 8, 0)
    assert torch.equal(moved["w"], rounded_params(params, 8, 0)["w"])
