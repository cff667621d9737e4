"""Recipes: optimizer, learning rate, batch size and number of steps of a private run, from public facts alone.

May import: plan and below. Privacy depends on it: no.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfunc._utils.validation import (
    fail,
    integer,
    named,
    one_of,
    open_unit,
    positive,
    probability,
    records,
    refuse,
    warn,
)
from dpfunc.accounting import calibrate_noise
from dpfunc.clipping import Automatic, Flat
from dpfunc.errors import NoiseWarning
from dpfunc.plan import Plan
from dpfunc.sampling import mean_over_views
from dpfunc.updates.averages import Average, average_of

Strategy = Literal["head", "lora", "projector", "full", "pretrained"]


@dataclass(frozen=True)
class _Rule:
    sampling_prob: float
    steps: int
    rate: float | tuple[float, float, float]  # of the first step; or a, low, high of a / sqrt(d); of a head see `_rate`
    hopeless: float  # noise-to-signal ratio above which nothing was seen to be learnt
    origin: str
    cheap: int = 1  # rows of a batch that cost little time: a smaller one would only have more noise


_HEAD_STEPS = (200, 400)  # fewest and most: 4 / r between
_HEAD_BOUND = (0.25, 1.0)  # of gradients on rows of norm 1: 0.08 / sqrt(r) between
_FULL_BOUND = 3.0  # of all weights of a small network, on inputs of unit variance
_HEAD_WAY = 1.4  # r^(-1/4) times this / sqrt(T) is the rate of a head on rows of norm 1
_CONSTANT = 0.5  # feature of `unit_rows` beside a row of norm 1: a longer one takes noise from what tells classes apart
_BESIDE_RATE = 0.5  # times k^(1/4) / sqrt(r): how far a step can move a logit of a head beside adapters
_BESIDE_RANGE = (2.0, 18.0)  # more lost accuracy on texts, less was not measured
_RULES: dict[Strategy, _Rule] = {
    "head": _Rule(0.5, 100, math.nan, 0.25, "chosen on six data sets"),
    "lora": _Rule(0.16, 40, 1e-3, 1.0, "measured on two data sets of texts, in one layer"),
    "projector": _Rule(
        0.1, 100, (8.0, 0.0, 0.05), 1.0, "measured on two data sets of images, in one language model", cheap=1000
    ),
    "full": _Rule(0.1, 100, (2.0, 0.002, 0.1), 1.0, "chosen on four data sets", cheap=1000),
    "pretrained": _Rule(0.1, 100, 5e-4, 1.0, "not measured here: that of Li et al. 2022"),
}
STRATEGIES: tuple[Strategy, ...] = tuple(_RULES)


def unit_rows(x_Bk: Tensor) -> Tensor:
    """Rows of norm 1 with a constant feature: what a recipe for a head needs, from each row alone.

        [x / |x|, 1/2] / sqrt(5/4)

    The gradient of a softmax or logistic cross-entropy for a linear layer without bias is then at most sqrt(2) long,
    whatever weights, row and label are: a bound that is known without the data and cuts nothing off. The constant
    feature takes the place of a bias, which would be small beside the other weights and drown in their noise.

    Args:
        x_Bk: features (..., k), finite; centred and scaled by what is public: ranges, the mean of each row, but no mean
            or deviation over records.

    Returns:
        (..., k + 1) of norm 1, or 1 / sqrt(5) for a row of zeros.

    Guarantees:
        tests/test_recipes.py: norms and the bound (test_rows_have_norm_1, test_the_bound_of_a_head), each row alone
        (test_a_row_is_scaled_alone).

    >>> unit_rows(torch.tensor([[3.0, 4.0]])) * 1.25**0.5
    tensor([[0.6000, 0.8000, 0.5000]])
    """
    constant = torch.full_like(x_Bk[..., :1], _CONSTANT)
    return torch.cat([F.normalize(x_Bk, dim=-1), constant], -1) / math.sqrt(1 + _CONSTANT**2)


class Head(nn.Linear):
    """A linear layer that starts at zero, on `unit_rows` of its inputs: logits W unit_rows(x).

    For `recipe("head", ...)`, which needs rows of norm 1 and takes classes * (k + 1) parameters.

    Args:
        num_features: k of a row, >= 1. num_classes: outputs, >= 1.

    >>> Head(3, 2)(torch.randn(5, 3)).shape, sum(p.numel() for p in Head(3, 2).parameters())
    (torch.Size([5, 2]), 8)
    """

    def __init__(self, num_features: int, num_classes: int) -> None:
        features = integer("num_features", num_features, minimum=1)
        super().__init__(features + 1, integer("num_classes", num_classes, minimum=1), bias=False)

    def reset_parameters(self) -> None:
        """Set the layer to zero: no class is preferred, and training need not undo a random direction."""
        nn.init.zeros_(self.weight)

    def forward(self, x_Bk: Tensor) -> Tensor:
        """Logits (..., num_classes) of features (..., k)."""
        return F.linear(unit_rows(x_Bk), self.weight)


@dataclass(frozen=True)
class Recipe:
    """Settings of a private run. Its values go into `Plan.for_budget` and into an optimizer; `recipe` derives them.

    Args:
        strategy: see `recipe`.
        dataset_size: number of records n. num_parameters: number of trained parameters d.
        epsilon, delta: the budget.
        expected_batch_size: q n. num_steps: T.
        clip: clip rule; `Flat` for a head and a small network, else `Automatic`.
        learning_rate: of the first step; it falls linearly to 0. The rate of Adam, without weight decay.
        noise_to_signal: `sqrt(d) sigma_1 / n`, see `recipe`.
        head_rate: rate of a new head beside adapters; None where there is none.
        views: times that a step reads each record; for `plan.loader(..., views=recipe.views)`.
        average: of the parameters over the steps, `ema:DECAY` or `last:COUNT`; None without one.

    Raises:
        InvalidArgument: from `plan`, where the plan would.

    >>> found = recipe("head", dataset_size=2000, num_parameters=770, epsilon=3.0, delta=1e-5, num_classes=2)
    >>> plan = found.plan()
    >>> plan.num_steps, plan.sampler.expected_batch_size(0)
    (207, 1000.0)
    >>> model = Head(384, 2)
    >>> optimizer = found.optimizer(model.parameters())
    >>> scheduler = found.scheduler(optimizer)
    """

    strategy: Strategy
    dataset_size: int
    num_parameters: int
    epsilon: float
    delta: float
    expected_batch_size: int
    num_steps: int
    clip: Flat | Automatic
    learning_rate: float
    noise_to_signal: float
    head_rate: float | None = None
    views: int = 1
    average: str | None = None

    def plan(self) -> Plan:
        """`Plan.for_budget` of these values, with add/remove neighbours."""
        return Plan.for_budget(
            epsilon=self.epsilon, delta=self.delta, dataset_size=self.dataset_size,
            expected_batch_size=self.expected_batch_size, num_steps=self.num_steps, clip=self.clip,
        )  # fmt: skip

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

    def loss(self, sample_loss: Callable[..., Any]) -> Callable[..., Any]:
        """The loss for `make_dp_step`: that of single rows, or with several views its mean over them, before the clip.

        >>> found = recipe("full", dataset_size=90_000, num_parameters=50, epsilon=3.0, delta=1e-6, views=2)
        >>> loss_fn = found.loss(lambda params, x: params["w"] * x)
        >>> loss_fn({"w": torch.tensor(1.0)}, torch.tensor([[1.0, 3.0], [5.0, 7.0]]))
        tensor([2., 6.])
        """
        return sample_loss if self.views == 1 else mean_over_views(sample_loss)

    def averaging(self) -> Average | None:
        """The average to add the parameters of each step to, `updates.Ema` or `updates.LastSteps`; None without one.

        >>> found = recipe("full", dataset_size=9000, num_parameters=50, epsilon=3.0, delta=1e-6, average="last:20")
        >>> found.averaging()
        LastSteps(count=20, num_steps=100)
        """
        return average_of(self.average, self.num_steps, "average")

    def training_arguments(self) -> dict[str, Any]:
        """The same settings for `transformers.TrainingArguments`, whose batch size is then the logical one."""
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
        """The same budget, clip rule, views and average for `dpfunc.hf.trainer.PrivacyArguments`."""
        given: dict[str, Any] = {"dp_epsilon": self.epsilon, "dp_delta": self.delta, **self.clip_arguments()}
        if self.views > 1:
            given["dp_views"] = self.views
        if self.average is not None:
            given["dp_average"] = self.average
        return given

    def clip_arguments(self) -> dict[str, Any]:
        """The clip rule alone, for `dpfunc.hf.trainer.PrivacyArguments`.

        >>> found = recipe("head", dataset_size=9000, num_parameters=770, epsilon=3.0, delta=1e-5, num_classes=2)
        >>> found.clip_arguments()
        {'dp_clip': 'flat', 'dp_max_grad_norm': 1.0}
        """
        return (
            {"dp_clip": "automatic"}
            if isinstance(self.clip, Automatic)
            else {"dp_clip": "flat", "dp_max_grad_norm": self.clip.clip_norm}
        )

    def reasons(self) -> dict[str, str]:
        """Each value with its reason, by the names of a training script.

        >>> found = recipe("lora", dataset_size=2000, num_parameters=50000, epsilon=3.0, delta=1e-5)
        >>> found.reasons()["batch_size"]
        '320: 0.16 of 2000 records; larger batches cost time and gain little'
        """
        share = self.expected_batch_size / self.dataset_size
        steps = "the noise of all steps together hardly depends on their number"
        clip = f"automatic, norm {self.clip.clip_norm:g}: Adam takes the scale of a gradient away"
        if self.strategy == "head":
            steps = f"{steps}; the less noise, the more steps are of use"
        if isinstance(self.clip, Flat):
            clip = f"flat, norm {self.clip.clip_norm:.3g}: what is learnt already gets small gradients"
        found = {
            "batch_size": f"{self.expected_batch_size}: {share:.2g} of {self.dataset_size} records; larger batches "
            "cost time and gain little",
            "steps": f"{self.num_steps}: {steps}",
            "learning_rate": f"{self.learning_rate:.3g} of Adam, falling linearly to 0; {_RULES[self.strategy].origin}",
            "clip": clip,
        }
        if self.head_rate is not None:
            found["head_rate"] = f"{self.head_rate:.3g} for the new head, which has longer ways to go than adapters"
        if self.views > 1:
            found["views"] = f"{self.views}: asked for; their gradients are averaged before the clip"
        if self.average is not None:
            found["average"] = f"{self.average}: asked for; of released parameters, at no cost"
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
    views: int = 1,
    average: str | None = None,
) -> Recipe:
    """Settings that work at the first try, from public facts alone.

    Every argument is public: the budget, the shape of the model, and n, which a plan publishes anyway. Nothing here
    reads a record, so a recipe costs no privacy and may be published. Where noise hides nearly all, it warns
    (`NoiseWarning`). With sigma_1, the noise of one release of all records at (epsilon, delta), and
    k = num_head_parameters / num_classes inputs:

        r = sqrt(d) sigma_1 / n                                          noise-to-signal ratio of the whole run
        T = 4 / r, at least 200 and at most 400                          steps of a head
        C = feature_norm 0.08 / sqrt(r), 0.25..1 times feature_norm      bound of a head
        batch = q n, and the learning rate of Adam falls linearly to 0, from:

        | strategy   | q    | steps | clip | learning rate |
        |---|---|---|---|---|
        | head       | 0.5  | T     | Flat(C) | 1.4 / (feature_norm r^(1/4) sqrt(T)) |
        | lora       | 0.16 | 40    | Automatic(1) | 0.001; b / (feature_norm sqrt(k)) for a new head of k inputs |
        | projector  | 0.1, and up to 0.5 for 1000 rows | 100 | Automatic(1) | 8 / sqrt(d), at most 0.05 |
        | full       | 0.1, and up to 0.5 for 1000 rows | 100 | Flat(3) | 2 / sqrt(d), within 0.002..0.1 |
        | pretrained | 0.1  | 100   | Automatic(1) | 0.0005 |

        b = k^(1/4) / (2 sqrt(r)), at least 2 and at most 18

    Why, and how each of them was found: docs/recipes.md.

    Args:
        strategy: `head`, a linear layer on frozen features that starts at zero, best a `Head`; `lora`, adapters of a
            pretrained model; `projector`, between a vision tower and a language model; `full`, all weights of a small
            network that starts at random, on inputs of unit variance; `pretrained`, all weights of a pretrained model.
        dataset_size: number of records n, >= 1.
        num_parameters: number of trained parameters d, >= 1.
        epsilon: budget, > 0. delta: 0 < delta < 1.
        num_classes: outputs of the head, >= 1; required for `head`, and for `lora` with a new head.
        num_head_parameters: of a new head beside the adapters of `lora`, 1 <= it <= d.
        feature_norm: norm of what a row gives to the head, the 1 of its bias included, > 0; with a head only. None: 1,
            that of `Head` and `unit_rows`; behind a layer norm it is sqrt(k). It must be known without the data.
        sampling_prob: q, 0 < q <= 1. A smaller one costs less time and a little accuracy. None: see above.
        views: K >= 1 of each record, see `sampling.mean_over_views`; no other value depends on it.
        average: `ema:DECAY` or `last:COUNT`, see `updates.Ema` and `updates.LastSteps`; no other value depends on it.
            What views and averages were worth where they were measured: docs/mechanisms.md.

    Raises:
        InvalidArgument: a value outside its domain; num_classes or feature_norm without a head.

    Guarantees:
        tests/test_recipes.py: a function of its arguments alone (test_a_recipe_is_a_pure_function); views and an
        average change no other value and are passed on (test_views_and_an_average_change_no_other_value).

    >>> found = recipe("head", dataset_size=7463, num_parameters=770, epsilon=3.0, delta=1e-5, num_classes=2)
    >>> found.expected_batch_size, found.num_steps, found.clip.clip_norm
    (3732, 400, 1.0)
    """
    rule = _RULES[one_of("strategy", strategy, STRATEGIES)]
    size, d = records("dataset_size", dataset_size), integer("num_parameters", num_parameters, minimum=1)
    positive("epsilon", epsilon)
    open_unit("delta", delta)
    inputs = _head_inputs(strategy, d, num_classes, num_head_parameters, feature_norm)
    norm = 1.0 if feature_norm is None else positive("feature_norm", feature_norm)
    usual = max(rule.sampling_prob, min(0.5, rule.cheap / size))
    q = usual if sampling_prob is None else probability("sampling_prob", sampling_prob)
    noise = math.sqrt(d) * calibrate_noise(epsilon=epsilon, delta=delta, sampling_prob=1.0, num_steps=1) / size
    fewest, most = _HEAD_STEPS
    steps = max(fewest, min(most, round(4 / noise))) if strategy == "head" else rule.steps
    head_rate = None if inputs is None else _beside_adapters(inputs, noise) / norm
    found = Recipe(
        strategy=strategy,
        dataset_size=size,
        num_parameters=d,
        epsilon=epsilon,
        delta=delta,
        expected_batch_size=max(1, round(q * size)),
        num_steps=steps,
        clip=_clip(strategy, noise, norm),
        learning_rate=_rate(strategy, d, noise, steps, norm),
        noise_to_signal=noise,
        head_rate=head_rate if strategy == "lora" else None,
        views=integer("views", views, minimum=1),
        average=average,
    )
    found.averaging()  # which refuses what is none
    if (advice := found.advice()) is not None:
        warn(advice, NoiseWarning)
    return found


def _head_inputs(
    strategy: Strategy, d: int, num_classes: int | None, num_head_parameters: int | None, feature_norm: float | None
) -> float | None:
    """Number of inputs of the head, with its bias; None without a head."""
    if strategy == "head":
        refuse(
            (num_classes is None,
             fail("num_classes >= 1 with a head", "num_classes", None, "Pass the number of its outputs.")),
            (num_head_parameters not in (None, d),
             fail(f"num_head_parameters={d}, all that are trained", "num_head_parameters", num_head_parameters)),
        )  # fmt: skip
        return d / integer("num_classes", num_classes, minimum=1)
    if strategy == "lora" and num_classes is not None and num_head_parameters is not None:
        own = integer("num_head_parameters", num_head_parameters, minimum=1)
        refuse((own > d, fail(f"num_head_parameters <= {d}, what is trained", "num_head_parameters", own)))
        return own / integer("num_classes", num_classes, minimum=1)
    facts = {"num_classes": num_classes, "num_head_parameters": num_head_parameters, "feature_norm": feature_norm}
    together = " Pass num_classes and num_head_parameters together." if strategy == "lora" else ""
    hint = f"strategy is {strategy!r}.{together}"
    refuse(
        *((value is not None, fail(f"no {name} without a head", name, value, hint)) for name, value in facts.items())
    )
    return None


def _clip(strategy: Strategy, noise: float, norm: float) -> Flat | Automatic:
    if strategy == "head":
        low, high = _HEAD_BOUND
        return Flat(norm * min(high, max(low, 0.08 / math.sqrt(noise))))
    return Flat(_FULL_BOUND) if strategy == "full" else Automatic()


def _rate(strategy: Strategy, d: int, noise: float, steps: int, norm: float) -> float:
    """Rate of the first step; of adapters beside a head, theirs."""
    if strategy == "head":
        return _HEAD_WAY / (norm * math.sqrt(math.sqrt(noise) * steps))
    rate = _RULES[strategy].rate
    if isinstance(rate, float):
        return rate
    a, low, high = rate
    return min(high, max(low, a / math.sqrt(d)))


def _beside_adapters(inputs: float, noise: float) -> float:
    """Rate of a new head beside adapters, on rows of norm 1: how far a step can move a logit, within what was seen."""
    low, high = _BESIDE_RANGE
    return min(high, max(low, _BESIDE_RATE * math.sqrt(math.sqrt(inputs) / noise))) / math.sqrt(inputs)
