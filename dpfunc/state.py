"""The state of a run: all that the next step needs, and when it may take one.

May import: plan and below. Privacy depends on it: yes.
"""

import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from dpfunc import errors
from dpfunc._utils.digests import checksum, digest
from dpfunc._utils.parts import is_dtensor, shard_dims
from dpfunc._utils.processes import first_with
from dpfunc._utils.validation import integer, refuse, warn, wrong_type
from dpfunc.accounting import Ledger
from dpfunc.accounting.accountant import upper
from dpfunc.accounting.record import COMPARED, ELSEWHERE, ROWS, SOURCES
from dpfunc.batches import check_params, refuse_narrow_range
from dpfunc.clipping.rules import group_bounds, of_run, partition
from dpfunc.distributed.ranks import Ranks
from dpfunc.noise import Turn
from dpfunc.plan import Plan
from dpfunc.rng import Key, check_key, check_process, fingerprint, fold_in
from dpfunc.sampling import Poisson
from dpfunc.types import Event, Params


class StepState(NamedTuple):
    """Everything that the next step needs; there is no other state. Use it once.

    Args:
        step: number of the next step, from 0.
        limit: the step at which the budget, or the plan, ends.
        charged: number of the first step that the ledger does not have; a resumed run repeats earlier ones at no cost,
            because it repeats them bit for bit.
        key: the root of the run's randomness; as secret as the data.
        noise_state: of the noise mechanism, as secret as the key; `()` for noise of each step by itself.
        ledger: what was spent, earlier phases included.
        released: (step, digest) of what an interrupted run released after this state; repeated bit for bit or refused.
        plan: `plan_digest` of the plan that limit and charged are about.
        drawn: the plan's sampler draws the batches. False in the one step of a call without a state, which is charged
            with sampling_prob=1.
        num_records: number n of records that there are, at most the plan's `dataset_size`, which is then a public bound
            on it; None where they are equal. Unreleased.
        journal: path of the journal with which a run was resumed, which later steps must go on with; empty for none.
        journal_lines: number of its lines when it was resumed.
        telemetry: the statistics that the step before this state released, by name; None without `Plan.telemetry`.
        clip_state: of the clip rule, e.g. the bounds of `clipping.Adaptive`; public. None for a rule without state.
        facts: noise source, rows and batches, in words of a `Record`: the weakest that hold for all steps of the run.
            `()` before the first one.

    >>> from dpfunc.rng import secure_key
    >>> StepState(0, 10, 0, secure_key(), (), Ledger())  # doctest: +ELLIPSIS
    StepState(step=0, limit=10, charged=0, key=Key(hidden), noise_state=(), ledger=...)
    """

    step: int
    limit: int
    charged: int
    key: Key
    noise_state: Any
    ledger: Ledger
    released: tuple[tuple[int, str], ...] = ()
    plan: str = ""
    drawn: bool = True
    num_records: int | None = None
    journal: str = ""
    journal_lines: int = 0
    telemetry: Mapping[str, float | list[float]] | None = None
    clip_state: Any = None
    facts: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """The fields, without noise, which is secret, and the number of records, which is private."""
        noise = "()" if isinstance(self.noise_state, tuple) and not self.noise_state else "hidden"
        private = {"noise_state": noise, "num_records": "None" if self.num_records is None else "hidden"}
        shown = {name: private.get(name, repr(value)) for name, value in self._asdict().items()}
        return f"StepState({', '.join(f'{name}={value}' for name, value in shown.items())})"


def first_state(plan: Plan, params: Params, key: Key, ledger: Ledger | None, num_records: int | None) -> StepState:
    """The state before the first step of a run, without a state of the noise; see `DPStep.init`."""
    check_params(params)
    refuse_narrow_range(params)
    check_key(key)
    bound = plan.sampler.dataset_size
    refuse(
        (num_records is not None and integer("num_records", num_records) > bound,
         f"Expected num_records <= {bound}, the plan's dataset_size, got more. A bound that the data exceed is none: "
         "sampling_prob, and so epsilon, would be wrong. Make the plan with a larger dataset_size."),
    )  # fmt: skip
    group_names = partition(plan.clip.groups, tuple(params)).group_names
    group_bounds(plan.clip.clip_norm, group_names)
    spent = _first_ledger(plan, ledger)
    limit = plan.step_limit(spent)
    if limit < 1:
        raise errors.BudgetExhausted(
            f"The budget epsilon={plan.epsilon:g} at delta={plan.delta:g} does not allow one more step: "
            f"{upper(spent.epsilon(plan.delta).epsilon, 4)} was spent before this run. Plan with a larger epsilon, "
            "or train on other records."
        )
    return StepState(
        0, limit, 0, key, (), spent, plan=plan_digest(plan), num_records=num_records,
        clip_state=of_run(plan.clip).initial(group_names),
    )  # fmt: skip


def _first_ledger(plan: Plan, ledger: Ledger | None) -> Ledger:
    """Ledger with which a run begins: the given one, which has what the plan counts, or that of the plan."""
    known = Ledger(adjacency=plan.adjacency) if plan.spent is None else plan.spent
    spent = known if ledger is None else ledger
    if not isinstance(spent, Ledger):
        raise wrong_type(
            "ledger to be a dpfunc.Ledger", "ledger", ledger,
            "Read a journal by dpfunc.checkpoint.journal_ledger(path).",
        )  # fmt: skip
    lacks = spent.lacks(known)
    refuse(
        (spent.adjacency != plan.adjacency, errors.LedgerConflict(
            f"Expected a ledger with adjacency {plan.adjacency!r}, as the plan has, got {spent.adjacency!r}.")),
        (lacks, errors.LedgerConflict(
            f"Expected a ledger with the {known.num_steps} steps that the plan counts as spent, got one that lacks "
            f"{lacks} of them. Leave ledger= out to begin with plan.spent, or compose it with what came after.")),
    )  # fmt: skip
    return spent


def check_reserved(plan: Plan, key: Key, ledger: Ledger | None = None) -> None:
    """Check that a run of a budget has reserved there, by its key or by a text: its plan, or what it counts, is of one.

    A text does not say of which key it is: the name of the run tells then, if the budget has one.

    Guarantees:
        tests/budget/test_budget.py: test_a_plan_of_a_budget_is_reserved_before_it_runs,
        test_what_a_budget_has_spent_is_counted_by_runs_that_reserve_there.
    """
    budget = plan.budget or getattr(plan.spent, "_budget", None) or getattr(ledger, "_budget", None)
    if budget is None:
        return
    there = [e for e in budget.account().entries.values() if e.state == "reserved"]
    by_text = [entry for entry in there if entry.token.startswith("text ") and budget.run in (None, entry.run)]
    own = [*(entry for entry in there if entry.token == fingerprint(key)), *by_text]
    if not any(not plan.ledger().beyond(entry.planned).events for entry in own):
        raise errors.InvalidArgument(
            f"Expected a run that has reserved in the budget of its data set, got none with this key and the "
            f"{plan.num_steps} steps of the plan in {budget!r}: nobody else would know what it costs. Before "
            "dp_step.init(params, key) call budget.reserve(plan, key, unit=...). Nothing was spent."
        )


def single_step_state(plan: Plan, first: StepState) -> StepState:
    """The state of a run of one step, whose batch was not drawn by the sampler."""
    state = first._replace(limit=1, drawn=False)
    after = state.ledger.compose(Ledger(step_events(plan, state, 0, 1), plan.adjacency))
    cost = after.epsilon(plan.delta, plan.accountant).epsilon
    if plan.epsilon is not None and cost > plan.epsilon:
        raise errors.BudgetExhausted(
            f"A call without a state costs epsilon={cost:.4g} at delta={plan.delta:g}"
            f"{', with what was spent before' if state.ledger.events else ''}, more than the budget "
            f"epsilon={plan.epsilon:g}: nobody drew its batch, so it claims no amplification by sampling. Draw it: "
            "state = dp_step.init(params, dpfunc.secure_key()), and batches from plan.batches(state). The step was not "
            "taken."
        )
    return state


def next_state(plan: Plan, state: StepState, noise_state: Any, facts: tuple[str, ...]) -> StepState:
    """The state after a step, with what it costs in its ledger; `facts` are those of the step."""
    step, state = state.step + 1, state._replace(facts=weakest(state.facts or facts, facts))
    if step <= state.charged:  # a resumed run repeats it bit for bit: it is in the ledger already
        left = tuple(item for item in state.released if item[0] >= step)
        return state._replace(step=step, noise_state=noise_state, released=left)
    cost = Ledger(step_events(plan, state, state.step, step), plan.adjacency)
    return state._replace(step=step, charged=step, noise_state=noise_state, ledger=state.ledger.compose(cost))


def weakest(*facts: tuple[str, ...]) -> tuple[str, ...]:
    """Noise source, rows and batches of several stretches of a run: what holds for all of them."""
    sources, rows, batches = map(set, zip(*facts, strict=True))
    return (
        min(sources) if len(sources) == 1 else SOURCES["both"],
        max(rows, key=(ROWS[1], ROWS[0], ROWS[2]).index),
        ELSEWHERE if ELSEWHERE in batches else COMPARED,
    )


def turn_of(state: StepState) -> Turn:
    """The number of the step after a state, and the keys of the run's releases, for its noise mechanism.

    Guarantees:
        tests/noise/test_mechanisms.py::test_earlier_keys_need_a_state.
    """

    def key_of(step: int) -> Key:
        if step != state.step and state.noise_state == ():
            raise errors.InvalidArgument(
                f"Expected a mechanism whose noise needs the key of step {step} in step {state.step} to have a state, "
                "got (). A run whose noise has no state may go on with a new key, and would draw other noise in the "
                'place of what it released. Return some, e.g. {"noise": "of all keys"}, from init.'
            )
        return fold_in(fold_in(state.key, "step", integer("step", step)), "release")

    return Turn(state.step, key_of(state.step), key_of)


def noise_digest(noise_state: Any) -> str:
    """A digest of the state of the noise, which all processes hold alike; of divided tensors only how they are."""
    leaves = pytree.tree_leaves_with_path(noise_state)
    whole = [(pytree.keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, Tensor) and not is_dtensor(leaf)]
    others = [
        (pytree.keystr(path), shard_dims(leaf) if isinstance(leaf, Tensor) else leaf)
        for path, leaf in leaves
        if not isinstance(leaf, Tensor) or is_dtensor(leaf)
    ]
    return f"{checksum(whole)} {others}"


def step_events(plan: Plan, state: StepState, start: int, stop: int) -> tuple[Event, ...]:
    """Events that steps of a run cost. A batch that was not drawn claims no amplification by sampling."""
    if state.drawn:
        return plan.events(start, stop)
    return plan.noise.events(plan.run._replace(sampler=Poisson(plan.sampler.dataset_size, 1.0)), start, stop)


def plan_digest(plan: Plan) -> str:
    """A digest of a plan, to tell two plans apart: of its repr, of the fields of a part without a repr, and of all
    that it counts as spent, of which the repr has six digits of the first kinds."""
    parts = (plan.sampler, plan.clip, plan.noise, getattr(plan.noise, "strategy", None))
    plain = [sorted(vars(part).items()) for part in parts if type(part).__repr__ is object.__repr__]
    spent = plan.spent.to_json() if plan.spent is not None and plan.spent.events else ""
    return f"{digest(stable_repr((plan, plain, spent) if any((*plain, spent)) else plan)):016x}"


def stable_repr(value: object) -> str:
    """The same text for the same settings, in each process: functions and objects by their names."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


class _Releases:
    """Steps of a run that this process has released, by their digests."""

    def __init__(self) -> None:
        self.next_step: int | None = None  # the first one that was not released yet; None where the run is new here
        self.digests: dict[int, str] = {}  # of each step; one that is repeated releases the same
        self.lock = RLock()
        self.is_own = False  # no other group of processes of the job takes steps of it

    def go_on_at(self, step: int) -> None:
        self.next_step = step

    def claimed(self) -> None:
        self.is_own = True


# Guards against mistakes in this process, no part of the computation: no result depends on them.
_runs: dict[str, _Releases] = {}  # fingerprint of the key of a run ->
_ledgers: dict[int, dict[str, Ledger]] = {}  # number of records -> fingerprint of a run -> ledger after its newest step


def _releases(state: StepState) -> _Releases:
    return _runs.setdefault(fingerprint(state.key), _Releases())


def release_lock(state: StepState) -> AbstractContextManager[Any]:
    """Context in which no other thread of this process releases a step of the run."""
    return _releases(state).lock


def mark_released(plan: Plan, after: StepState, release: str) -> None:
    """Record that the step that leads to `after` was released; `release` is a digest of the values."""
    run = _releases(after)
    run.go_on_at(after.step)
    run.digests[after.step - 1] = release
    _ledgers.setdefault(plan.sampler.dataset_size, {})[fingerprint(after.key)] = after.ledger


def warn_of_start(plan: Plan, state: StepState) -> None:
    """Warn of a key that others know, and of steps on as many records that the run does not count, of whatever plan."""
    if state.key.guessable:
        warn(
            "The key of this run is known to everybody (insecure_key): its noise can be subtracted, and no epsilon "
            "holds. That is for tests and public data. For private data use dpfunc.secure_key().",
            errors.InsecureKeyWarning,
        )
    earlier = tuple(_ledgers.get(plan.sampler.dataset_size, {}).values())  # other threads may add to it
    same_run = _releases(state).next_step is not None  # whose steps are repeated, or refused
    if not same_run and any(state.ledger.lacks(ledger) for ledger in earlier):
        warn(
            "This process has taken steps on as many records as the plan has, which the ledger of the new run does "
            "not count. On the same records both add up, to more than either ledger says, also where the plan was "
            "edited in between. Count the first run in the second: dp_step.init(params, key, ledger=state.ledger) with "
            "its last state, in a plan whose budget is for both (Plan.for_budget(..., spent=state.ledger)). For other "
            "records, or public ones, filter this warning out.",
            errors.RunWarning,
        )


def resumed(state: StepState) -> StepState:
    """Allow the steps from `state` on again, bit for bit: `check_repeated` compares them with the first release."""
    _releases(state).go_on_at(state.step)
    return state


def allow_repeat(state: StepState) -> StepState:
    """Declare that the steps from `state` on may be drawn again, whatever they release, e.g. to reproduce a run.

    Only safe with the same data, parameters and code: with anything else changed, two releases share their noise and
    their difference is not protected.
    """
    digests = _releases(state).digests
    for step in [step for step in digests if step >= state.step]:
        del digests[step]
    return resumed(state)


def check_newest(state: StepState) -> None:
    """Check that no later step of the run was released in this process: that one costs too."""
    done = _releases(state).next_step or 0
    if state.step < done:
        raise errors.StateReused(
            f"Expected the newest state of the run, after {done} steps, got state.step={state.step}: its ledger lacks "
            "what the later steps cost. Take the state that the last call of dp_step returned. If those steps are of "
            "another run, both use one key, and so the same noise: begin each run with a dpfunc.secure_key() of its "
            "own, and leave out what this one released."
        )


def check_writer(state: StepState) -> None:
    """Check, in the process that writes, that no other group of processes of the job takes steps with this key.

    Groups that share their writer are told apart by `check_state`: it has released the steps of both.
    """
    run = _releases(state)
    if not run.is_own and (writer := first_with(fingerprint(state.key))) != dist.get_rank():
        raise errors.StateReused(
            f"Expected a key of one group of processes, got one with which a group whose first is process {writer} "
            "takes steps, too: both would draw the same noise, and the difference of what they release would have "
            "none. Make a key for each: dpfunc.distributed.shared_key(ranks), with the ranks of its own group. Nothing "
            "was spent."
        )
    run.claimed()


def check_own_plan(state: StepState, digest_of_plan: str) -> None:
    """Check that a state is of a plan."""
    if state.plan != digest_of_plan:
        raise errors.InvalidArgument(
            f"Expected a state of this plan, got one of another plan: its budget, and its end after {state.limit} "
            "steps, are not those of this one. For another phase begin a new run that counts the old one: "
            "dp_step.init(params, dpfunc.secure_key(), ledger=state.ledger). Nothing was spent."
        )


def check_journal(state: StepState, journal: object) -> None:
    """Check that a resumed run writes on in the journal that it was resumed with, which a second resumption reads."""
    file = getattr(journal, "file", None)
    other = file is not None and os.path.realpath(file) != os.path.realpath(state.journal)
    if state.journal and (journal is None or other):
        raise errors.CheckpointError(
            f"Expected the journal of the resumed run, make_dp_step(..., journal=Journal({state.journal!r}, plan)), "
            f"got {'no journal' if journal is None else str(file)}. Steps that are not in it could be released again, "
            "with the same noise and other values. Nothing was spent."
        )


def check_draw(plan: Plan, state: StepState, real_samples: int, ranks: Ranks | None) -> Tensor:
    """The draw of this step, or of this process, if a batch has as many samples."""
    drawn = plan.draw(state, state.step, ranks)
    if len(drawn) != real_samples:
        call = "state" if ranks is None else "state, ranks"
        other = "more" if real_samples > len(drawn) else "fewer"
        raise errors.SamplingMismatch(
            f"Expected the batch that the plan's sampler drew for step {state.step}, got one with {other} "
            f"samples. Epsilon holds for the plan's batches only: take them from plan.batches({call}) or plan.loader("
            f"dataset, {call}), drop none, and mark padding with mask_B. If you draw by the same law "
            "elsewhere, say so with make_dp_step(..., verify_batch=False). Nothing was spent."
        )
    return drawn


def check_state(state: StepState, plan: Plan, digest_of_plan: str) -> None:
    """Check that a step may be taken from a state."""
    if not isinstance(state, StepState):
        raise wrong_type("state to be a StepState", "state", state, "Start with state = dp_step.init(params, key).")
    check_own_plan(state, digest_of_plan)
    check_process(state.key)
    if state.step >= state.limit and not state.drawn:
        raise errors.BudgetExhausted(
            "No step is left: a call without a state is a run of one step. Begin a run of more with "
            "state = dp_step.init(params, dpfunc.secure_key()). The step was not taken."
        )
    if state.step >= state.limit:
        reason = (
            f"the plan's {plan.num_steps} steps are taken"
            if state.limit == plan.num_steps
            else f"another step would exceed epsilon={plan.epsilon:g}"
        )
        raise errors.BudgetExhausted(
            f"No step is left: {reason}. Spent epsilon={upper(state.ledger.epsilon(plan.delta).epsilon, 4)} at "
            f"delta={plan.delta:g} in {state.step} steps of this run. The step was not taken."
        )
    if state.step < (_releases(state).next_step or 0):
        raise errors.StateReused(
            f"Step {state.step} of this run was already released: a second release with the same noise would give the "
            "first one away. Each state is used once. The usual mistake:\n"
            "    grads, _, unreleased = dp_step(params, batch, state)       # state stays what it was\n"
            "    grads, state, unreleased = dp_step(params, batch, state)   # right\n"
            "or two threads with one state, or a key that was used for an earlier run: take a new dpfunc.secure_key(). "
            "To reproduce a run with the same data on purpose, see dpfunc.state.allow_repeat. Nothing was spent."
        )


def check_repeated(state: StepState, release: str) -> None:
    """Check that a step that an interrupted run released is released again bit for bit."""
    before = dict(state.released).get(state.step)
    here = _releases(state).digests.get(state.step, release)
    if here != release or (state.step < state.charged and before != release):
        raise errors.StateReused(
            f"Step {state.step} of this run was released before, and with other values: their "
            "difference would have no noise. Something is not as it was: the records or their order, augmentation by "
            "NumPy's or Python's random numbers, optimizer or its state, learning rate, loss, engine, precision, "
            "microbatch_size (with dropout), number of processes or threads, numpy, or a kernel that is not "
            "deterministic. Resume with what the run was started with; or go on as a new run from the saved "
            "parameters, which counts the old one: dp_step.init(params, dpfunc.secure_key(), journal_ledger(path)). "
            "Nothing was released and nothing was spent."
        )
