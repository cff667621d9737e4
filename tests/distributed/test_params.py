"""Trained parameters of which each process holds a part: the step is that of one process, and so is its noise."""

from __future__ import annotations

import pytest
import torch
from sharded_cases import check, close, expected
from workers import run

CASES = [("sharded lora", "vmap", 2), ("full", "auto", None), ("full", "ghost", 2)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[:2]))
def test_parts_give_the_same(case):
    """Eight noisy steps of two processes; the optimizer holds parts only."""
    way, engine, microbatch_size = case
    settings = {"way": way, "engine": engine, "microbatch_size": microbatch_size, "adam": True}
    found, wanted = run(2, "fsdp_jobs:train_with", settings), expected(way, "loop", adam=True)
    check(found, wanted)
    whole = wanted[3][1]
    assert sum(held for _, _, _, (_, held) in found) < 1.2 * whole  # a few small ones are held by both
    assert all(sharded > len(wanted[0]) // 2 and held < 0.65 * whole for _, _, _, (sharded, held) in found)


def test_replicas_of_parts():
    """HSDP: each half of the parameters is held by two processes, and stays the same on both in every bit."""
    check(run(4, "fsdp_jobs:train_with", {"way": "full", "engine": "auto", "hsdp": True}), expected("full", "loop"))


@pytest.mark.parametrize(("size", "hsdp"), [(2, False), (4, False), (4, True)])
def test_each_process_draws_the_noise_of_its_part(size, hsdp):
    """Rows that do not divide, fewer rows than processes, several tiles: slices of the noise of one process."""
    found = run(size, "fsdp_jobs:noise_of_parts", hsdp)
    for shape in found[0]:
        parts = [row[shape] for row in found]
        assert all(equal for _, equal, _ in parts)
        parts_of = 2 if hsdp else size
        assert sum(part[0] for part, _, _ in parts) == shape[0] * (size // parts_of)
        if hsdp:  # replicas
            assert torch.equal(parts[0][2], parts[2][2])
            assert torch.equal(parts[1][2], parts[3][2])


def test_an_error_of_one_process():
    """Inside of the loss; others are told, nothing is spent, and the step can be taken then."""
    found = run(2, "fsdp_jobs:an_error_of_one_with_parts")
    assert [row[0][0][0] for row in found] == ["StepAborted", "ValueError"]
    assert [row[0][1][0] for row in found] == ["ok", "ok"]
    assert all(row[1:3] == (1, 1) for row in found)
    close(found[0][3], found[1][3], 0)


def test_replicas_that_differ_are_found():
    """One entry of one part, in one of its two replicas."""
    for [(kind, text)], step, spent in run(4, "fsdp_jobs:one_replica_differs"):
        assert (kind, step, spent) == ("RankMismatch", 0, 0)
        assert "differ in at least one bit" in text
