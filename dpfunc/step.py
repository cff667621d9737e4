"""One private step: params, batch and state in; released gradients and the next state out.

May import: calls, recipes, state and below. Privacy depends on it: yes.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dpfunc import state as states
from dpfunc._utils.processes import initialized, process_context
from dpfunc._utils.validation import fail, named, one_of, positive, refuse, wrong_type
from dpfunc._utils.versions import installed
from dpfunc.accounting import Ledger
from dpfunc.accounting import record as known
from dpfunc.batches import (
    batch_size,
    check_named,
    own_digest,
    ranges_told,
    refuse_list_of_rows,
    refuse_narrow_range,
    tree_leaves,
)
from dpfunc.calls import Calls
from dpfunc.clipped import RULE_LEAF, ClippedGrad, StepClip, check_mask, make_clipped_grad
from dpfunc.clipping.rules import of_run
from dpfunc.clipping.telemetry import LEAF
from dpfunc.distributed._agreement import UNABLE, Rows, agree, digest_of_all, padded, summarize
from dpfunc.distributed._object_collectives import together
from dpfunc.distributed._reduce import gathered, release
from dpfunc.distributed.ranks import Ranks, check_ranks
from dpfunc.engines._guards.several_rows import look_at_rows, warn_of_unused
from dpfunc.engines.by_name import engine_of
from dpfunc.engines.capture import CapturedGrad
from dpfunc.engines.loop import Loop
from dpfunc.engines.vmap_grad import Decision, VmapGrad
from dpfunc.errors import StepAborted
from dpfunc.noise import Mechanism
from dpfunc.noise.gaussian import with_noise
from dpfunc.plan import Plan
from dpfunc.rng import Key, fingerprint, fold_in, secure_key
from dpfunc.state import StepState
from dpfunc.types import Batch, ClippedSum, Engine, LossFn, Params, Unreleased

_ENGINES: dict[type, str] = {VmapGrad: known.ROWS[0], CapturedGrad: known.ROWS[0], Loop: known.ROWS[1]}


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
    unit: Literal["gradient", "clip_norm"]
    noise_source: Literal["secure", "device"]
    verify_batch: bool
    journal: Callable[[StepState], None] | None
    ranks: Ranks | None
    _calls: Calls = field(default_factory=Calls, repr=False, compare=False)

    @cached_property
    def _plan_digest(self) -> str:
        return states.plan_digest(self.plan)

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
            InvalidArgument: bad parameters, or groups and bounds that do not fit them; more records than the bound; a
                plan of a budget in which nothing is reserved for this key.
            LedgerConflict: the ledger uses another adjacency, or lacks steps that the plan's `spent` has.
            BudgetExhausted: not one step fits into the budget. StepAborted: another process raised one of these.

        Warns:
            InsecureKeyWarning: everybody can know the key.
            RunWarning: this process took steps on as many records, with whatever plan, that the ledger does not have.
        """
        with self._sharing_errors():
            if self.ranks is None or self.ranks.writes:
                states.check_reserved(self.plan, key, ledger)
            first = states.first_state(self.plan, params, key, ledger, num_records)
            with_leaves = self.clipped_grad.at(0, first.clip_state).with_leaves(params)
            state = first._replace(noise_state=self._mechanism.init(with_leaves))
        states.warn_of_start(self.plan, state)
        return state

    def __call__(
        self, params: Params, batch: Batch, state: StepState | None = None, *, mask_B: Tensor | None = None
    ) -> StepResult:
        """Clip, sum, add noise, divide by the expected batch size; see `make_dp_step`."""
        rows = self._check(params, batch, state, mask_B)
        if state is None:
            self._calls.refuse_second_run()
            state = states.single_step_state(self.plan, self.init(params, secure_key()))
        clip = self.clipped_grad.at(state.step, state.clip_state)
        clipped, unreleased = self._clip(params, rows, state, clip)
        if self.ranks is None and len(unreleased.losses_B) > 1 and self._calls.first_rows():
            real_B = torch.ones(rows.size, dtype=torch.bool, device="cpu") if rows.mask_B is None else rows.mask_B
            num_records = state.num_records or self.plan.sampler.dataset_size
            warn_of_unused(self.clipped_grad.unused(params, rows.batch))
            look_at_rows(self.clipped_grad.loss_fn, params, rows.batch, real_B, unreleased.losses_B, num_records)
        released, noise_state = self._add_noise(clipped, params, state, clip)
        size = positive("expected_batch_size of the sampler", self.plan.sampler.expected_batch_size(state.step))
        statistics = clip.read(released, size)
        after = states.next_state(self.plan, state, noise_state, self.facts)._replace(
            telemetry=statistics.get(LEAF),
            clip_state=of_run(self.plan.clip).next(state.clip_state, statistics.get(RULE_LEAF)),
        )
        self._record(released, state, after, params, unreleased)
        return StepResult(self._divide(released, params, state.step, clip), after, unreleased)

    def _check(self, params: Params, batch: Batch, state: StepState | None, mask_B: Tensor | None) -> Rows:
        """Check everything before anything is spent, on all processes; numbers that are not finite: see `_record`."""
        if self.ranks is not None or initialized():  # others may have joined since the step was made
            check_ranks(self.ranks, self.clipped_grad.microbatch_size)
        if self.ranks is None:
            return self._check_own(params, batch, state, mask_B)
        own = UNABLE
        try:  # without communication
            rows = self._check_own(params, batch, state, mask_B)
            if state is None:
                raise fail(
                    "a state, which all processes share", "state", None,
                    "Start with dp_step.init(params, shared_key(ranks)).",
                )  # fmt: skip
            prepared = self.clipped_grad.prepared(params, batch)
            able = summarize(
                step=state.step, rows=rows, params=params, run=self._must_be_equal(state), prepared=prepared,
                ranks=self.ranks,
            )  # fmt: skip
            if self.ranks.writes:
                states.check_writer(state)
            own = able
        finally:  # all mean the same by this call, or each has an error
            num_rows = agree(own, self.ranks)
        return rows._replace(size=num_rows)

    def _check_own(self, params: Params, batch: Batch, state: StepState | None, mask_B: Tensor | None) -> Rows:
        """The checks that this process makes by itself."""
        check_named(params)
        refuse_narrow_range(params)
        size = batch_size(batch)
        if getattr(self.plan.sampler, "batch_size", None) == size:
            refuse_list_of_rows(batch, size)
        real_B = check_mask(mask_B, size, torch.device("cpu"))
        if state is not None:
            states.check_state(state, self.plan, self._plan_digest)
            states.check_journal(state, self.journal)
            if self.verify_batch:
                real = size if real_B is None else int(real_B.sum())
                drawn = states.check_draw(self.plan, state, real, self.ranks)
                if len(drawn) < self.plan.sampler.dataset_size:  # else each step has all records
                    self._calls.refuse_given_again(tree_leaves(batch if mask_B is None else (batch, mask_B)), drawn)
        if self.ranks is None or self.ranks.writes:
            self._calls.refuse_unmoved(params)
        return Rows(batch, real_B, size)

    def _sharing_errors(self) -> AbstractContextManager[None]:
        """Context in which an error of one process is an error of all."""
        return (
            nullcontext()
            if self.ranks is None
            else together(self.ranks, StepAborted("Another process could not go on. Nothing was released."))
        )

    def _must_be_equal(self, state: StepState) -> str:
        """Describe the settings and the state that must be equal in all processes."""
        clipped = self.clipped_grad
        settings = (
            self._plan_digest, self.reduction, self.unit, self.noise_source, clipped.engine, clipped.microbatch_size,
            self.verify_batch, self.journal is None, *installed().values(),
        )  # fmt: skip
        released = (state.ledger.to_json(), state.clip_state, states.noise_digest(state.noise_state))
        place = (state.step, state.limit, state.charged, fingerprint(state.key), *released)
        # Machines whose libraries round differently could draw different records.
        drawn = self.plan.draw(state, state.step) if self.verify_batch else torch.zeros(0, device="cpu")
        return states.stable_repr((settings, place, state.num_records, len(drawn), int(drawn.sum())))

    def _clip(self, params: Params, rows: Rows, state: StepState, clip: StepClip) -> tuple[ClippedSum, Unreleased]:
        # Replicas draw different dropout for their different records.
        rank = (self.ranks.rank,) if self.ranks and self.ranks.rank else ()
        key = fold_in(fold_in(state.key, "step", state.step), "dropout", *rank)
        sums = partial(self.clipped_grad.of_step, clip, key=key, places=self._places(rows))
        if self.ranks is None:
            with process_context("independent"), ranges_told(rows.batch):
                return sums(params, rows.batch, mask_B=rows.mask_B)
        with gathered(params, self.ranks) as whole, ranges_told(rows.batch):
            batch, mask_B = padded(rows, self.ranks)
            return sums(whole, batch, mask_B=mask_B)

    def _places(self, rows: Rows) -> Sequence[int] | None:
        """Positions whose random numbers the rows draw, where they are not their own: of a step that is replayed."""
        return None

    def _add_noise(
        self, clipped: ClippedSum, params: Params, state: StepState, clip: StepClip
    ) -> tuple[dict[str, Tensor], Any]:
        mechanism, turn = self._mechanism, states.turn_of(state)
        if self.ranks is not None:
            return release(self.ranks, mechanism, clipped, clip.with_leaves(params), state.noise_state, turn)
        return with_noise(mechanism, clipped, state.noise_state, turn)

    @cached_property
    def _mechanism(self) -> Mechanism:
        return self.plan.noise.mechanism(self.plan.run._replace(source=self.noise_source))

    def _record(
        self, released: dict[str, Tensor], state: StepState, after: StepState, params: Params, unreleased: Unreleased
    ) -> None:
        """Record the step, first of all on disk, before the caller gets the gradients."""
        norms_BG = unreleased.norms_BG
        finite_B = torch.isfinite(norms_BG).all(1)
        none, half = ~(finite_B & norms_BG.any(1)).any(), 2 * finite_B.sum() <= len(norms_BG)
        lost = (none | half) & bool(len(norms_BG))
        one_draw = self._mechanism.add_share is not None
        with states.release_lock(state):
            with self._sharing_errors():
                digest, all_lost = (
                    own_digest(released, params, lost)
                    if self.ranks is None
                    else digest_of_all(released, self.ranks, lost, one_draw=one_draw)
                )
                states.check_state(state, self.plan, self._plan_digest)  # again: another thread may have taken the step
                states.check_repeated(state, digest)
                self._calls.warn_if_lost(all_lost)
                if self.journal is not None and (self.ranks is None or self.ranks.writes):
                    self.journal(after._replace(released=((state.step, digest),)))
            states.mark_released(self.plan, after, digest)
        self._calls.note(params, stateless=not state.drawn, without_gradient=all_lost)

    def _divide(self, released: dict[str, Tensor], params: Params, step: int, clip: StepClip) -> dict[str, Tensor]:
        size = self._divisor(step, clip)  # after the noise, which fits the undivided sum
        return {name: (value / size).to(params[name].dtype) for name, value in released.items() if name in params}

    def _divisor(self, step: int, clip: StepClip) -> float:
        # the expected size, never the drawn one, which is private
        size = self.plan.sampler.expected_batch_size(step) if self.reduction == "mean" else 1.0
        return size * (clip.whole if self.unit == "clip_norm" else 1.0)

    def gradient_noise(self, params: Params, state: StepState) -> dict[str, float]:
        """Standard deviation of the noise in the gradient that the step from `state` releases, by parameter. Public.

        Args:
            params: of the run; only their names and shapes count.
            state: of the run; with `clipping.Adaptive`, or a schedule, each step has another one.

        Raises:
            InvalidArgument: noise of a user that does not say its deviation.

        Guarantees:
            tests/updates/test_adamw_bc.py::test_the_noise_of_a_step.
        """
        clip, deviation = self.clipped_grad.at(state.step, state.clip_state), self.plan.deviation(state.step)
        found = self.clipped_grad.deviations(params, clip, deviation, self.plan.allocation)
        divisor = self._divisor(state.step, clip)
        return {name: value / divisor for name, value in found.items()}

    @property
    def facts(self) -> tuple[str, ...]:
        """Noise source, rows and batches of a step, in the words of a `Record`."""
        rows = _ENGINES.get(type(self.clipped_grad.engine), known.ROWS[2])
        return known.SOURCES[self.noise_source], rows, known.COMPARED if self.verify_batch else known.ELSEWHERE

    @property
    def decision(self) -> Decision | None:
        """The way of the rows of the last microbatch, with its reason; None before the first, or where none is told."""
        decide = getattr(self.clipped_grad.engine, "decision", None)
        return decide(self.clipped_grad.loss_fn) if decide else None


@named
def make_dp_step(
    loss_fn: LossFn,
    plan: Plan,
    *,
    engine: str | Engine = "auto",
    microbatch_size: int | Literal["auto"] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    unit: Literal["gradient", "clip_norm"] = "gradient",
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
            (norms first, sums in a second pass: least memory), `"loop"` (each row alone), `"captured"` (operations of
            `"auto"` recorded and replayed: small steps on a CPU, see `engines.captured`), or an engine. This and the
            next argument change speed and memory, never the result.
        microbatch_size: samples differentiated at once; `"auto"` chooses by memory.
        reduction: `"mean"` divides by the expected batch size, `"sum"` does not.
        unit: `"clip_norm"` divides by the step's bound too, so that a learning rate suits any bound, also one that
            changes over the run; `"gradient"` does not.
        noise_source: `"secure"`, a keyed AES stream, drawn on the CPU; or `"device"`, a keyed ChaCha20 stream, drawn
            where the sums are.
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
    one_of("unit", unit, ("gradient", "clip_norm"))
    one_of("noise_source", noise_source, ("secure", "device"))
    check_ranks(ranks, microbatch_size)
    refuse(
        (journal is not None and not callable(journal),
         f"Expected journal to be dpfunc.Journal(path, plan), or a function of the next state, got {journal!r}."),
        (getattr(journal, "plan", plan) != plan,
         "Expected the journal of this plan, got one of another plan: it would write down other costs. Use "
         "Journal(path, plan); phases on the same records may share the path."),
    )  # fmt: skip
    prepared = make_clipped_grad(
        loss_fn,
        plan.clip,
        engine=engine_of(engine),
        microbatch_size=microbatch_size,
        adjacency=plan.adjacency,
        ranks=ranks,
        telemetry=plan.telemetry,
    )
    return DPStep(plan, prepared, reduction, unit, noise_source, verify_batch, journal, ranks)
