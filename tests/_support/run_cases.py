"""A small run: its data, plan, steps and checkpoints."""

from __future__ import annotations

import json

import torch
from cases import as_batch, linear_loss, params, random_rows

from dpfunc import Journal, Plan, clipping, load, make_dp_step, sampling, save, secure_key, take
from dpfunc._utils.files import sha256
from dpfunc.checkpoint import journal_ledger

DATA = as_batch(random_rows(0, 60))
PLAN = Plan(sampling.Poisson(60, 0.3), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=8, delta=1e-3)


def steps(state, values, optimizer, count, journal=None, loss_fn=linear_loss, plan=PLAN):
    dp_step = make_dp_step(loss_fn, plan, journal=journal, engine="loop")
    for _, indices in zip(range(count), plan.batches(state), strict=False):
        grads, state, _ = dp_step(values, take(DATA, indices), state)
        for name, value in values.items():
            value.grad = grads[name]
        optimizer.step()
    return state


def start(ledger=None, plan=PLAN):
    values = {name: p.clone().requires_grad_() for name, p in params().items()}
    optimizer = torch.optim.Adam(values.values(), lr=0.1)
    return make_dp_step(linear_loss, plan).init(values, secure_key(), ledger), values, optimizer


class Run:
    """A run in a folder: its steps, its journal, its checkpoints.

    Args:
        folder: of all files. counts: its ledger has the steps of the journal that is there. journal: name of the file.
    """

    def __init__(self, folder, counts=False, journal="journal.jsonl", ledger=None, plan=PLAN):
        self.folder, self.path, self.plan = folder, folder / journal, plan
        ledger = journal_ledger(self.path) if counts else ledger
        self.state, self.values, self.optimizer = start(ledger, plan)

    def step(self, count=1, journal=True, state=None):
        """Take steps, with a journal of its own unless it is given one, or None."""
        journal, state = Journal(self.path, self.plan) if journal is True else journal, state or self.state
        self.state = steps(state, self.values, self.optimizer, count, journal, plan=self.plan)
        return self

    def save(self, **changes):
        options = {"journal": self.path, "state": self.state, "values": self.values, "optimizer": self.optimizer}
        return store(self.folder / "c", **{**options, "plan": self.plan, **changes})

    def load(self, **changes):
        options = {"plan": self.plan, "params": self.values, "data": DATA, "journal": self.path}
        return load(self.folder / "c", **{**options, **changes})

    def resume(self, **changes):
        """Load, and go on from there with the parameters, the optimizer and the state that were saved."""
        saved = self.load(**changes)
        with torch.no_grad():
            for name, p in self.values.items():
                p.copy_(saved.params[name])
        self.optimizer.load_state_dict(dict(saved.optimizer_state))
        self.state = saved.state
        return self

    def copies(self):
        return {name: p.detach().clone() for name, p in self.values.items()}

    @property
    def ledger(self):
        return self.state.ledger

    @property
    def counted(self):
        return journal_ledger(self.path)


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
