"""An audit of a loop as it is: canaries join its batches, or its records, and are scored by what is released.

May import: its folder, checkpoint and below. Privacy depends on it: no.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor

from dpfunc._utils.validation import fail, integer
from dpfunc.batches import batch_size
from dpfunc.engines._guards.loss import split_aux
from dpfunc.errors import BudgetExhausted, InvalidArgument
from dpfunc.evidence._noise_check import with_noise_check
from dpfunc.evidence._one_run import Audit, audit, largest_bound
from dpfunc.evidence.canaries import Canaries, append_canaries, coins
from dpfunc.evidence.neighbours import Init, Step
from dpfunc.evidence.watch import Tape, WatchedNoise, WatchedSampler, settings_of
from dpfunc.plan import Plan
from dpfunc.rng import Key, fold_in
from dpfunc.state import StepState
from dpfunc.step import DPStep, StepResult
from dpfunc.types import Batch, Params

_log = logging.getLogger("dpfunc")
Score = Literal["sum", "spread"]


@dataclass
class Planted:
    """Canaries of a run, records as the loss takes them or else in gradients, and what its releases say of them."""

    key: Key = field(repr=False)
    count: int
    records: Batch | None = field(default=None, repr=False)
    canaries: Canaries | None = None
    present: Tensor = field(default_factory=lambda: torch.zeros(0, device="cpu"), repr=False)
    reads: list[Tensor] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.key = fold_in(self.key, "canaries")
        if self.records is not None:
            self.count = batch_size(self.records)
            self.present = coins(self.count, self.key)

    def draw(self, params: Params) -> None:
        """Draw canaries of the form of these parameters, unless records are the canaries."""
        if self.records is None:
            self.canaries = Canaries.draw(params, self.count, self.key)
            self.present = self.canaries.present

    def verdict(self, plan: Plan, score: Score) -> Audit:
        """The audit of all releases that were read: its claim is what their steps cost by the plan."""
        if not self.reads:
            raise InvalidArgument("Expected a loop that calls its dp_step, got one that took no step.")
        reads = torch.stack(self.reads)
        scores = reads.sum(0) if score == "sum" else reads.amax(0) - reads.amin(0)
        result = audit(
            scores[self.present], scores[~self.present], delta=plan.delta, claim=plan.ledger(len(self.reads))
        )
        noise = plan.noise.watch.differs() if isinstance(plan.noise, WatchedNoise) else ""
        return replace(result, noise=noise, exceeds=bool(result.exceeds or noise))


def planted_plan(plan: Plan, planted: Planted) -> Plan:
    """The plan of a loop among whose records there are canaries; it draws those that the loop is given."""
    if not is_dataclass(plan.sampler):
        raise fail("a sampler that is a dataclass", "sampler", plan.sampler)
    n, m = plan.sampler.dataset_size, planted.count
    larger: Any = replace(plan.sampler, dataset_size=n + m)
    out = torch.arange(m, device="cpu") if planted.records is None else torch.nonzero(~planted.present)[:, 0]
    settings = {"epsilon": None, "spent": None, "allow_large_delta": True}  # the claim is that of the steps
    most, most_gaussian = largest_bound(m, delta=plan.delta)  # guesses cannot refute more
    _log.warning(
        "An audit with %d canaries shows at most epsilon >= %.3g at delta=%g, %.3g if the noise is Gaussian. A "
        "claim above that is not refuted by guesses; more canaries show more.", m, most, plan.delta, most_gaussian,
    )  # fmt: skip
    return with_noise_check(replace(plan, sampler=WatchedSampler(larger, Tape(without=n + out)), **settings))


@dataclass(frozen=True)
class PlantedStep(DPStep):
    """A step whose batches canaries join, and whose releases are read."""

    planted: Planted = field(kw_only=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.ranks is not None:
            raise InvalidArgument("Expected a step of one process, got ranks. Audit the step with ranks=None.")

    def init(self, params: Params, key: Key, ledger: Any = None, *, num_records: int | None = None) -> StepState:
        self.planted.draw(params)
        return super().init(params, key)

    def __call__(
        self, params: Params, batch: Batch, state: StepState | None = None, *, mask_B: Tensor | None = None
    ) -> StepResult:
        planted = self.planted
        if state is None:
            raise InvalidArgument("Expected a state in each call of dp_step, got None: it starts with dp_step.init.")
        if planted.canaries is None:
            result = super().__call__(params, batch, state, mask_B=mask_B)
            planted.reads.append(self._alignment(params, result.grads))
            return result
        sampler: Any = self.plan.sampler
        n = sampler.dataset_size - planted.count
        drawn = sampler.sampler.indices(state.key, state.step)
        own = drawn[drawn >= n] - n
        rows, numbers = append_canaries(batch, own)
        if mask_B is not None:
            mask_B = torch.cat([mask_B, mask_B.new_ones(len(own))])
        result = self._whole(params, (rows, numbers.to(next(iter(params.values())).device)), state, mask_B=mask_B)
        planted.reads.append(planted.canaries.read(result.grads))
        return result

    @cached_property
    def _whole(self) -> DPStep:
        sampler: Any = self.plan.sampler
        canaries: Any = self.planted.canaries
        clipped = replace(self.clipped_grad, loss_fn=canaries.loss(self.clipped_grad.loss_fn))
        plan = replace(self.plan, sampler=sampler.sampler)
        return DPStep(**settings_of(self) | {"plan": plan, "clipped_grad": clipped})

    def _alignment(self, params: Params, grads: dict[str, Tensor]) -> Tensor:
        """Inner products of a release with the gradients of all canaries, each of norm 1: float64, (m,)."""
        loss_fn, records = self.clipped_grad.loss_fn, self.planted.records
        own = {name: value.detach() for name, value in params.items()}
        along: Any = torch.func.jvp(lambda at: split_aux(loss_fn(at, records))[0], (own,), (grads,))
        sq_norms = self.clipped_grad.engine(loss_fn, own, records).sq_norms()
        norms_m = torch.stack([*sq_norms.values()]).sum(0).sqrt().clamp(min=1e-12)
        return cast(Tensor, (along[1] / norms_m).detach().cpu().double().nan_to_num(0.0))


def audit_loop(
    dp_step: DPStep, init: Init, step: Step, data: Batch, planted: Planted, *, key: Key, steps: int,
    score: Score = "sum",
) -> tuple[Audit, int, Plan]:  # fmt: skip
    """Run a loop, see `replay`, once with canaries: the audit, the number of steps that it took, and its plan."""
    integer("steps", steps, minimum=1)
    n = dp_step.plan.sampler.dataset_size
    if planted.records is not None and batch_size(data) != n:
        raise InvalidArgument(
            f"Expected data of {n} records, the plan's dataset_size, before canaries are added, got another number."
        )
    plan = planted_plan(dp_step.plan, planted)
    own: Any = PlantedStep(**settings_of(dp_step) | {"plan": plan, "journal": None}, planted=planted)
    if planted.records is not None:
        data = torch.utils._pytree.tree_map(lambda a, b: torch.cat([a, b]), data, planted.records)
    carry = init(own, data, key)
    with suppress(BudgetExhausted):  # an end like None
        while carry is not None and len(planted.reads) < steps:
            carry = step(own, data, carry)
    return planted.verdict(plan, score), len(planted.reads), plan
