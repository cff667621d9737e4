"""Recipes: formulas against an independent copy, public facts only, and a first run that learns."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

import dpfunc
from dpfunc.errors import InsecureKeyWarning, InvalidArgument, NoiseWarning
from dpfunc.recipes import STRATEGIES, Recipe, recipe

BUDGET = {"epsilon": 3.0, "delta": 1e-5}
# formulas hold for any noise, also where it hides all
NOISY = pytest.mark.filterwarnings("ignore:Expected noise_to_signal:dpfunc.errors.NoiseWarning")


def head(**changes):
    return recipe("head", **{"dataset_size": 2000, "num_parameters": 770, "num_classes": 2, **BUDGET, **changes})


def one_release(epsilon, delta):
    """Noise multiplier of one Gaussian release (Balle and Wang 2018), from scratch."""

    def excess(sigma):
        mu = 1 / sigma
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    return brentq(excess, 0.05, 1000, xtol=1e-12)


def way(inputs, r):
    """How far a step of a head can move a logit."""
    return min(18.0, max(2.0, 0.5 * inputs**0.25 * r**-0.5))


@given(
    n=st.integers(500, 50_000), k=st.integers(2, 2000), classes=st.integers(2, 100),
    epsilon=st.floats(0.3, 8.0), length=st.floats(0.1, 30.0),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
@NOISY
def test_the_rate_of_a_head(n, k, classes, epsilon, length):
    d = (k + 1) * classes
    found = head(dataset_size=n, num_parameters=d, num_classes=classes, epsilon=epsilon, feature_norm=length)
    r = math.sqrt(d) * one_release(epsilon, 1e-5) / n
    assert found.noise_to_signal == pytest.approx(r, rel=1e-4)
    assert found.learning_rate == pytest.approx(way(k + 1, r) / (length * math.sqrt(k + 1)), rel=1e-4)


@NOISY
@pytest.mark.parametrize(("d", "rate"), [(100, 0.2), (1600, 0.1), (40_000, 0.02), (10**7, 0.004)])
def test_the_rate_of_a_whole_network(d, rate):
    """4 / sqrt(d) within what was measured, at any number of records and any budget."""
    for n, epsilon in ((500, 0.5), (50_000, 8.0)):
        found = recipe("full", dataset_size=n, num_parameters=d, epsilon=epsilon, delta=1e-6)
        assert found.learning_rate == pytest.approx(rate)


@pytest.mark.parametrize(("n", "batch"), [(100, 50), (1500, 750), (5000, 1000), (10_000, 1000), (50_000, 5000)])
def test_the_batch_of_a_whole_network(n, batch):
    """Small batches have more noise and save hardly any time."""
    facts = {"dataset_size": n, "num_parameters": 1000, "epsilon": 3.0, "delta": 1e-6}
    assert recipe("full", **facts).expected_batch_size == batch
    assert recipe("full", **facts, sampling_prob=0.1).expected_batch_size == n // 10
    assert recipe("pretrained", **facts).expected_batch_size == n // 10


def test_features_behind_a_layer_norm_are_the_default():
    assert head().learning_rate == pytest.approx(head(feature_norm=math.sqrt(385)).learning_rate)


def test_longer_features_get_shorter_steps():
    """Logits do not change when features are ten times as long and the rate is a tenth."""
    assert head(feature_norm=10.0).learning_rate == pytest.approx(head(feature_norm=1.0).learning_rate / 10)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_recipe_is_a_pure_function(strategy):
    classes = {"num_classes": 2} if strategy == "head" else {}
    arguments = {"dataset_size": 2000, "num_parameters": 770, **BUDGET, **classes}
    state = torch.get_rng_state()
    assert recipe(strategy, **arguments) == recipe(strategy, **arguments)
    assert torch.equal(state, torch.get_rng_state())
    kinds = {p.annotation for p in inspect.signature(recipe).parameters.values()}
    assert kinds == {"Strategy", "int", "float", "int | None", "float | None"}  # no records, no tensors, no modules


def test_a_new_head_beside_adapters_has_the_rate_of_a_head_with_that_much_noise():
    arguments = {"dataset_size": 2000, "num_classes": 2, "feature_norm": 3.0, **BUDGET}
    found = recipe("lora", num_parameters=7000, num_head_parameters=770, **arguments)
    distance = way(385, found.noise_to_signal)  # all 7000 parameters get noise
    assert found.head_rate == pytest.approx(distance / (3.0 * math.sqrt(385)))
    assert found.learning_rate == recipe("lora", dataset_size=2000, num_parameters=7000, **BUDGET).learning_rate
    adapter, weight = (torch.zeros(size, requires_grad=True) for size in (7000 - 770, 770))
    groups = found.optimizer([adapter, weight], head=[weight]).param_groups
    assert [(group["lr"], group["params"]) for group in groups] == [
        (found.learning_rate, [adapter]), (found.head_rate, [weight]),
    ]  # fmt: skip


def test_each_value_has_a_reason():
    found = recipe("lora", dataset_size=2000, num_parameters=7000, num_classes=2, num_head_parameters=770, **BUDGET)
    reasons = found.reasons()
    assert set(reasons) == {"batch_size", "steps", "learning_rate", "clip", "head_rate"}
    assert reasons["learning_rate"].startswith(f"{found.learning_rate:.3g} ")
    assert reasons["steps"].startswith(f"{found.num_steps}: ")


def test_a_recipe_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        head().learning_rate = 1.0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_its_values_go_into_the_plan(strategy):
    classes = {"num_classes": 2} if strategy == "head" else {}
    found = recipe(strategy, dataset_size=2000, num_parameters=770, **BUDGET, **classes)
    plan = found.plan()
    assert (plan.num_steps, plan.clip, plan.delta, plan.epsilon) == (found.num_steps, found.clip, 1e-5, 3.0)
    assert plan.sampler.expected_batch_size(0) == found.expected_batch_size
    assert 2.9 < plan.guarantee().epsilon <= 3.0


def test_the_rate_falls_to_zero():
    found = head()
    optimizer = found.optimizer([torch.zeros(2, requires_grad=True)])
    scheduler = found.scheduler(optimizer)
    rates = []
    for _ in range(found.num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    wanted = [found.learning_rate * (1 - t / found.num_steps) for t in range(found.num_steps)]
    assert rates == pytest.approx(wanted)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)


@NOISY
def test_a_smaller_share_of_the_records():
    assert head(sampling_prob=0.1).expected_batch_size == 200
    assert head(dataset_size=1, sampling_prob=0.1).expected_batch_size == 1


def test_the_arguments_of_a_trainer_are_the_same():
    from transformers import TrainingArguments

    from dpfunc.hf.trainer.arguments import PrivacyArguments

    found = recipe("lora", dataset_size=2000, num_parameters=5000, **BUDGET)
    given_to = found.training_arguments()
    assert set(given_to) <= {f.name for f in dataclasses.fields(TrainingArguments)}
    plan = PrivacyArguments(**found.privacy_arguments()).plan(
        dataset_size=2000,
        expected_batch_size=given_to["per_device_train_batch_size"] * given_to["gradient_accumulation_steps"],
        num_steps=given_to["max_steps"],
    )
    assert plan == found.plan()


@pytest.mark.parametrize(
    ("strategy", "changes", "message"),
    [
        ("tail", {}, "got strategy='tail'"),
        ("head", {}, "got num_classes=None"),
        ("head", {"num_classes": 0}, "got num_classes=0"),
        ("head", {"num_classes": 2, "feature_norm": 0.0}, "got feature_norm=0.0"),
        ("lora", {"num_classes": 2}, "got num_classes=2"),
        ("lora", {"num_classes": 2, "num_head_parameters": 771}, "got num_head_parameters=771"),
        ("head", {"num_classes": 2, "num_head_parameters": 770 - 2}, "got num_head_parameters=768"),
        ("lora", {"num_head_parameters": 770}, "got num_head_parameters=770"),
        ("full", {"feature_norm": 1.0}, "got feature_norm=1.0"),
        ("full", {"epsilon": -1.0}, "got epsilon=-1.0"),
        ("full", {"delta": 1.0}, "got delta=1.0"),
        ("full", {"dataset_size": 0}, "got dataset_size=0"),
        ("full", {"num_parameters": 0}, "got num_parameters=0"),
        ("full", {"sampling_prob": 1.5}, "got sampling_prob=1.5"),
    ],
)
def test_values_outside_of_their_domain(strategy, changes, message):
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        recipe(strategy, **{"dataset_size": 2000, "num_parameters": 770, **BUDGET, **changes})


@NOISY
def test_advice_names_numbers_that_help():
    hopeless = {"dataset_size": 300, "num_parameters": 100_000, "epsilon": 0.5, "delta": 1e-5}
    said = recipe("full", **hopeless).advice()
    parameters = int(re.search(r"at most (\d+) parameters", said).group(1))
    size = int(re.search(r"have (\d+) records", said).group(1))
    assert recipe("full", **{**hopeless, "num_parameters": parameters}).advice() is None
    assert recipe("full", **{**hopeless, "dataset_size": size}).advice() is None
    assert recipe("full", **{**hopeless, "dataset_size": size - 2}).advice() is not None


def test_a_hopeless_recipe_is_said():
    """A language model for 1000 records: noise-to-signal 344, noise multiplier 170."""
    with pytest.warns(NoiseWarning, match="got noise_to_signal=3.4e[+]02 with 125000000 trained parameters") as caught:
        found = recipe("full", dataset_size=1000, num_parameters=125_000_000, epsilon=0.1, delta=1e-5)
    assert str(caught[0].message) == found.advice()
    assert caught[0].filename == __file__
    recipe(
        "full", dataset_size=1000, num_parameters=1000, epsilon=0.1, delta=1e-5
    )  # warnings are errors in these tests


@NOISY
def test_advice_names_no_number_of_parameters_where_none_would_help():
    few = recipe("full", dataset_size=20, num_parameters=400, epsilon=0.01, delta=1e-5).advice()
    head = recipe("head", dataset_size=20, num_parameters=400, num_classes=2, epsilon=3.0, delta=1e-5).advice()
    for said in (few, head):
        assert said is not None
        assert "parameters (a head on frozen features" not in said
        assert re.search(r"Have \d+ records, or take a larger epsilon", said)


@pytest.mark.parametrize("length", [0.05, 1.0, 20.0])
def test_a_first_run_learns(length):
    """Two classes whose means differ, at any length of the features: far above the 0.5 of one class."""
    source = torch.Generator().manual_seed(0)
    y = torch.randint(2, (1000,), generator=source)
    x = torch.randn(1000, 16, generator=source) + 0.5 * (2 * y[:, None] - 1)
    x = length * torch.nn.functional.normalize(x, dim=1)
    model = torch.nn.Linear(16, 2)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    forward, params = dpfunc.functionalize(model)
    found: Recipe = head(dataset_size=1000, num_parameters=34, feature_norm=length, sampling_prob=0.1)
    dp_step = dpfunc.make_dp_step(
        lambda params, batch: torch.nn.functional.cross_entropy(forward(params, batch[0]), batch[1], reduction="none"),
        found.plan(),
    )
    with pytest.warns(InsecureKeyWarning):  # always the same noise
        state = dp_step.init(params, key=dpfunc.insecure_key(71000 + int(length)))
    optimizer = found.optimizer(params.values())
    scheduler = found.scheduler(optimizer)
    for indices in dp_step.plan.batches(state):
        grads, state, _ = dp_step(params, dpfunc.take((x, y), indices), state)
        for name, p in params.items():
            p.grad = grads[name]
        optimizer.step()
        scheduler.step()
    assert float((forward(params, x).argmax(1) == y).float().mean()) > 0.8
