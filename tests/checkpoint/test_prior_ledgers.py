"""Files of earlier runs become a ledger; what cannot be read is never free."""

from __future__ import annotations

import json

import pytest
import torch

from dpfunc import clipping, sampling
from dpfunc.checkpoint.journal import Journal
from dpfunc.checkpoint.prior_ledgers import read_spent
from dpfunc.errors import InvalidArgument, LedgerConflict
from dpfunc.plan import Plan
from dpfunc.rng import secure_key
from dpfunc.step import make_dp_step


def plan(adjacency="add_remove"):
    return Plan(
        sampling.Poisson(100, 0.1), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=5, delta=1e-3,
        adjacency=adjacency,
    )  # fmt: skip


def journal(path, plan):
    """The journal of a run of one step."""
    dp_step = make_dp_step(
        lambda params, batch: (params["w"] * batch).sum(1), plan, journal=Journal(path, plan), engine="loop"
    )
    params = {"w": torch.zeros(2)}
    state = dp_step.init(params, secure_key())
    dp_step(params, torch.ones(100, 2)[plan.draw(state, 0)], state)
    return path


def test_a_killed_run_without_checkpoints_is_counted(tmp_path):
    path = journal(tmp_path / "a.jsonl", plan())
    assert read_spent([path]) == plan().ledger(1)


def test_all_kinds_of_files_together(tmp_path):
    ledger = plan().ledger(3)
    (tmp_path / "b.json").write_text(ledger.to_json())
    (tmp_path / "c.json").write_text(json.dumps({"epsilon": 1.0, "ledger": json.loads(ledger.to_json())}))
    names = [journal(tmp_path / "a.jsonl", plan()), tmp_path / "b.json", str(tmp_path / "c.json")]
    assert read_spent(names).num_steps == 7
    assert read_spent(()) is read_spent(None) is None


def test_other_neighbours_do_not_add_up(tmp_path):
    names = [journal(tmp_path / f"{kind}.jsonl", plan(kind)) for kind in ("add_remove", "zero_out")]
    with pytest.raises(LedgerConflict):
        read_spent(names)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", None, "which is no file"),
        ("x.jsonl", "", "which is empty"),
        ("x.jsonl", "{}\n", "cannot be read"),
        ("x.json", "{", "cannot be read"),
        ("x.json", "[]", "cannot be read"),
        ("x.json", "{}", "cannot be read"),
        ("x.json", '{"ledger": {}, "ledger": {}}', "the name 'ledger' occurs twice"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidArgument, match=message):
        read_spent([tmp_path / name])
