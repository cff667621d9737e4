"""Full fine-tuning of a model that `fully_shard` manages: the step is that of one process with the whole model."""

from __future__ import annotations

import pytest
from sharded_cases import check, expected
from workers import run

CASES = [
    # processes, microbatch size, options
    (2, None, {}),
    (2, 1, {}),
    (2, 2, {"gradient_checkpointing": True}),
    (4, None, {"hsdp": True}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_managed_model_gives_the_same(case):
    """Eight noisy steps with AdamW, of which each process holds parts."""
    size, microbatch_size, options = case
    settings = {"way": "managed", "engine": None, "microbatch_size": microbatch_size, "adam": True, **options}
    found, wanted = run(size, "fsdp_jobs:train_with", settings), expected("full", "loop", adam=True)
    check(found, wanted)
    assert all(sharded >= len(wanted[0]) - 1 and held < 0.65 * wanted[3][1] for _, _, _, (sharded, held) in found)


def test_refusals():
    """Any other engine or ranks would give no gradient, or that of one process: an error on all, nothing is spent."""
    for found, difference, sharded in run(2, "fsdp_jobs:managed_refusals"):
        for case, (errors, step, spent) in found.items():
            kind, text = errors[0]
            assert kind in ("UnsupportedModel", "InvalidArgument"), (case, kind, text)
            assert (step, spent) == (0, 0)
        assert "does not use the trained parameters" in found["unused"][0][0][1]
        assert "does not manage them" in found["ignored"][0][0][1]
        assert difference < 1e-6
        assert sharded


def test_one_layer_is_gathered_at_a_time():
    """Each layer is put together four times, forward and backward for norms and for sums; half of the sums is kept."""
    for gathers, kept, most, every in run(2, "fsdp_jobs:managed_costs"):
        assert gathers == 10  # two layers four times, and what is outside of them twice
        assert kept < 0.6 * every
        assert most < 0.75 * every
