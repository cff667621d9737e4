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
from torch.nn import Parameter
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from dpfunc._utils.memory import refuse_out_of_memory
from dpfunc._utils.processes import in_lockstep
from dpfunc.batches import batch_size
from dpfunc.engines._levels import Stop
from dpfunc.engines._numerics import is_exact
from dpfunc.engines._per_sample import PerSample
from dpfunc.engines._recording import CannotRecord, Norms, Recording, factors_of, record, same_numbers
from dpfunc.engines._row_pass import ORDINARY
from dpfunc.engines.prepare import PreparedLoss
from dpfunc.engines.vmap_grad import Decision, VmapGrad
from dpfunc.errors import DPFuncError, UnsupportedModel
from dpfunc.rng import with_generator_state
from dpfunc.types import Batch, LossFn, Params, PerSampleGrads

_log = logging.getLogger("dpfunc")

COMPARED = 2  # passes with which a recording is compared before it is used; the first is over what was recorded
CHECKED = 100  # of so many later passes one is compared
MOST_SHAPES = 8  # recordings of one loss


@dataclass
class _Shape:
    """Decides whether rows of one shape are recorded, compared or replayed. It changes no result.

    Args:
        why_not: why there is no recording; empty if there is one, or may be, None before the first pass.
        compared: passes that were compared before the first replay. replayed: uses after that. ordinary: decision of
            `auto` about the last ordinary pass.
    """

    why_not: str | None = None
    recording: Recording | None = None
    compared: int = 0
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
        if self.compared < COMPARED:
            return None
        self.replayed += 1
        return self.recording if self.replayed % CHECKED else None

    def passed(self, decision: Decision | None) -> None:
        """Take the decision of `auto` about an ordinary pass."""
        self.ordinary = decision

    def decide(self, why_not: str) -> None:
        """Decide that there is no recording, and why; or, if `why_not` is empty, that there may be one."""
        self.why_not = why_not
        if why_not:
            self.recording = None
            _log.warning("engine captured: %s", self.note)

    def compare(
        self, make: Callable[[PerSample], Recording], inputs: Sequence[Tensor], positions: Sequence[int],
        found: PerSampleGrads, after: Tensor,
    ) -> None:  # fmt: skip
        """Record, if that is not done, and compare what is recorded with an ordinary pass over these rows.

        Args:
            after: state in which the ordinary pass has left torch's generator.

        Raises:
            UnsupportedModel: it was replayed before, and is not what the loss computes now.
        """
        why_not = self._difference(make, inputs, positions, found, after)
        if why_not:
            self.decide(why_not)
        elif self.compared < COMPARED:
            self.compared += 1
            if self.compared == COMPARED:
                _log.info("engine captured: %s", self.note)
        if why_not and self.replayed:
            raise UnsupportedModel(
                "The loss is another one than when its operations were recorded: something that it reads in Python has "
                "changed (a number, a flag, a tensor that was replaced), which a recording does not see. Use "
                f"engine='auto', and repeat the last {CHECKED} steps if they need the change. They are as private as "
                "they were said to be; nothing was released and nothing was spent in this one."
            )

    def _difference(
        self, make: Callable[[PerSample], Recording], inputs: Sequence[Tensor], positions: Sequence[int],
        found: PerSampleGrads, after: Tensor,
    ) -> str:  # fmt: skip
        """Why the recording cannot be used, as these rows show it; empty if they show nothing."""
        if not isinstance(found, PerSample):
            return "its rows were not computed in one pass"
        state = torch.default_generator.get_state()
        try:
            self.recording = self.recording or make(found)
            torch.default_generator.set_state(state)
            norms, ordinary = self.recording.norms(inputs, positions), found.unmarked()
            factors = factors_of(norms.sq_norms)
            drawn = torch.default_generator.get_state()
            recorded = [drawn, norms.losses_B, norms.aux, norms.sq_norms, self.recording.sums(norms, factors)]
            same = same_numbers(
                recorded, [after, found.losses_B, found.aux, ordinary.sq_norms(), ordinary.weighted_sum(factors)]
            )
        except (DPFuncError, Stop, *ORDINARY) as error:
            refuse_out_of_memory(error)
            if "tracing tensor" in str(error):  # torch's own words are about its tracing
                return "an operation reads numbers of rows"
            return (str(error).splitlines() or [type(error).__name__])[0]
        return "" if same else "another pass gave other numbers"


@dataclass(frozen=True)
class Replayed:
    """Gradients of a recorded pass. Where their mark is set, an ordinary pass takes its place; see `PerSample`."""

    recording: Recording
    found: Norms
    ordinary: Callable[[], PerSampleGrads]
    late: bool = False
    needs_audit: ClassVar[bool] = True
    repeatable: ClassVar[bool] = True

    @property
    def losses_B(self) -> Tensor:
        return self.found.losses_B

    @property
    def aux(self) -> Any:
        return self.found.aux

    def unmarked(self) -> "Replayed":
        """The same as if the mark were not set."""
        return replace(self, late=True)

    @cached_property
    def is_marked(self) -> bool:
        """Read the mark: True if some number needs the careful computation."""
        return not bool(self.found.no_mark)

    @cached_property
    def _careful(self) -> PerSampleGrads | None:
        return self.ordinary() if not self.late and self.is_marked else None

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


@dataclass(frozen=True)
class CapturedGrad:
    """Engine that `captured` returns."""

    inner: VmapGrad = field(default_factory=VmapGrad, repr=False, compare=False)
    _known: MutableMapping[LossFn, dict[object, _Shape]] = field(
        default_factory=WeakIdKeyDictionary, repr=False, compare=False
    )
    _last: MutableMapping[LossFn, _Shape] = field(default_factory=WeakIdKeyDictionary, repr=False, compare=False)
    fixed_rows: ClassVar[bool] = True

    def prepare(self, loss_fn: LossFn, params: Params, batch: Batch) -> PreparedLoss:
        """Prepare the loss for rows of this shape, or return what was prepared before."""
        return self.inner.prepare(loss_fn, params, batch)

    def __call__(self, loss_fn: LossFn, params: Params, batch: Batch) -> PerSampleGrads:
        """Gradients of all rows."""
        return self.rows(loss_fn, params, batch, range(batch_size(batch)))

    def decision(self, loss_fn: LossFn) -> Decision | None:
        """Decision of `auto` about rows of the last shape, and whether it was replayed; None before the first."""
        shape = self._last.get(loss_fn)
        found = shape.ordinary if shape else None
        return replace(found, reason=f"{found.reason}; {shape.note}") if found and shape and shape.note else found

    def rows(self, loss_fn: LossFn, params: Params, batch: Batch, positions: Sequence[int]) -> PerSampleGrads:
        """Gradients of rows at these positions of a batch: replayed, or those of `auto`."""
        if not positions:
            return self.inner.rows(loss_fn, params, batch, positions)
        leaves, structure = pytree.tree_flatten(batch)
        given = (*params.values(), *leaves)
        how = in_lockstep(), is_exact(given[0].device), torch.get_default_dtype()
        of_loss = self._known.setdefault(loss_fn, {})
        layout: object = (tuple(params), structure, *how, *map(_layout, given))
        # all further shapes are one
        shape = of_loss.setdefault(layout if layout in of_loss or len(of_loss) < MOST_SHAPES else None, _Shape())
        self._last[loss_fn] = shape
        inputs, state = [value.detach() for value in given], torch.default_generator.get_state()
        recording = shape.replays()
        if recording is not None:
            ordinary = partial(_from_state, state, partial(self.inner.rows, loss_fn, params, batch, positions))
            try:
                return Replayed(recording, recording.norms(inputs, positions), ordinary)
            except ORDINARY as error:  # an ordinary pass says what is wrong with this batch
                refuse_out_of_memory(error)
                torch.default_generator.set_state(state)
        read: list[str] = []
        engine = replace(self.inner, on_pass=lambda result: read.append(result.reads))
        per_sample = engine.rows(loss_fn, params, batch, positions)
        shape.passed(self.inner.decision(loss_fn))
        if shape.why_not is None:
            shape.decide(self._why_not(loss_fn, given, how, any(read), len(of_loss)))
        elif recording is None and not shape.why_not:

            def compute(tensors: Sequence[Tensor], draws: Any) -> object:
                own, rows = dict(zip(params, tensors, strict=False)), tensors[len(params) :]
                recorded = _Recorded(**vars(replace(engine, draws=draws)))
                found = recorded.rows(loss_fn, own, pytree.tree_unflatten(rows, structure), positions)
                if any(read):  # the numbers, or what follows from them, would be constants
                    raise CannotRecord("Python reads numbers of rows")
                return found

            after = torch.default_generator.get_state()
            with with_generator_state(state):
                shape.compare(partial(record, compute, inputs), inputs, positions, per_sample, after)
        return per_sample

    def _why_not(
        self, loss_fn: LossFn, given: Sequence[Tensor], how: tuple[bool, bool, torch.dtype], reads: bool, shapes: int
    ) -> str:
        """Why a pass cannot be recorded, as far as the first one shows; empty if it may be tried."""
        decision = self.inner.decision(loss_fn)
        lockstep, exactly, _ = how
        reasons = {
            "processes go in lockstep": lockstep,
            "it is no CPU, or products are shortened (autocast, set_float32_matmul_precision)": not exactly,
            "its rows were not computed in one pass": decision is None or decision.engine != "one pass",
            "Python reads numbers of rows": reads,
            "functions run row by row": bool(decision and decision.by_row),
            "parameters or rows are of a class of their own": not {Tensor, Parameter}.issuperset(map(type, given)),
            f"there are more than {MOST_SHAPES} shapes of rows: set microbatch_size, and fill rows up to few lengths":
                shapes > MOST_SHAPES,
        }  # fmt: skip
        return next((reason for reason, holds in reasons.items() if holds), "")


def _layout(value: Any) -> object:
    return (type(value), value.shape, value.stride(), value.dtype, value.device)


def _from_state(state: Tensor, compute: Callable[[], PerSampleGrads]) -> PerSampleGrads:
    """Compute with random numbers from a state of torch's generator."""
    with with_generator_state(state):
        return compute()


def captured() -> CapturedGrad:
    """`auto` whose operations are recorded once for rows of a shape, and replayed without the Python between them.

    For small steps, where Python takes longer than the operations. The second pass over rows of a shape is recorded,
    which takes some seconds; it and the next one are compared with the recording, which has to give the same numbers,
    bit for bit, for losses, norms and sums. One in 100 later passes is compared, too.

    A recording does what the operations did, on the numbers of new parameters and rows. **Python does not run**: hooks,
    counters and messages of the loss happen in the passes that are compared only, and a number of Python that changes
    between steps, such as a coefficient by schedule, stays as it was until a pass is compared, which then ends the run
    with an error. Gradients are per-sample gradients of the recorded loss, clipped as any others: the guarantee holds.

    Not recorded, and computed by `auto`: losses that draw other random numbers than those of dropout, that write into
    their batch, or whose rows do not go through one pass; products in fewer digits (autocast); devices other than a
    CPU; more than 8 shapes of rows. Rows of padding fill the last microbatch up to `microbatch_size`, which has to be
    set where the size of batches is random. `decision(loss_fn)` says what became of the last microbatch.

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
