"""The engine `captured`: records the operations of a pass over rows of a shape once, and replays them.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

In a small step the Python between two operations takes longer than they do. A recording has no Python between them.
"""

import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpfunc._utils.memory import refuse_out_of_memory
from dpfunc._utils.processes import in_lockstep
from dpfunc.batches import ByLoss, batch_size, tree_leaves
from dpfunc.engines._guards.kept_state import Reached, quick_state
from dpfunc.engines._guards.loss import refuse_kept
from dpfunc.engines._levels import PassResult, Stop
from dpfunc.engines._numerics import is_exact
from dpfunc.engines._per_sample import PerSample
from dpfunc.engines._recording import CannotRecord, Norms, Recording, factors_of, record, same_numbers
from dpfunc.engines._row_pass import ORDINARY
from dpfunc.engines.prepare import PreparedLoss
from dpfunc.engines.vmap_grad import Decision, VmapGrad
from dpfunc.errors import DPFuncError, UnsupportedModel
from dpfunc.rng import cpu_generators, with_generator_state
from dpfunc.types import Batch, LossFn, Params, PerSampleGrads

_log = logging.getLogger("dpfunc")

COMPARED = 2  # passes with which a recording is compared before it is used; the first is over what was recorded
CHECKED = 100  # of so many later passes one is compared
MOST_SHAPES = 8  # recordings that are begun for one loss


@dataclass(frozen=True)
class _Pass:
    """Arguments of a pass over rows, and the state of torch's generator before it."""

    loss_fn: LossFn
    params: Params
    batch: Batch
    positions: Sequence[int]
    seed: Tensor = field(default_factory=torch.default_generator.get_state)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Parameters and columns of the batch."""
        return [value.detach() for value in (*self.params.values(), *tree_leaves(self.batch))]

    @cached_property
    def layout(self) -> object:
        """Key of passes that have the same operations, if Python does the same in them."""
        settings = in_lockstep(), is_exact(self.tensors[0].device), torch.get_default_dtype()
        shapes = [(type(v), v.shape, v.stride(), v.dtype, v.device) for v in self.tensors]
        return (*self.params, pytree.tree_structure(self.batch), *settings, *shapes)

    def by(self, engine: VmapGrad) -> PerSampleGrads:
        """Compute it by an engine."""
        return engine.rows(self.loss_fn, self.params, self.batch, self.positions)


@dataclass
class _Shape:
    """Decides whether rows of one shape are recorded, compared or replayed. It changes no result.

    Args:
        why_not: why there is no recording. passes: ordinary ones. replayed: uses of the recording, and comparisons.
        ordinary: decision of `auto` about the last ordinary pass.
    """

    why_not: str = ""
    recording: Recording | None = None
    passes: int = 0
    replayed: int = 0
    ordinary: Decision | None = None

    @property
    def note(self) -> str:
        """Tell users whether such rows are replayed, and why not; empty before that is decided."""
        if self.why_not:
            return f"not recorded, since {self.why_not}"
        return f"{self.recording.operations} recorded operations are replayed" if self.recording else ""

    def replays(self) -> Recording | None:
        """The recording, if the next use is a replay; one in `CHECKED` is compared instead."""
        if self.recording is None or self.passes <= COMPARED:
            return None
        self.replayed += 1
        return self.recording if self.replayed % CHECKED else None

    def passed(self, decision: Decision | None) -> None:
        """Take the decision of `auto` about an ordinary pass."""
        self.passes, self.ordinary = self.passes + 1, decision

    def refuse(self, why_not: str, *, differs: bool = True) -> None:
        """Decide that there is no recording, and why.

        Raises:
            UnsupportedModel: there was one, it was replayed, and it `differs` from what the loss computes now.
        """
        self.why_not, self.recording = why_not, None
        _log.warning("engine captured: %s", self.note)
        if self.replayed and differs:
            raise UnsupportedModel(
                "The loss is another one than when its operations were recorded: it depends on something that has "
                "changed and that a recording does not see (memory of NumPy, a file, the time). Use engine='auto', and "
                f"repeat the last {CHECKED} steps if they need the change. They are as private as they were said to "
                f"be; nothing was released and nothing was spent in this one. What was seen: {why_not}."
            )

    def compare(self, make: Callable[[], Recording], given: _Pass, found: PerSample, end: Tensor) -> None:
        """Record, if that is not done, and compare what is recorded with an ordinary pass over these rows.

        Args:
            found: what the ordinary pass has found. end: state in which it has left torch's generator.

        Raises:
            UnsupportedModel: see `refuse`.
        """
        why_not, differs, ordinary = "another pass gave other numbers", True, found.unmarked()
        try:
            self.recording = self.recording or make()
            norms = self.recording.norms(given.tensors, given.positions, given.seed)
            factors, drawn = factors_of(norms.sq_norms), torch.default_generator.get_state()
            recorded = [drawn, norms.losses_B, norms.aux, norms.sq_norms, self.recording.sums(norms, factors)]
            expected = [end, found.losses_B, found.aux, ordinary.sq_norms(), ordinary.weighted_sum(factors)]
            why_not = "" if same_numbers(recorded, expected) else why_not
        except (DPFuncError, Stop, *ORDINARY) as error:
            refuse_out_of_memory(error)
            why_not = (str(error).splitlines() or [type(error).__name__])[0]
            differs = False  # a replay before would have failed, too
        if why_not:
            self.refuse(why_not, differs=differs)
        elif self.passes == COMPARED + 1:
            _log.info("engine captured: %s", self.note)


@dataclass
class _Known:
    """The recordings of one loss, by layout of a pass, and the Python values with which they were made.

    Args:
        begun: layouts that got a place of their own, also before a change. changed: what changed last, in words. rest:
            stands for all layouts after the first `MOST_SHAPES`. last: of the newest pass.
    """

    reached: Reached = field(default_factory=Reached)
    shapes: dict[object, _Shape] = field(default_factory=dict)
    begun: int = 0
    changed: str = ""
    rest: _Shape = field(default_factory=_Shape)
    last: _Shape | None = None

    def shape(self, given: _Pass) -> _Shape:
        """Return the decisions about passes of this layout; drop those of all, if the loss reaches other values now."""
        if self.shapes and (changed := self.reached.changed(given.loss_fn)):
            _log.info("engine captured: what the loss reads in Python has changed (%s), recordings begin anew", changed)
            self.shapes.clear()
            self.changed = f" ({changed})"
        if given.layout not in self.shapes and self.begun < MOST_SHAPES:
            self.begun += 1
            self.shapes[given.layout] = _Shape()
        self.last = self.shapes.get(given.layout, self.rest)
        if self.last is self.rest and not self.rest.why_not:
            self.rest.refuse(
                f"there are more than {MOST_SHAPES} shapes of rows, or what it reads in Python changes from step to "
                f"step{self.changed}: set microbatch_size, fill rows up to few lengths, and put what changes into the "
                "batch"
            )
        return self.last


def _kept(loss_fn: LossFn) -> tuple[object, ...]:
    """Return the state of the loss and of the random generators of Python and NumPy, to compare around a pass."""
    return quick_state(loss_fn), *cpu_generators()[1:]


@dataclass(frozen=True)
class Replayed:
    """Gradients of a recorded pass. Where their mark is set, an ordinary pass takes its place; see `PerSample`."""

    recording: Recording
    found: Norms
    given: _Pass
    engine: VmapGrad
    needs_audit: ClassVar[bool] = True
    repeatable: ClassVar[bool] = True

    @property
    def losses_B(self) -> Tensor:
        return self.found.losses_B

    @property
    def aux(self) -> Any:
        return self.found.aux

    @cached_property
    def _careful(self) -> PerSampleGrads | None:
        if bool(self.found.no_mark):
            return None
        with with_generator_state(self.given.seed):
            return self.given.by(self.engine)

    def sq_norms(self) -> dict[str, Tensor]:
        return self.found.sq_norms if self._careful is None else self._careful.sq_norms()

    def weighted_sum(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        careful = self._careful
        return self.recording.sums(self.found, factors) if careful is None else careful.weighted_sum(factors)


@dataclass(frozen=True)
class _Recorded(VmapGrad):
    """The engine of a pass that is recorded: rows alone would be as many passes."""

    def _by_loop(self, every: Any, places: Any, calls: Any, reason: str) -> NoReturn:
        raise CannotRecord(f"torch cannot record its pass ({reason})")


def _refuse_reads(result: PassResult) -> None:
    """Refuse to record a pass in which Python reads numbers: they, or what follows from them, would be constants."""
    if read := result.reads or result.reads_of_constants:
        raise CannotRecord(f"Python reads numbers of tensors ({read})")


@dataclass(frozen=True)
class CapturedGrad:
    """Engine that `captured` returns."""

    inner: VmapGrad = field(default_factory=VmapGrad, repr=False, compare=False)
    _known: MutableMapping[LossFn, _Known] = field(default_factory=ByLoss, repr=False, compare=False)
    fixed_rows: ClassVar[bool] = True

    def prepare(self, loss_fn: LossFn, params: Params, batch: Batch) -> PreparedLoss:
        """Prepare the loss for rows of this shape, or return what was prepared before."""
        return self.inner.prepare(loss_fn, params, batch)

    def __call__(self, loss_fn: LossFn, params: Params, batch: Batch) -> PerSampleGrads:
        """Gradients of all rows."""
        return self.rows(loss_fn, params, batch, range(batch_size(batch)))

    def decision(self, loss_fn: LossFn) -> Decision | None:
        """Decision of `auto` about rows of the last shape, and whether it was replayed; None before the first."""
        known = self._known.get(loss_fn)
        shape = known.last if known else None
        found = shape.ordinary if shape else None
        return replace(found, reason=f"{found.reason}; {shape.note}") if found and shape and shape.note else found

    def rows(self, loss_fn: LossFn, params: Params, batch: Batch, positions: Sequence[int]) -> PerSampleGrads:
        """Gradients of rows at these positions of a batch: replayed, or those of `auto`."""
        if not positions:
            return self.inner.rows(loss_fn, params, batch, positions)
        refuse_kept(loss_fn)
        given = _Pass(loss_fn, params, batch, positions)
        shape = self._known.setdefault(loss_fn, _Known()).shape(given)
        return self._replayed(given, shape) or self._ordinary(given, shape)

    def _replayed(self, given: _Pass, shape: _Shape) -> Replayed | None:
        """A replay. None where there is none, and where it fails: an ordinary pass says what is wrong with the rows."""
        recording = shape.replays()
        if recording is None:
            return None
        try:
            return Replayed(recording, recording.norms(given.tensors, given.positions, given.seed), given, self.inner)
        except ORDINARY as error:
            refuse_out_of_memory(error)
            torch.default_generator.set_state(given.seed)
            return None

    def _ordinary(self, given: _Pass, shape: _Shape) -> PerSampleGrads:
        """The pass of `auto`; it is recorded, or compared with what was, if it can be and is not the first."""
        kept, found = None if shape.why_not else _kept(given.loss_fn), given.by(self.inner)
        end, decision = torch.default_generator.get_state(), self.inner.decision(given.loss_fn)
        shape.passed(decision)
        if shape.why_not:
            return found
        changes = shape.passes > 1 and kept != _kept(given.loss_fn)
        reasons = {
            "processes go in lockstep": in_lockstep(),
            "it is no CPU, or products are shortened (autocast, set_float32_matmul_precision)":
                not is_exact(given.tensors[0].device),
            "its rows were not computed in one pass": not (isinstance(found, PerSample) and found.needs_audit),
            "functions run row by row": decision is not None and decision.by_row,
            "parameters or rows are of a class of their own": {*map(type, given.tensors)} != {Tensor},
            "it changes what it keeps from call to call, or draws from a generator of Python or NumPy": changes,
        }  # fmt: skip
        why_not = next((reason for reason, holds in reasons.items() if holds), "")
        if why_not:
            shape.refuse(why_not, differs=not changes)
        elif shape.passes > 1 and isinstance(found, PerSample):
            with with_generator_state(given.seed):
                shape.compare(partial(self._record, given, found), given, found, end)
        return found

    def _record(self, given: _Pass, found: PerSample) -> Recording:
        """Record a pass over these rows, of which an ordinary one has found this."""
        structure, count = pytree.tree_structure(given.batch), len(given.params)

        def compute(tensors: Sequence[Tensor], draws: Any) -> object:
            params, rows = dict(zip(given.params, tensors, strict=False)), tensors[count:]
            engine = _Recorded(**vars(replace(self.inner, draws=draws, on_pass=_refuse_reads)))
            return engine.rows(given.loss_fn, params, pytree.tree_unflatten(rows, structure), given.positions)

        return record(compute, given.tensors, found)


def captured() -> CapturedGrad:
    """`auto` whose operations are recorded once for rows of a shape, and replayed without the Python between them.

    For small steps, where Python takes longer than the operations. The second pass over rows of a shape is recorded,
    which takes some seconds; it and the next one are compared with the recording, which has to give the same numbers,
    bit for bit, for losses, norms and sums. One in 100 later passes is compared, too.

    A recording does what the operations did, on the numbers of new parameters and rows. **Python does not run**: hooks
    and messages of the loss happen in the passes that are compared only. Before each pass, what the loss reaches in
    Python (numbers, flags, which tensors) is compared with what it was: if it has changed, recordings begin anew. A
    change that this does not see, in memory of NumPy or a file, is seen where a pass is compared, and ends the run.
    Gradients are per-sample gradients of the recorded loss, clipped as any others: the guarantee holds.

    Not recorded, and computed by `auto`: losses that give numbers of tensors to Python, that draw other random numbers
    than those of dropout, that write into their batch, that change what they reach (a counter), or whose rows do not go
    through one pass; products in fewer digits (autocast); devices other than a CPU; more than 8 shapes of rows, or
    changes. Rows of padding fill microbatches up to `microbatch_size`, or up to one of few sizes if it is not set.
    `decision(loss_fn)` says what became of the last microbatch.

    Returns:
        An engine as `auto`, with its errors and guarantees. Unreleased.

    Raises:
        UnsupportedModel: as `auto`, and a recording that is not what the loss computes any more.

    Guarantees:
        those of `auto`; equals `auto` bit for bit (tests/engines/test_captured.py).

    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> params, engine = {"w": torch.ones(2)}, captured()
    >>> for step in range(4):
    ...     norms = engine(loss_fn, params, torch.tensor([[3.0, 4.0], [0.0, step]])).sq_norms()["w"]
    >>> norms
    tensor([25.,  9.])
    """
    return CapturedGrad()
