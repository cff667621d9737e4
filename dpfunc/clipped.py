"""Engine + clip rule -> ClippedSum, for every engine, rule, grouping and microbatch size.

The algorithm is `ClippedGrad._clip_and_sum`: norms, factors, the sum by factors. The rest is microbatches and audits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from dpfunc._utils.dtensor import is_dtensor, local
from dpfunc._utils.memory import out_of_memory
from dpfunc._utils.validation import integer, one_of
from dpfunc.batches import batch_size, pad_rows, rows, signature
from dpfunc.clipping.bounds import group_bounds, group_sensitivities, safe_factors
from dpfunc.clipping.groups import Partition, partition
from dpfunc.compiled import ClipMicrobatch, Compilation, Compile, Compiler, RunFacts, check_setting, rows_at_once
from dpfunc.distributed.processes import FullNorms
from dpfunc.engines.guards.audit import Audits, audit, credited_by
from dpfunc.engines.guards.lockstep import in_lockstep
from dpfunc.engines.guards.loss import unfollowed_code_is_an_error
from dpfunc.engines.guards.parameters import check_params
from dpfunc.engines.guards.python_state import python_state, refuse_counting
from dpfunc.engines.marks import ReadTogether
from dpfunc.engines.microbatch import automatic_size
from dpfunc.engines.numerics import accumulation_dtype, exact
from dpfunc.engines.per_sample import PerSample
from dpfunc.engines.vmap import vmap
from dpfunc.errors import InvalidArgument, OutOfMemory
from dpfunc.rng import Key, fold_in, torch_seed
from dpfunc.types import (
    ADJACENCIES,
    Adjacency,
    Batch,
    ClippedSum,
    ClipRule,
    Engine,
    GroupFactors,
    LossFn,
    MicrobatchSums,
    Params,
    PerSampleGrads,
    Unreleased,
)


@dataclass(frozen=True)
class ClippedGrad:
    """A prepared computation of clipped sums; see `clipped_grad` for the arguments."""

    loss_fn: LossFn
    clip: ClipRule
    engine: Engine
    microbatch_size: int | Literal["auto"] | None
    adjacency: Adjacency
    compile: Compile
    full_norms: FullNorms | None = field(default=None, repr=False)
    _audits: Audits = field(default_factory=Audits, repr=False, compare=False)
    _read_together: ReadTogether = field(default_factory=ReadTogether, repr=False, compare=False)
    _sizes: dict[tuple[object, ...], int] = field(default_factory=dict, repr=False, compare=False)
    _unchanging: set[tuple[object, ...]] = field(default_factory=set, repr=False, compare=False)

    def __call__(
        self, params: Params, batch: Batch, *, mask_B: Tensor | None = None, key: Key | None = None
    ) -> tuple[ClippedSum, Unreleased]:
        """The clipped sum over the batch, and its losses and norms."""
        check_params(params)
        return self.compute(params, batch, mask_B, key)

    def compute(
        self, params: Params, batch: Batch, mask_B: Tensor | None, key: Key | None, run: RunFacts | None = None
    ) -> tuple[ClippedSum, Unreleased]:
        """The same in a step of a run (`run`: its public facts), without the check of params, which the step does."""
        try:
            return self._compute(params, batch, mask_B, key, run)
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
        self, params: Params, batch: Batch, mask_B: Tensor | None, key: Key | None, run: RunFacts | None
    ) -> tuple[ClippedSum, Unreleased]:
        if self.full_norms is None and any(is_dtensor(param) for param in params.values()):
            raise InvalidArgument(
                "Expected whole parameters, got DTensors: the norm of a part is not the norm of a gradient. Use "
                "make_dp_step(..., ranks=dpfunc.distributed.sharded(mesh))."
            )
        num_samples = batch_size(batch)
        given_B = mask_B  # None: all rows are real, and the losses need no selection
        mask_B = check_mask(mask_B, num_samples, next(iter(params.values())).device)
        parts = partition(self.clip.groups, tuple(params))
        bounds = group_bounds(self.clip.clip_norm, parts.group_names)
        seen: list[tuple[Tensor, Tensor]] = []
        total: dict[str, Tensor] = {}
        size, padded, compute = self._microbatches(params, batch, num_samples, parts, bounds, run)
        several = 0 < size < num_samples and not in_lockstep()
        state = python_state(self.loss_fn) if several else ()
        for number, start in enumerate(range(0, num_samples, max(size, 1))):
            chunk, chunk_mask_B = _chunk(batch, mask_B, start, size, padded)
            own_key = fold_in(key, "microbatch", number) if key else None
            once = partial(_seeded, compute, params, chunk, chunk_mask_B, own_key)
            result = once()
            if several and (start + size >= num_samples or _shapes(chunk) not in self._unchanging):
                if python_state(self.loss_fn) != state:  # what it builds for a shape is there for all rows
                    state, result = python_state(self.loss_fn), once()
                refuse_counting(self.loss_fn, state)
                self._unchanging.add(_shapes(chunk))
            total = {name: total[name].add_(value) for name, value in result.sums.items()} if seen else result.sums
            real = min(size, num_samples - start)
            seen.append((result.losses_B[:real], result.norms_BG[:real]))
        if not seen:
            total = {n: torch.zeros_like(local(p), dtype=accumulation_dtype(p.dtype)) for n, p in params.items()}
        clipped = ClippedSum(total, parts.group_of, group_sensitivities(bounds, self.adjacency))
        return clipped, self._unreleased(seen, given_B, len(parts.group_names))

    @cached_property
    def _compiler(self) -> Compiler:
        return Compiler(self.loss_fn, self.engine, self.compile, self._audits)

    @property
    def compilation(self) -> Compilation:
        """Record of the last step: compiled or eager, and why."""
        return self._compiler.last

    def _microbatches(
        self,
        params: Params,
        batch: Batch,
        num_samples: int,
        parts: Partition,
        bounds: Mapping[str, float],
        run: RunFacts | None,
    ) -> tuple[int, bool, ClipMicrobatch]:
        """Rows of a microbatch; true if smaller ones are padded to it; the function that computes its clipped sums."""
        clip_and_sum = partial(self._clip_and_sum, parts, tuple(bounds.values()))
        eager = partial(self._eager_microbatch, parts, tuple(bounds.values()))
        if not self.compile or not num_samples:
            return self._size(params, batch, num_samples), _narrow(params), eager
        size = self._compiled_size(params, batch, num_samples, run)
        if self.compile == "auto" and self._compiler.stays_eager(params, batch, size, run):
            return self._size(params, batch, num_samples), _narrow(params), eager
        bound = math.hypot(*bounds.values())
        return size, True, self._compiler.clip_microbatch(params, batch, size, clip_and_sum, bound, eager)

    def _size(self, params: Params, batch: Batch, num_samples: int) -> int:
        """Rows of an eager microbatch."""
        if self.microbatch_size is None or not num_samples:
            return max(2, num_samples) if num_samples and _narrow(params) else num_samples
        if self.microbatch_size != "auto":
            return self.microbatch_size
        largest = self._largest(params, batch)
        return math.ceil(num_samples / math.ceil(num_samples / largest))

    def _compiled_size(self, params: Params, batch: Batch, num_samples: int, run: RunFacts | None) -> int:
        """Rows of a compiled microbatch, which do not depend on the number that was drawn."""
        if isinstance(self.microbatch_size, int):
            return self.microbatch_size
        largest = self._largest(params, batch) if self.microbatch_size == "auto" else None
        if self.compile is True and largest is not None:
            return largest
        return rows_at_once(num_samples if run is None else run.expected_rows, largest)

    def _largest(self, params: Params, batch: Batch) -> int:
        """Rows whose activations fit into the memory for them."""
        shapes = signature(batch)
        if shapes not in self._sizes:
            self._sizes[shapes] = automatic_size(self.loss_fn, params, pad_rows(rows(batch, 0, 2), 2))
        return self._sizes[shapes]

    def _clip_and_sum(
        self,
        parts: Partition,
        bounds: tuple[float, ...],
        params: Params,
        per_sample: PerSampleGrads,
        mask_B: Tensor,
        check: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> MicrobatchSums:
        """Norms, factors and the sum; `check` sees the norms before anything is returned."""

        def compute() -> MicrobatchSums:
            sq_norms = per_sample.sq_norms()
            norms_BG = parts.norms(self.full_norms(params, sq_norms) if self.full_norms else sq_norms)
            factors_BG = safe_factors(self.clip, norms_BG, norms_BG.new_tensor(bounds), mask_B)
            sums = per_sample.weighted_sum(parts.spread(factors_BG))
            return MicrobatchSums(sums, per_sample.losses_B, norms_BG, sq_norms)

        # `_read_together` may call `compute` twice, and other engines can take their sums once only; processes in
        # lockstep must read the same marks.
        repeatable = check is not None and isinstance(per_sample, PerSample) and not in_lockstep()
        with exact(mask_B.device):
            result = self._read_together(compute) if repeatable else compute()
            if check is not None:
                check(result.sq_norms)
        return result

    def _eager_microbatch(
        self,
        parts: Partition,
        bounds: tuple[float, ...],
        params: Params,
        microbatch: Batch,
        mask_B: Tensor,
        key: Key | None,
    ) -> MicrobatchSums:
        """The clipped sums of a microbatch, some of whose rows are audited."""
        start = time.perf_counter()
        engine = self._engine_of(params, parts, bounds, mask_B)
        unknown = _shapes(microbatch) not in self._unchanging and not in_lockstep()
        state = python_state(self.loss_fn) if unknown else ()
        per_sample = engine(self.loss_fn, params, microbatch)
        seconds = time.perf_counter() - start
        changes = unknown and python_state(self.loss_fn) != state
        if not changes:
            self._unchanging.add(_shapes(microbatch))

        def check(sq_norms: Mapping[str, Tensor]) -> None:
            credited = credited_by(per_sample, sq_norms)
            if credited is not None:
                credited = replace(credited, evidence=credited.evidence._replace(changes=changes))
            self._audits.note(credited)
            if credited is not None:
                with self._audits.choose_rows(key, microbatch, credited.evidence, seconds) as chosen:
                    audit(self.loss_fn, params, microbatch, credited, chosen)

        return self._clip_and_sum(parts, bounds, params, per_sample, mask_B, check)

    def _engine_of(self, params: Params, parts: Partition, bounds: tuple[float, ...], mask_B: Tensor) -> Engine:
        """The engine of a microbatch: the given one, or its `groupwise`, which sums clip groups in the backward pass.

        The second where there are several groups and the factor of one depends on its own norm alone (`by_group`), and
        where this norm is known: not where processes hold parts of the parameters.
        """
        groupwise: Callable[[GroupFactors], Engine] | None = getattr(self.engine, "groupwise", None)
        alone = getattr(self.clip, "by_group", False) is True and len(parts.group_names) > 1
        if groupwise is None or not alone or in_lockstep() or any(is_dtensor(param) for param in params.values()):
            return self.engine
        bound_of = dict(zip(parts.group_names, bounds, strict=True))

        def factors(group: str, sq_norms: Mapping[str, Tensor]) -> Tensor:
            norms_B1 = Partition(dict.fromkeys(sq_norms, group), (group,)).norms(sq_norms)
            return safe_factors(self.clip, norms_B1, norms_B1.new_tensor([bound_of[group]]), mask_B)[:, 0]

        return groupwise(GroupFactors(len(mask_B), parts.group_of, factors))

    def _unreleased(self, seen: list[tuple[Tensor, Tensor]], mask_B: Tensor | None, num_groups: int) -> Unreleased:
        if not seen:
            return Unreleased(torch.zeros(0), torch.zeros(0, num_groups))
        losses_B, norms_BG = (torch.cat(pieces) for pieces in zip(*seen, strict=True))
        return Unreleased(losses_B, norms_BG) if mask_B is None else Unreleased(losses_B[mask_B], norms_BG[mask_B])


def _shapes(batch: Batch) -> tuple[object, ...]:
    return batch_size(batch), *signature(batch)


def _seeded(compute: ClipMicrobatch, params: Params, chunk: Batch, mask_B: Tensor, key: Key | None) -> MicrobatchSums:
    with torch_seed(key) if key else nullcontext(), unfollowed_code_is_an_error():
        return compute(params, chunk, mask_B, key)


def _chunk(batch: Batch, mask_B: Tensor, start: int, size: int, padded: bool) -> tuple[Batch, Tensor]:
    """A microbatch and its mask; if `padded`, of `size` rows also at the end."""
    chunk, chunk_mask_B = rows(batch, start, start + size), mask_B[start : start + size]
    missing = size - chunk_mask_B.shape[0]
    if missing and padded:
        return pad_rows(chunk, size), torch.cat([chunk_mask_B, chunk_mask_B.new_zeros(missing)])
    return chunk, chunk_mask_B


def _narrow(params: Params) -> bool:
    """True if there are parameters of 16 bits.

    Their kernels round differently for other shapes, by more than the bound has room for: the rounding of a row would
    depend on the number of the other rows.
    """
    return any(param.dtype in (torch.bfloat16, torch.float16) for param in params.values())


def check_mask(mask_B: Tensor | None, num_samples: int, device: torch.device) -> Tensor:
    """The mask of real samples, all true when there is none."""
    if mask_B is None:
        return torch.ones(num_samples, dtype=torch.bool, device=device)
    if not isinstance(mask_B, Tensor) or mask_B.shape != (num_samples,) or mask_B.dtype != torch.bool:
        got = f"{mask_B.dtype} {tuple(mask_B.shape)}" if isinstance(mask_B, Tensor) else type(mask_B).__name__
        raise InvalidArgument(
            f"Expected mask to be a bool tensor of shape ({num_samples},), got {got}. True marks real samples."
        )
    return mask_B.to(device)


def make_clipped_grad(
    loss_fn: LossFn,
    clip: ClipRule,
    *,
    engine: Engine | None = None,
    microbatch_size: int | Literal["auto"] | None = None,
    adjacency: Adjacency = "add_remove",
    compile: Compile = False,
    full_norms: FullNorms | None = None,
) -> ClippedGrad:
    """Prepare `clipped_grad` for many batches; the arguments are the same.

    With `full_norms`, parameters may be DTensors of which the engine sees the local parts. `compile` is that of
    `make_dp_step`; without a run, "auto" compiles whatever a step costs, from the first step on.

    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> from dpfunc.clipping import Flat
    >>> make_clipped_grad(loss_fn, Flat(clip_norm=1.0)).microbatch_size is None
    True
    """
    if not callable(loss_fn):
        raise InvalidArgument(f"Expected loss_fn to be a function (params, batch) -> losses, got {loss_fn!r}.")
    if not callable(getattr(clip, "factors", None)):
        raise InvalidArgument(f"Expected clip to be a clip rule such as clipping.Flat(clip_norm=...), got {clip!r}.")
    if engine is not None and not callable(engine):
        raise InvalidArgument(f"Expected engine to be an engine such as dpfunc.engines.vmap(), got engine={engine!r}.")
    size = microbatch_size
    if size is not None and size != "auto":
        size = integer("microbatch_size", size, minimum=1)
    one_of("adjacency", adjacency, ADJACENCIES)
    check_setting(compile, size)
    return ClippedGrad(loss_fn, clip, vmap() if engine is None else engine, size, adjacency, compile, full_norms)


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
        docs/gotchas.md; tests/test_guarantees.py::test_sensitivity, test_sensitivity_of_aligned_records); a sample
        whose gradient is not finite contributes exact zero (test_rows_that_are_not_finite); no dependence on order or
        microbatch_size beyond rounding (test_microbatch_invariance, test_permutation); an empty batch gives zeros
        (test_empty_batch).

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
