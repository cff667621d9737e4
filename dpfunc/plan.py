"""The plan of a run: public facts only, cross-checked when it is built.

May import: clipped and below. Privacy depends on it: yes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from dpfunc._utils.validation import (
    below_one,
    boolean,
    checked,
    count,
    expect,
    fail,
    integer,
    named,
    one_of,
    open_unit,
    optional,
    positive,
    refuse,
    warn,
    wrong_type,
)
from dpfunc.accounting import Guarantee, Ledger, affordable_steps, calibrate, epsilon
from dpfunc.accounting.accountant import ACCOUNTANTS
from dpfunc.batches import own_records
from dpfunc.clipping import Telemetry
from dpfunc.clipping.rules import of_run
from dpfunc.distributed._object_collectives import check_same_data
from dpfunc.distributed.ranks import Ranks
from dpfunc.errors import InvalidArgument, LedgerConflict, NoiseWarning, RunWarning
from dpfunc.noise import DEFAULT, Noise, Run
from dpfunc.rng import Key
from dpfunc.sampling import Poisson, Sampler
from dpfunc.sampling.loader import Collate, Draws, Once, check_dataset, data_loader
from dpfunc.sampling.records import batches_name
from dpfunc.types import ADJACENCIES, Adjacency, Allocation, Batch, ClipRule, Event, Schedule, schedule_at

# Parts of a plan that may be of a user: name, methods that it needs, what is expected.
_PARTS = (
    ("sampler", ("indices", "events", "expected_batch_size"), "a sampler such as sampling.Poisson(...)"),
    ("clip", ("factors",), "a clip rule such as clipping.Flat(clip_norm=...)"),
    ("noise", ("check", "events", "mechanism"), "noise such as noise.Gaussian()"),
)


class Position(Protocol):
    """Progress of a run: the part of a step state that `Plan.batches` needs."""

    @property
    def step(self) -> int: ...
    @property
    def limit(self) -> int: ...
    @property
    def key(self) -> Key: ...
    @property
    def num_records(self) -> int | None: ...


def _steps_left(state: Position) -> range:
    if state.step >= state.limit:
        warn(
            f"No step is left after step {state.limit}, so this loop takes none. One loop has all steps of a run: "
            "there are no epochs to repeat. To go on, make another plan: Plan.for_budget(..., spent=state.ledger).",
            RunWarning,
        )
    return range(state.step, state.limit)


class _Budget(Protocol):
    """The part of a `dpfunc.Budget` that a plan needs."""

    @property
    def run(self) -> str | None: ...
    def account(self) -> Any: ...
    def spent(self) -> Ledger: ...


@named
@dataclass(frozen=True)
@checked({
    "noise_multiplier": lambda name, value: value if isinstance(value, Schedule) else positive(name, value),
    "num_steps": count,
    "delta": open_unit,
    "epsilon": optional(positive),
    "adjacency": partial(one_of, allowed=ADJACENCIES),
    "allocation": partial(one_of, allowed=("uniform", "optimal")),
    "accountant": partial(one_of, allowed=ACCOUNTANTS, hint="The GDP approximation under-reports: no budget."),
    "allow_large_delta": boolean,
})  # fmt: skip
class Plan:
    """Sampling, clipping, noise, steps and delta, which together fix epsilon. A plan can be published.

    Args:
        sampler: who is in each batch, and what that claims: `Poisson`, `FixedSize`, `Shuffled`, ..
        clip: clip rule; it decides utility and, through its sensitivity, the noise, but not epsilon.
        noise_multiplier: standard deviation of the noise / sensitivity, > 0; or a `Schedule`.
        num_steps: steps of the whole run, >= 1.
        delta: 0 < delta < 1, and below 1 / dataset_size.
        epsilon: the budget, > 0. The plan is refused when it would spend more. None: no budget, only accounting.
        adjacency: which data sets are neighbours.
        allocation: `uniform` noise, or `optimal` over groups of different size at equal privacy.
        accountant: `auto`, `tilted`, `prv` or `rdp`.
        allow_large_delta: accept delta >= 1 / dataset_size, at which publishing a random record whole is "private".
        spent: what earlier phases on the same data have cost: a run of this plan begins with it, and the budget covers
            both. `ledger` and `guarantee` are of the plan's own steps.
        noise: the noise mechanism.
        telemetry: statistics that each step releases with its gradient, in `state.telemetry`.
        budget: of the data set: `dp_step.init` refuses to begin a run that has not reserved there. Not published.

    Raises:
        InvalidArgument: a value outside its domain, or values that contradict each other.
        LedgerConflict: `spent` uses another adjacency.

    Guarantees:
        tests/test_plan.py::test_contradictions_are_refused; a run begins with what the plan counts
        (tests/test_step.py::test_a_run_begins_with_what_its_plan_counts).

    >>> from dpfunc import clipping
    >>> plan = Plan(Poisson(1000, 0.1), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=10, delta=1e-5)
    >>> plan.ledger()
    Ledger(10 steps, add_remove: (q=0.1, sigma=1) x 10)
    """

    sampler: Sampler
    clip: ClipRule
    noise_multiplier: float | Schedule
    num_steps: int
    delta: float
    epsilon: float | None = None
    adjacency: Adjacency = "add_remove"
    allocation: Allocation = "uniform"
    accountant: str = "auto"
    allow_large_delta: bool = False
    spent: Ledger | None = None
    noise: Noise = DEFAULT
    telemetry: Telemetry | None = None
    budget: _Budget | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, methods, domain in _PARTS:
            part = getattr(self, name)
            if isinstance(part, type) or not all(callable(getattr(part, method, None)) for method in methods):
                raise fail(domain, name, part)
        self._check_parts()
        self.noise.check(self.run)
        positive("expected_batch_size of the sampler", self.sampler.expected_batch_size(0))
        self._check_budget(self.ledger())

    def _check_parts(self) -> None:
        """Check that the parts fit together: no combination of them is known whose epsilon would not hold."""
        n, allowed = max(self.sampler.dataset_size, 1), self.sampler.adjacencies
        counted = getattr(self.spent, "adjacency", self.adjacency)
        starts = self.noise_multiplier.starts() if isinstance(self.noise_multiplier, Schedule) else ()
        inside = next((start for start in starts if not self.sampler.events(start, start + 1, 1.0)), None)
        refuse(
            (not isinstance(self.spent, Ledger | None),
             wrong_type("spent to be a dpfunc Ledger, or None", "spent", self.spent)),
            (counted != self.adjacency, LedgerConflict(
                f"Expected spent with adjacency {self.adjacency!r}, as the plan has, got {counted!r}.")),
            (self.delta * n >= 1 and not self.allow_large_delta,
             f"Expected delta < 1 / dataset_size = {1 / n:.3g}, got delta={self.delta:g}. A mechanism that "
             f"publishes one random record has delta = 1 / {n}. Choose e.g. delta={min(1e-5, n**-1.1):.1g}, or "
             "pass allow_large_delta=True and say so with the result."),
            (self.adjacency not in allowed,
             f"Expected adjacency to be one of {allowed} with {type(self.sampler).__name__}, got "
             f"adjacency={self.adjacency!r}. Batches of a fixed size change when a record is added or removed: use "
             "Poisson, or claim zero_out or replace_one."),
            (inside is not None,
             f"Expected the noise schedule to change where a release begins, got a change at step {inside}, which is "
             "charged with a step before it. A shuffled epoch is one release, with one noise multiplier."),
            (not isinstance(self.telemetry, Telemetry | None),
             wrong_type("telemetry to be a clipping.Telemetry, or None", "telemetry", self.telemetry)),
            (self.share_beside and self.allocation == "optimal",
             fail('allocation="uniform" with telemetry or clipping.Adaptive', "allocation", self.allocation,
                  "The optimal one gives few numbers, as statistics are, much of the noise.")),
            (self.share_beside >= 1,
             fail("telemetry and clip rule to leave a share of the squared bound to the gradient", "their shares",
                  self.share_beside)),
        )  # fmt: skip

    def _check_budget(self, own: Ledger) -> None:
        expect(
            own.events, "noise whose events say what the steps of the run cost", "events", (),
            "A release that no event counts is free in every ledger.",
        )  # fmt: skip
        if self.epsilon is None:
            return
        whole = own if self.spent is None else self.spent.compose(own)
        spent = epsilon(whole, self.delta, self.accountant).epsilon
        if spent > self.epsilon:
            earlier = "" if self.spent is None else f", after {self.spent.num_steps} earlier ones,"
            raise InvalidArgument(
                f"Expected a plan within its budget, got epsilon={self.epsilon:g}, but {self.num_steps} steps with "
                f"noise_multiplier={self.noise_multiplier}{earlier} spend {spent:.4g}. Take more noise, fewer steps or "
                "smaller batches, or let Plan.for_budget find the noise multiplier."
            )

    @classmethod
    @named
    def for_budget(
        cls,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        dataset_size: int | None = None,
        expected_batch_size: float | None = None,
        num_steps: int,
        clip: ClipRule,
        sampler: Sampler | None = None,
        noise: Noise = DEFAULT,
        runs: int = 1,
        noise_schedule: Schedule | None = None,
        spent: Ledger | None = None,
        adjacency: Adjacency = "add_remove",
        allocation: Allocation = "uniform",
        accountant: str = "auto",
        allow_large_delta: bool = False,
        telemetry: Telemetry | None = None,
        budget: _Budget | None = None,
    ) -> "Plan":
        """The plan with the least noise that keeps all steps within (epsilon, delta).

        Args:
            epsilon: budget, > 0. delta: see `Plan`. With `budget` they are its own, by default.
            dataset_size: number of records n. expected_batch_size: q n, of Poisson sampling with q =
                expected_batch_size / n.
            sampler: in place of these two numbers, any sampler.
            num_steps, clip, noise, adjacency, allocation, accountant, allow_large_delta, telemetry: see `Plan`.
            runs: number of runs that share the budget, one after the other, e.g. of a sweep: each begins with the
                ledger of those before it, `dp_step.init(params, key, ledger=state.ledger)`. All may be published.
            noise_schedule: relative noise over the run; the result is this times one number.
            spent: what earlier phases on the same data have cost; the budget covers both, and a run begins with it.
            budget: a `dpfunc.Budget`, of which this is the plan for what is left; it says what was spent. Before the
                run begins it reserves: `budget.reserve(plan, key, unit=...)`.

        Raises:
            UnreachableBudget: no noise is enough, e.g. because `spent` alone exceeds the budget.
            InvalidArgument: an argument outside its domain, or a run that the noise refuses.
            NoiseWarning, which is a warning: so much noise that hardly anything can be learnt, see `advice`.

        >>> from dpfunc import clipping
        >>> plan = Plan.for_budget(epsilon=3.0, delta=1e-5, dataset_size=1000, expected_batch_size=100, num_steps=50,
        ...     clip=clipping.Automatic())
        >>> 2.9 < plan.guarantee().epsilon <= 3.0
        True
        """
        if not isinstance(noise_schedule, Schedule | None):
            raise wrong_type("noise_schedule to be a dpfunc.types.Schedule, or None", "noise_schedule", noise_schedule)
        epsilon, delta, spent = _of_budget(epsilon, delta, spent, budget)
        positive("epsilon", epsilon)
        drawn = _sampler(sampler, dataset_size, expected_batch_size)
        before = spent or Ledger(adjacency=adjacency)
        count = integer("runs", runs, minimum=1)

        def plan(scale: float, target: float | None) -> "Plan":
            scaled = Schedule(tuple((n, scale * v) for n, v in noise_schedule.pieces)) if noise_schedule else scale
            return cls(
                sampler=drawn, clip=clip, noise_multiplier=scaled, num_steps=num_steps, delta=delta,
                epsilon=target, adjacency=adjacency, allocation=allocation, accountant=accountant, noise=noise,
                allow_large_delta=allow_large_delta, spent=spent, telemetry=telemetry, budget=budget,
            )  # fmt: skip

        plan(1.0, None)  # bad arguments are found before the search
        scale = calibrate(
            lambda s: before.compose(*[plan(s, None).ledger()] * count), epsilon=epsilon, delta=delta, method=accountant
        )
        found = plan(scale, epsilon)
        if (advice := found.advice()) is not None:
            warn(advice, NoiseWarning)
        return found

    def advice(self) -> str | None:
        """A sentence with the number of records that would help, where noise leaves room for few parameters; else None.

        With b_t records expected in step t, d parameters have noise-to-signal `sqrt(d) / sqrt(sum_t (b_t / sigma_t)^2)`
        (sigma_t twice with replace_one). Few: less than 100 of them have at most 0.25, see docs/recipes.md. None where
        the noise of steps is correlated, of which sums have less.
        """
        weights = getattr(self.noise, "weights", None)
        if weights is not None and len(weights(self.run, self.num_steps - 1)) > 1:
            return None
        sigmas = [schedule_at(self.noise_multiplier, step) for step in range(self.num_steps)]
        signal = sum((self.sampler.expected_batch_size(step) / sigma) ** 2 for step, sigma in enumerate(sigmas))
        room = 0.25**2 * signal / (4 if self.adjacency == "replace_one" else 1)
        if room >= 100:
            return None
        return (
            f"Expected noise with room for at least 100 trained parameters, got room for {int(room)}: more of them "
            f"have noise_to_signal > 0.25 with noise_multiplier={max(sigmas):.3g} in {self.num_steps} steps, and a "
            "head was seen to lose half of its accuracy there. Train fewer, or have "
            f"{math.ceil(self.sampler.dataset_size * math.sqrt(100 / room))} records, or take a larger epsilon."
        )

    @property
    def run(self) -> Run:
        """Public facts about a run of this plan, for its noise mechanism."""
        return Run(self.sampler, self.noise_multiplier, self.num_steps, self.allocation)

    def events(self, start: int, stop: int) -> tuple[Event, ...]:
        """Events of the steps start..stop-1, run-length encoded: the privacy that they cost."""
        return self.noise.events(self.run, start, stop)

    def ledger(self, num_steps: int | None = None) -> Ledger:
        """Ledger of the first `num_steps` steps (all, by default)."""
        return Ledger(self.events(0, self.num_steps if num_steps is None else num_steps), self.adjacency)

    def guarantee(self, num_steps: int | None = None) -> Guarantee:
        """The (epsilon, delta) of the first `num_steps` steps (all, by default)."""
        return epsilon(self.ledger(num_steps), self.delta, self.accountant)

    @property
    def share_beside(self) -> float:
        """Share of the squared bound that statistics take from the gradient: of `telemetry`, and of the clip rule."""
        return getattr(self.telemetry, "share", 0.0) + below_one("share", of_run(self.clip).share)

    def telemetry_errors(self, step: int = 0) -> dict[str, float]:
        """Standard error that the noise gives each statistic of a step (of a histogram each share), before the run.

        `z sqrt(K / share) h / b`, with h half of the distance of its bounds, b the expected batch size, and twice the
        noise multiplier z with replace_one. How much batches differ from the data comes on top. Public.

        Args:
            step: number of the step, from 0.

        Raises:
            InvalidArgument: noise of a user that does not say its weights, see `Noise`.

        >>> from dpfunc import clipping
        >>> telemetry = clipping.Telemetry((clipping.Statistic("loss", high=4.0),), share=0.04)
        >>> plan = Plan(Poisson(1000, 0.1), clipping.Flat(1.0), 1.0, 10, 1e-5, telemetry=telemetry)
        >>> {name: round(error, 3) for name, error in plan.telemetry_errors().items()}
        {'loss': 0.1}
        """
        if self.telemetry is None:
            return {}
        noise = self.deviation(step) * (2 if self.adjacency == "replace_one" else 1)
        return self.telemetry.errors(noise, self.sampler.expected_batch_size(step))

    def deviation(self, step: int) -> float:
        """Standard deviation of the noise in what a step releases, relative to its sensitivity.

        Args:
            step: number of the step, from 0.

        Raises:
            InvalidArgument: noise of a user that does not say it, see `Noise`.
        """
        weights = getattr(self.noise, "weights", None)
        if weights is None:
            raise wrong_type("noise that says its weights", "noise", self.noise)
        return math.hypot(*weights(self.run, step))

    def step_limit(self, spent: Ledger, start: int = 0) -> int:
        """The step at which the budget ends after `spent`, which has those below `start`; at most `num_steps`."""
        if self.epsilon is None or not spent.events:
            return self.num_steps
        return start + affordable_steps(
            lambda steps: spent.compose(Ledger(self.events(start, start + steps), self.adjacency)),
            epsilon=self.epsilon, delta=self.delta, limit=max(self.num_steps - start, 0), method=self.accountant,
        )  # fmt: skip

    def batches(self, state: Position, ranks: Ranks | None = None) -> Iterator[Tensor]:
        """The index tensors of the steps from `state` to the end of its budget, in order; some may be empty.

        With `ranks`, the records of this process: each draw is dealt out in turn.
        """
        for step in _steps_left(state):
            yield self.draw(state, step, ranks)

    def draw(self, state: Position, step: int, ranks: Ranks | None = None) -> Tensor:
        """The records of one step, of all processes or of this one."""
        place = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        return own_records(self.sampler.indices(state.key, step), state.num_records, *place)

    @named
    def loader(
        self,
        dataset: Any,
        state: Position,
        ranks: Ranks | None = None,
        *,
        views: int = 1,
        collate_fn: Callable[[list[Any]], Batch] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        data_name: str | None = None,
    ) -> DataLoader[Any]:
        """The batches of the steps from `state` to the end of its budget, from a data set of torch or Hugging Face.

        Args:
            dataset: `len(dataset)` records, `dataset[i]` or `dataset.__getitems__(indices)` reads them.
            state: of the run, also a resumed one; the first batch is that of its step.
            ranks: of the run; the loader then gives the records of this process, and all processes must call it.
            views: K >= 1: each record is read K times, with random augmentation of its own each time, and leaves are
                (B, K, ...). For a loss of `sampling.mean_over_views`. Epsilon does not depend on it.
            collate_fn: list of records -> pytree of tensors with one row a record. None: torch's `default_collate`.
            num_workers, pin_memory, prefetch_factor, persistent_workers, timeout, worker_init_fn,
                multiprocessing_context: as in `torch.utils.data.DataLoader`, whose other arguments (`sampler`,
                `shuffle`, `drop_last`, ..) say who is in a batch: here the plan does.
            data_name: with ranks, a name of the data set (a version, a hash) that is compared instead of its records.

        Returns:
            A `torch.utils.data.DataLoader` for one iteration; unreleased. The batch of an empty draw has no rows, and
            the structure, dtypes and trailing shapes of a batch of the first record. Torch's generator is seeded by
            the step while records are read and collated, so a repeated step augments them alike.

        Raises:
            InvalidArgument: a stream, a data set of another length than the plan's, or than the state's `num_records`;
                from a second iteration.
            RankMismatch: on all processes: the data sets differ in their records or in their order, as far as up to
                1024 records say, which each process reads. StepAborted: another process could not read its own.

        Guarantees:
            the draws of the sampler, in order, with workers and on several processes, from any step
            (tests/sampling/test_loader.py::test_batches_are_the_draws, tests/distributed/test_object_collectives.py).

        >>> import torch
        >>> from dpfunc import clipping
        >>> from dpfunc.rng import secure_key
        >>> from dpfunc.step import make_dp_step
        >>> records = [(torch.ones(2), i) for i in range(40)]
        >>> plan = Plan(Poisson(len(records), 0.1), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=3, delta=1e-3)
        >>> dp_step = make_dp_step(lambda params, batch: (params["w"] * batch[0]).sum(1), plan)
        >>> params = {"w": torch.zeros(2)}
        >>> state = dp_step.init(params, secure_key())
        >>> for batch in plan.loader(records, state):
        ...     grads, state, unreleased = dp_step(params, batch, state)
        >>> state.step
        3
        """
        collate = default_collate if collate_fn is None else collate_fn

        def described() -> str:
            check_dataset(dataset, self.sampler.dataset_size, state.num_records)
            expect(
                callable(collate), "a function of a list of records", "collate_fn", collate,
                "Leave it out for torch's own.",
            )  # fmt: skip
            integer("num_workers", num_workers)
            integer("views", views, minimum=1)
            return "" if ranks is None else data_name or batches_name(dataset, collate)

        check_same_data(described, ranks)
        place = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        return data_loader(
            dataset,
            Draws(
                self.sampler, state.key, Once(state.step, state.limit), len(_steps_left(state)), *place,
                state.num_records, views,
            ),
            Collate(collate, views=views),
            num_workers=num_workers, pin_memory=pin_memory, prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers, timeout=timeout, worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
        )  # fmt: skip


def _sampler(sampler: Sampler | None, dataset_size: int | None, expected_batch_size: float | None) -> Sampler:
    """The sampler that was given, or Poisson sampling of these numbers."""
    if sampler is not None and dataset_size is None and expected_batch_size is None:
        return sampler
    if sampler is not None or dataset_size is None or expected_batch_size is None:
        raise InvalidArgument(
            f"Expected dataset_size and expected_batch_size, of Poisson sampling, or sampler, got dataset_size="
            f"{dataset_size}, expected_batch_size={expected_batch_size} and sampler={sampler}."
        )
    return Poisson.of_batch_size(dataset_size, expected_batch_size)


def _of_budget(
    epsilon: float | None, delta: float | None, spent: Ledger | None, budget: _Budget | None
) -> tuple[float, float, Ledger | None]:
    """Epsilon, delta and what was spent, as given or as the budget of the data set says."""
    if budget is None and epsilon is not None and delta is not None:
        return epsilon, delta, spent
    if budget is None or spent is not None:
        raise InvalidArgument(
            f"Expected epsilon and delta, or the budget of the data set without spent, got epsilon={epsilon}, "
            f"delta={delta}, budget={budget} and {'no' if spent is None else 'a'} ledger of what was spent."
        )
    facts = budget.account().facts
    return facts.epsilon if epsilon is None else epsilon, facts.delta if delta is None else delta, budget.spent()
