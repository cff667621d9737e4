"""One private step: params, batch and state in; released gradients and the next state out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dpfunc._utils.dtensor import is_dtensor
from dpfunc._utils.unchanged import Calls
from dpfunc._utils.validation import fail, integer, named, one_of, warn, wrong_type
from dpfunc._utils.versions import installed
from dpfunc.accounting import Ledger
from dpfunc.batches import batch_size
from dpfunc.clipped import ClippedGrad, check_mask, make_clipped_grad
from dpfunc.clipping.bounds import group_bounds
from dpfunc.clipping.groups import partition
from dpfunc.distributed.collective_step import processes_of
from dpfunc.distributed.processes import Processes, Rows, StepCall
from dpfunc.distributed.ranks import Ranks
from dpfunc.engines.guards.parameters import check_named, check_params, refuse_narrow_range
from dpfunc.engines.vmap_grad import Decision, engine_of
from dpfunc.errors import BudgetExhausted, InvalidArgument, LedgerConflict, NoGradientWarning, SamplingMismatch
from dpfunc.noise import Mechanism, gaussian
from dpfunc.noise.streams import drawn_by_free_cores
from dpfunc.plan import Plan
from dpfunc.rng import Key, fingerprint, fold_in, secure_key
from dpfunc.state import (
    StepState,
    check_journal,
    check_repeated,
    check_state,
    mark_released,
    one_release,
    plan_digest,
    stable_repr,
    step_events,
    warn_of_start,
)
from dpfunc.types import Batch, ClippedSum, Engine, LossFn, Params, Unreleased, schedule_at

_UNCHANGED = (
    "dp_step got the parameters of its first step again, with nothing written into them: each step spends budget, and "
    "so far none changes anything. An optimizer takes params.values(), not model.parameters(), and reads .grad: "
    "p.grad = grads[name] for each name, p in params.items(), then optimizer.step(). This warning comes once."
)
_WITHOUT_GRADIENT = (
    "In this step and an earlier one no record of this process had a finite gradient: budget is spent, and only noise "
    "released. Look for NaN and inf in inputs, labels and the loss (log, division, masks). This warning was computed "
    "from private data: it reveals this about two batches, and no noise protects that. Do not publish it."
)
_logger = logging.getLogger(__name__)


class StepResult(NamedTuple):
    """Results of a step: released gradients, the next state, and values that must stay private."""

    grads: dict[str, Tensor]
    state: StepState
    unreleased: Unreleased


@dataclass(frozen=True)
class DPStep:
    """A private step as a function; see `make_dp_step`."""

    plan: Plan
    clipped_grad: ClippedGrad
    reduction: Literal["mean", "sum"]
    noise_source: Literal["secure", "device"]
    verify_batch: bool
    journal: Callable[[StepState], None] | None
    ranks: Ranks | None
    _processes: Processes = field(repr=False, compare=False)
    _calls: Calls = field(default_factory=Calls, repr=False, compare=False)

    @cached_property
    def _plan_digest(self) -> str:
        return plan_digest(self.plan)

    def init(
        self, params: Params, key: Key, ledger: Ledger | None = None, *, num_records: int | None = None
    ) -> StepState:
        """The state before the first step; all processes call it.

        Args:
            params: trainable parameters; checked together with the plan's groups and bounds.
            key: `dpfunc.secure_key()`. A key starts one run, ever.
            ledger: what was already spent on the same data (an earlier phase); it counts against the budget. None: the
                plan's `spent`.
            num_records: number n of records that there are, where the plan's `dataset_size` is a public bound on it.
                Under add/remove adjacency n is private: the plan, epsilon and expected batch size do not depend on it.

        Raises:
            InvalidArgument: bad parameters, or groups and bounds that do not fit them; more records than the bound.
            LedgerConflict: the ledger uses another adjacency, or lacks steps that the plan's `spent` has.
            BudgetExhausted: not one step fits into the budget. StepAborted: another process raised one of these.

        Warns:
            InsecureKeyWarning: everybody can know the key.
            RunWarning: without a journal, this process took steps with the same plan that the ledger does not have.
        """
        states: list[StepState] = []
        self._processes.confirm(lambda: states.append(self._begun(params, key, ledger, num_records)))
        warn_of_start(states[0], journalled=self.journal is not None)
        return states[0]

    def _begun(self, params: Params, key: Key, ledger: Ledger | None, num_records: int | None) -> StepState:
        check_params(params)
        refuse_narrow_range(params)
        if not isinstance(key, Key):
            raise wrong_type("key to be a dpfunc Key", "key", key, "Use dpfunc.secure_key().")
        if num_records is not None:
            num_records = self._check_bound(num_records)
        parts = partition(self.plan.clip.groups, tuple(params))
        group_bounds(self.plan.clip.clip_norm, parts.group_names)
        spent = self._spent(ledger)
        limit = self.plan.step_limit(spent)
        if limit < 1:
            raise BudgetExhausted(
                f"The budget epsilon={self.plan.epsilon:g} at delta={self.plan.delta:g} does not allow one more step: "
                f"{spent.epsilon(self.plan.delta).epsilon:.4g} was spent before this run. Plan with a larger epsilon, "
                "or train on other records."
            )
        noise = self._mechanism(0).init(params)
        return StepState(0, limit, 0, key, noise, spent, plan=self._plan_digest, num_records=num_records)

    def _spent(self, ledger: Ledger | None) -> Ledger:
        """Ledger with which a run begins: the given one, which has what the plan counts, or that of the plan."""
        known = Ledger(adjacency=self.plan.adjacency) if self.plan.spent is None else self.plan.spent
        spent = known if ledger is None else ledger
        if not isinstance(spent, Ledger):
            advice = "Read a journal by dpfunc.checkpoint.journal_ledger(path)."
            raise wrong_type("ledger to be a dpfunc.Ledger", "ledger", ledger, advice)
        if spent.adjacency != self.plan.adjacency:
            raise LedgerConflict(
                f"Expected a ledger with adjacency {self.plan.adjacency!r}, as the plan has, got {spent.adjacency!r}."
            )
        if spent.lacks(known):
            raise LedgerConflict(
                f"Expected a ledger with the {known.num_steps} steps that the plan counts as spent, got one that lacks "
                f"{spent.lacks(known)} of them. Leave ledger= out to begin with plan.spent, or compose it with what "
                "came after."
            )
        return spent

    def _check_bound(self, num_records: int) -> int:
        count, bound = integer("num_records", num_records, minimum=1), self.plan.sampler.dataset_size
        if count > bound:
            raise fail(
                f"num_records <= {bound}, the plan's dataset_size", "num_records", num_records,
                "A bound that the data exceed is none: sampling_prob, and so epsilon, would be wrong. Make the plan "
                "with a larger dataset_size.",
            )  # fmt: skip
        return count

    def __call__(
        self, params: Params, batch: Batch, state: StepState | None = None, *, mask_B: Tensor | None = None
    ) -> StepResult:
        """Clip, sum, add noise, divide by the expected batch size; see `make_dp_step`."""
        state, rows = self._check(params, batch, state, mask_B)
        with self._noise_ahead(params, state):
            clipped, unreleased = self._clip(params, rows, state)
            released, noise_state = self._add_noise(clipped, params, state)
        after = self._record(released, noise_state, state, params, unreleased)
        return StepResult(self._divide(released, params, state.step), after, unreleased)

    def _check(
        self, params: Params, batch: Batch, state: StepState | None, mask_B: Tensor | None
    ) -> tuple[StepState, Rows]:
        """Find what can be wrong with a call before anything is computed or spent; the state, and the rows to clip.

        That the numbers of params are finite is read together with the digest, before the release (`_record`).
        """

        def check() -> Tensor | None:
            check_named(params)
            refuse_narrow_range(params)
            size = batch_size(batch)
            real_B = None if mask_B is None else check_mask(mask_B, size, torch.device("cpu"))
            if state is not None:
                check_state(state, self.plan, self._plan_digest)
                check_journal(state, self.journal)
                if self.verify_batch:
                    self._check_draw(state, size if real_B is None else int(real_B.sum()))
            return real_B

        step = state.step if isinstance(state, StepState) else None
        rows = self._processes.check(
            StepCall(check, lambda: "" if state is None else self._described(state), step, params, batch)
        )
        if self._calls.changed_nothing(params) and self._processes.writes:
            _logger.warning(_UNCHANGED)
        return self._run_of_its_own(params) if state is None else state, rows

    def _clip(self, params: Params, rows: Rows, state: StepState) -> tuple[ClippedSum, Unreleased]:
        # Replicas draw different dropout for their different records.
        rank = (self._processes.rank,) if self._processes.rank else ()
        key = fold_in(fold_in(state.key, "step", state.step), "dropout", *rank)

        def clip(params: Params, batch: Batch, mask_B: Tensor | None) -> tuple[ClippedSum, Unreleased]:
            return self.clipped_grad.compute(params, batch, mask_B, key)

        return self._processes.clip(clip, params, rows)

    def _noise_ahead(self, params: Params, state: StepState) -> AbstractContextManager[None]:
        """Inside, free cores draw the noise of this step: with its key, and for this step only."""
        if self.noise_source != "secure" or any(is_dtensor(param) for param in params.values()):
            return nullcontext()
        on_cpu = all(param.is_cpu for param in params.values())
        return drawn_by_free_cores(self._release_key(state), lambda: self._processes.noise_of(params), on_cpu)

    def _release_key(self, state: StepState) -> Key:
        return fold_in(fold_in(state.key, "step", state.step), "release")

    def _add_noise(self, clipped: ClippedSum, params: Params, state: StepState) -> tuple[dict[str, Tensor], Any]:
        mechanism, key = self._mechanism(state.step), self._release_key(state)
        return self._processes.release(mechanism, clipped, params, state.noise_state, key)

    def _mechanism(self, step: int) -> Mechanism:
        multiplier = schedule_at(self.plan.noise_multiplier, step)
        return gaussian(multiplier, allocation=self.plan.allocation, source=self.noise_source)

    def _record(
        self, released: dict[str, Tensor], noise_state: Any, state: StepState, params: Params, unreleased: Unreleased
    ) -> StepState:
        """Note the step where it must not be lost, on disk above all, before anybody sees the gradients."""
        after = self._advance(state, noise_state)
        lost = ~torch.isfinite(unreleased.norms_BG).all(1).any() & bool(len(unreleased.norms_BG))
        digest, all_lost = self._processes.digest(released, params, lost)

        def write() -> None:
            check_state(state, self.plan, self._plan_digest)  # again: another thread may have taken the step
            check_repeated(state, digest)
            if all_lost and self._calls.without_gradient == 1:
                warn(_WITHOUT_GRADIENT, NoGradientWarning)
            if self.journal is not None and self._processes.writes:
                self.journal(after._replace(released=((state.step, digest),)))

        with one_release(state):
            self._processes.confirm(write)
            mark_released(after, digest)
        self._calls.note(params, stateless=not state.drawn, without_gradient=all_lost)
        return after

    def _described(self, state: StepState) -> str:
        """Describe the settings and the state that must be equal in all processes."""
        clipped = self.clipped_grad
        settings = (
            self._plan_digest, self.reduction, self.noise_source, clipped.engine, clipped.microbatch_size,
            self.verify_batch, self.journal is None, *installed().values(),
        )  # fmt: skip
        place = (
            state.step,
            state.limit,
            state.charged,
            fingerprint(state.key),
            state.ledger.to_json(),
            state.num_records,
        )
        # Machines whose libraries round differently could draw different records.
        drawn = self.plan.draw(state, state.step) if self.verify_batch else torch.zeros(0)
        return stable_repr((settings, place, len(drawn), int(drawn.sum())))

    @property
    def decision(self) -> Decision | None:
        """Engine that `engine="auto"` decided on, and why; None before the first batch, or with another engine."""
        decide = getattr(self.clipped_grad.engine, "decision", None)
        return decide(self.clipped_grad.loss_fn) if decide else None

    def _run_of_its_own(self, params: Params) -> StepState:
        if self._calls.stateless:
            raise InvalidArgument(
                "dp_step was called without a state more than once. Each such call is a run of its own with its own "
                "ledger, and nobody adds them up. In a loop, pass the state on: begin with "
                "state = dp_step.init(params, dpfunc.secure_key()), then "
                "grads, state, unreleased = dp_step(params, batch, state). Nothing was spent."
            )
        state = self.init(params, secure_key())._replace(limit=1, drawn=False)
        plan = self.plan
        charged = state.ledger.compose(Ledger(step_events(plan, state, 0, 1), plan.adjacency))
        cost = charged.epsilon(plan.delta, plan.accountant).epsilon
        if plan.epsilon is not None and cost > plan.epsilon:
            raise BudgetExhausted(
                f"A call without a state costs epsilon={cost:.4g} at delta={plan.delta:g}"
                f"{', with what was spent before' if state.ledger.events else ''}, more than the budget "
                f"epsilon={plan.epsilon:g}: nobody drew its batch, so it claims no amplification by sampling. Draw it: "
                "state = dp_step.init(params, dpfunc.secure_key()), and batches from plan.batches(state). The step was "
                "not taken."
            )
        return state

    def _check_draw(self, state: StepState, real_samples: int) -> None:
        drawn = len(self.plan.draw(state, state.step, self.ranks))
        if drawn != real_samples:
            call = "state" if self.ranks is None else "state, ranks"
            raise SamplingMismatch(
                f"Expected the batch that the plan's sampler drew for step {state.step}, with {drawn} samples, got "
                f"{real_samples}. Epsilon holds for the plan's batches only: take them from plan.batches({call}) or "
                f"plan.loader(dataset, {call}), drop none, and mark padding with mask_B. If you draw by the same law "
                "elsewhere, say so with make_dp_step(..., verify_batch=False). Nothing was spent."
            )

    def _advance(self, state: StepState, noise_state: Any) -> StepState:
        step = state.step + 1
        if step <= state.charged:  # a resumed run repeats it bit for bit: it is in the ledger already
            left = tuple(item for item in state.released if item[0] >= step)
            return state._replace(step=step, noise_state=noise_state, released=left)
        cost = Ledger(step_events(self.plan, state, state.step, state.step + 1), self.plan.adjacency)
        return state._replace(step=step, charged=step, noise_state=noise_state, ledger=state.ledger.compose(cost))

    def _divide(self, released: dict[str, Tensor], params: Params, step: int) -> dict[str, Tensor]:
        # The expected size, never the drawn one, which is private; and after the noise, which fits the undivided sum.
        size = self.plan.sampler.expected_batch_size(step) if self.reduction == "mean" else 1.0
        return {name: (value / size).to(params[name].dtype) for name, value in released.items()}


@named
def make_dp_step(
    loss_fn: LossFn,
    plan: Plan,
    *,
    engine: str | Engine = "auto",
    microbatch_size: int | Literal["auto"] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    noise_source: Literal["secure", "device"] = "secure",
    verify_batch: bool = True,
    journal: Callable[[StepState], None] | None = None,
    ranks: Ranks | None = None,
) -> DPStep:
    """Build `grads, state, unreleased = dp_step(params, batch, state)`.

    `grads = (sum_i clip(grad_i) + noise_multiplier * sensitivity * N(0, 1)) / expected_batch_size`. Only `grads` (and
    what is computed from it) is released; everything else about the batch stays in `unreleased`.
    Abadi et al. 2016, Deep Learning with Differential Privacy, Algorithm 1.

    Args:
        loss_fn: `(params, batch) -> (B,)`, one loss a row; rows do not influence each other.
        plan: everything that decides privacy.
        engine: `"auto"` (vmap(grad(loss)) with rules, see `engines.auto`), `"vmap"` (the same without), `"ghost"`
            (norms first, sums in a second pass: least memory), `"loop"` (rows one by one), or an engine. This and the
            next argument change speed and memory, never the result.
        microbatch_size: samples differentiated at once; `"auto"` chooses by memory.
        reduction: `"mean"` divides by the expected batch size, `"sum"` does not.
        noise_source: `"secure"`, a keyed AES stream; or `"device"`, the CUDA generator.
        verify_batch: compare the size of each batch with the plan's draw of that step. With False the ledger has the
            same events, and that they hold is your claim: you draw by the law of the plan's sampler elsewhere.
        journal: called with the next state before a step returns, e.g. `checkpoint.Journal`; if it raises, nothing is
            released. With ranks, one process calls it.
        ranks: the processes that take the step together, `dpfunc.distributed.data_parallel()` or `sharded(mesh)`; each
            calls with its own records, `plan.batches(state, ranks)`. None is one process.

    Returns:
        `dp_step`, with `dp_step.init(params, key)` for the first state. `dp_step(params, batch)` without a state is a
        run of its own, once, with fresh entropy and its own ledger; nobody drew its batch, so it is charged with
        sampling_prob=1. `mask_B=` marks real samples in padded batches.

    Raises:
        InvalidArgument, BudgetExhausted, StateReused, SamplingMismatch, OutOfMemory: all before anything is spent.

    Guarantees:
        tests/test_step.py: the noise has the promised scale (test_noise_scale), the budget is kept (test_budget), a
        state works once (test_state_reuse; threads: tests/test_state.py), a bad call spends nothing (test_bad_input).

    >>> import torch, dpfunc
    >>> from dpfunc import clipping, sampling
    >>> plan = Plan(sampling.Poisson(100, 0.1), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=3, delta=1e-3)
    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> dp_step = make_dp_step(loss_fn, plan)
    >>> data, params = torch.randn(100, 2), {"w": torch.zeros(2)}
    >>> state = dp_step.init(params, key=secure_key())
    >>> for indices in plan.batches(state):
    ...     grads, state, unreleased = dp_step(params, data[indices], state)
    >>> state.ledger
    Ledger(3 steps, add_remove: (q=0.1, sigma=1) x 3)
    """
    if not isinstance(plan, Plan):
        raise wrong_type("plan to be a dpfunc.Plan", "plan", plan)
    one_of("reduction", reduction, ("mean", "sum"))
    one_of("noise_source", noise_source, ("secure", "device"))
    processes = processes_of(ranks)
    processes.check_settings(microbatch_size)
    if journal is not None and not callable(journal):
        raise InvalidArgument(
            f"Expected journal to be dpfunc.Journal(path, plan), or a function of the next state, got {journal!r}."
        )
    if getattr(journal, "plan", plan) != plan:
        raise InvalidArgument(
            "Expected the journal of this plan, got one of another plan: it would write down other costs. Use "
            "Journal(path, plan); phases on the same records may share the path."
        )
    prepared = make_clipped_grad(
        loss_fn,
        plan.clip,
        engine=engine_of(engine),
        microbatch_size=microbatch_size,
        adjacency=plan.adjacency,
        full_norms=processes.full_norms,
    )
    return DPStep(plan, prepared, reduction, noise_source, verify_batch, journal, ranks, processes)
