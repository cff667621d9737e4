"""A loss that communicates mixes the records of different ranks: refused by every engine. And DDP is taken off."""

from __future__ import annotations

import pytest
import torch
from workers import run

WRONG = ("scaled_by_all", "scaled_in_place", "gathered", "autograd_function", "trained_by_all")


@pytest.mark.parametrize("engine", ["auto", "vmap", "ghost", "loop"])
@pytest.mark.parametrize("loss", WRONG)
def test_a_loss_that_communicates_is_refused(loss, engine):
    for kind, message in run(2, "collective_jobs:message", loss, engine):
        assert kind == "UnsupportedModel", message
        assert "communicates between ranks" in message
        assert "called in collective_jobs, line" in message


@pytest.mark.parametrize(("loss", "word"), [("context_parallel", "positions"), ("pipeline", "layers")])
def test_records_in_parts_are_refused(loss, word):
    for kind, message in run(2, "collective_jobs:message", loss, "auto"):
        assert kind == "UnsupportedModel"
        assert f"splits the {word}" in message


def test_what_does_not_depend_on_samples_may_be_gathered_under_vmap():
    """As FSDP2 gathers frozen weights."""
    for kind, message in run(2, "collective_jobs:message", "sums_weights", "vmap"):
        assert kind == "losses", message


def test_distributed_data_parallel_is_taken_off():
    for same_names, off, kind, refused in run(2, "collective_jobs:data_parallel_module"):
        assert same_names
        assert off < 1e-6
        assert kind == "Sequential"
        assert len(refused) == 3
        assert all("Take its .module" in message for message in refused)


@pytest.mark.parametrize("independent", [True, False])
@pytest.mark.parametrize("engine", ["auto", "ghost"])
def test_a_use_that_comes_late_is_right(engine, independent):
    """In a loss that reads numbers of its batch, on processes whose batches differ."""
    for found, expected in run(2, "collective_jobs:late_use", engine, independent):
        torch.testing.assert_close(found, expected)
