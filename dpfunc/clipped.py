"""Engine + clip rule -> ClippedSum, for every engine, rule, grouping and microbatch size.

The algorithm is `ClippedGrad._clip_and_sum`: norms, factors, the sum by factors. The rest is microbatches and audits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dpfunc._utils.dtensor import is_dtensor, local
from dpfunc._utils.memory import out_of_memory
from dpfunc._utils.validation import integer, one_of
from dpfunc.batches import batch_size, pad_rows, rows, signature
from dpfunc.clipping.bounds import group_bounds, group_sensitivities, safe_factors
from dpfunc.clipping.groups import Partition, partition
from dpfunc.distributed.processes import FullNorms
from dpfunc.engines.draws import first_row
from dpfunc.engines.explain import automatic_size
from dpfunc.engines.guards.audit import Audits, audit, credited_by
from dpfunc.engines.guards.kept_state import refuse_counting
from dpfunc.engines.guards.lockstep import in_lockstep
from dpfunc.engines.guards.loss import uncompiled, unfollowed_code_is_an_error
from dpfunc.engines.guards.parameters import check_params
from dpfunc.engines.loop import state_before
from dpfunc.engines.numerics import ReadTogether, accumulation_dtype, exact
from dpfunc.engines.per_sample import PerSample
from dpfunc.engines.vmap_grad import Grouped, vmap
from dpfunc.errors import InvalidArgument, OutOfMemory
from dpfunc.rng import Key, fold_in, torch_seed, with_generator_state
from dpfunc.types import (
    ADJACENCIES,
    Adjacency,
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


@dataclass(frozen=True)
class ClippedGrad:
    """A prepared computation of clipped sums; see `clipped_grad` for the arguments."""

    loss_fn: LossFn
    clip: ClipRule
    engine: Engine
    microbatch_size: int | Literal["auto"] | None
    adjacency: Adjacency
    full_norms: FullNorms | None = field(default=None, repr=False)
    _audits: Audits = field(default_factory=Audits, repr=False, compare=False)
    _read_together: ReadTogether = field(default_factory=ReadTogether, repr=False, compare=False)
    _sizes: dict[tuple[object, ...], int] = field(default_factory=dict, repr=False, compare=False)

    def __call__(
        self, params: Params, batch: Batch, *, mask_B: Tensor | None = None, key: Key | None = None
    ) -> tuple[ClippedSum, Unreleased]:
        """The clipped sum over the batch, and its losses and norms."""
        check_params(params)
        return self.compute(params, batch, mask_B, key)

    def compute(
        self, params: Params, batch: Batch, mask_B: Tensor | None, key: Key | None
    ) -> tuple[ClippedSum, Unreleased]:
        """The same without the check of params, which a step does."""
        try:
            with _TURN:
                return self._compute(params, batch, mask_B, key)
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
        self, params: Params, batch: Batch, mask_B: Tensor | None, key: Key | None
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
        size, padded = self._size(params, batch, num_samples), _narrow(params)
        compute = partial(self._microbatch, parts, tuple(bounds.values()))
        several = 0 < size < num_samples and not in_lockstep()
        state = state_before(self.loss_fn, params, rows(batch, 0, 1)) if several else ()
        drawn = torch.default_generator.get_state()
        by_position = getattr(self.engine, "by_position", False)
        for number, start in enumerate(range(0, num_samples, max(size, 1))):
            chunk, chunk_mask_B = _chunk(batch, mask_B, start, size, padded)
            own_key = fold_in(key, "microbatch", number) if key else None
            seed = fold_in(key, "microbatch", 0) if key and by_position else own_key
            seeded = torch_seed(seed) if seed else nullcontext()
            with seeded, first_row(start), uncompiled(), unfollowed_code_is_an_error():
                result = compute(params, chunk, chunk_mask_B, own_key)
            # their number follows from the number of rows: what changes nothing in the first ones never does, unless
            # it reads numbers, of which the engine takes care
            if several and (number < 2 or start + size >= num_samples):
                with with_generator_state(drawn, torch.device("cpu")):
                    refuse_counting(self.loss_fn, state)
            total = {name: total[name].add_(value) for name, value in result.sums.items()} if seen else result.sums
            real = min(size, num_samples - start)
            seen.append((result.losses_B[:real], result.norms_BG[:real]))
        if not seen:
            total = {n: torch.zeros_like(local(p), dtype=accumulation_dtype(p.dtype)) for n, p in params.items()}
        clipped = ClippedSum(total, parts.group_of, group_sensitivities(bounds, self.adjacency))
        return clipped, self._unreleased(seen, given_B, len(parts.group_names))

    def _size(self, params: Params, batch: Batch, num_samples: int) -> int:
        """Rows of a microbatch."""
        if self.microbatch_size is None or not num_samples:
            return max(2, num_samples) if num_samples and _narrow(params) else num_samples
        if self.microbatch_size != "auto":
            return self.microbatch_size
        largest = self._largest(params, batch)
        return math.ceil(num_samples / math.ceil(num_samples / largest))

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
        repeatable = check is not None and _repeatable(per_sample) and not in_lockstep()
        with exact(mask_B.device):
            result = self._read_together(compute) if repeatable else compute()
        if check is not None:  # with the precision that the engine has run in
            check(result.sq_norms)
        return result

    def _microbatch(
        self,
        parts: Partition,
        bounds: tuple[float, ...],
        params: Params,
        microbatch: Batch,
        mask_B: Tensor,
        key: Key | None,
    ) -> MicrobatchSums:
        """The clipped sums of a microbatch, some of whose rows are audited."""
        start, seed = time.perf_counter(), torch.default_generator.get_state()
        per_sample = self.engine(self.loss_fn, params, microbatch)
        seconds = time.perf_counter() - start

        def check(sq_norms: Mapping[str, Tensor]) -> None:
            credited = credited_by(per_sample, sq_norms, seed, repeatable=_repeatable(per_sample))
            if credited is not None:
                with self._audits.choose_rows(key, microbatch, seconds) as chosen:
                    audit(self.loss_fn, params, microbatch, credited, chosen, self._audits)

        return self._clip_and_sum(parts, bounds, params, per_sample, mask_B, check)

    def _unreleased(self, seen: list[tuple[Tensor, Tensor]], mask_B: Tensor | None, num_groups: int) -> Unreleased:
        if not seen:
            return Unreleased(torch.zeros(0), torch.zeros(0, num_groups))
        losses_B, norms_BG = (torch.cat(pieces) for pieces in zip(*seen, strict=True))
        return Unreleased(losses_B, norms_BG) if mask_B is None else Unreleased(losses_B[mask_B], norms_BG[mask_B])


def _repeatable(per_sample: PerSampleGrads) -> bool:
    """True if weighted sums can be taken more than once."""
    return isinstance(per_sample, PerSample) or (isinstance(per_sample, Grouped) and per_sample.repeatable)


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
    full_norms: FullNorms | None = None,
) -> ClippedGrad:
    """Prepare `clipped_grad` for many batches; the arguments are the same.

    With `full_norms`, parameters may be DTensors of which the engine sees the local parts.

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
    return ClippedGrad(loss_fn, clip, vmap() if engine is None else engine, size, adjacency, full_norms)


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
