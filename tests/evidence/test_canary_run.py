"""Audits of a loop as it is: the loop sees its own records only, and what is planted is found or not."""

from __future__ import annotations

import pytest
import torch
from evidence_scripts import IN_DATA, LOOP, NO_NOISE, PLAIN, written

import dpfunc
from dpfunc.errors import InvalidArgument
from dpfunc.evidence._canary_run import Planted, audit_loop, read_script


def audited(path, seed, count=300, steps=50, score="sum", step=None):
    own, key = read_script(path), dpfunc.insecure_key(seed)
    planted = Planted(key, count, own.canaries)
    return audit_loop(
        own.dp_step, own.init, step or own.step, own.data, planted, key=key, steps=steps, score=score
    )  # fmt: skip


@pytest.mark.parametrize(("form", "space"), [(LOOP, ""), (PLAIN, IN_DATA)], ids=["gradient", "input"])
def test_an_honest_loop_is_not_refuted_and_one_without_noise_is(tmp_path, form, space):
    found, steps, plan = audited(written(tmp_path, form + space), len(space))
    assert (found.exceeds, steps, found.num_canaries) == (False, 5, 300)
    assert found.claim == pytest.approx(plan.ledger(5).epsilon(plan.delta).epsilon)
    found, _, _ = audited(written(tmp_path, form + space + NO_NOISE), 50 + len(space))
    assert found.exceeds, found


def test_honest_loops_of_many_seeds(tmp_path):
    """Of 20 honest loops, at claims that hold, at most 3 are refuted at 95 %."""
    path = written(tmp_path, PLAIN)
    assert sum(bool(audited(path, 100 + seed, 100)[0].exceeds) for seed in range(20)) <= 3


def test_the_loop_sees_its_own_records(tmp_path):
    """As many as its own draw, and never a canary."""
    seen = []
    own = read_script(written(tmp_path, LOOP))

    def looking(dp_step, data, carry):
        indices = dp_step.plan.draw(carry[1], carry[1].step)
        seen.append(indices)
        assert len(data) == 60
        return own.step(dp_step, data, carry)

    _, _, plan = audited(tmp_path / "loop.py", 60, step=looking)
    assert int(torch.cat(seen).max()) < 60
    assert plan.sampler.dataset_size == 360


def test_records_that_are_out_are_never_drawn(tmp_path):
    own = read_script(written(tmp_path, LOOP + IN_DATA))
    key = dpfunc.insecure_key(61)
    planted, seen = Planted(key, 0, own.canaries), []

    def looking(dp_step, data, carry):
        seen.append(dp_step.plan.draw(carry[1], carry[1].step))
        return own.step(dp_step, data, carry)

    audit_loop(own.dp_step, own.init, looking, own.data, planted, key=key, steps=5)
    drawn = torch.cat(seen).unique() - 60
    assert bool(planted.present[drawn[drawn >= 0]].all())


def test_bad_loops(tmp_path):
    own = read_script(written(tmp_path, LOOP))
    with pytest.raises(InvalidArgument, match="took no step"):
        audited(tmp_path / "loop.py", 62, step=lambda *given: None)
    with pytest.raises(InvalidArgument, match="Expected a state"):
        audited(tmp_path / "loop.py", 63, step=lambda dp_step, data, carry: dp_step(carry[0], data))
    key = dpfunc.insecure_key(64)
    planted = Planted(key, 0, torch.zeros(4, 500))
    with pytest.raises(InvalidArgument, match="dataset_size"):
        audit_loop(own.dp_step, own.init, own.step, own.data[:9], planted, key=key, steps=5)
