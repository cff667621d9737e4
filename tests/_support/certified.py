"""A small run with a journal and a record, of which certificates are made."""

import torch

from dpfunc import clipping, sampling
from dpfunc.checkpoint import Journal, make_record
from dpfunc.plan import Plan
from dpfunc.rng import secure_key
from dpfunc.step import make_dp_step


def plan_of(sampler=None, **changes):
    values = {"noise_multiplier": 2.0, "num_steps": 4, "delta": 1e-3, "adjacency": "zero_out", **changes}
    return Plan(sampler or sampling.InOrder(100, 100), clipping.Flat(1.5), **values)


def trained(folder, plan=None, key=None, num_records=None, public_bound=False, **options):
    """A run in a folder, and the numbers of records that its batches had. Batches of all are exact, and fast to check."""
    plan = plan or plan_of()
    folder.mkdir(exist_ok=True)
    journal = Journal(folder / "journal.jsonl", plan)
    dp_step = make_dp_step(lambda params, batch: (params["w"] * batch).sum(1), plan, journal=journal, **options)
    params, data = {"w": torch.zeros(2)}, torch.ones(plan.sampler.dataset_size, 2)
    state = dp_step.init(params, key or secure_key(), num_records=num_records)
    sizes = []
    for indices in plan.batches(state):
        sizes.append(len(indices))
        _, state, _ = dp_step(params, data[indices], state)
    record = make_record(dp_step, state, unit="one patient", public_bound=public_bound)
    (folder / "privacy_accounting.json").write_text(record.to_json())
    return record, sizes
