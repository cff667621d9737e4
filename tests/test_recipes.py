"""Recipes: formulas against an independent copy, public facts only, and a run whose probabilities are of use."""

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
from dpfunc import recipes
from dpfunc.errors import InsecureKeyWarning, InvalidArgument, NoiseWarning
from dpfunc.recipes import STRATEGIES, Head, recipe, unit_rows
from dpfunc.state import allow_repeat

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


@given(
    n=st.integers(500, 50_000), k=st.integers(2, 2000), classes=st.integers(2, 100),
    epsilon=st.floats(0.3, 8.0), length=st.floats(0.1, 30.0),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
@NOISY
def test_the_values_of_a_head(n, k, classes, epsilon, length):
    d = (k + 1) * classes
    found = head(dataset_size=n, num_parameters=d, num_classes=classes, epsilon=epsilon, feature_norm=length)
    r = math.sqrt(d) * one_release(epsilon, 1e-5) / n
    assert found.noise_to_signal == pytest.approx(r, rel=1e-4)
    assert found.num_steps == pytest.approx(min(400, max(200, 4 / r)), abs=1)
    assert found.learning_rate == pytest.approx(1.4 / (length * r**0.25 * math.sqrt(found.num_steps)), rel=1e-4)
    assert found.clip.clip_norm == pytest.approx(length * min(1.0, max(0.25, 0.08 * r**-0.5)), rel=1e-4)


def rows_of(seed, *shape):
    source = torch.Generator().manual_seed(seed)
    lengths = 10 ** torch.empty(shape[0], 1).uniform_(-4, 4, generator=source)
    x = torch.randn(*shape, generator=source) * lengths
    x[0] = 0
    return x


@given(seed=st.integers(0, 10**6), k=st.integers(1, 50), classes=st.integers(1, 20), scale=st.floats(0.0, 100.0))
@settings(max_examples=50, deadline=None)
def test_the_bound_of_a_head(seed, k, classes, scale):
    """For any weights, rows and labels a gradient is at most sqrt(2) long; with one output, logistic, at most 1."""
    x = rows_of(seed, 8, k)
    source = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (8,), generator=source)
    model = Head(k, classes)
    torch.nn.init.normal_(model.weight, std=scale, generator=source)
    forward, params = dpfunc.functionalize(model)

    def loss_fn(params, batch):
        logits, target = forward(params, batch[0]), batch[1]
        if classes == 1:
            labels = (target % 2).float()
            return torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 0], labels, reduction="none")
        return torch.nn.functional.cross_entropy(logits, target, reduction="none")

    of_row = torch.func.grad(lambda p, x, y: loss_fn(p, (x[None], y[None])).sum())
    (grads,) = torch.func.vmap(of_row, in_dims=(None, 0, 0))(params, x, y).values()
    assert float(grads.flatten(1).norm(dim=1).max()) <= (1.0 if classes == 1 else math.sqrt(2)) * (1 + 1e-5)


@given(seed=st.integers(0, 10**6), k=st.integers(1, 50))
@settings(max_examples=50, deadline=None)
def test_rows_have_norm_1(seed, k):
    rows = unit_rows(rows_of(seed, 8, k))
    assert rows.shape == (8, k + 1)
    torch.testing.assert_close(rows[1:].norm(dim=1), torch.ones(7))
    torch.testing.assert_close(rows[:, -1], torch.full((8,), math.sqrt(0.2)))


def test_a_row_is_scaled_alone():
    x = rows_of(3, 6, 5)
    together = unit_rows(x)
    for row in range(6):
        assert torch.equal(unit_rows(x[row]), together[row])
    assert torch.equal(unit_rows(1e3 * x[1:]).sign(), together[1:].sign())


def test_a_head_starts_at_zero_and_has_no_bias():
    model = Head(4, 3)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {"weight": (3, 5)}
    assert not model.weight.any()
    torch.nn.init.normal_(model.weight)
    x = torch.randn(2, 4)
    torch.testing.assert_close(model(x), unit_rows(x) @ model.weight.T)
    for sizes in ((0, 2), (4, 0), (2.5, 2)):
        with pytest.raises(InvalidArgument, match="Expected an integer num_"):
            Head(*sizes)


@NOISY
@pytest.mark.parametrize(("d", "rate"), [(100, 0.1), (1600, 0.05), (40_000, 0.01), (10**7, 0.002)])
def test_the_rate_of_a_whole_network(d, rate):
    """2 / sqrt(d) within limits, at any number of records and any budget."""
    for n, epsilon in ((500, 0.5), (50_000, 8.0)):
        found = recipe("full", dataset_size=n, num_parameters=d, epsilon=epsilon, delta=1e-6)
        assert found.learning_rate == pytest.approx(rate)
        assert found.clip == dpfunc.clipping.Flat(3.0)


@pytest.mark.parametrize(("n", "batch"), [(100, 50), (1500, 750), (5000, 1000), (10_000, 1000), (50_000, 5000)])
def test_the_batch_of_a_whole_network(n, batch):
    """Small batches have more noise and save hardly any time."""
    facts = {"dataset_size": n, "num_parameters": 1000, "epsilon": 3.0, "delta": 1e-6}
    assert recipe("full", **facts).expected_batch_size == batch
    assert recipe("full", **facts, sampling_prob=0.1).expected_batch_size == n // 10
    assert recipe("pretrained", **facts).expected_batch_size == n // 10


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_recipe_is_a_pure_function(strategy):
    classes = {"num_classes": 2} if strategy == "head" else {}
    arguments = {"dataset_size": 2000, "num_parameters": 770, **BUDGET, **classes}
    state = torch.get_rng_state()
    assert recipe(strategy, **arguments) == recipe(strategy, **arguments)
    assert torch.equal(state, torch.get_rng_state())
    kinds = {p.annotation for p in inspect.signature(recipe).parameters.values()}
    assert kinds == {
        recipes.Strategy,
        int,
        float,
        int | None,
        float | None,
        str | None,
    }  # no records, no tensors, no modules


def test_a_new_head_beside_adapters_has_its_own_rate():
    arguments = {"dataset_size": 2000, "num_classes": 2, "feature_norm": 3.0, **BUDGET}
    found = recipe("lora", num_parameters=7000, num_head_parameters=770, **arguments)
    # all 7000 parameters get noise
    distance = min(18.0, max(2.0, 0.5 * 385**0.25 * found.noise_to_signal**-0.5))
    assert found.head_rate == pytest.approx(distance / (3.0 * math.sqrt(385)))
    assert found.learning_rate == recipe("lora", dataset_size=2000, num_parameters=7000, **BUDGET).learning_rate
    adapter, weight = (torch.zeros(size, requires_grad=True) for size in (7000 - 770, 770))
    groups = found.optimizer([adapter, weight], head=[weight]).param_groups
    assert [(group["lr"], group["params"]) for group in groups] == [
        (found.learning_rate, [adapter]), (found.head_rate, [weight]),
    ]  # fmt: skip


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


def test_the_guidance_of_the_requirements_quotes_the_recipe_of_a_head():
    need = dpfunc.accounting.privacy_requirements(dataset_size=100, batch_size=10, epochs=1, target_epsilon=3.0)
    fewest, most = recipes._HEAD_STEPS
    said = f"a linear head takes half of the records in each of {fewest} to {most} steps."
    assert sum(said in sentence for sentence in need.guidance) == (recipes._RULES["head"].sampling_prob == 0.5)


@NOISY
def test_a_smaller_share_of_the_records():
    assert head(sampling_prob=0.1).expected_batch_size == 200
    assert head(dataset_size=1, sampling_prob=0.1).expected_batch_size == 1


def test_rows_of_norm_1_are_the_default():
    assert head() == head(feature_norm=1.0)


@pytest.mark.parametrize("strategy", ["head", "lora"])
def test_the_arguments_of_a_trainer_are_the_same(strategy):
    from transformers import TrainingArguments

    from dpfunc.hf.trainer.arguments import PrivacyArguments

    classes = {"num_classes": 2} if strategy == "head" else {}
    found = recipe(strategy, dataset_size=2000, num_parameters=5000, **BUDGET, **classes)
    given_to = found.training_arguments()
    assert set(given_to) <= {f.name for f in dataclasses.fields(TrainingArguments)}
    plan = PrivacyArguments(**found.privacy_arguments()).plan(
        dataset_size=2000,
        expected_batch_size=given_to["per_device_train_batch_size"] * given_to["gradient_accumulation_steps"],
        num_steps=given_to["max_steps"],
    )
    assert plan == found.plan()


def test_views_and_an_average_change_no_other_value():
    """Nor the plan; by default there is neither, and nothing is passed on."""
    from dpfunc.hf.trainer.arguments import PrivacyArguments

    plain, found = head(), head(views=4, average="ema:.95")
    assert dataclasses.replace(found, views=1, average=None) == plain
    assert found.plan() == plain.plan()
    assert found.training_arguments() == plain.training_arguments()
    loss_fn = lambda params, batch: batch
    assert plain.loss(loss_fn) is loss_fn
    assert plain.averaging() is None
    asked = PrivacyArguments(**found.privacy_arguments())
    assert (asked.dp_views, asked.dp_average) == (4, "ema:.95")
    assert asked.average(found.num_steps) == found.averaging() == dpfunc.updates.Ema(0.95)
    assert head(average="last:9999").averaging() == dpfunc.updates.LastSteps(found.num_steps, found.num_steps)
    assert {*plain.privacy_arguments()} == {*found.privacy_arguments()} - {"dp_views", "dp_average"}
    reasons = found.reasons()
    assert {*reasons} - {*plain.reasons()} == {"views", "average"}
    assert reasons["views"].startswith("4: asked for")
    assert reasons["average"].startswith("ema:.95: asked for")


def test_a_run_of_a_recipe_with_views_and_an_average():
    """Equal, bit for bit, to a loop in which both are written out."""

    class Turned(torch.utils.data.Dataset):
        def __init__(self, x, y):
            self.x, self.y = x, y

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            return {"x": self.x[index] + 0.1 * torch.randn(3), "y": self.y[index]}

    source = torch.Generator().manual_seed(3)
    dataset = Turned(torch.randn(200, 3, generator=source), torch.randint(2, (200,), generator=source))
    found = recipe("lora", dataset_size=200, num_parameters=6, **BUDGET, views=3, average="last:5")
    plan = found.plan()

    def loss_fn(params, batch):
        return torch.nn.functional.cross_entropy(batch["x"] @ params["w"], batch["y"], reduction="none")

    def run(loss, views):
        params, seen, dp_step = {"w": torch.zeros(3, 2)}, [], dpfunc.make_dp_step(loss, plan)
        state = allow_repeat(dp_step.init(params, dpfunc.rng.insecure_key(71)))
        for batch in plan.loader(dataset, state, views=views):
            grads, state, _ = dp_step(params, batch, state)
            params = {"w": params["w"] - 0.1 * grads["w"]}
            seen.append(params["w"])
        return seen

    mine = run(found.loss(loss_fn), found.views)
    theirs = run(dpfunc.sampling.mean_over_views(loss_fn), 3)
    assert len(mine) == found.num_steps == 40
    assert torch.equal(torch.stack(mine), torch.stack(theirs))
    assert not torch.equal(mine[-1], run(loss_fn, 1)[-1])
    average = found.averaging()
    state = average.begin()
    for value in mine:
        state = average.add(state, {"w": value})
    torch.testing.assert_close(state["params"]["w"], torch.stack(mine[-5:]).mean(0))


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
        ("full", {"views": 0}, "got views=0"),
        ("full", {"views": 2.5}, "got views=2.5"),
        ("full", {"average": "mean"}, "Expected ema:DECAY, or last:COUNT, got average='mean'"),
        ("full", {"average": 0.99}, "Expected ema:DECAY, or last:COUNT, got average=0.99"),
        ("full", {"average": "ema:1.5"}, "got decay=1.5"),
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
    # warnings are errors in these tests
    recipe("full", dataset_size=1000, num_parameters=1000, epsilon=0.1, delta=1e-5)


@NOISY
def test_advice_names_no_number_of_parameters_where_none_would_help():
    few = recipe("full", dataset_size=20, num_parameters=400, epsilon=0.01, delta=1e-5).advice()
    head = recipe("head", dataset_size=20, num_parameters=400, num_classes=2, epsilon=3.0, delta=1e-5).advice()
    for said in (few, head):
        assert said is not None
        assert "parameters (a head on frozen features" not in said
        assert re.search(r"Have \d+ records, or take a larger epsilon", said)


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_probabilities_are_better_than_the_shares_of_the_classes(share):
    """What `Automatic` failed: less cross-entropy than a constant that knows the shares, and both classes are found."""
    source = torch.Generator().manual_seed(0)
    y = (torch.rand(2000, generator=source) < share).long()
    x = torch.randn(2000, 16, generator=source) + 0.3 * (2 * y[:, None] - 1)  # 1,000 records, and as many others
    model, found = Head(16, 2), head(dataset_size=1000, num_parameters=34, epsilon=3.0)
    forward, params = dpfunc.functionalize(model)
    cross_entropy = torch.nn.functional.cross_entropy
    dp_step = dpfunc.make_dp_step(
        lambda params, batch: cross_entropy(forward(params, batch[0]), batch[1], reduction="none"), found.plan()
    )
    with pytest.warns(InsecureKeyWarning):
        state = dp_step.init(params, key=dpfunc.rng.insecure_key(72000 + int(10 * share)))
    optimizer = found.optimizer(params.values())
    scheduler = found.scheduler(optimizer)
    for indices in dp_step.plan.batches(state):
        grads, state, _ = dp_step(params, dpfunc.take((x, y), indices), state)
        for name, p in params.items():
            p.grad = grads[name]
        optimizer.step()
        scheduler.step()
    logits, target = dpfunc.with_params(model, params)(x[1000:]).detach(), y[1000:]
    constant = torch.bincount(target).float().div(len(target)).log().expand(len(target), -1)
    assert cross_entropy(logits, target) < 0.9 * cross_entropy(constant, target)
    assert all(float((logits.argmax(1)[target == label] == label).float().mean()) > 0.3 for label in (0, 1))
