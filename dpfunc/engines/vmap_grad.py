"""The engine `vmap(grad(loss))`: rows are apart by construction; rules make it fast.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import logging
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from dpfunc._utils.memory import refuse_out_of_memory
from dpfunc._utils.processes import in_lockstep, on_any_process
from dpfunc.batches import ByLoss, Memo, batch_size
from dpfunc.engines._draws import OwnDraws
from dpfunc.engines._ghost import Ghost, Streamed, SwappedParameters, differs
from dpfunc.engines._guards.kept_state import note_changed, python_state
from dpfunc.engines._guards.loss import joined_aux, parameters_unchanged, refuse_kept
from dpfunc.engines._levels import Diverged, FirstRead, NeedsLoop, PassResult, Stop
from dpfunc.engines._numerics import exact, precision_now
from dpfunc.engines._per_sample import Kept, PerSample
from dpfunc.engines._row_pass import Rows, Settings, first_settings_that_work, run_pass
from dpfunc.engines.check import warn_without_rules
from dpfunc.engines.loop import rows_alone
from dpfunc.engines.prepare import PreparedLoss, prepare
from dpfunc.errors import DPFuncError, UnsupportedModel
from dpfunc.types import Batch, LossFn, Params

_log = logging.getLogger("dpfunc")

# Passes over one batch after which rows that still do not agree are computed alone.
_MAX_PASSES = 64


@dataclass(frozen=True)
class Decision:
    """Way in which the rows of the last microbatch of a loss function were computed, and the reason.

    Args:
        engine: `"one pass"`, `"groups"` (of rows that agree on what Python reads) or `"loop"`. reason: in words.
        by_row: functions that have run row by row, since torch's rules for rows were not seen right.

    >>> Decision("one pass", "all rows together")
    Decision(engine='one pass', reason='all rows together')
    """

    engine: str
    reason: str
    by_row: tuple[str, ...] = field(default=(), repr=False)


class _Part(NamedTuple):
    """Rows of one pass: places in the batch, and gradients."""

    rows: Sequence[int]
    samples: PerSample | Ghost
    counted: bool = True
    why_loop: str = ""


class Grouped:
    """Gradients of rows that were computed in several passes."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self.parts, counted = parts, [part for part in parts if part.counted]
        self._order = torch.tensor([row for part in counted for row in part.rows], device="cpu").argsort()
        self.needs_audit = any(part.samples.needs_audit for part in parts)
        self.repeatable = all(part.samples.repeatable for part in parts)
        self.losses_B = self._joined([part.samples.losses_B for part in parts])
        self.aux = joined_aux([part.samples.aux for part in counted], self._order)

    def _joined(self, values: Sequence[Tensor]) -> Tensor:
        """The values of the rows of each part that counts, in the order of the batch."""
        joined_B = torch.cat([value for value, part in zip(values, self.parts, strict=True) if part.counted])
        return joined_B[self._order.to(joined_B.device)]

    def sq_norms(self) -> dict[str, Tensor]:
        found = [part.samples.sq_norms() for part in self.parts]
        return {name: self._joined([norms[name] for norms in found]) for name in found[0]}

    def weighted_sum(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for rows, part, counted, _ in self.parts:
            own = {n: value[list(rows)] if counted else value.new_zeros(len(rows)) for n, value in factors.items()}
            sums = part.weighted_sum(own)
            total = {name: total[name] + value for name, value in sums.items()} if total else sums
        return total


class _Calls:
    """Calls of a loss for one batch. What it keeps must be the same after them, if it reads numbers of rows, or if
    the number of calls follows from the rows."""

    def __init__(self, loss_fn: LossFn, seed: Tensor, prepared: PreparedLoss, read: str) -> None:
        self.loss_fn, self.seed, self.prepared, self.read = loss_fn, seed, prepared, read
        self.number, self.done, self.settings = 0, False, prepared.settings
        self.kept: tuple[object, ...] = ()
        self.by_row = set[str]()

    @property
    def allowed(self) -> float:
        """Numbers that Python may read: none before what the loss keeps is noted (in lockstep, others wait)."""
        return math.inf if self.kept or in_lockstep() else 0

    def run_pass(self, rows: Rows, settings: Settings, kept: Kept) -> PassResult:
        """One call: a pass over rows, which draw the same in each."""
        torch.default_generator.set_state(self.seed)
        self.number += 1
        if self.kept and (self.read or self.done):  # what one call changes, another could change back
            self.end()
            refuse_kept(self.loss_fn)
        elif (self.read or self.number > 1) and not self.allowed:
            self.kept = python_state(self.loss_fn)
        found = run_pass(rows, settings, self.prepared.known, kept, self.allowed)
        self.by_row.update(found.by_row)
        return found

    def first_read(self, read: str) -> None:
        """Note that Python is about to read numbers of rows; the next call notes what the loss keeps."""
        self.read, self.kept = read, ()

    def succeed(self, settings: Settings) -> None:
        """Record that a call succeeded."""
        self.done, self.settings = True, settings

    def end(self) -> None:
        """Report a loss whose state has changed."""
        if self.kept:
            reason = f"gives numbers of its rows to Python ({self.read})" if self.read else ""
            note_changed(self.loss_fn, self.kept, reason)


@dataclass(frozen=True)
class VmapGrad:
    """Engine of `auto`, `vmap` and `ghost`; it prepares each loss once for rows of a shape."""

    rules: bool = True
    two_passes: bool = False
    source: SwappedParameters | None = field(default=None, repr=False)
    on_pass: Callable[[PassResult], None] | None = field(default=None, repr=False, compare=False)
    draws: Callable[[Sequence[int], Tensor], OwnDraws] = field(default=OwnDraws, repr=False, compare=False)
    _prepared: Memo[PreparedLoss] = field(default_factory=Memo, repr=False, compare=False)
    _decisions: MutableMapping[LossFn, Decision] = field(default_factory=ByLoss, repr=False, compare=False)
    _marked: MutableMapping[LossFn, bool] = field(default_factory=ByLoss, repr=False, compare=False)

    def prepare(self, loss_fn: LossFn, params: Params, batch: Batch) -> PreparedLoss:
        """Prepare the loss for rows of this shape, or return what was prepared before."""
        rows = Rows(loss_fn, params, batch, (), self.source)
        return self._prepared(partial(prepare, rows, rules=self.rules), loss_fn, params, batch)

    def __call__(self, loss_fn: LossFn, params: Params, batch: Batch) -> PerSample | Ghost | Grouped:
        """Gradients of all rows, in one pass where they go the same way."""
        return self.rows(loss_fn, params, batch, range(batch_size(batch)))

    def rows(
        self, loss_fn: LossFn, params: Params, batch: Batch, positions: Sequence[int]
    ) -> PerSample | Ghost | Grouped:
        """Gradients of rows at these positions of a batch."""
        if not positions:
            return rows_alone(loss_fn, params, batch, ())
        refuse_kept(loss_fn)
        prepared = self.prepare(loss_fn, params, batch)
        calls = _Calls(loss_fn, torch.default_generator.get_state(), prepared, prepared.reads)
        every, ended = Rows(loss_fn, params, batch, positions, self.source, self.draws), False
        try:
            with parameters_unchanged(params):
                parts, read = self._parts(every, calls)
            ended = True
        finally:
            if ended or calls.read:  # also where an error of the loss has ended it
                calls.end()
        refuse_kept(loss_fn)
        decision = self._decision(calls, parts, read)
        before = self.decision(loss_fn)
        if before is None or before.engine != decision.engine:
            level = logging.WARNING if decision.engine == "loop" else logging.INFO
            _log.log(level, "engine %s: %s", decision.engine, decision.reason)
            if self.rules and not calls.settings.rules:
                warn_without_rules()
        self._decisions[loss_fn] = decision
        return parts[0].samples if len(parts) == 1 else Grouped(parts)

    def _parts(self, every: Rows, calls: _Calls) -> tuple[list[_Part], str]:
        """Passes over rows that agree, equally many in all processes in lockstep; and the read on which rows differ."""
        places: Sequence[int] = range(len(every.positions))
        why_loop = calls.prepared.why_loop
        if every.are_split:
            why_loop = "parameters are split over processes (tensor parallel)"
        todo: list[Sequence[int]] = [places]
        done, passes, read = list[_Part](), 0, ""
        while not passes or on_any_process(bool(todo)):
            counted, own = bool(todo), todo.pop() if todo else [0]
            passes += 1
            try:
                if passes > _MAX_PASSES:
                    own, todo = [*own, *chain.from_iterable(todo)], []
                    why_loop = f"rows do not agree on what Python reads ({read})"
                if why_loop:
                    raise NeedsLoop(why_loop)
                attempt = partial(self._gradients, every.some(own), calls)
                found, settings = first_settings_that_work(calls.prepared.settings, attempt)
                calls.succeed(settings)
                # an audit computes rows alone, and cannot where a module swaps its parameters in itself
                done.append(_Part(own, found if self.source is None else replace(found, needs_audit=False), counted))
            except FirstRead as stop:
                calls.first_read(str(stop))
                todo.append(own)
            except Diverged as stop:
                todo += stop.within(own)
                read = stop.read
            except NeedsLoop as stop:
                if in_lockstep():
                    return [self._by_loop(every, places, calls, str(stop))], read
                done.append(self._by_loop(every, own, calls, str(stop)))
        return done, read

    def _decision(self, calls: _Calls, parts: Sequence[_Part], read: str) -> Decision:
        for part in reversed(parts):
            if part.why_loop:
                return Decision("loop", f"rows alone, since {part.why_loop}")
        settings, names = calls.settings, tuple(sorted(calls.by_row))
        by_row = f"; row by row, since torch's rules were not seen right: {', '.join(names)}" if names else ""
        if read:
            reason = f"groups of rows, which do not agree on what Python reads ({read})"
            return Decision("groups", f"{reason}{by_row}", names)
        slower = f", without rules, since {settings.since}" if self.rules and not settings.rules else ""
        return Decision("one pass", f"all rows together{slower}{by_row}", names)

    def decision(self, loss_fn: LossFn) -> Decision | None:
        """Decision about the last microbatch of a loss function, and why; None before its first."""
        return self._decisions.get(loss_fn)

    def _gradients(self, rows: Rows, calls: _Calls, settings: Settings) -> PerSample | Ghost:
        """Gradients of rows by one pass; with `two_passes`, each sum takes another."""
        if not self.two_passes or not settings.rules:
            kept = Kept()
            result = calls.run_pass(rows, settings, kept)
            if self.on_pass is not None:
                self.on_pass(result)
            kept.take_formed(result.rest)
            with exact(result.losses_B.device), torch.no_grad():
                grads = {name: kept.joined(name, param, len(result.losses_B)) for name, param in result.params.items()}
            return PerSample(result.losses_B, grads, aux=result.aux)
        # where the last batch had numbers that need care, no pass is tried without it: the results are the same
        careful = self._marked.get(rows.loss_fn, False)
        first = Streamed(together=calls.prepared.together, careful=careful)
        result = calls.run_pass(rows, settings, first)
        with exact(result.losses_B.device), torch.no_grad():
            first.finish(result)
            marked = first.is_marked()
        self._marked[rows.loss_fn] = on_any_process(marked)
        if self._marked[rows.loss_fn] and not careful:
            return self._gradients(rows, calls, settings)
        again = partial(self._weigh, rows, settings, first, calls, precision_now(result.losses_B.device))
        return Ghost(result.losses_B, first.sq_norms, first.unused, again, aux=result.aux)

    def _weigh(
        self, rows: Rows, settings: Settings, first: Streamed, before: _Calls,
        around: Callable[[], AbstractContextManager[None]], factors: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:  # fmt: skip
        """Weighted sums, by another pass with the same random numbers and precision."""
        again = Streamed(together=first.together, careful=first.careful, factors=factors, source=self.source)
        after = torch.default_generator.get_state()
        calls = _Calls(rows.loss_fn, before.seed, before.prepared, before.read)
        try:
            with parameters_unchanged(rows.params), around():
                result = calls.run_pass(rows, settings, again)
            with exact(result.losses_B.device), torch.no_grad():
                again.finish(result)
        except Stop as stop:
            raise differs(rows.params) from stop
        finally:
            torch.default_generator.set_state(after)
            calls.end()
        refuse_kept(rows.loss_fn)
        again.check_same(first)
        return {name: again.sums[name] for name in rows.params}

    def _by_loop(self, every: Rows, places: Sequence[int], calls: _Calls, reason: str) -> _Part:
        torch.default_generator.set_state(calls.seed)
        rows = every.some(places)
        try:
            found = rows_alone(rows.loss_fn, rows.params, rows.batch, rows.positions, read=bool(calls.read))
        except DPFuncError:
            raise
        except RuntimeError as error:
            refuse_out_of_memory(error)
            raise UnsupportedModel(
                f"The loss of a row alone cannot be computed: {type(error).__name__}: {error}. See shapes, dtypes and "
                f"devices of the batch and the model: loss_fn gets batches of one row. (All rows: {reason}.)"
            ) from error
        return _Part(places, found, why_loop=reason)


def auto() -> VmapGrad:
    """`vmap(grad(loss))` over batches of one, with rules that make it fast.

    A row cannot see another one, in whatever the loss, a module, a hook or a custom function does: forward and backward
    pass run inside of torch's vmap. A number that Python reads is answered if all rows agree bit for bit; else rows are
    grouped by it, and each group runs by itself. What cannot be run so is computed by `loop`; `decision(loss_fn)` says
    why. Random numbers of a row are a function of the seed and of its position, not of the other rows.

    Operations on parameters go to their rules, and large operations to native kernels. Speed and memory only.

    Returns:
        An engine `(loss_fn, params, batch) -> PerSampleGrads`. Unreleased.

    Raises:
        InvalidArgument: the loss has a wrong shape, or no gradient.
        UnsupportedModel: the loss uses a tensor of rows of an earlier call, or changes what it keeps after it has read
            numbers of rows; no way to compute a row.

    Guarantees:
        equals a loop over single samples (tests/engines/test_parity.py, tests/engines/test_engine_rules.py); a row does
        not depend on those beside it (tests/engines/test_row_programs.py,
        tests/engines/test_isolation_zoo.py); what torch must do for that (tests/engines/test_levels.py); the
        law of a row's draws (tests/engines/test_vmap_grad.py).

    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> engine = auto()
    >>> engine(loss_fn, {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [0.0, 1.0]])).sq_norms()["w"]
    tensor([25.,  1.])
    >>> engine.decision(loss_fn).engine
    'one pass'
    """
    return VmapGrad()


def vmap() -> VmapGrad:
    """`auto` without rules and native kernels: torch's vmap and grad do everything. The definition; slower.

    Returns:
        An engine as `auto`, with its errors and guarantees.

    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> vmap()(loss_fn, {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [0.0, 1.0]])).sq_norms()["w"]
    tensor([25.,  1.])
    """
    return VmapGrad(rules=False)


def ghost() -> VmapGrad:
    """`auto` in two passes: norms in the first, sums in the second. No per-sample gradient is kept: least memory.

    Each pass is a forward and a backward pass. A parameter that is used several times keeps the factors of its uses for
    the time of a pass, since their norms do not add up.
    Li et al. 2022, Large Language Models Can Be Strong Differentially Private Learners, section 4.

    Returns:
        An engine `(loss_fn, params, batch) -> PerSampleGrads`. Unreleased.

    Raises:
        InvalidArgument: as `auto`. UnsupportedModel: as `auto`, and two passes that differ.

    Guarantees:
        those of `auto`; what is summed has the norms it is clipped by
        (tests/engines/test_ghost.py::test_a_second_pass_that_differs_is_refused).

    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> per_sample = ghost()(loss_fn, {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    >>> per_sample.sq_norms()["w"]
    tensor([25.,  1.])
    """
    return VmapGrad(two_passes=True)
