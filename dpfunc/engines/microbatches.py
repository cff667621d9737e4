"""Microbatches of a batch: how many rows at once, their seeds, their gradients by an engine, and audits of some rows.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

Clip rules and engines do not know each other.
"""

import math
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from dpfunc._utils.processes import in_lockstep
from dpfunc.batches import Memo, batch_size, pad_rows, rows, tree_map
from dpfunc.engines._guards.kept_state import python_state, refuse_counting
from dpfunc.engines._guards.loss import (
    backward_inside,
    joined_aux,
    refuse_modes,
    uncompiled,
    unfollowed_code_is_an_error,
)
from dpfunc.engines._numerics import exact
from dpfunc.engines._per_sample import PerSample
from dpfunc.engines.audit import FIRST_ROWS, Credited, audit
from dpfunc.engines.loop import Loop, RowAlone, made_up, made_up_row, quiet_trial
from dpfunc.rng import Key, fold_in, insecure_key, secure_key, torch_seed, with_generator_state
from dpfunc.types import Batch, Engine, LossFn, MicrobatchSums, Params, PerSampleGrads

ROWS_IN = 100  # audited in the first step: two rows, or one in so many
STEPS_IN = 100  # later: one row in so many steps, about 1 % of the time, since a row takes no longer than a step
# Activations of one microbatch on a CPU. Twice as much or half as much changes the time of a step by a few per cent.
_CPU_BYTES = 2**28
# The same on an accelerator, as a share of its memory: the rest is for the model, gradients and what kernels need.
_DEVICE_SHARE = 4

ClipAndSum = Callable[[PerSampleGrads, Tensor | None], MicrobatchSums]
"""Clipped sums of a microbatch, of its gradients and the mask of its real rows (None: all are). Without effects: it may
run twice."""


@runtime_checkable
class RowEngine(Protocol):
    """An engine of dpfunc. One of a user is a function, whose rows draw by their microbatch.

    Its gradients have two members more: `needs_audit`, false if each row was computed alone, or cannot be; and
    `repeatable`, true if weighted sums can be taken more than once without another pass. An engine whose `fixed_rows`
    is true gets microbatches of one size, with rows of padding; of few sizes, where none is given.
    """

    def prepare(self, loss_fn: LossFn, params: Params, batch: Batch) -> object:
        """Learn public facts about the loss that a pass needs; computed once for each shape of rows, and cached."""

    def rows(self, loss_fn: LossFn, params: Params, batch: Batch, positions: Sequence[int]) -> PerSampleGrads:
        """Gradients of rows at these positions of a batch, of which random numbers of a row are a function."""

    def decision(self, loss_fn: LossFn) -> Any:
        """The way in which the rows of the last microbatch were computed, and its reason; None before the first."""


@dataclass
class Audits:
    """Schedule of the audits of a loss function, by the key: two runs of one key audit alike. No result depends on it.

    Args:
        steps: that it has seen. counting: the loss changes what it keeps at each call. by_row: functions of torch that
            have run row by row.
    """

    steps: int = 0
    counting: bool = False
    by_row: frozenset[str] = frozenset()

    def due(self, count: int, chance: float, by_row: Sequence[str] = ()) -> int:
        """Number of rows of this step to compute alone; one at least where another function runs row by row."""
        if not count:
            return 0
        step, self.steps = self.steps, self.steps + 1
        new, self.by_row = not self.by_row.issuperset(by_row), self.by_row.union(by_row)
        if not step:
            return min(count, max(FIRST_ROWS, count // ROWS_IN))
        if in_lockstep():  # the ranks have keys of their own
            return int(self.counting or not step % STEPS_IN)
        return int(self.counting or new or chance * STEPS_IN < 1)

    def note(self, changed: bool) -> None:
        """Record that a call has changed the state of the loss."""
        self.counting |= changed

    def choose_rows(self, key: Key | None, batch: Batch, by_row: Sequence[str] = ()) -> list[int]:
        """Rows of this batch to compute alone; see `due`."""
        chance = random.Random((secure_key() if key is None else fold_in(key, "audit")).secret)
        count = batch_size(batch)
        return chance.sample(range(count), self.due(count, chance.random(), by_row))


@dataclass
class LateMark:
    """Reads the mark of a pass after the sums: they are computed as if it were not set, and again if it is.

    Where it is set in each step, that would take longer: after such a step it is read before the sums, until it is not
    set any more. The result is the same, bit for bit.
    """

    early: bool = False

    def __call__(self, found: PerSample, mask_B: Tensor | None, clip_and_sum: ClipAndSum) -> MicrobatchSums:
        """The sums of a microbatch."""
        early, quick = self.early, found if self.early else found.unmarked()
        sums = clip_and_sum(quick, mask_B)
        self.early = quick.is_marked
        return clip_and_sum(found, mask_B) if self.early and not early else sums


@dataclass(frozen=True)
class Microbatches:
    """A loss with an engine, and the number of rows at once, for many batches. What it keeps changes no result."""

    loss_fn: LossFn
    engine: Engine
    size: int | Literal["auto"] | None
    audits: Audits = field(default_factory=Audits, repr=False, compare=False)
    late_mark: LateMark = field(default_factory=LateMark, repr=False, compare=False)
    _sizes: Memo[int] = field(default_factory=Memo, repr=False, compare=False)
    _loop: Loop = field(default_factory=Loop, repr=False, compare=False)

    @cached_property
    def _row_engine(self) -> RowEngine | None:
        return self.engine if isinstance(self.engine, RowEngine) else None

    def sums(
        self, params: Params, batch: Batch, mask_B: Tensor | None, key: Key | None, clip_and_sum: ClipAndSum,
        places: Sequence[int] | None,
    ) -> MicrobatchSums:  # fmt: skip
        """The clipped sums of all microbatches together, and what else they give.

        Rows draw the random numbers of `places`, and rows of padding those of others; None: of their own positions.
        """
        refuse_modes()
        num_samples = batch_size(batch)
        self.prepare(params, batch)
        size = self._size(params, batch, num_samples)
        padded = _narrow(params) or getattr(self.engine, "fixed_rows", False)
        if padded and mask_B is None:
            mask_B = torch.ones(num_samples, dtype=torch.bool, device=next(iter(params.values())).device)
        several = size < num_samples and not in_lockstep()
        state = python_state(self.loss_fn) if several else ()
        most = num_samples + size  # with rows of padding
        positions = range(most) if places is None else [*places, *range(2**40, 2**40 + most)]
        generator = torch.default_generator.get_state()
        sums: dict[str, Tensor] = {}
        found: list[MicrobatchSums] = []
        for number, start in enumerate(range(0, num_samples, size)):
            chunk, chunk_mask_B = _chunk(batch, mask_B, start, size, padded)
            own_key = fold_in(key, "microbatch", number) if key else None
            seed = fold_in(key, "microbatch", 0) if key and self._row_engine else own_key
            with torch_seed(seed) if seed else nullcontext(), uncompiled(), unfollowed_code_is_an_error():
                given = positions[start : start + batch_size(chunk)]
                own = self._microbatch(params, chunk, chunk_mask_B, given, own_key, clip_and_sum)
            # their number follows from the number of rows: what changes nothing in the first ones never does, unless
            # it reads numbers, of which the engine takes care
            if several and (number < 2 or start + size >= num_samples):
                with with_generator_state(generator):
                    refuse_counting(self.loss_fn, state)
            for name, value in own.sums.items():
                sums[name] = sums[name].add_(value) if name in sums else value
            found.append(own._replace(sums={}))
        if len(found) == 1:
            return own
        _, losses, norms, _, aux = zip(*found, strict=True)
        return MicrobatchSums(sums, torch.cat(losses), torch.cat(norms), {}, joined_aux(aux))

    def prepare(self, params: Params, batch: Batch) -> object:
        """Let the loss build what it keeps for rows of this shape; what the engine has learnt of it, if it says so."""
        with uncompiled():
            return (self._row_engine or self._loop).prepare(self.loss_fn, params, batch)

    def _size(self, params: Params, batch: Batch, num_samples: int) -> int:
        if isinstance(self.size, int):
            return self.size
        size = max(2, num_samples) if _narrow(params) else num_samples
        if self.size == "auto":
            largest = self._sizes(partial(_largest, self.loss_fn, params, batch), self.loss_fn, params, batch)
            size = math.ceil(num_samples / math.ceil(num_samples / largest))
        step = 1 << max(2, size.bit_length() - 3) if getattr(self.engine, "fixed_rows", False) else 1  # few sizes
        return math.ceil(size / step) * step

    def _microbatch(
        self,
        params: Params,
        microbatch: Batch,
        mask_B: Tensor | None,
        positions: Sequence[int],
        key: Key | None,
        clip_and_sum: ClipAndSum,
    ) -> MicrobatchSums:
        """The clipped sums of a microbatch, some of whose rows are audited."""
        generator = torch.default_generator.get_state()
        positions, found, by_row = self._gradients(params, microbatch, positions)
        with exact(next(iter(params.values())).device):  # processes in lockstep must take the same way
            if isinstance(found, PerSample) and not in_lockstep():
                sums = self.late_mark(found, mask_B, clip_and_sum)
            else:
                sums = clip_and_sum(found, mask_B)
        if not getattr(found, "needs_audit", False):
            return sums
        chosen = self.audits.choose_rows(key, microbatch, by_row)
        if chosen:
            credited = Credited(self.loss_fn, params, microbatch, found, sums.sq_norms, positions, generator)
            audit(credited, chosen, self.audits)
        return sums

    def _gradients(
        self, params: Params, microbatch: Batch, positions: Sequence[int]
    ) -> tuple[Sequence[int], PerSampleGrads, Sequence[str]]:
        """Positions of the rows, their gradients, and functions that ran row by row."""
        engine, loss_fn = self._row_engine, self.loss_fn
        if engine is None:
            return range(len(positions)), self.engine(loss_fn, params, microbatch), ()
        found = engine.rows(loss_fn, params, microbatch, positions)
        return positions, found, getattr(engine.decision(loss_fn), "by_row", ())


def _chunk(
    batch: Batch, mask_B: Tensor | None, start: int, size: int, padded: bool
) -> tuple[Batch, Tensor | None]:  # fmt: skip
    """A microbatch and its mask; if `padded`, of `size` rows also at the end."""
    chunk = rows(batch, start, start + size)
    own_B = None if mask_B is None else mask_B[start : start + size]
    missing = size - batch_size(chunk)
    if missing and own_B is not None and padded:
        return pad_rows(chunk, size), torch.cat([own_B, own_B.new_zeros(missing)])
    return chunk, own_B


def _narrow(params: Params) -> bool:
    """True for parameters of 16 bits, and under autocast: kernels round differently for other shapes, by more than the
    bound has room for, and the rounding of a row would depend on the number of the other rows."""
    cast = any(torch.is_autocast_enabled(param.device.type) for param in params.values())
    return cast or not {torch.bfloat16, torch.float16}.isdisjoint([param.dtype for param in params.values()])


def _largest(loss_fn: LossFn, params: Params, batch: Batch) -> int:
    """The largest microbatch whose activations stay within a fixed number of bytes, at least 1.

    Made-up rows and the device decide, never numbers of rows, nor the time: a step that is repeated takes the same
    microbatches. If no made-up row can be computed, it is 1.
    """
    device, num_bytes = next(iter(params.values())).device, 0
    for value in (1, 0):
        with quiet_trial():
            num_bytes = max(num_bytes, saved_bytes(loss_fn, made_up(params), made_up_row(batch, value)))
    of_device = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory // _DEVICE_SHARE
    return max(1, (of_device or _CPU_BYTES) // num_bytes) if num_bytes else 1


def saved_bytes(loss_fn: LossFn, params: Params, row: Batch) -> int:
    """Bytes that autograd saves of a row.

    The row runs forward twice: what both calls save are parameters and constants, which are not counted.
    """
    saved: dict[int, torch.UntypedStorage] = {}  # alive until they are counted: a freed one could count twice
    shared = set[int]()

    def count(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    for _ in range(2):
        shared, own = set(saved), tree_map(torch.clone, row)
        mode = RowAlone(own, 0)
        try:
            with torch_seed(insecure_key(0)), torch.enable_grad(), backward_inside(), hooks, mode:
                loss_fn(leaves, own)
        finally:
            mode.memory.end()
    return sum(storage.nbytes() for key, storage in saved.items() if key not in shared)
