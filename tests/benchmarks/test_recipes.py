"""The benchmark of the recipes: its closed form is the clipped sum of the library, its table is the committed result."""

from __future__ import annotations

import pytest
import torch

import dpfunc
from benchmarks.recipes import closed
from benchmarks.recipes.__main__ import RESULT, accuracy, network, train_readme
from benchmarks.recipes.data import Part, chosen_on, split
from benchmarks.results import rows_of
from dpfunc.recipes import recipe


@pytest.mark.parametrize("strategy", ["head", "full"])
def test_the_closed_form_is_the_clipped_sum(strategy):
    source = torch.Generator().manual_seed(1)
    x, y = torch.randn(60, 7, generator=source), torch.randint(3, (60,), generator=source)
    data = split("drawn", "tabular", x, y)
    module = network(strategy, data, seed=2)
    forward, params = dpfunc.functionalize(module)

    def loss_fn(params, batch):
        return torch.nn.functional.cross_entropy(forward(params, batch[0]), batch[1], reduction="none")

    clipped, _ = dpfunc.clipped_grad(loss_fn, params, (x, y), dpfunc.clipping.Automatic())
    for ours, theirs in zip(closed.summed(module, x, y), clipped.sums.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_loop_of_the_readme_is_run_word_for_word():
    source = torch.Generator().manual_seed(1)
    x = torch.randn(400, 7, generator=source)
    part = Part(x, (x[:, 0] > 0).long())
    start = network("full", split("drawn", "tabular", x, part.y), seed=2)
    before = accuracy(start, part, 1.0)
    assert accuracy(train_readme(start, part, 1.0), part, 1.0) > 0.8 > before
    assert accuracy(start, part, 1.0) == before  # a copy is trained


def test_sets_that_were_kept_apart_are_of_every_kind():
    results = rows_of(RESULT)
    assert all(result["chosen_on"] == chosen_on(result["data"], result["strategy"]) for result in results)
    assert {result["kind"] for result in results if not result["chosen_on"]} == {"text", "images", "tabular"}


@pytest.mark.parametrize("result", rows_of(RESULT), ids=lambda result: f"{result['data']} {result['strategy']}")
def test_results_have_the_recipe_of_now(result):
    """A rule that is changed must be measured again."""
    classes = {"num_classes": result["classes"]} if result["strategy"] == "head" else {}
    found = recipe(
        result["strategy"], dataset_size=result["n"], num_parameters=result["parameters"], epsilon=result["epsilon"],
        delta=result["delta"], **classes,
    )  # fmt: skip
    assert result["recipe_settings"]["lr"] == pytest.approx(found.learning_rate)
    assert result["recipe_settings"]["expected_batch_size"] == found.expected_batch_size
