"""What worker processes run in test_object_collectives.py: runs on batches of a loader, and data sets that differ."""

from __future__ import annotations

import torch
from jobs import NUM_RECORDS, data, loss_fn, params, plan
from torch.utils.data import Subset, default_collate
from workers import caught

from dpfunc import distributed, sampling
from dpfunc.rng import insecure_key
from dpfunc.state import replay
from dpfunc.step import make_dp_step


class Records:
    """The records of jobs.py, one by one, with some noise of torch's generator in a column that no loss reads."""

    def __len__(self):
        return NUM_RECORDS

    def __getitem__(self, index):
        record = {name: value[index] for name, value in data().items()}
        return {**record, "number": index, "noise": torch.rand(())}


def collate(records):
    batch = default_collate(records)
    return {name: batch[name] for name in ("x", "y")}


def train(use_ranks=True):
    """A run of some noisy steps: parameters, ledger, and the numbers of the records of this process in each step."""
    ranks = distributed.data_parallel() if use_ranks else None
    the_plan = plan(sampler=sampling.Poisson(NUM_RECORDS, 2.9 / NUM_RECORDS))
    dp_step = make_dp_step(loss_fn, the_plan, engine="auto", ranks=ranks)
    current = params()
    state = replay(dp_step.init(current, insecure_key(7)))
    numbers = [b["number"].tolist() for b in the_plan.loader(Records(), state, ranks)]
    noise = [b["noise"].tolist() for b in the_plan.loader(Records(), state, ranks)]
    for batch in the_plan.loader(Records(), state, ranks, collate_fn=collate):
        grads, state, _ = dp_step(current, batch, state)
        current = {name: p - 0.3 * grads[name] for name, p in current.items()}
    return current, state.ledger.to_json(), numbers, noise


class Unreadable(Records):
    def __getitem__(self, index):
        raise OSError("the file of this record is gone")


def _said(dataset, ranks, **settings):
    state = replay(make_dp_step(loss_fn, plan(), ranks=ranks).init(params(), insecure_key(7)))
    return caught(plan().loader, dataset, state, ranks, **settings)


def data_sets():
    """What is said of data sets that are another one on the second process."""
    ranks = distributed.data_parallel()
    first = ranks.rank == 0
    usual = Records()
    swapped = [*range(10), 11, 10, *range(12, NUM_RECORDS)]
    return {
        "same": _said(usual, ranks),
        "reversed": _said(usual if first else Subset(usual, range(NUM_RECORDS)[::-1]), ranks),
        "two swapped": _said(usual if first else Subset(usual, swapped), ranks),
        "other preprocessing": _said(usual, ranks, collate_fn=default_collate if first else collate),
        "shorter": _said(usual if first else Subset(usual, range(NUM_RECORDS - 1)), ranks),
        "unreadable": _said(usual if first else Unreadable(), ranks),
        "names": _said(Unreadable(), ranks, data_name="mails of May"),
        "other names": _said(usual, ranks, data_name=f"mails of {ranks.rank}"),
    }
