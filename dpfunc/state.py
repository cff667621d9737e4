"""The state of a run: all that the next step needs, and when it may take one."""

from __future__ import annotations

from typing import Any, NamedTuple

from dpfunc.accounting import Ledger
from dpfunc.checks import fail
from dpfunc.errors import BudgetExhausted, StateReused
from dpfunc.plan import Plan
from dpfunc.rng import Key, fingerprint


class StepState(NamedTuple):
    """All that the next step needs, and the only state there is. Use it once.

    Args:
        step: number of the next step, from 0.
        limit: the step at which the budget, or the plan, ends.
        charged: steps below this are in the ledger already; a resumed run repeats them at no cost, because it
            repeats them bit for bit.
        key: the root of the run's randomness; as secret as the data.
        noise_state: of the noise mechanism; empty for Gaussian noise.
        ledger: what was spent, earlier phases included.
        released: (step, digest) of what an interrupted run released after this state; repeated bit for bit or refused.

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


# The first step of each run (by the fingerprint of its key) that was not released yet, in this process. A guard against
# mistakes, not part of the computation: no result depends on it.
_next_release: dict[str, int] = {}


def remember(after: StepState) -> None:
    """The step that leads to `after` was released."""
    _next_release[fingerprint(after.key)] = after.step


def replay(state: StepState) -> StepState:
    """Declare that the steps from `state` on may be drawn again, e.g. to reproduce a run.

    Only safe with the same data, parameters and code: then the same values are released again. With anything else
    changed, two releases share their noise and their difference is not protected.
    """
    _next_release[fingerprint(state.key)] = state.step
    return state


def a_state(state: StepState | None) -> StepState:
    if state is None:
        raise fail(
            "a state, which all processes share", "state", None, "Start with dp_step.init(params, shared_key(ranks))."
        )
    return state


def check_state(state: StepState, plan: Plan) -> None:
    """The state is one that may take a step.

    Raises:
        InvalidArgument: not a state.
        BudgetExhausted: the next step would overspend.
        StateReused: this step was released before.
    """
    if not isinstance(state, StepState):
        raise fail(
            "state to be a StepState", "state", type(state).__name__, "Start with state = dp_step.init(params, key)."
        )
    if state.step >= state.limit:
        spent = state.ledger.epsilon(plan.delta).epsilon
        reason = (
            f"the plan's {plan.num_steps} steps are taken"
            if state.limit == plan.num_steps
            else f"another step would exceed epsilon={plan.epsilon:g}"
        )
        raise BudgetExhausted(
            f"No step is left: {reason}. Spent epsilon={spent:.4g} at delta={plan.delta:g} in {state.step} steps of "
            "this run. The step was not taken."
        )
    done = _next_release.get(fingerprint(state.key), 0)
    if state.step < done:
        raise StateReused(
            f"Step {state.step} of this run was already released: a second release with the same noise would give the "
            "first one away. Each state is used once. The usual mistake:\n"
            "    grads, _, unreleased = dp_step(params, batch, state)       # state stays what it was\n"
            "    grads, state, unreleased = dp_step(params, batch, state)   # right\n"
            "or a key that was used for an earlier run: take a new one from dpfunc.secure_key(). To reproduce a run "
            "with the same data on purpose, see dpfunc.state.replay. Nothing was spent."
        )


def check_repeated(state: StepState, digest: str) -> None:
    """A step that an interrupted run released is released again bit for bit, or not at all.

    Args:
        state: before the step. digest: of what it would release.

    Raises:
        StateReused: other values would be released with the same noise.
    """
    before = dict(state.released).get(state.step)
    if state.step < state.charged and before != digest:
        raise StateReused(
            f"Step {state.step} of this run was released before the interruption, and with other values: their "
            "difference would have no noise. Something is not as it was: optimizer or its state, learning rate, loss, "
            "engine, precision, microbatch_size (with dropout), number of processes or threads, or a kernel that is "
            "not deterministic. Resume with what the run was started with; or go on as a new run from the saved "
            "parameters, which counts the old one: dp_step.init(params, dpfunc.secure_key(), journal_ledger(path)). "
            "Nothing was released and nothing was spent."
        )
