"""Processes that do not mean the same thing do not take a step: all raise, nothing is spent."""

from __future__ import annotations

import pytest
import torch
from workers import outcomes, run

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
