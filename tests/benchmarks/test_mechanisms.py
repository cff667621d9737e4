"""The benchmark of mechanisms: its closed form is what the library releases, its tables are the committed result."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pages import blocks
from pages import run as run_blocks

from benchmarks.mechanisms import __main__ as benchmark
from benchmarks.mechanisms.heads import SPEED, Way, noise_beside_count, shifted, sums_of_views, train
from benchmarks.mechanisms.noises import (
    FAMILIES,
    INDEPENDENT,
    Budget,
    NoiseOf,
    allocated,
    batches,
    best,
    best_of_all,
    correlated,
    in_cycles,
    in_order,
    independent,
)
from benchmarks.recipes import closed
from benchmarks.recipes.data import Part
from benchmarks.results import filled, rows_of
from dpfunc.accounting import Allocated, Ledger
from dpfunc.clipping import Adaptive, Flat
from dpfunc.noise import BSR, LambdaCGD, optimal_bands
from dpfunc.types import Event
from dpfunc.updates import AdamWBC

BUDGET = Budget(3.0, 1e-5, 8, 2)


def drawn(n=60, k=7):
    source = torch.Generator().manual_seed(1)
    return Part(torch.randn(n, k, generator=source), torch.randint(3, (n,), generator=source))


def test_noise_has_the_covariance_of_its_matrix():
    """(C C^T)^-1, from many draws, and not that of independent noise."""
    strategy, steps = LambdaCGD(0.7), 6
    noise = correlated(strategy, steps, (200_000,), torch.Generator().manual_seed(2))
    inverse = np.zeros((steps, steps))
    for step in range(steps):
        row = strategy.row(steps, step)
        inverse[step, step + 1 - len(row) : step + 1] = row[::-1]
    found = (noise @ noise.T / noise.shape[1]).numpy()
    assert np.abs(found - inverse @ inverse.T).max() < 0.03
    assert np.abs(found - np.eye(steps)).max() > 0.5


@pytest.mark.parametrize("sampler", ["poisson", "order", "cycles", "allocated"])
def test_samplers_draw_as_they_are_accounted(sampler):
    n, cycle = 4000, {"order": 8, "cycles": 4}.get(sampler, 1)
    noise = NoiseOf(sampler, cycle, INDEPENDENT, 1.0, "")
    steps = [set(each.tolist()) for each in batches(noise, BUDGET, n, torch.Generator().manual_seed(3))]
    assert len(steps) == BUDGET.steps
    assert sum(map(len, steps)) / BUDGET.steps == pytest.approx(n / 8, rel=0.06)
    if sampler == "order":
        assert steps[:8] == steps[8:]
        assert sum(map(len, steps[:8])) == len(set().union(*steps[:8])) == n
    if sampler == "cycles":
        assert not steps[0] & set().union(*steps[1:4])
        assert not steps[4] & (steps[1] | steps[2] | steps[3])
        assert len(steps[0] & steps[4]) == pytest.approx(n / 4 / 4, rel=0.3)
    if sampler == "allocated":
        assert sum(map(len, steps[:8])) == len(set().union(*steps[:8])) == n
        assert steps[0] != steps[8]


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_each_contestant_has_its_budget(epsilon):
    budget = Budget(epsilon, 1e-5, 8, 2)
    matrix = optimal_bands(16, 4)
    for noise, event in (
        (independent(budget), lambda std: Event(1 / 8, std, 16)),
        (in_order(budget, BSR(16), ""), lambda std: Event(1.0, std / BSR(16).sensitivity(16, 8, 2), 1)),
        (in_cycles(budget, 4), lambda std: Event(4 / 8, std / matrix.sensitivity(16, 16, 1), 4)),
    ):
        assert Ledger((event(noise.std),)).epsilon(1e-5).epsilon <= epsilon
        assert Ledger((event(noise.std * 0.999),)).epsilon(1e-5).epsilon > epsilon


@pytest.mark.slow
def test_allocation_has_its_budget():
    std = allocated(BUDGET).std
    assert Ledger((Allocated(std, 2, num_batches=8),)).epsilon(1e-5).epsilon <= BUDGET.epsilon
    assert Ledger((Allocated(std * 0.999, 2, num_batches=8),)).epsilon(1e-5).epsilon > BUDGET.epsilon


def test_the_best_has_the_least_error():
    name, noise = best_of_all(BUDGET)
    errors = {each: best(each, BUDGET).mean_error(BUDGET.steps) for each in FAMILIES}
    assert errors[name] == min(errors.values()) == noise.mean_error(BUDGET.steps)


def test_plain_training_is_that_of_the_recipes():
    """The same draws, so the same weights: with all records in each step, and hardly any noise."""
    part, budget = drawn(), Budget(3.0, 1e-5, 1, 12)
    noise = NoiseOf("order", 1, INDEPENDENT, 1e-9, "")
    setting = closed.Setting(0.1, 0.5, 1e-9)
    theirs = closed.head(part, 3, 1.0, 12, [setting], 5)
    ours = train(part, 3, budget, noise, 0.5, (0.1,), Way(), 5)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_corrected_training_is_that_of_the_library():
    """AdamWBC, with the gradients of the same draws; more noise leaves moments near 0, which float32 cannot tell."""
    part, steps, std = drawn(), 10, 0.4
    noise = NoiseOf("order", 1, INDEPENDENT, std, "")
    ours = train(part, 3, Budget(3.0, 1e-5, 1, steps), noise, 0.5, (0.1,), Way(falling=False, corrected=True), 5)[0]
    normals = correlated(INDEPENDENT, steps, (3, 7), torch.Generator().manual_seed(5))
    weight, size = torch.zeros(3, 7, requires_grad=True), len(part.y)
    optimizer = AdamWBC([weight], lr=0.1, noise_std=0.5 * std / size)
    for step in range(steps):
        sums = closed.head_sums(weight.detach()[None], part.x, part.y, torch.tensor([0.5]))[0]
        weight.grad = (sums + 0.5 * std * normals[step]) / size
        optimizer.step()
    torch.testing.assert_close(ours, weight.detach(), rtol=1e-3, atol=1e-4)
    plain = train(part, 3, Budget(3.0, 1e-5, 1, steps), noise, 0.5, (0.1,), Way(falling=False), 5)[0]
    assert (plain - ours).abs().max() > 0.01


def test_views_are_clipped_as_their_mean():
    """Against gradients that autograd computes for each record and view."""
    source = torch.Generator().manual_seed(4)
    x, y = torch.randn(5, 4, 6, generator=source), torch.tensor([0, 1, 2, 0, 1])
    weights, bounds = torch.randn(2, 3, 6, generator=source), torch.tensor([0.4, 2.0])
    sums, norms = sums_of_views(weights, x, y, bounds)
    for run in range(2):
        weight, total = weights[run].clone().requires_grad_(), torch.zeros(3, 6)
        for record in range(5):
            loss = torch.nn.functional.cross_entropy(x[record] @ weight.T, y[record].expand(4))
            (grad,) = torch.autograd.grad(loss, weight)
            assert norms[record, run] == pytest.approx(float(grad.norm()), rel=1e-4)
            total += grad * min(1.0, float(bounds[run] / grad.norm()))
        torch.testing.assert_close(sums[run], total, rtol=1e-4, atol=1e-5)


def test_shifts_of_images():
    image = torch.arange(9.0).view(1, 9)
    found = shifted(image)
    assert found.shape == (1, 9, 9)
    assert torch.equal(found[0, 0], image[0])
    assert len({tuple(each.tolist()) for each in found[0]}) == 9


def test_adaptive_bounds_are_those_of_the_library():
    """The noise beside the count, and the bound after each step, where the noise of the count is nearly none."""
    assert noise_beside_count(1.1, 12.8) == pytest.approx(1.10101688, rel=1e-8)
    share = (1.1 / 2 / 12.8) ** 2
    assert noise_beside_count(1.1, 12.8) == pytest.approx(1.1 / math.sqrt(1 - share), rel=1e-12)
    mean = 0.4  # of +-1 for records below and above
    theirs = Adaptive(share=share, rate=SPEED).next({"all": 0.7}, {"(below)": [mean]})["all"]
    assert 0.7 * math.exp(-SPEED * ((0.5 + mean / 2) - 0.5)) == pytest.approx(theirs, rel=1e-12)
    assert Flat(0.7).clip_norm == 0.7


RESULTS = rows_of(benchmark.RESULT)


def test_the_result_has_all_contestants():
    found = {(each["data"], each["epsilon"], each["run"], each["contestant"]) for each in RESULTS}
    for data in benchmark.SETS:
        for epsilon in benchmark.EPSILONS:
            for run in benchmark.RUNS:
                named = {name for *rest, name in found if rest == [data, epsilon, run]}
                assert benchmark.BASES[run] in named
                assert len(named) >= 7
    assert all(len(each["accuracy"]) == benchmark.SEEDS for each in RESULTS)


def test_the_tables_are_those_of_the_result():
    """All but the table of errors, which is computed and takes seconds."""
    page = benchmark.PAGE.read_text()
    shown = {**{run: benchmark.summary(RESULTS, run) for run in benchmark.RUNS}, "details": benchmark.details(RESULTS)}
    assert filled(page, shown) == page


def test_the_block_of_the_page(capsys):
    """mechanisms.md: the ratio of errors is that of the table."""
    names = run_blocks(*blocks("mechanisms.md"))
    printed = capsys.readouterr().out.strip()
    assert printed == f"{names['correlated'] / names['independent']:.2f}"
    budget = Budget(8.0, 1e-5, 32, 8)
    theirs = in_order(budget, optimal_bands(256, 32), "").mean_error(256) / independent(budget).mean_error(256)
    assert names["correlated"] / names["independent"] == pytest.approx(theirs, rel=1e-9)
    assert f"BandMF | 1.38, 1.23 (32 bands) | 1.03, 0.92 (32 bands) | {printed}, " in benchmark.PAGE.read_text()
