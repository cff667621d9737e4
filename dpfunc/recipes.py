"""Recipes: optimizer, learning rate, batch size and number of steps of a private run, from public facts alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dpfunc._utils.validation import fail, integer, named, one_of, open_unit, positive, probability, records, warn
from dpfunc.accounting import calibrate_noise
from dpfunc.clipping import Automatic
from dpfunc.errors import NoiseWarning
from dpfunc.plan import Plan

Strategy = Literal["head", "lora", "projector", "full", "pretrained"]


@dataclass(frozen=True)
class _Rule:
    """Values of a strategy.

    Args:
        rate: of the first step; or a, low, high for a / sqrt(d) within these limits, since the noise of a step adds up
            over the inputs of a neuron: no more was measured. That of a head is `_head_rate`.
        hopeless: noise-to-signal ratio above which nothing was seen to be learnt. cheap: rows of a batch that cost
            little time, so that a smaller one would only have more noise.
    """

    sampling_prob: float
    steps: int
    rate: float | tuple[float, float, float]
    hopeless: float
    origin: str
    cheap: int = 1


_HEAD_RATE = 0.5  # times k^(1/4) / sqrt(r): how far a step can move a logit
_HEAD_RANGE = (2.0, 18.0)  # more lost accuracy on texts, less was not measured
_UNSEARCHED = "not measured here"
_RULES: dict[Strategy, _Rule] = {
    "head": _Rule(0.5, 100, math.nan, 0.25, "measured on nine data sets"),
    "lora": _Rule(0.16, 40, 1e-3, 1.0, "measured on two data sets of texts, in one layer"),
    "projector": _Rule(
        0.1, 100, (8.0, 0.0, 0.05), 1.0, "measured on two data sets of images, in one language model", cheap=1000
    ),
    "full": _Rule(0.1, 100, (4.0, 0.004, 0.2), 1.0, "measured on seven data sets", cheap=1000),
    "pretrained": _Rule(0.1, 100, 5e-4, 1.0, f"{_UNSEARCHED}: that of Li et al. 2022"),
}
STRATEGIES: tuple[Strategy, ...] = tuple(_RULES)


@dataclass(frozen=True)
class Recipe:
    """Settings of a private run. Its values go into `Plan.for_budget` and into an optimizer; `recipe` derives them.

    Args:
        strategy: see `recipe`.
        dataset_size: number of records n. num_parameters: number of trained parameters d.
        epsilon, delta: the budget.
        expected_batch_size: q n. num_steps: T.
        clip: clip rule.
        learning_rate: of the first step; it falls linearly to 0. The rate of Adam, without weight decay.
        noise_to_signal: `sqrt(d) sigma_1 / n`, see `recipe`.
        head_rate: rate of a new head beside adapters; None where there is none.

    Raises:
        InvalidArgument: from `plan`, where the plan would.

    >>> found = recipe("head", dataset_size=2000, num_parameters=770, epsilon=3.0, delta=1e-5, num_classes=2)
    >>> plan = found.plan()
    >>> plan.num_steps, plan.sampler.expected_batch_size(0)
    (100, 1000.0)
    >>> weight = torch.zeros(2, 385, requires_grad=True)
    >>> optimizer = found.optimizer([weight])
    >>> scheduler = found.scheduler(optimizer)
    """

    strategy: Strategy
    dataset_size: int
    num_parameters: int
    epsilon: float
    delta: float
    expected_batch_size: int
    num_steps: int
    clip: Automatic
    learning_rate: float
    noise_to_signal: float
    head_rate: float | None = None

    def plan(self) -> Plan:
        """`Plan.for_budget` of these values, with add/remove neighbours."""
        return Plan.for_budget(
            epsilon=self.epsilon,
            delta=self.delta,
            dataset_size=self.dataset_size,
            expected_batch_size=self.expected_batch_size,
            num_steps=self.num_steps,
            clip=self.clip,
        )

    def optimizer(self, params: Iterable[Tensor], head: Iterable[Tensor] = ()) -> torch.optim.Adam:
        """Adam over the trained parameters, e.g. `params.values()`; those of a new head beside adapters apart."""
        apart = list(head)
        rest = [p for p in params if all(p is not other for other in apart)]
        groups: list[dict[str, Any]] = [{"params": rest}] if rest else []
        if apart:
            groups.append({"params": apart, "lr": self.head_rate or self.learning_rate})
        return torch.optim.Adam(groups, lr=self.learning_rate)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """The rate `learning_rate (1 - t / T)` at step t, if `step()` is called after each step."""
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=self.num_steps)

    def training_arguments(self) -> dict[str, Any]:
        """The same settings for `transformers.TrainingArguments`, whose batch size is then the logical one.

        >>> found = recipe("lora", dataset_size=2000, num_parameters=50000, epsilon=3.0, delta=1e-5)
        >>> found.training_arguments()["max_steps"]
        40
        """
        return {
            "learning_rate": self.learning_rate,
            "max_steps": self.num_steps,
            "per_device_train_batch_size": self.expected_batch_size,
            "gradient_accumulation_steps": 1,
            "optim": "adamw_torch",
            "weight_decay": 0.0,
            "lr_scheduler_type": "linear",
            "warmup_steps": 0,
        }

    def privacy_arguments(self) -> dict[str, Any]:
        """The same budget and clip rule for `dpfunc.hf.trainer.PrivacyArguments`.

        >>> found = recipe("lora", dataset_size=2000, num_parameters=50000, epsilon=3.0, delta=1e-5)
        >>> sorted(found.privacy_arguments())
        ['dp_clip', 'dp_delta', 'dp_epsilon']
        """
        return {"dp_epsilon": self.epsilon, "dp_delta": self.delta, "dp_clip": "automatic"}

    def reasons(self) -> dict[str, str]:
        """Each value with its reason, by the names of a training script.

        >>> found = recipe("lora", dataset_size=2000, num_parameters=50000, epsilon=3.0, delta=1e-5)
        >>> found.reasons()["batch_size"]
        '320: 0.16 of 2000 records; larger batches cost time and gain little'
        """
        rule = _RULES[self.strategy]
        share = self.expected_batch_size / self.dataset_size
        found = {
            "batch_size": f"{self.expected_batch_size}: {share:.2g} of {self.dataset_size} records; larger batches "
            "cost time and gain little",
            "steps": f"{self.num_steps}: the noise of all steps together hardly depends on their number",
            "learning_rate": f"{self.learning_rate:.3g} of Adam, falling linearly to 0; {rule.origin}",
            "clip": f"automatic, norm {self.clip.clip_norm:g}: Adam takes the scale of a gradient away",
        }
        if self.head_rate is not None:
            found["head_rate"] = f"{self.head_rate:.3g} for the new head, which has longer ways to go than adapters"
        return found

    def advice(self) -> str | None:
        """A sentence with the number of records that would help, where noise hides nearly all; else None.

        >>> found = recipe("full", dataset_size=2000, num_parameters=5000, epsilon=1.0, delta=1e-5)
        >>> print(Recipe(**{**vars(found), "noise_to_signal": 5.9}).advice()[:59])
        Expected noise_to_signal <= 1, got noise_to_signal=5.9 with
        """
        most = _RULES[self.strategy].hopeless
        if self.noise_to_signal <= most:
            return None
        share = most / self.noise_to_signal
        fewer = int(self.num_parameters * share * share)
        smaller = f"Train at most {fewer} parameters (a head on frozen features, LoRA of a lower rank), or have"
        return (
            f"Expected noise_to_signal <= {most:g}, got noise_to_signal={self.noise_to_signal:.2g} with "
            f"{self.num_parameters} trained parameters and {self.dataset_size} records. "
            f"{'Have' if self.strategy == 'head' or fewer < 1 else smaller} "
            f"{math.ceil(self.dataset_size / share)} records, or take a larger epsilon."
        )


@named
def recipe(
    strategy: Strategy,
    *,
    dataset_size: int,
    num_parameters: int,
    epsilon: float,
    delta: float,
    num_classes: int | None = None,
    num_head_parameters: int | None = None,
    feature_norm: float | None = None,
    sampling_prob: float | None = None,
) -> Recipe:
    """Settings that work at the first try, from public facts alone.

    Every argument is public: the budget, the shape of the model, and n, which a plan publishes anyway. Nothing here
    reads a record, so a recipe costs no privacy. Where noise hides nearly all, it warns (`NoiseWarning`). With sigma_1,
    the noise of one release of all records at (epsilon, delta), and k = num_head_parameters / num_classes inputs:

        r = sqrt(d) sigma_1 / n                                          noise-to-signal ratio of the whole run
        clip = Automatic(clip_norm=1)                                    every gradient gets norm 1
        batch = q n, and the learning rate of Adam falls linearly to 0, from:

        | strategy   | q    | steps | learning rate |
        |---|---|---|---|
        | head       | 0.5  | 100   | a / (feature_norm sqrt(k)), a = k^(1/4) / (2 sqrt(r)), 2 <= a <= 18 |
        | lora       | 0.16 | 40    | 0.001; a new head beside the adapters has that of a head |
        | projector  | 0.1, and up to 0.5 for 1000 rows | 100 | 8 / sqrt(d), at most 0.05 |
        | full       | 0.1, and up to 0.5 for 1000 rows | 100 | 4 / sqrt(d), at least 0.004 and at most 0.2 |
        | pretrained | 0.1  | 100   | 0.0005 |

    Adam divides by the noise, so its rate is a distance: a is about how far a step can move a logit. What is smaller
    than the noise needs shorter steps; the more inputs a logit has, the more their noise averages out. How each of
    them was found: docs/recipes.md.

    Args:
        strategy: `head`, a linear layer on frozen features that starts at zero; `lora`, adapters of a pretrained
            model; `projector`, between a vision tower and a language model; `full`, all weights of a small network
            that starts at random, on inputs of unit variance; `pretrained`, all weights of a pretrained model.
        dataset_size: number of records n, >= 1.
        num_parameters: number of trained parameters d, >= 1.
        epsilon: budget, > 0. delta: 0 < delta < 1.
        num_classes: outputs of the head, >= 1; required for `head`, and for `lora` with a new head.
        num_head_parameters: of a new head beside the adapters of `lora`, 1 <= it <= d.
        feature_norm: norm of the features of a row, > 0; with a head only. None: sqrt(k), as behind a layer norm.
            It must be known without the data: normalise each row by its own norm.
        sampling_prob: q, 0 < q <= 1. A smaller one costs less time and a little accuracy. None: see above.

    Returns:
        A `Recipe`, which may be published.

    Raises:
        InvalidArgument: a value outside its domain; num_classes or feature_norm without a head.

    Guarantees:
        a function of its arguments alone (tests/test_recipes.py::test_a_recipe_is_a_pure_function).

    >>> found = recipe("head", dataset_size=7463, num_parameters=770, epsilon=3.0, delta=1e-5, num_classes=2)
    >>> found.expected_batch_size, found.num_steps
    (3732, 100)
    """
    rule = _RULES[one_of("strategy", strategy, STRATEGIES)]
    size, d = records(dataset_size), integer("num_parameters", num_parameters, minimum=1)
    positive("epsilon", epsilon)
    open_unit("delta", delta)
    inputs = _head_inputs(strategy, d, num_classes, num_head_parameters, feature_norm)
    if sampling_prob is None:
        q = max(rule.sampling_prob, min(0.5, rule.cheap / size))
    else:
        q = probability("sampling_prob", sampling_prob)
    sigma = calibrate_noise(epsilon=epsilon, delta=delta, sampling_prob=1.0, num_steps=1)
    noise = math.sqrt(d) * sigma / size
    head_rate = None if inputs is None else _head_rate(inputs, feature_norm, noise)
    found = Recipe(
        strategy=strategy,
        dataset_size=size,
        num_parameters=d,
        epsilon=epsilon,
        delta=delta,
        expected_batch_size=max(1, round(q * size)),
        num_steps=rule.steps,
        clip=Automatic(),
        learning_rate=_rate(strategy, d, head_rate),
        noise_to_signal=noise,
        head_rate=None if strategy == "head" else head_rate,
    )
    if (advice := found.advice()) is not None:
        warn(advice, NoiseWarning)
    return found


def _head_inputs(
    strategy: Strategy, d: int, num_classes: int | None, num_head_parameters: int | None, feature_norm: float | None
) -> float | None:
    """Inputs of the head, its bias included; None without a head.

    Raises:
        InvalidArgument: a head that the strategy does not have, or lacks.
    """
    if strategy == "head":
        if num_classes is None:
            raise fail("num_classes >= 1 with a head", "num_classes", num_classes, "Pass the number of its outputs.")
        if num_head_parameters is not None and num_head_parameters != d:
            raise fail(f"num_head_parameters={d}, all that are trained", "num_head_parameters", num_head_parameters)
        return d / integer("num_classes", num_classes, minimum=1)
    if strategy == "lora" and num_classes is not None and num_head_parameters is not None:
        own = integer("num_head_parameters", num_head_parameters, minimum=1)
        if own > d:
            raise fail(f"num_head_parameters <= {d}, what is trained", "num_head_parameters", own)
        return own / integer("num_classes", num_classes, minimum=1)
    given = {"num_classes": num_classes, "num_head_parameters": num_head_parameters, "feature_norm": feature_norm}
    for name, value in given.items():
        if value is not None:
            hint = "Pass num_classes and num_head_parameters together." if strategy == "lora" else ""
            raise fail(f"no {name} without a head", name, value, f"strategy is {strategy!r}. {hint}".strip())
    return None


def _rate(strategy: Strategy, d: int, head_rate: float | None) -> float:
    """Rate of the first step; of adapters beside a head, theirs."""
    if strategy == "head" and head_rate is not None:
        return head_rate
    rate = _RULES[strategy].rate
    if isinstance(rate, float):
        return rate
    a, low, high = rate
    return min(high, max(low, a / math.sqrt(d)))


def _head_rate(inputs: float, feature_norm: float | None, noise: float) -> float:
    root_k = math.sqrt(inputs)
    norm = root_k if feature_norm is None else positive("feature_norm", feature_norm)
    low, high = _HEAD_RANGE
    return min(high, max(low, _HEAD_RATE * math.sqrt(root_k / noise))) / (norm * root_k)
