"""Engine + clip rule -> ClippedSum, for every engine, rule, grouping and microbatch size.

The algorithm is `ClippedGrad._clip_and_sum`. The rest is microbatches and audits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dpfunc._utils.memory import out_of_memory
from dpfunc._utils.processes import in_lockstep, is_dtensor
from dpfunc._utils.validation import integer, one_of
from dpfunc.batches import Memo, batch_size, check_params, pad_rows, refuse_narrow_range, rows, tree_map
from dpfunc.clipping.rules import Partition, group_bounds, group_sensitivities, partition, safe_factors
from dpfunc.clipping.telemetry import Telemetry
from dpfunc.distributed._reduce import full_norms, zeros
from dpfunc.distributed.ranks import Ranks
from dpfunc.engines._guards.kept_state import python_state, refuse_counting
from dpfunc.engines._guards.loss import joined_aux, refuse_modes, uncompiled, unfollowed_code_is_an_error
from dpfunc.engines._levels import first_row
from dpfunc.engines._numerics import ReadTogether, exact
from dpfunc.engines._per_sample import PerSample
from dpfunc.engines.audit import Audits, Credited, audit
from dpfunc.engines.microbatches import prepared_size, size_by_row
from dpfunc.engines.prepare import warmed
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
    ranks: Ranks | None = field(default=None, repr=False)
    telemetry: Telemetry | None = None
    _audits: Audits = field(default_factory=Audits, repr=False, compare=False)
    _read_together: ReadTogether = field(default_factory=ReadTogether, repr=False, compare=False)
    _sizes: Memo[int | None] = field(default_factory=Memo, repr=False, compare=False)
    _warmed: Memo[None] = field(default_factory=Memo, repr=False, compare=False)

    def __call__(
        self, params: Params, batch: Batch, *,
        mask_B: Tensor | None = None, key: Key | None = None, checked: bool = False,
    ) -> tuple[ClippedSum, Unreleased]:  # fmt: skip
        """The clipped sum over the batch, and its losses and norms; with `checked`, params were looked at before."""
        if not checked:
            check_params(params)
            refuse_narrow_range(params)
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
        if self.ranks is None and any(map(is_dtensor, params.values())):
            raise InvalidArgument(
                "Expected whole parameters, got DTensors: the norm of a part is not the norm of a gradient. Use "
                "make_dp_step(..., ranks=dpfunc.distributed.sharded(mesh))."
            )
        refuse_modes()
        num_samples = batch_size(batch)
        real_B = check_mask(mask_B, num_samples, next(iter(params.values())).device)
        parts = partition(self.clip.groups, tuple(params))
        bounds = group_bounds(self.clip.clip_norm, parts.group_names)
        if self.telemetry is not None:
            bounds = self.telemetry.bounds(bounds)
        parts = replace(parts, bounds=tuple(bounds[group] for group in parts.group_names))
        if num_samples:
            found = self._all_microbatches(parts, params, batch, real_B, key)
        else:
            none = torch.zeros(0, len(bounds), device=real_B.device)
            found = MicrobatchSums(zeros(params), none.sum(1), none, {})
        # without the rows of `_chunk`; all rows are real without a mask: no selection, for which a device has to wait
        kept = real_B.nonzero()[:, 0] if mask_B is not None else slice(num_samples)
        aux = None if found.aux is None else tree_map(lambda leaf: leaf[kept], found.aux)
        unreleased = Unreleased(found.losses_B[kept], found.norms_BG[kept], aux)
        clipped = ClippedSum(found.sums, parts.group_of, group_sensitivities(bounds, self.adjacency))
        return clipped if self.telemetry is None else self.telemetry.add(clipped, unreleased, bounds), unreleased

    def _all_microbatches(
        self, parts: Partition, params: Params, batch: Batch, mask_B: Tensor, key: Key | None
    ) -> MicrobatchSums:
        num_samples = len(mask_B)
        self._prepare(params, batch)
        size, padded = self._size(params, batch, num_samples), _narrow(params)
        several = size < num_samples and not in_lockstep()
        state = python_state(self.loss_fn) if several else ()
        generator = torch.default_generator.get_state()
        sums: dict[str, Tensor] = {}
        found: list[MicrobatchSums] = []
        for number, start in enumerate(range(0, num_samples, size)):
            chunk, chunk_mask_B = _chunk(batch, mask_B, start, size, padded)
            with first_row(start), self._seeded(key, number) as own_key:
                own = self._microbatch(parts, params, chunk, chunk_mask_B, own_key)
            # their number follows from the number of rows: what changes nothing in the first ones never does, unless
            # it reads numbers, of which the engine takes care
            if several and (number < 2 or start + size >= num_samples):
                with with_generator_state(generator):
                    refuse_counting(self.loss_fn, state)
            for name, value in own.sums.items():
                sums[name] = sums[name].add_(value) if name in sums else value
            found.append(own._replace(sums={}))
        _, losses, norms, _, aux = zip(*found, strict=True)
        return MicrobatchSums(sums, torch.cat(losses), torch.cat(norms), {}, joined_aux(aux))

    def _prepare(self, params: Params, batch: Batch) -> None:
        """Let the loss build what it keeps for rows of this shape."""
        prepare = getattr(self.engine, "prepare", None)
        with uncompiled():
            if prepare:
                prepare(self.loss_fn, params, batch)
            else:
                self._warmed(partial(warmed, self.loss_fn, params, batch), self.loss_fn, params, batch)

    def _size(self, params: Params, batch: Batch, num_samples: int) -> int:
        if self.microbatch_size is None:
            return max(2, num_samples) if _narrow(params) else num_samples
        if self.microbatch_size != "auto":
            return self.microbatch_size
        prepared = self._sizes(partial(prepared_size, self.loss_fn, params, batch), self.loss_fn, params, batch)
        largest = prepared or size_by_row(self.loss_fn, params, batch)
        return math.ceil(num_samples / math.ceil(num_samples / largest))

    @contextmanager
    def _seeded(self, key: Key | None, number: int) -> Iterator[Key | None]:
        """Inside, torch's generators are those of a microbatch, whose key is returned; code runs as it is written."""
        own_key = fold_in(key, "microbatch", number) if key else None
        by_position = getattr(self.engine, "by_position", False)  # draws of a row depend on its place in the batch
        seed = fold_in(key, "microbatch", 0) if key and by_position else own_key
        with torch_seed(seed) if seed else nullcontext(), uncompiled(), unfollowed_code_is_an_error():
            yield own_key

    def _microbatch(
        self, parts: Partition, params: Params, microbatch: Batch, mask_B: Tensor, key: Key | None
    ) -> MicrobatchSums:
        """The clipped sums of a microbatch, some of whose rows are audited."""
        generator = torch.default_generator.get_state()
        per_sample = self.engine(self.loss_fn, params, microbatch)
        repeatable = isinstance(per_sample, PerSample) or (isinstance(per_sample, Grouped) and per_sample.repeatable)
        clip_and_sum = partial(self._clip_and_sum, parts, params, per_sample, mask_B)
        # `_read_together` may sum twice, and other engines can take their sums once only; processes in lockstep must
        # read the same marks.
        with exact(mask_B.device):
            found = self._read_together(clip_and_sum) if repeatable and not in_lockstep() else clip_and_sum()
        if not getattr(per_sample, "alone", True):  # nor for engines of users
            own = Credited(self.loss_fn, params, microbatch, per_sample, found.sq_norms, generator, repeatable)
            decision = getattr(self.engine, "decision", None)
            by_row = getattr(decision(self.loss_fn), "by_row", ()) if decision else ()
            audit(own, self._audits.choose_rows(key, microbatch, by_row), self._audits)
        return found

    def _clip_and_sum(
        self, parts: Partition, params: Params, per_sample: PerSampleGrads, mask_B: Tensor
    ) -> MicrobatchSums:
        """The algorithm: norms, factors, and the sum by factors."""
        sq_norms = per_sample.sq_norms()
        full = sq_norms if self.ranks is None else full_norms(params, sq_norms, self.ranks)
        norms_BG = parts.norms(full)
        factors_BG = safe_factors(self.clip, norms_BG, norms_BG.new_tensor(parts.bounds), mask_B)
        sums = per_sample.weighted_sum(parts.spread(factors_BG))
        return MicrobatchSums(sums, per_sample.losses_B, norms_BG, sq_norms, getattr(per_sample, "aux", None))


def _chunk(batch: Batch, mask_B: Tensor, start: int, size: int, padded: bool) -> tuple[Batch, Tensor]:
    """A microbatch and its mask; if `padded`, of `size` rows also at the end."""
    chunk, chunk_mask_B = rows(batch, start, start + size), mask_B[start : start + size]
    missing = size - chunk_mask_B.shape[0]
    if missing and padded:
        return pad_rows(chunk, size), torch.cat([chunk_mask_B, chunk_mask_B.new_zeros(missing)])
    return chunk, chunk_mask_B


def _narrow(params: Params) -> bool:
    """True if there are parameters of 16 bits: their kernels round differently for other shapes, by more than the bound
    has room for, and the rounding of a row would depend on the number of the other rows."""
    return not {torch.bfloat16, torch.float16}.isdisjoint([param.dtype for param in params.values()])


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
    ranks: Ranks | None = None,
    telemetry: Telemetry | None = None,
) -> ClippedGrad:
    """Prepare `clipped_grad` for many batches; with `ranks`, the engine sees the local parts of DTensors."""
    if not callable(loss_fn):
        raise InvalidArgument(f"Expected loss_fn to be a function (params, batch) -> losses, got {loss_fn!r}.")
    if not callable(getattr(clip, "factors", None)):
        raise InvalidArgument(f"Expected clip to be a clip rule such as clipping.Flat(clip_norm=...), got {clip!r}.")
    if engine is not None and not callable(engine):
        raise InvalidArgument(f"Expected engine to be an engine such as dpfunc.engines.vmap(), got engine={engine!r}.")
    if not type(loss_fn).__weakrefoffset__:  # an object with slots: what is known of a loss ends with it
        loss_fn = partial(loss_fn)
    size = microbatch_size
    if size is not None and size != "auto":
        size = integer("microbatch_size", size, minimum=1)
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
        docs/gotchas.md; tests/test_clipped.py::test_sensitivity, test_sensitivity_of_aligned_records); a sample
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
