"""A step of several processes is the step of one; those that do not mean the same do not take it, nothing is spent."""

from __future__ import annotations

import pytest
import torch
from sharded_cases import close
from workers import outcomes, run

CASES = [
    # engine, clip rule, dtype, microbatch size, expected batch size, tolerance
    ("vmap", "automatic", torch.float32, None, 2.9, 1e-6),
    ("auto", "layers", torch.float32, 2, 2.9, 1e-6),
    ("ghost", "flat", torch.float64, 1, 9.0, 1e-12),
    ("auto", "automatic", torch.float32, "auto", 20.0, 1e-6),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[3]}")
def test_any_number_of_processes_gives_the_same(case):
    """Eight noisy steps with 1, 2 and 4 processes, where some have no records in some steps."""
    *settings, tolerance = case
    [(expected, ledger, counts)] = run(1, "jobs:train", *settings, False)
    assert (0 in counts) == (settings[4] < 4)  # some draws have no records at all
    for size in (1, 2, 4):
        found = run(size, "jobs:train", *settings)
        for params, its_ledger, _ in found:
            close(params, expected, tolerance)
            assert its_ledger == ledger
            for name, value in found[0][0].items():  # processes of one run agree in every bit
                assert torch.equal(params[name], value)
        dealt = [list(row) for row in zip(*(theirs for _, _, theirs in found), strict=True)]
        assert [sum(row) for row in dealt] == counts
        assert all(max(row) - min(row) <= 1 for row in dealt)
        if size == 4 and settings[4] < 4:
            assert any(0 in row and sum(row) for row in dealt)  # some had nothing to do, and took part


def test_processes_release_the_statistics_of_one():
    """Telemetry and the counts of adaptive clipping are of the records of all; aux is of the own ones."""
    [(expected, _)] = run(1, "jobs:telemetry", 3, False)
    found = run(2, "jobs:telemetry", 3, True)
    for released, counts in found:
        assert released == found[0][0]
        assert all(own == rows for own, rows in counts)
        for (grads, told, bounds), (its_grads, its_told, its_bounds) in zip(released, expected, strict=True):
            assert grads == pytest.approx(its_grads, abs=1e-6)
            assert told["loss"] == pytest.approx(its_told["loss"], abs=1e-4)
            assert told["y"] == pytest.approx(its_told["y"], abs=1e-4)
            assert bounds == pytest.approx(its_bounds, rel=1e-4)
            assert set(bounds) == {"in", "out"}


def test_a_process_whose_records_have_no_gradient_says_so_of_its_own():
    """Each knows its share only."""
    fine, spoilt = run(2, "jobs:lost_share")
    assert fine == [[], [], []]
    assert [len(each) for each in spoilt] == [0, 1, 1]
    assert "records of this process had no finite gradient" in spoilt[1][0]


def step(**trouble):
    return [outcome.value for outcome in outcomes(2, "jobs:one_step_of", trouble)]


def test_an_error_of_one_process_aborts_the_step_on_all():
    """Inside of the loss; the failing process says what happened, the other that it did; then the step can be taken."""
    fine = step()
    assert [row[0] for row in fine] == ["ok", "ok"]
    for (kind, text, at, spent, written, again), expected in zip(
        step(raises=True), [("StepAborted", "Another process failed"), ("ValueError", "the loss of this")], strict=True
    ):
        assert (kind, at, spent) == (expected[0], 0, 0)
        assert expected[1] in text
        assert written in ([1], [])
        assert again[1] == 1
        assert torch.equal(again[0], fine[0][1]["in.bias"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bad_call_of_one_process_aborts_the_step_on_all(rank):
    for trouble, kind in (({"nan": True}, "InvalidArgument"), ({"drop": 1}, "SamplingMismatch")):
        found = step(rank=rank, **trouble)
        assert [row[0] for row in found] == [kind if r == rank else "StepAborted" for r in range(2)]
        assert f"Process [{rank}]" in found[1 - rank][1]
        assert all(row[2:5] == (0, 0, []) for row in found)


def test_a_journal_that_cannot_be_written_releases_nothing():
    found = step(rank=0, journal="full")
    assert [row[0] for row in found] == ["OSError", "StepAborted"]
    assert all(row[3] == 0 for row in found)


@pytest.mark.parametrize("moment", ["before", "inside"])
def test_a_killed_process_is_an_error_of_the_others(moment):
    alive, dead = outcomes(2, "jobs:one_step_of", {"killed": moment})
    assert dead.died
    assert (alive.value or [alive.error])[0] in ("RuntimeError", "DistBackendError")


def test_a_stalled_process_is_an_error_of_the_others(tmp_path):
    alive, _ = outcomes(2, "jobs:one_step_of", {"stalls": f"{tmp_path}/given up"})
    assert (alive.value or [alive.error])[0] in ("RuntimeError", "DistBackendError")
    assert "imed out" in (alive.value[1] if alive.value else alive.message)


def test_replicas_draw_dropout_of_their_own():
    """Each process, each step and each record; and again the same when it is repeated."""
    found = run(2, "jobs:masks")
    losses = [loss for steps in found for rows in steps for loss in rows]
    assert len(set(losses)) > len(losses) / 2  # sums of 64 masks: some are equal by chance
    first, second = found
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert first[0] != first[1]
    assert run(2, "jobs:masks") == found


def test_a_group_that_waits_for_good_is_refused():
    for kind, said in run(2, "jobs:endless"):
        assert kind == "InvalidArgument"
        assert "Expected a process group with a timeout of at most 1:00:00, got 2:00:00" in said


# Agreement


BAD_DUMMY = {"x": torch.zeros(1, 6), "y": torch.zeros(1)}
DISAGREEMENTS = {
    # what is different on one process, the error of all, words of it
    "key": ({"seed": 4}, "RankMismatch", "about run", "shared_key"),
    "noise": ({"noise_multiplier": 1.0000001}, "RankMismatch", "about run", "Plan, key, ledger"),
    "reduction": ({"reduction": "sum"}, "RankMismatch", "about run", "settings differ"),
    "engine": ({"engine": "vmap"}, "RankMismatch", "about run", "engine"),
    "torch": ({"versions": {"torch": "2.12.1"}}, "RankMismatch", "about run", "versions of dpfunc or torch"),
    "journal": ({"journal": "none"}, "RankMismatch", "about run", "all pass a journal"),
    "step": ({"step": 1}, "RankMismatch", "about step", "All processes take every step"),
    "one ulp": ({"ulp": True}, "RankMismatch", "about params", "at least one bit"),
    "code of the loss": ({"other code": True}, "RankMismatch", "about prepared", "Code of the loss differs"),
    "dummy that no process needs": (
        {"dummy": BAD_DUMMY},
        "InvalidArgument",
        "Expected dummy to be a batch of one row",
        "",
    ),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_a_disagreement_is_an_error_of_all(name):
    trouble, expected, what, advice = DISAGREEMENTS[name]
    found = [outcome.value for outcome in outcomes(2, "jobs:one_step_of", trouble)]
    for kind, text, _, spent, written, _ in found:
        assert kind == expected
        assert what in text
        assert advice in text
        assert "Nothing was spent" in text or kind != "RankMismatch"
        assert (spent, written) == (0, [])


@pytest.mark.parametrize("whole", [True, False])
def test_a_sum_that_is_not_finite_is_an_error_of_all(whole):
    own, other = (outcome.value for outcome in outcomes(2, "jobs:spoiled_sums", whole))
    assert f"got NaN or inf in {'v' if whole else 'w'}. A sample" in own
    assert f"got NaN or inf in {'v' if whole else 'the part of another process'}. A sample" in other


def test_parameters_on_a_part_of_the_processes_are_refused():
    """Each part would release a sum of its own with the same noise: the difference would have none."""
    for kind, text in run(2, "jobs:part_of_the_mesh"):
        assert kind == "InvalidArgument"
        assert "release sums of their own with the same noise" in text


def test_groups_of_one_job_do_not_share_a_key():
    """Their releases would have the same noise: the difference would have none. With keys of their own they go on."""
    (first, _, own), (kind, text, its_own) = run(2, "jobs:groups_with_one_key")
    assert (first, kind) == ("ok", "StateReused")
    assert "a group whose first is process 0 takes steps, too" in text
    assert own == its_own == ("ok", "")
