"""Engine + clip rule -> ClippedSum, for every engine, rule, grouping and microbatch size.

May import: distributed and below. Privacy depends on it: yes.

The algorithm is `ClippedGrad._clip_and_sum`, for each microbatch.
"""

import math
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from dpfunc._utils.memory import out_of_memory
from dpfunc._utils.parts import is_dtensor
from dpfunc._utils.processes import process_context
from dpfunc._utils.validation import fail, integer, one_of, refuse, shorten
from dpfunc.batches import batch_size, check_params, refuse_narrow_range, tree_map
from dpfunc.clipping.rules import Partition, group_bounds, group_sensitivities, of_run, partition, safe_factors
from dpfunc.clipping.telemetry import LEAF, Telemetry
from dpfunc.distributed._reduce import full_norms, zeros
from dpfunc.distributed.ranks import Ranks
from dpfunc.engines import vmap
from dpfunc.engines.microbatches import Microbatches
from dpfunc.errors import InvalidArgument, OutOfMemory
from dpfunc.noise import noise_std
from dpfunc.rng import Key
from dpfunc.types import (
    ADJACENCIES,
    Adjacency,
    Allocation,
    Batch,
    ClippedSum,
    ClipRule,
    Engine,
    LossFn,
    MicrobatchSums,
    Params,
    PerSampleGrads,
    Unreleased,
)

# torch's generator, and the modules into which parameters are put, are those of the process: threads take turns.
_TURN = threading.RLock()
RULE_LEAF = "(clip rule)"  # name, among the sums, of what a rule of a run releases


@dataclass(frozen=True)
class StepClip:
    """The clip rule of one step, and the statistics that it releases beside its gradient, by their name among the sums.

    Gradient and statistics of a record have together at most the norm that the rule allows: the statistics have their
    shares of its square, the gradient has the rest.
    """

    rule: ClipRule
    beside: Mapping[str, Telemetry]

    @property
    def whole(self) -> float:
        """The bound on gradient and statistics together."""
        bound = self.rule.clip_norm
        return math.hypot(*bound.values()) if isinstance(bound, Mapping) else bound

    def bounds(self, group_names: tuple[str, ...]) -> dict[str, float]:
        """The bounds that are left to the clip groups, and those of the statistics."""
        self._refuse_taken(group_names)
        bounds = group_bounds(self.rule.clip_norm, group_names)
        rest = math.sqrt(1 - sum(each.share for each in self.beside.values()))
        left = {group: bound * rest for group, bound in bounds.items()}
        return left | {leaf: self._bound(leaf) for leaf in self.beside}

    def _bound(self, leaf: str) -> float:
        return self.whole * math.sqrt(self.beside[leaf].share)

    def with_leaves(self, params: Params) -> Params:
        """Parameters, and one for each kind of statistics, for what lays noise out as them."""
        if not self.beside:  # in each step of several processes
            return params
        self._refuse_taken({*params, *partition(self.rule.groups, tuple(params)).group_names})
        device = next(iter(params.values())).device
        return {**params, **{leaf: torch.zeros(each.num_values, device=device) for leaf, each in self.beside.items()}}

    def _refuse_taken(self, names: Collection[str]) -> None:
        """Refuse names of statistics for others: the sums and the bounds of both would be one."""
        if taken := [leaf for leaf in self.beside if leaf in names]:
            raise fail(f"no parameter and no clip group of the name {taken[0]}", "name", taken[0],
                       "Rename it: statistics have it.")  # fmt: skip

    def with_totals(self, clipped: ClippedSum, unreleased: Unreleased, bounds: Mapping[str, float]) -> ClippedSum:
        """The clipped sum with those of the statistics of the same records. UNRELEASED, as what goes in."""
        if not self.beside:
            return clipped
        own = [bound for group, bound in bounds.items() if group not in self.beside]
        sums = {leaf: each.total(unreleased, own, bounds[leaf]) for leaf, each in self.beside.items()}
        return replace(clipped, sums={**clipped.sums, **sums}, group_of={**clipped.group_of, **{n: n for n in sums}})

    def read(self, released: Params, batch_size: float) -> dict[str, dict[str, float | list[float]]]:
        """The means that a step released, from its sums with noise and its expected batch size."""
        return {leaf: each.read(released[leaf], self._bound(leaf), batch_size) for leaf, each in self.beside.items()}


@dataclass(frozen=True)
class ClippedGrad:
    """A prepared computation of clipped sums; see `clipped_grad` for the arguments."""

    loss_fn: LossFn
    clip: ClipRule
    engine: Engine
    microbatch_size: int | Literal["auto"] | None
    adjacency: Adjacency
    ranks: Ranks | None = field(default=None, repr=False)
    telemetry: Telemetry | None = None

    def at(self, step: int, clip_state: Any) -> StepClip:
        """The clip rule and the statistics of a step, from `StepState.clip_state`."""
        own = of_run(self.clip)
        rule = own.at(step, clip_state)  # which refuses a state that is not there
        beside = {LEAF: self.telemetry, RULE_LEAF: own.released(clip_state)}
        return StepClip(rule, {leaf: each for leaf, each in beside.items() if each is not None})

    def deviations(self, params: Params, clip: StepClip, deviation: float, allocation: Allocation) -> dict[str, float]:
        """Standard deviation of the noise in the sum of each parameter; `deviation` is relative to the sensitivity."""
        parts = partition(clip.rule.groups, tuple(params))
        sensitivities = group_sensitivities(clip.bounds(parts.group_names), self.adjacency)
        shapes = {name: torch.empty(param.shape, device="meta") for name, param in params.items()}
        of_group = noise_std(ClippedSum(shapes, parts.group_of, sensitivities), deviation, allocation)
        return {name: of_group[group] for name, group in parts.group_of.items()}

    @cached_property
    def _microbatches(self) -> Microbatches:
        return Microbatches(self.loss_fn, self.engine, self.microbatch_size)

    def prepared(self, params: Params, batch: Batch) -> str:
        """Facts that the engine has learnt of the loss for rows of this shape, as text: the same in each process.

        It is empty where the loss, or the preparation, communicates: what differs there ends the pass; and where no
        made-up row could be computed.
        """
        if self.ranks is None or not self.ranks.independent or any(map(is_dtensor, params.values())):
            return ""
        with _TURN, process_context("independent"):
            return getattr(self._microbatches.prepare(params, batch), "facts", "")

    def unused(self, params: Params, batch: Batch) -> tuple[str, ...]:
        """Parameters that the loss does not use, as the engine has seen of made-up rows of this shape."""
        with _TURN, process_context("independent"):
            return getattr(self._microbatches.prepare(params, batch), "unused", ())

    def __call__(
        self, params: Params, batch: Batch, *, mask_B: Tensor | None = None, key: Key | None = None
    ) -> tuple[ClippedSum, Unreleased]:
        """The clipped sum over the batch by the rule of the first step, and its losses and norms."""
        clip = self.at(0, None)
        check_params(params)
        refuse_narrow_range(params)
        return self.of_step(clip, params, batch, mask_B=mask_B, key=key)

    def of_step(
        self, clip: StepClip, params: Params, batch: Batch, *,
        mask_B: Tensor | None, key: Key | None, places: Sequence[int] | None = None,
    ) -> tuple[ClippedSum, Unreleased]:  # fmt: skip
        """The same by the rule of a step, of parameters that were checked.

        Rows draw the random numbers of `places`; None: of their own.
        """
        try:
            with _TURN:
                return self._compute(params, batch, mask_B, key, clip, places)
        except (RuntimeError, MemoryError) as error:
            asked, together = out_of_memory(error), self.microbatch_size or batch_size(batch)
            if not asked:
                raise
            raise OutOfMemory(
                f"Expected enough memory for a microbatch, got microbatch_size={self.microbatch_size!r}: {asked} could "
                f"not be had. Set it to a number{'' if together == 'auto' else f' smaller than {together}'} in "
                "make_dp_step, the sum stays the same; if one row is too much, shorten the rows. The state can be used "
                "again: nothing was released and nothing was spent."
            ) from error

    def _compute(
        self, params: Params, batch: Batch, mask_B: Tensor | None, key: Key | None, clip: StepClip,
        places: Sequence[int] | None,
    ) -> tuple[ClippedSum, Unreleased]:  # fmt: skip
        if self.ranks is None and any(map(is_dtensor, params.values())):
            raise InvalidArgument(
                "Expected whole parameters, got DTensors: the norm of a part is not the norm of a gradient. Use "
                "make_dp_step(..., ranks=dpfunc.distributed.sharded(mesh))."
            )
        num_samples = batch_size(batch)
        device = next(iter(params.values())).device
        real_B = check_mask(mask_B, num_samples, device)
        parts = partition(clip.rule.groups, tuple(params))
        bounds = clip.bounds(parts.group_names)
        parts = replace(parts, bounds=tuple(bounds[group] for group in parts.group_names))
        if num_samples:
            found = self._microbatches.sums(
                params, batch, real_B, key, partial(self._clip_and_sum, clip.rule, parts, params), places
            )
        else:
            none = torch.zeros(0, len(parts.bounds), device=device)
            found = MicrobatchSums(zeros(params), none.sum(1), none, {})
        # without rows of padding; all rows are real without a mask: no selection, for which a device has to wait
        kept = slice(num_samples) if real_B is None else real_B.nonzero()[:, 0]
        aux = None if found.aux is None else tree_map(lambda leaf: leaf[kept], found.aux)
        unreleased = Unreleased(found.losses_B[kept], found.norms_BG[kept], aux)
        clipped = ClippedSum(found.sums, parts.group_of, group_sensitivities(bounds, self.adjacency))
        return clip.with_totals(clipped, unreleased, bounds), unreleased

    def _clip_and_sum(
        self,
        rule: ClipRule,
        parts: Partition,
        params: Params,
        per_sample: PerSampleGrads,
        mask_B: Tensor | None,
    ) -> MicrobatchSums:
        """The algorithm: norms, factors, and the sum by factors."""
        sq_norms = per_sample.sq_norms()
        norms_BG = parts.norms(sq_norms if self.ranks is None else full_norms(params, sq_norms, self.ranks))
        factors_BG = safe_factors(rule, norms_BG, parts.bounds, mask_B)
        sums = per_sample.weighted_sum(parts.spread(factors_BG))
        if not params.keys() == sq_norms.keys() == sums.keys():
            raise InvalidArgument(
                f"Expected an engine with a norm and a sum of each parameter, got norms of [{shorten([*sq_norms])}] "
                f"and sums of [{shorten([*sums])}]: what is in no norm is not clipped. Nothing was spent."
            )
        return MicrobatchSums(sums, per_sample.losses_B, norms_BG, sq_norms, getattr(per_sample, "aux", None))


def check_mask(mask_B: Tensor | None, num_samples: int, device: torch.device) -> Tensor | None:
    """The mask of real samples on a device; None, where all are real, is None."""
    if mask_B is None:
        return None
    if not isinstance(mask_B, Tensor) or mask_B.shape != (num_samples,) or mask_B.dtype != torch.bool:
        got = f"{mask_B.dtype} of {mask_B.ndim} axes" if isinstance(mask_B, Tensor) else type(mask_B).__name__
        raise InvalidArgument(
            f"Expected mask_B to be a bool tensor (B,), with as many numbers as the batch has rows, got {got}. "
            "True marks real samples."
        )
    return mask_B.to(device)


def make_clipped_grad(
    loss_fn: LossFn,
    clip: ClipRule,
    *,
    engine: Engine | None = None,
    microbatch_size: int | Literal["auto"] | None = None,
    adjacency: Adjacency = "add_remove",
    ranks: Ranks | None = None,
    telemetry: Telemetry | None = None,
) -> ClippedGrad:
    """Prepare `clipped_grad` for many batches; with `ranks`, the engine sees the local parts of DTensors."""
    refuse(
        (not callable(loss_fn), f"Expected loss_fn to be a function (params, batch) -> losses, got {loss_fn!r}."),
        (not callable(getattr(clip, "factors", None)),
         f"Expected clip to be a clip rule such as clipping.Flat(clip_norm=...), got {clip!r}."),
        (engine is not None and not callable(engine),
         f"Expected engine to be an engine such as dpfunc.engines.vmap(), got engine={engine!r}."),
    )  # fmt: skip
    if not type(loss_fn).__weakrefoffset__:  # an object with slots: what is known of a loss ends with it
        loss_fn = partial(loss_fn)
    size = (
        microbatch_size if microbatch_size in (None, "auto") else integer("microbatch_size", microbatch_size, minimum=1)
    )
    one_of("adjacency", adjacency, ADJACENCIES)
    return ClippedGrad(loss_fn, clip, vmap() if engine is None else engine, size, adjacency, ranks, telemetry)


def clipped_grad(
    loss_fn: LossFn,
    params: Params,
    batch: Batch,
    clip: ClipRule,
    *,
    engine: Engine | None = None,
    microbatch_size: int | Literal["auto"] | None = None,
    adjacency: Adjacency = "add_remove",
    mask_B: Tensor | None = None,
    key: Key | None = None,
) -> tuple[ClippedSum, Unreleased]:
    """The sum of clipped per-sample gradients: `sum_i factor_i * grad_i`, not divided by anything. UNRELEASED.

    Args:
        loss_fn: `(params, batch) -> (B,)`, one loss a row.
        params: trainable parameters, name -> floating tensor.
        batch: pytree of tensors with the samples on axis 0; may have no rows.
        clip: the rule, e.g. `clipping.Flat(clip_norm=1.0)`.
        engine: how per-sample gradients are found; `engines.vmap()` by default.
        microbatch_size: samples at once; speed and memory only. The last microbatch may be smaller. `"auto"` takes as
            many as have 256 MiB of activations (a quarter of the memory on an accelerator).
        adjacency: whether neighbours differ by a record added, removed or zeroed (sensitivity C) or replaced (2C).
        mask_B: true for real samples, false for padding, which contributes exact zero.
        key: drives dropout, so that the call can be repeated. None uses torch's global generator.

    Returns:
        `(ClippedSum, Unreleased)`: float32 sums (float64 for float64 parameters) with their sensitivity, and the
        losses and norms of the real samples. Neither is private: give the first to `noise.add_gaussian`.

    Guarantees:
        one record moves the sum by at most the sensitivity, rounding included up to 1024 aligned gradients (see
        docs/troubleshooting.md; tests/test_clipped.py::test_sensitivity, test_sensitivity_of_aligned_records); a sample
        whose gradient is not finite, or too long for a square in float32 (1.8e19), contributes exact zero
        (test_rows_that_are_not_finite); no dependence on order or microbatch_size beyond rounding
        (test_microbatch_invariance, test_permutation); an empty batch gives zeros (test_empty_batch).

    Raises:
        InvalidArgument: bad params, batch, mask or loss.

    >>> from dpfunc.clipping import Flat
    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> batch = torch.tensor([[3.0, 4.0], [0.0, 0.5]])
    >>> clipped, unreleased = clipped_grad(loss_fn, {"w": torch.zeros(2)}, batch, Flat(clip_norm=1.0))
    >>> clipped
    ClippedSum(UNRELEASED, 1 parameters, sensitivity=1)
    """
    prepared = make_clipped_grad(loss_fn, clip, engine=engine, microbatch_size=microbatch_size, adjacency=adjacency)
    return prepared(params, batch, mask_B=mask_B, key=key)
