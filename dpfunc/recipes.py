"""Recipes: optimizer, learning rate, batch size and number of steps of a private run, from public facts alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dpfunc._utils.validation import fail, one_of, open_unit, positive, probability, records, whole
from dpfunc.accounting import calibrate_noise
from dpfunc.clipping import Automatic
from dpfunc.plan import Plan

Strategy = Literal["head", "lora", "full"]
STRATEGIES = ("head", "lora", "full")

STEPS = {"head": 100, "lora": 40, "full": 100}
SAMPLING_PROB = {"head": 0.5, "lora": 0.16, "full": 0.1}
RATE = {"lora": 1e-3, "full": 3e-2}
HEAD_SCALE = 1.2
HEAD_RANGE = (2.0, 25.0)  # of rate * feature_norm * sqrt(k): no more and no less was measured
HOPELESS = {"head": 0.25, "lora": 1.0, "full": 1.0}


@dataclass(frozen=True)
class Recipe:
    """Settings of a private run. Its values go into `Plan.for_budget` and into an optimizer; `recipe` derives them.

    Args:
        strategy: `head`, `lora` or `full`.
        dataset_size: number of records n. num_parameters: number of trained parameters d.
        epsilon, delta: the budget.
        expected_batch_size: q n. num_steps: T.
        clip: clip rule.
        learning_rate: of the first step; it falls linearly to 0. The rate of Adam, without weight decay.
        noise_to_signal: `sqrt(d) sigma_1 / n`, see `recipe`.

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

    def optimizer(self, params: Iterable[Tensor]) -> torch.optim.Adam:
        """Adam over the trained parameters, e.g. `params.values()`."""
        return torch.optim.Adam(params, lr=self.learning_rate)

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

    def advice(self) -> str | None:
        """A sentence with the number of records that would help, where noise hides nearly all; else None.

        >>> found = recipe("full", dataset_size=2000, num_parameters=10**7, epsilon=1.0, delta=1e-5)
        >>> print(found.advice()[:59])
        Expected noise_to_signal <= 1, got noise_to_signal=5.9 with
        """
        most = HOPELESS[self.strategy]
        if self.noise_to_signal <= most:
            return None
        share = most / self.noise_to_signal
        return (
            f"Expected noise_to_signal <= {most:g}, got noise_to_signal={self.noise_to_signal:.2g} with "
            f"{self.num_parameters} trained parameters and {self.dataset_size} records. Train at most "
            f"{max(1, int(self.num_parameters * share * share))} parameters (a head on frozen features, LoRA of a "
            f"lower rank), or have {math.ceil(self.dataset_size / share)} records, or take a larger epsilon."
        )


def recipe(
    strategy: Strategy,
    *,
    dataset_size: int,
    num_parameters: int,
    epsilon: float,
    delta: float,
    num_classes: int | None = None,
    feature_norm: float | None = None,
    sampling_prob: float | None = None,
) -> Recipe:
    """Settings that work at the first try, from public facts alone.

    Every argument is public: the budget, the shape of the model, and n, which a plan publishes anyway. Nothing here
    reads a record, so a recipe costs no privacy. With `sigma_1`, the noise of one release of all records at
    (epsilon, delta), and k = d / num_classes inputs of a head:

        r = sqrt(d) sigma_1 / n                                          noise-to-signal ratio of the whole run
        clip = Automatic(clip_norm=1)                                    every gradient gets norm 1
        batch = q n, and the learning rate of Adam falls linearly to 0, from:

        | strategy | q    | steps | learning rate |
        |---|---|---|---|
        | head     | 0.5  | 100   | a / (feature_norm sqrt(k)), with a = 1.2 / sqrt(r), at least 2 and at most 25 |
        | lora     | 0.16 | 40    | 0.001; a new head beside the adapters: that of a head, in a parameter group |
        | full     | 0.1  | 100   | 0.03 |

    Adam divides by the noise, so its rate is a distance: a is about how far a step can move a logit. What is smaller
    than the noise needs shorter steps. Heads were measured on five data sets, networks with one hidden layer on three;
    the values for adapters come from one example and were not searched: docs/recipes.md.

    Args:
        strategy: `head`, a linear layer on frozen features that starts at zero; `lora`, adapters of a pretrained
            model; `full`, all weights of a small network that starts at random, on inputs of unit variance.
        dataset_size: number of records n, >= 1.
        num_parameters: number of trained parameters d, >= 1.
        epsilon: budget, > 0. delta: 0 < delta < 1.
        num_classes: outputs of the head, >= 1; for `head` only, and required there.
        feature_norm: norm of the features of a row, > 0; for `head` only. None: sqrt(k), as behind a layer norm.
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
    one_of("strategy", strategy, STRATEGIES)
    size, d = records(dataset_size), whole("num_parameters", num_parameters, minimum=1)
    positive("epsilon", epsilon)
    open_unit("delta", delta)
    if strategy != "head" and num_classes is not None:
        raise fail("no num_classes without a head", "num_classes", num_classes, f"strategy is {strategy!r}.")
    if strategy != "head" and feature_norm is not None:
        raise fail("no feature_norm without a head", "feature_norm", feature_norm, f"strategy is {strategy!r}.")
    q = SAMPLING_PROB[strategy] if sampling_prob is None else probability("sampling_prob", sampling_prob)
    sigma = calibrate_noise(epsilon=epsilon, delta=delta, sampling_prob=1.0, num_steps=1)
    noise = math.sqrt(d) * sigma / size
    rate = RATE[strategy] if strategy != "head" else _head_rate(d, num_classes, feature_norm, noise)
    return Recipe(
        strategy=strategy,
        dataset_size=size,
        num_parameters=d,
        epsilon=epsilon,
        delta=delta,
        expected_batch_size=max(1, round(q * size)),
        num_steps=STEPS[strategy],
        clip=Automatic(),
        learning_rate=rate,
        noise_to_signal=noise,
    )


def _head_rate(num_parameters: int, num_classes: int | None, feature_norm: float | None, noise: float) -> float:
    if num_classes is None:
        raise fail("num_classes >= 1 with a head", "num_classes", num_classes, "Pass the number of its outputs.")
    root_k = math.sqrt(num_parameters / whole("num_classes", num_classes, minimum=1))
    norm = root_k if feature_norm is None else positive("feature_norm", feature_norm)
    low, high = HEAD_RANGE
    return min(high, max(low, HEAD_SCALE / math.sqrt(noise))) / (norm * root_k)
