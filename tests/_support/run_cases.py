"""A small run: its data, plan, steps and checkpoints."""

from __future__ import annotations

import json

import torch
from cases import as_batch, linear_loss, params, random_rows

from dpfunc import clipping, sampling
from dpfunc.batches import take
from dpfunc.checkpoint import save
from dpfunc.checkpoint.folder import sha256
from dpfunc.plan import Plan
from dpfunc.rng import secure_key
from dpfunc.step import make_dp_step

DATA = as_batch(random_rows(0, 60))


PLAN = Plan(sampling.Poisson(60, 0.3), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=8, delta=1e-3)


def steps(state, values, optimizer, count, journal=None, loss_fn=linear_loss):
    dp_step = make_dp_step(loss_fn, PLAN, journal=journal)
    for _, indices in zip(range(count), PLAN.batches(state), strict=False):
        grads, state, _ = dp_step(values, take(DATA, indices), state)
        for name, value in values.items():
            value.grad = grads[name]
        optimizer.step()
    return state


def start(ledger=None):
    values = {name: p.clone().requires_grad_() for name, p in params().items()}
    optimizer = torch.optim.Adam(values.values(), lr=0.1)
    return make_dp_step(linear_loss, PLAN).init(values, secure_key(), ledger), values, optimizer


def folders(place):
    """The checkpoints in a directory, and what was begun there; without the file of notes."""
    return sorted(path for path in place.iterdir() if path.is_dir())


def store(folder, state, values, optimizer, **changes):
    options = {"params": values, "state": state, "plan": PLAN, "data": DATA, "optimizer_state": optimizer.state_dict()}
    return save(folder, **{**options, **changes})


def rewrite(path, file, content):
    """Change a file of a checkpoint, and its digest in the list of files."""
    (path / file).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, file: sha256(path / file)}))
