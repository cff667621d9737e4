"""The privacy arguments of a training script: one dataclass that command lines, YAML files and scripts share.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: no.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, Self

from dpfunc._utils.validation import (
    boolean,
    checked,
    count,
    fail,
    named,
    one_of,
    open_unit,
    optional,
    positive,
    probability,
    refuse,
    suggestion,
)
from dpfunc.accounting import Ledger, affordable_steps
from dpfunc.accounting.accountant import ACCOUNTANTS
from dpfunc.clipping import Adaptive, Automatic, Flat, Statistic, Telemetry
from dpfunc.engines.by_name import ENGINES
from dpfunc.errors import InvalidArgument, NoiseWarning, UnreachableBudget
from dpfunc.plan import Plan
from dpfunc.recipes import STRATEGIES
from dpfunc.sampling import Poisson, Sampler, Shuffled
from dpfunc.types import ADJACENCIES, Adjacency, ClipRule
from dpfunc.updates.averages import Average, average_of

_HIGHEST = {"loss": "10", "accuracy": "1", "clipped": "1"}  # values of statistics, where none is given

# What other libraries call the same thing. `disable_dp` is the opposite of `dp_enabled`.
OTHER_NAMES = {
    "per_sample_max_grad_norm": "dp_max_grad_norm",
    "noise_multiplier": "dp_noise_multiplier",
    "target_epsilon": "dp_epsilon",
    "target_delta": "dp_delta",
    "disable_dp": "dp_enabled",
    "dry_run": "dp_dry_run",
}


def _option(default: object, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@named
@dataclass(frozen=True)
@checked({
    **dict.fromkeys(("dp_enabled", "dp_poisson_sampling", "dp_secure_mode"), boolean),
    **dict.fromkeys(("dp_dry_run", "dp_allow_large_delta", "dp_log_unreleased"), boolean),
    **dict.fromkeys(("dp_epsilon", "dp_max_grad_norm", "dp_noise_multiplier", "dp_max_epsilon"), optional(positive)),
    "dp_delta": optional(open_unit),
    "dp_warn_at": probability,
    **dict.fromkeys(("dp_physical_batch_size", "dp_dataset_size"), optional(count)),
    "dp_views": count,
    "dp_engine": partial(one_of, allowed=ENGINES),
    "dp_accountant": partial(one_of, allowed=ACCOUNTANTS, hint="The GDP approximation under-reports: no budget."),
    "dp_clip": optional(partial(one_of, allowed=("flat", "automatic", "adaptive"))),
    "dp_adjacency": optional(partial(one_of, allowed=ADJACENCIES)),
    "dp_recipe": optional(partial(one_of, allowed=STRATEGIES)),
})  # fmt: skip
class PrivacyArguments:
    """Privacy settings of a training script. `HfArgumentParser` makes flags of it, e.g. `--dp_epsilon 8`.

    Args, beside what the text of each field says:
        dp_enabled: without it the other arguments change nothing.
        dp_epsilon, dp_noise_multiplier: > 0, exactly one of them. dp_delta: 0 < delta < 1, required.
        dp_max_grad_norm: > 0. Required for dp_clip="flat"; 1 for "automatic", where it acts like a learning rate; with
            "adaptive" the first bound, 0.1 where none is given.
        dp_recipe: take batch size, steps, rate, schedule and optimizer from `dpfunc.recipes.recipe`: `head`, `lora`,
            `projector`, `full` or `pretrained`; the clip rule too, where neither it nor a bound is given. Those of
            TrainingArguments are then left at their defaults.
        dp_secure_mode: as always on a CPU. dp_engine: see `make_dp_step`. dp_warn_at: once, 0 < share <= 1.
        dp_physical_batch_size: None is the Trainer's batch size.
        dp_adjacency: None is `add_remove`, and `zero_out` without Poisson sampling.
        dp_telemetry: `loss`, `accuracy`, `clipped`, `norm`, or a key of the aux of a loss; with its largest value
            after a colon, `loss:4` (by default 10, and 1 for the accuracy). See docs/guides/telemetry.md.
        dp_telemetry_share: share of the squared bound that they take from the gradient, 0 < share < 1.
        dp_views: >= 1, see `sampling.mean_over_views`. Augment with torch's generator, in the data set.
        dp_average: `ema:DECAY` or `last:COUNT`, see `updates.Ema` and `updates.LastSteps`. Evaluations and checkpoints
            during training have the parameters of their step.

    Raises:
        InvalidArgument: a value outside its domain, missing, or contradicting another.

    >>> privacy = PrivacyArguments(dp_epsilon=8.0, dp_delta=1e-5, dp_max_grad_norm=1.0)
    >>> privacy.plan(dataset_size=1000, expected_batch_size=100, num_steps=50).num_steps
    50
    """

    dp_enabled: bool = _option(True, "Train with differential privacy; --no_dp_enabled trains the twin without.")
    dp_epsilon: float | None = _option(None, "Privacy budget; the noise is computed from it.")
    dp_delta: float | None = _option(None, "Below 1 / number of records.")
    dp_max_grad_norm: float | None = _option(None, "Bound on the gradient norm of one sample.")
    dp_noise_multiplier: float | None = _option(None, "Noise / sensitivity, instead of an epsilon.")
    dp_max_epsilon: float | None = _option(None, "With a noise multiplier: no step that would exceed this.")
    dp_poisson_sampling: bool = _option(True, "Without it batches are shuffled and no amplification is claimed.")
    dp_secure_mode: bool = _option(
        True, "Noise of an AES stream from the CPU; False: on a GPU, of a ChaCha20 stream from there."
    )
    dp_physical_batch_size: int | None = _option(None, "Samples differentiated at once; memory only.")
    dp_clip: Literal["flat", "automatic", "adaptive"] | None = _option(
        None,
        "Clip to a ball (flat), to one whose bound follows the median norm (adaptive), or normalise every gradient "
        "(automatic); flat where a norm is given.",
    )
    dp_engine: str = _option("auto", "How per-sample gradients are found: auto, ghost, vmap, loop, captured.")
    dp_accountant: Literal["auto", "tilted", "prv", "rdp"] = _option("auto", "How epsilon is found.")
    dp_adjacency: Literal["add_remove", "zero_out", "replace_one"] | None = _option(None, "What neighbours are.")
    dp_dry_run: bool = _option(False, "Show the plan and train nothing.")
    dp_warn_at: float = _option(0.9, "Warn when this share of the budget is spent.")
    dp_allow_large_delta: bool = _option(False, "Accept delta >= 1 / number of records.")
    dp_dataset_size: int | None = _option(None, "Public number that the number of records cannot exceed.")
    dp_log_unreleased: bool = _option(False, "Log the training loss, which is private, as unreleased/loss.")
    dp_telemetry: list[str] | None = _option(  # noqa: RUF009  (the parser of Transformers takes lists)
        None, "Statistics to release with the gradient, e.g. loss accuracy."
    )
    dp_telemetry_share: float = _option(0.05, "Share of the squared bound that they take from the gradient.")
    dp_views: int = _option(1, "Times that a step reads each record, to average its gradients before the clip.")
    dp_average: str | None = _option(None, "Average over steps that the model has at the end: ema:0.99 or last:20.")
    dp_recipe: Literal["head", "lora", "projector", "full", "pretrained"] | None = _option(
        None, "Take batch size, steps and learning rate from a recipe."
    )

    def __post_init__(self) -> None:
        self.telemetry()
        self.average(2**62)
        private, given = self.dp_enabled, "neither" if self.dp_epsilon is None else "both"
        refuse(
            (self.dp_recipe is not None and (self.dp_epsilon is None or self.dp_delta is None),
             f"Expected dp_epsilon and dp_delta with dp_recipe, got dp_epsilon={self.dp_epsilon} and dp_delta="
             f"{self.dp_delta}: the recipe depends on them, also for the twin without privacy."),
            (private and (self.dp_epsilon is None) == (self.dp_noise_multiplier is None),
             f"Expected exactly one of dp_epsilon and dp_noise_multiplier, got {given}. With dp_epsilon the noise is "
             "computed; with dp_noise_multiplier epsilon is, and dp_max_epsilon is its ceiling."),
            (private and self.dp_max_epsilon is not None and self.dp_noise_multiplier is None,
             "Expected dp_max_epsilon together with dp_noise_multiplier only, got dp_max_epsilon="
             f"{self.dp_max_epsilon} and dp_epsilon={self.dp_epsilon}. dp_epsilon is a ceiling already."),
            (private and self.dp_epsilon is None and self.dp_max_epsilon is None
             and self.dp_warn_at != type(self).dp_warn_at,
             f"Expected dp_epsilon or dp_max_epsilon together with dp_warn_at, got dp_warn_at={self.dp_warn_at} alone: "
             "there is no budget of which a share could be spent."),
            (private and self.dp_delta is None,
             "Expected dp_delta to be given, got dp_delta=None. Choose it well below 1 / number of records, e.g. "
             "1e-5 for 10 000 records; dpfunc.accounting.suggest_delta(n) suggests one."),
            (private and self.dp_telemetry is None and self.dp_telemetry_share != type(self).dp_telemetry_share,
             f"Expected dp_telemetry together with dp_telemetry_share, got dp_telemetry_share="
             f"{self.dp_telemetry_share} alone: there are no statistics to take a share."),
            (private and self.dp_max_grad_norm is None and self.dp_clip == "flat",
             "Expected dp_max_grad_norm to be given with dp_clip='flat', got dp_max_grad_norm=None. It bounds the "
             "gradient of each sample, e.g. 1.0. dp_clip='automatic' needs none."),
        )  # fmt: skip

    @classmethod
    def from_names(cls, values: Mapping[str, Any]) -> Self:
        """The arguments from a mapping, e.g. of a YAML file; names that other libraries use are understood.

        Args:
            values: name -> value. Besides the fields: per_sample_max_grad_norm, noise_multiplier, target_epsilon,
                target_delta, disable_dp, dry_run.

        Raises:
            InvalidArgument: an unknown name, with a suggestion; or two names of one argument that differ.

        >>> names = {"target_epsilon": 8.0, "dp_delta": 1e-5, "per_sample_max_grad_norm": 1.0}
        >>> PrivacyArguments.from_names(names).dp_epsilon
        8.0
        """
        return cls(**own_names(values))

    @property
    def adjacency(self) -> Adjacency:
        """Relation between neighbouring data sets: `dp_adjacency`, or the default of the sampling."""
        return self.dp_adjacency or ("add_remove" if self.dp_poisson_sampling else "zero_out")

    def clip(self) -> ClipRule:
        """Clip rule named by `dp_clip`; flat where only a norm is given, automatic with a bound of 1 without one."""
        norm = self.dp_max_grad_norm
        if self.dp_clip == "adaptive":
            return Adaptive() if norm is None else Adaptive(norm)
        if norm is None:
            return Automatic()
        return Automatic(norm) if self.dp_clip == "automatic" else Flat(norm)

    def average(self, num_steps: int) -> Average | None:
        """The average that `dp_average` names, over a run of so many steps; None without one."""
        return average_of(self.dp_average, num_steps, "dp_average")

    def telemetry(self) -> Telemetry | None:
        """Statistics of `dp_telemetry`. A histogram of norms has edges at 1/4, 1/2, 1, 2 and 4 times the bound."""
        if self.dp_telemetry is None:
            return None
        edges = tuple((self.dp_max_grad_norm or 1.0) * 2.0**power for power in range(-2, 3))
        statistics = []
        for text in self.dp_telemetry:
            name, _, high = text.partition(":")
            given = high or _HIGHEST.get(name, "")
            if text == "norm":
                statistics.append(Statistic(name, edges=edges))
            elif given.replace(".", "", 1).isdecimal():
                statistics.append(Statistic(name, high=float(given)))
            else:
                raise fail("NAME, or NAME:HIGHEST", "dp_telemetry", text, f"Alone: {', '.join(_HIGHEST)}, norm.")
        return Telemetry(tuple(statistics), self.dp_telemetry_share)

    def public_size(self, num_records: int) -> int:
        """Number of records that the plan publishes: what there are, or `dp_dataset_size`, which is no smaller."""
        if self.dp_dataset_size is None or num_records <= self.dp_dataset_size:
            return self.dp_dataset_size or num_records
        raise InvalidArgument(
            f"Expected at most dp_dataset_size={self.dp_dataset_size} records, got more. A bound that the data exceed "
            "is none: choose a larger one."
        )

    def plan(self, dataset_size: int, expected_batch_size: float, num_steps: int, spent: Ledger | None = None) -> Plan:
        """Make the plan of a run; the noise is computed from `dp_epsilon` if that is given.

        Args:
            dataset_size: number of records n, or a public bound on it. expected_batch_size: q n, the logical batch.
            num_steps: optimizer steps.
            spent: what earlier phases on the same data have cost; dp_epsilon and dp_max_epsilon cover both.

        Returns:
            A plan with num_steps steps, or fewer where dp_max_epsilon allows no more.

        Raises:
            InvalidArgument: dp_enabled is False, or a value does not fit the data.
            UnreachableBudget: the budget does not allow one step.
        """
        if not self.dp_enabled or self.dp_delta is None:
            raise InvalidArgument("Expected dp_enabled=True for a plan, got dp_enabled=False: nothing is private.")
        size = float(expected_batch_size)
        if self.dp_poisson_sampling:
            sampler: Sampler = Poisson.of_batch_size(dataset_size, size)
        elif size.is_integer():
            sampler = Shuffled(dataset_size, int(size))
        else:
            raise fail("a whole expected_batch_size without Poisson sampling", "expected_batch_size", size)
        given: dict[str, Any] = {
            "sampler": sampler, "clip": self.clip(), "num_steps": num_steps, "delta": self.dp_delta,
            "adjacency": self.adjacency, "accountant": self.dp_accountant,
            "allow_large_delta": self.dp_allow_large_delta, "spent": spent, "telemetry": self.telemetry(),
        }  # fmt: skip
        if self.dp_noise_multiplier is None:
            with warnings.catch_warnings(action="ignore", category=NoiseWarning):  # a run says it in its own words
                return Plan.for_budget(epsilon=self.dp_epsilon, **given)
        whole_run = Plan(noise_multiplier=self.dp_noise_multiplier, **given)
        if self.dp_max_epsilon is None:
            return whole_run
        before = Ledger(adjacency=self.adjacency) if spent is None else spent
        steps = affordable_steps(
            lambda k: before.compose(whole_run.ledger(k)),
            epsilon=self.dp_max_epsilon, delta=self.dp_delta, limit=num_steps, method=self.dp_accountant,
        )  # fmt: skip
        if steps == 0:
            raise UnreachableBudget(
                f"Expected a budget for at least one step, got dp_max_epsilon={self.dp_max_epsilon:g}, which one step "
                f"with dp_noise_multiplier={self.dp_noise_multiplier:g} exceeds. Take more noise or smaller batches."
            )
        return replace(whole_run, num_steps=steps, epsilon=self.dp_max_epsilon)


def own_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Privacy arguments by the names of `PrivacyArguments`, where other libraries' names may be among them."""
    known = [f.name for f in fields(PrivacyArguments)]
    chosen: dict[str, tuple[Any, str]] = {}
    for name, value in values.items():
        target = OTHER_NAMES.get(name, name)
        if target not in known:
            raise InvalidArgument(
                f"Expected a privacy argument, got {name!r}. {suggestion(str(name), [*known, *OTHER_NAMES])}"
            )
        if name == "disable_dp":
            value = not boolean(name, value)
        before, other = chosen.setdefault(target, (value, name))
        if other != name and before != value:
            raise InvalidArgument(f"Expected one value for {target}, got {other} and {name}, which contradict.")
    return {target: value for target, (value, _) in chosen.items()}
