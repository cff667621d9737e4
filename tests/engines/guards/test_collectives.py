"""A loss that communicates mixes the records of different ranks: refused by every engine. And DDP is taken off."""

from __future__ import annotations

import pytest
from workers import run

WRONG = ("scaled_by_all", "scaled_in_place", "gathered", "autograd_function")


@pytest.mark.parametrize("engine", ["vmap", "bookkeeping", "ghost", "loop", "auto"])
@pytest.mark.parametrize("loss", WRONG)
def test_a_loss_that_communicates_is_refused(loss, engine):
    for kind, message in run(2, "collective_jobs:message", loss, engine):
        assert kind == "UnsupportedModel", message
        assert "communicates between ranks" in message


def test_the_line_that_communicates_is_named():
    for _, message in run(2, "collective_jobs:message", "autograd_function", "bookkeeping"):
        assert "called in collective_jobs, line" in message


@pytest.mark.parametrize(("loss", "word"), [("context_parallel", "positions"), ("pipeline", "layers")])
def test_records_in_parts_are_refused(loss, word):
    for kind, message in run(2, "collective_jobs:message", loss, "bookkeeping"):
        assert kind == "UnsupportedModel"
        assert f"splits the {word}" in message


def test_without_the_guard_vmap_is_silently_wrong():
    """The rank that is first has the losses of a rank alone; the true ones are elsewhere."""
    from_alone, from_truth = run(2, "collective_jobs:silently_wrong")[0]
    assert from_alone < 1e-6
    assert from_truth > 1e-3


def test_a_compiled_loss_that_communicates_is_refused():
    for kind, message in run(2, "collective_jobs:compiled_message"):
        assert kind != "sums"
        assert "communicates between ranks" in message


def test_what_does_not_depend_on_samples_may_be_gathered_under_vmap():
    """As FSDP2 gathers frozen weights."""
    for kind, message in run(2, "collective_jobs:message", "sums_weights", "vmap"):
        assert kind == "losses", message


@pytest.mark.parametrize("engine", ["vmap", "bookkeeping", "auto"])
def test_a_loss_that_does_not_communicate_is_as_ever(engine):
    assert max(run(2, "collective_jobs:ordinary", engine, False)) < 1e-6


def test_distributed_data_parallel_is_taken_off():
    for same_names, off, kind, refused in run(2, "collective_jobs:data_parallel_module"):
        assert same_names
        assert off < 1e-6
        assert kind == "Sequential"
        assert len(refused) == 3
        assert all("Take its .module" in message for message in refused)


@pytest.mark.parametrize("independent", [True, False])
@pytest.mark.parametrize("engine", ["bookkeeping", "ghost"])
def test_a_use_that_comes_late_is_right_or_refused(engine, independent):
    """No knowledge from a first batch is used; a loss that reads numbers of its batch has a doubt, on all processes."""
    assert run(2, "collective_jobs:late_use", engine, independent, "audit") == [("norms", "")] * 2
    for kind, message in run(2, "collective_jobs:late_use", engine, independent, "refuse"):
        assert kind == "UnsupportedModel"
        assert "of numbers of the batch" in message
