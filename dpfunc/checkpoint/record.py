"""Record of the privacy cost of a run, to be published with its result: `privacy_accounting.json`.

May import: its folder, step and below. Privacy depends on it: yes.
"""

import platform
from collections.abc import Sequence
from datetime import UTC, datetime

from dpfunc._utils.validation import expect
from dpfunc._utils.versions import installed
from dpfunc.accounting import Ledger
from dpfunc.accounting import record as known
from dpfunc.accounting.record import EXACT_SIZE, GUESSABLE, NOT_COVERED, OTHER_STEPS, SECRET, SIZES, Record
from dpfunc.errors import LedgerConflict
from dpfunc.noise import DEFAULT
from dpfunc.rng import fingerprint
from dpfunc.state import StepState, check_newest, check_own_plan, plan_digest, step_events
from dpfunc.step import DPStep

_MECHANISMS = dict(zip(("uniform", "optimal"), known.MECHANISMS, strict=True))


def make_record(
    dp_step: DPStep,
    state: StepState,
    *,
    unit: str,
    public_bound: bool = False,
    epoch: float | None = None,
    not_covered: Sequence[str] = (),
    ledger: Ledger | None = None,
) -> Record:
    """The record of a run up to a state, earlier phases included.

    Args:
        dp_step: of the run. state: after its last step.
        unit: what one row of a batch is, e.g. `"one patient"`: what is protected.
        public_bound: the plan's `dataset_size` is a public number that the number of records cannot exceed. False: it
            is the number of records, which the record then publishes, and says so.
        epoch: passes over the data; None computes it from the steps.
        not_covered: sentences on what else was looked at or published, besides `dpfunc.accounting.record.NOT_COVERED`.
        ledger: all that was spent on these records, this run included: of `release_mean` after it, or `journal_ledger`
            of a journal that several runs share. None: `state.ledger`, the run and what was spent before it.

    Returns:
        What `dpfunc ledger show` reads: write its `to_json()` into `privacy_accounting.json`, and publish that.

    Raises:
        InvalidArgument: an empty unit, a text with control characters, or a state of another plan.
        LedgerConflict: a ledger without all steps of the run and of what was spent before it.
        StateReused: a later step was released in this process: its cost belongs into the record.

    Guarantees:
        tests/checkpoint/test_record.py::test_a_record_says_what_the_run_was,
        ::test_a_record_of_all_that_was_spent.

    >>> import dpfunc, torch
    >>> poisson, flat = dpfunc.sampling.Poisson(100, 0.1), dpfunc.clipping.Flat(1.0)
    >>> plan = dpfunc.Plan(poisson, flat, noise_multiplier=1.0, num_steps=3, delta=1e-3)
    >>> loss_fn, params = lambda params, batch: (params["w"] * batch).sum(1), {"w": torch.zeros(2)}
    >>> dp_step = dpfunc.make_dp_step(loss_fn, plan)
    >>> state = dp_step.init(params, dpfunc.secure_key())
    >>> grads, state, _ = dp_step(params, torch.ones(100, 2)[next(iter(plan.batches(state)))], state)
    >>> record = make_record(dp_step, state, unit="one patient")
    >>> print(f"{record.unit}: epsilon={record.epsilon:.2f} after {record.global_step} step")
    one patient: epsilon=0.65 after 1 step
    """
    plan = dp_step.plan
    expect(unit.strip(), "what one row of a batch is, e.g. unit='one patient'", "unit", unit)
    check_own_plan(state, plan_digest(plan))
    check_newest(state)
    spent = state.ledger if ledger is None else ledger
    if spent.adjacency != state.ledger.adjacency or spent.lacks(state.ledger):
        raise LedgerConflict(
            f"Expected a ledger of all that was spent, {state.ledger!r} of the run included, got ledger={spent!r}. "
            "Pass that of the last release, or journal_ledger(path). No record was made."
        )
    answer = spent.epsilon(plan.delta, plan.accountant)
    last = max(0, state.step - 1)
    clip = dp_step.clipped_grad.at(last, state.clip_state)
    proven = type(clip.rule).__module__.startswith("dpfunc.")  # a schedule may be of a rule that is not
    n, size = plan.sampler.dataset_size, plan.sampler.expected_batch_size(last)
    ours, strategy = repr(plan.noise) == repr(DEFAULT), getattr(plan.noise, "strategy", DEFAULT)
    noise_source, rows, batches = state.facts or dp_step.facts
    own = Ledger(step_events(plan, state, 0, state.step), plan.adjacency)
    others = (OTHER_STEPS,) if own.lacks(spent) else ()
    publishes_size = plan.adjacency == "add_remove" and not public_bound
    return Record(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        run=fingerprint(state.key),
        unit=unit,
        adjacency=plan.adjacency,
        epsilon=answer.epsilon,
        delta=plan.delta,
        target_epsilon=plan.epsilon,
        accountant=answer.method,
        note=answer.note,
        epsilon_rdp=spent.epsilon(plan.delta, "rdp").epsilon,
        ledger=spent,
        mechanism=_named(_MECHANISMS[plan.allocation] if ours else repr(plan.noise), plan.noise, strategy),
        noise_multiplier=plan.events(0, last + 1)[-1].noise_multiplier,  # other noise may have a scale of its own
        noise_source=noise_source,
        noise_key=GUESSABLE if state.key.guessable else SECRET,
        max_grad_norm=clip.whole,
        clip=type(plan.clip if proven else clip.rule).__name__,
        rows=rows,
        batches=batches,
        sampler=_named(type(plan.sampler).__name__, plan.sampler),
        sampling_prob=size / n,
        expected_batch_size=size,
        dataset_size=n,
        dataset_size_is=SIZES[public_bound],
        global_step=state.step,
        num_steps=state.limit,
        epoch=state.step * size / n if epoch is None else epoch,
        versions=versions(),
        not_covered=(*((EXACT_SIZE,) if publishes_size else ()), *others, *not_covered, *NOT_COVERED),
    )


def _named(name: str, *parts: object) -> str:
    """The name of parts of a plan; of a user's behind its module, since it can be that of one of dpfunc."""
    modules = [type(part).__module__ for part in parts]
    return next((f"{module}.{name}" for module in modules if not module.startswith("dpfunc.")), name)


def versions() -> dict[str, str]:
    """Versions of this library, of torch and of Python."""
    return {**installed(), "python": platform.python_version()}
