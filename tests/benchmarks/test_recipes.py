"""The benchmark of the recipes: its closed form is the clipped sum of the library, its table is the committed result."""

from __future__ import annotations

import pytest
import torch

import dpfunc
from benchmarks.recipes import __main__ as benchmark
from benchmarks.recipes import closed
from benchmarks.recipes.data import SETS, chosen_on
from benchmarks.results import rows_of
from dpfunc.recipes import Head, recipe, unit_rows

RESULTS = rows_of(benchmark.RESULT)


def drawn():
    source = torch.Generator().manual_seed(1)
    return torch.randn(60, 7, generator=source), torch.randint(3, (60,), generator=source)


def clipped_sums(module, x, y, clip):
    forward, params = dpfunc.functionalize(module)

    def loss_fn(params, batch):
        return torch.nn.functional.cross_entropy(forward(params, batch[0]), batch[1], reduction="none")

    return dpfunc.clipped.clipped_grad(loss_fn, params, (x, y), clip)[0].sums


def test_the_closed_form_of_heads_is_the_clipped_sum():
    x, y = drawn()
    models = [Head(7, 3) for _ in range(2)]
    bounds = torch.tensor([0.3, 1.0])
    for model in models:
        torch.nn.init.normal_(model.weight)
    found = closed.head_sums(torch.stack([model.weight.detach() for model in models]), unit_rows(x), y, bounds)
    for model, bound, ours in zip(models, bounds.tolist(), found, strict=True):
        (theirs,) = clipped_sums(model, x, y, dpfunc.clipping.Flat(bound)).values()
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_the_closed_form_of_networks_is_the_clipped_sum():
    x, y = drawn()
    module = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    theirs = clipped_sums(module, x, y, dpfunc.clipping.Flat(0.5)).values()
    for one, other in zip(closed.network_sum(module, x, y, 0.5), theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_the_measures():
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
    sure = float(torch.tensor(2.0).sigmoid())
    found = benchmark.measured(logits, torch.tensor([0, 0, 1, 1]))
    assert found["accuracy"] == 0.75
    assert found["balanced"] == 0.75
    assert found["calibration"] == pytest.approx(sure - 0.75, abs=1e-6)
    skewed = benchmark.measured(logits, torch.tensor([0, 0, 0, 1]))
    assert (skewed["accuracy"], skewed["balanced"]) == (0.5, pytest.approx(1 / 3))


def test_both_halves_have_every_kind():
    for half in (True, False):
        assert {SETS[name][0] for name in SETS if chosen_on(name) is half} == {"text", "images", "tabular"}
    assert all(result["chosen_on"] == chosen_on(result["data"]) for result in RESULTS)


# two sets have too few records at epsilon 1
@pytest.mark.filterwarnings("ignore:Expected noise_to_signal")
@pytest.mark.parametrize("result", RESULTS, ids=lambda result: f"{result['data']} {result['epsilon']}")
def test_results_have_the_recipe_of_now(result):
    """A rule that is changed must be measured again."""
    found = recipe(
        "head", dataset_size=result["n"], num_parameters=result["classes"] * (result["features"] + 1),
        epsilon=result["epsilon"], delta=result["delta"], num_classes=result["classes"],
    )  # fmt: skip
    assert result["recipe_settings"]["lr"] == pytest.approx(found.learning_rate, rel=1e-4)
    assert result["recipe_settings"]["expected_batch_size"] == found.expected_batch_size
    assert result["recipe_settings"]["steps"] == found.num_steps


# 105 records are few
@pytest.mark.filterwarnings("ignore:Expected noise_to_signal")
def test_a_small_set_is_measured(monkeypatch):
    """All contestants, at one epsilon."""
    from benchmarks.recipes.data import split

    x, y = drawn()
    monkeypatch.setattr(benchmark, "load", lambda name: split(name, "tabular", x.repeat(5, 1), y.repeat(5)))
    monkeypatch.setattr(benchmark, "EPSILONS", (3.0,))
    (result,) = benchmark.measure("wine")
    assert set(result["contestants"]) == {*benchmark.CONTESTANTS, "network"}
    assert len(result["contestants"]["recipe"]["accuracy"]) == benchmark.SEEDS
    assert len(benchmark.line(result)) == 10
