"""Follows through every operation of a step, forward and backward, which sample each number depends on.

A dispatch mode sees what runs below torch's functions, in custom autograd functions and hooks too. A step in which
each loss, and each gradient that is credited, has rows without a doubt is proven: samples did not reach each other.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode_temporarily
from torch.utils.weak import WeakIdKeyDictionary

from dpfunc.batches import batch_size, signature
from dpfunc.engines.guards.collectives import check_own, note_meshes
from dpfunc.engines.guards.lockstep import in_lockstep
from dpfunc.engines.guards.modes import DispatchMode, unseen
from dpfunc.engines.guards.python_state import python_state
from dpfunc.engines.guards.random_calls import RandomCall, random_call
from dpfunc.engines.guards.scope import backward_inside
from dpfunc.engines.tracing import declared
from dpfunc.engines.tracing import rows as rows_module
from dpfunc.engines.tracing.backward import Unsettled, is_plain, saving_hooked
from dpfunc.engines.tracing.call import Call, Type, tensors_of
from dpfunc.engines.tracing.code_inside import code_inside, may_have_code_inside, number_of_modes
from dpfunc.engines.tracing.credit import WrongGuess, check_credited
from dpfunc.engines.tracing.entries import (
    COARSE_DTYPES,
    EARLIER_MEMORY,
    Constant,
    Entry,
    carries_gradients,
    fits,
    forget_freed,
    has_own_dispatch,
    is_doubtful,
    key_of,
    part,
    parts,
    pieces_of,
)
from dpfunc.engines.tracing.operations import Kind, Known, known_operation
from dpfunc.engines.tracing.python_values import ERRORS, SHARING, PythonValues
from dpfunc.engines.tracing.readers import TRUSTED, FirstRead, checks_itself, listed, reader
from dpfunc.engines.tracing.repeated import is_keyed_write, keep, key_of_call, recall
from dpfunc.engines.tracing.results import check_complete, type_copies, type_exchanged, type_results
from dpfunc.engines.tracing.reviewed import may_measure, may_read
from dpfunc.engines.tracing.rows import (
    ONE_SAMPLE,
    Mixed,
    Rows,
    Stored,
    end_in_storage,
    is_shaped_by_values,
    located,
    stored,
)
from dpfunc.engines.tracing.writes import clear_unwritten, copy_before_write, refuse_writes, write
from dpfunc.engines.uses.sample_axis import SampleAxis
from dpfunc.errors import UnsupportedModel
from dpfunc.rng import cpu_seeds, generator_state, insecure_key, torch_seed
from dpfunc.types import Batch, LossFn, Params

__all__ = ["Trace", "WrongGuess", "backward_pass", "current_trace", "following", "tracing_rows_alone"]

_KEPT_INTEGERS = 8
_MANY = 100
SEVERAL = "several results"
"""What is heard of an operation with several results."""


@dataclass(eq=False, repr=False)  # torch prints modes in some errors, and arguments of draws can be records
class Trace(DispatchMode):
    """Dispatch mode that follows one forward and backward pass over one batch.

    Args:
        num_samples: B. entries: key of a memory -> weak reference to it, and the samples that it depends on.
        doubts: reasons why the step is not proven. reads: those about numbers, shapes and errors, which Python may
            keep. random_calls: operations that drew random numbers, noted if `recording`.
        alone: the pass computes each row alone; the trace only checks that nothing of the batch is kept.
        ragged: shapes follow from values of the batch. coarse: there are numbers of 16 bits.
        untraced_memory: memory that was made without an operation of this step: parameters, constants of the loss.
        integers: the last integers that are numbers of each sample's own, such as experts.
        shuffled: rows are in an order that depends on several samples.
        meshes: meshes of the split layers that were computed. marks: notes of families about tensors.
        numbers_read: the type of the last result depends on the numbers of a constant.
        heard: names of operations, if somebody asks: empty for those whose types do not follow from a key (`repeated`),
            `SEVERAL` for those with several results.
        clean: no number that can carry a gradient depends on several samples so far, for certain.
        settled: the backward pass is proven by the forward pass.
        shared: keys of memory of constants that Python was given, which may be written into without an operation.
        lifted, given: how many tensors were made of Python values, and how many numbers were given to Python.
        whole: functions of several operations that occur again may run as a whole: the operations inside of them are
            not followed, which is right only if the step is settled. skipped: one did.
        modes: number of dispatch modes, this one included, before the loss is called.
        states: of torch's generators, at the beginning and after each draw.
        noticed: how often the loss was told something about the batch; allowed: how often it may be, before its state
            must be known. Where there is a limit, nothing may be told on which rows could differ.
    """

    num_samples: int
    entries: dict[int, tuple[StorageWeakRef, Entry]] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    random_calls: list[RandomCall] = field(default_factory=list)
    recording: bool = False
    alone: bool = False
    ragged: bool = False
    coarse: bool = False
    untraced_memory: dict[int, StorageWeakRef] = field(default_factory=dict)
    integers: deque[Tensor] = field(default_factory=lambda: deque(maxlen=_KEPT_INTEGERS))
    shuffled: bool = False
    meshes: list[Any] = field(default_factory=list)
    marks: set[tuple[str, int, int, tuple[int, ...]]] = field(default_factory=set)
    numbers_read: bool = False
    heard: list[str] | None = None
    clean: bool = True
    settled: bool = False
    shared: set[int] = field(default_factory=set)
    lifted: int = 0
    given: int = 0
    whole: bool = False
    skipped: bool = False
    states: list[Tensor] = field(default_factory=list)
    modes: int = 0
    noticed: int = 0
    allowed: float = math.inf

    def __post_init__(self) -> None:
        super().__init__()
        forget_freed()

    def begin(self, batch: Batch) -> None:
        """Note that axis 0 of every leaf of the batch holds the samples. Next, this mode is entered."""
        self.modes = number_of_modes() + 1
        if self.recording and not self.alone:
            devices = {torch.device("cpu"), *(leaf.device for leaf in pytree.tree_leaves(batch))}
            self.states += map(generator_state, devices)
        for leaf in pytree.tree_leaves(batch):
            own = part(leaf)
            if not own.numel():
                continue
            if own.stride(0) == 0 and not self.alone:
                self.doubts.append("a batch whose rows share their memory")
                continue
            start = int(own.storage_offset()) * own.element_size()
            rows = Rows(ONE_SAMPLE if self.alone else 0, self.num_samples)
            made = replace(stored(rows, own), base=start, end=end_in_storage(own))
            known = self.entries.get(key_of(own), (None, None))[1]
            if isinstance(known, Stored):  # columns of one tensor
                self.doubts += ["a batch whose tensors share memory in different ways"] * (known.step != made.step)
                made = replace(made, base=min(known.base, made.base), end=max(known.end, made.end))
            self.note(own, made)

    def end(self) -> None:
        """Note the memory of the batch that is still in use: a later step must not use it."""
        for key, (reference, entry) in self.entries.items():
            if not isinstance(entry, Constant) and not reference.expired():
                EARLIER_MEMORY[key] = reference

    def type_of(self, tensor: Tensor) -> Type:
        """The type of a tensor, from the entry of its memory."""
        own = part(tensor)
        if (type(own) is not Tensor and has_own_dispatch(type(own))) or own.layout is not torch.strided:
            return self._type_without_memory(own)
        known = self.entries.get(key_of(own))
        if known is None:
            self._note_untraced(own, tuple(tensor.shape))
            return None
        entry = known[1]
        if isinstance(entry, Constant) or not own.numel():
            return None
        if isinstance(entry, Mixed):
            return entry
        found = located(entry, own, self.num_samples)
        if found is None:
            self.clean = self.clean and not carries_gradients(own)
            return Mixed(f"a view {tuple(tensor.shape)} across samples")
        return found

    def _type_without_memory(self, own: Tensor) -> Type:
        """The type of a tensor without a memory of its own that can be followed: mixed, but for sparse constants."""
        if type(own) is not Tensor and has_own_dispatch(type(own)):
            what = f"a {type(own).__name__}"
        elif own.layout is torch.sparse_coo and self._is_constant(own):
            return None
        else:
            what = "a tensor that is not strided"
        return Rows(ONE_SAMPLE, 1) if self.alone else Mixed(f"{what}, which is not followed")

    def _note_untraced(self, own: Tensor, shape: tuple[int, ...]) -> None:
        """Note that a tensor of this shape has memory that was made outside of this step.

        Raises:
            UnsupportedModel: it was computed from the batch of an earlier step.
        """
        key = key_of(own)
        if key in EARLIER_MEMORY and not EARLIER_MEMORY[key].expired():
            raise UnsupportedModel(
                f"The loss uses a tensor {shape} that was computed from another batch (a memory bank, a running mean, "
                "a cache): its records would reach the gradients of this one. Compute it from the batch of this step, "
                "or from what was released."
            )
        if key not in self.untraced_memory and own.untyped_storage().nbytes():  # what is empty has no numbers
            self.untraced_memory[key] = StorageWeakRef(own.untyped_storage())

    def entry_of(self, tensor: Tensor) -> Entry | None:
        """The entry of the memory of a tensor; None if it was made outside of this step."""
        known = self.entries.get(key_of(part(tensor)))
        return None if known is None else known[1]

    def depends_on_none(self, tensor: Tensor) -> bool:
        """True if the type of a tensor is None. Quick where its memory has rows."""
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            known = self.entries.get(tensor.untyped_storage()._cdata)
            if known is not None and not isinstance(known[1], Constant):
                return not tensor.numel()
        return self.type_of(tensor) is None

    def _is_constant(self, sparse: Tensor) -> bool:
        """True of a sparse tensor made here of constants: of others, the memory was made elsewhere, or is mixed."""
        positions, values = pieces_of(sparse)
        return isinstance(self.entry_of(values), Constant) and self.type_of(positions) is None

    def uniform(self, tensor: Tensor, rows: Rows, axis: int) -> bool:
        """True if a tensor without rows has equal numbers for each row along an axis."""
        own = part(tensor)
        if axis < 0 or axis >= own.ndim or own.shape[axis] == 1 or own.stride(axis) == 0:
            return True
        entry = self.entries.get(key_of(own))
        if entry is not None and entry[1] in (Constant.EQUAL, Constant.RANDOM):
            return True
        self.note_numbers_read()
        return rows_module.uniform(own, rows, axis)

    def note_numbers_read(self) -> None:
        """Note that the type of the last result depends on the numbers of a constant."""
        self.numbers_read = True

    def keep_integers(self, values: Tensor) -> None:
        """Keep integers of the samples\' own, one a row: what a later operation computes by segments is compared."""
        self.integers.append(values)

    def are_own_integers(self, values: Tensor, rows: Rows) -> bool:
        """True if integers, one a row, equal numbers that are known to be of each row's own sample."""
        for kept in reversed(self.integers):
            kind = self.type_of(kept)
            if not isinstance(kind, Rows) or kind.doubt or kind.axis != 0 or kept.shape != values.shape:
                continue
            if rows_module.alike(kind, rows) and bool((kept == values).all()):
                return True
        return False

    def note_read(self, what: str, value: Tensor, result: object) -> None:
        """Note a doubt where a number of the batch becomes a Python value, on which the rest of the step may depend."""
        kind = self.type_of(value)
        if kind is None and what in SHARING and self.entry_of(value) is not None:
            self.shared.add(key_of(part(value)))
            self.note(part(value), Constant.ANY)
        if kind is None:
            return
        module, line, name = reader()
        if isinstance(kind, Mixed) and kind.agrees is not None and bool(result) == kind.agrees:
            if not listed(TRUSTED, module, name):
                self._notice(harmless=True)
        elif not may_read(self, value, kind, module, name):
            self._doubt_read(f"{what} of numbers of the batch, in {module} line {line}")

    def _doubt_read(self, doubt: str) -> None:
        """Note a doubt about something that Python has learnt of the batch, and may keep for later steps."""
        self._notice()
        self.reads.append(doubt)
        self.doubts.append(doubt)

    def _notice(self, *, harmless: bool = False) -> None:
        """Note that the loss is about to learn something of the batch.

        Raises:
            FirstRead: its state must be known before that.
        """
        self.noticed += 1
        if self.noticed > self.allowed or (not harmless and self.allowed < math.inf):
            raise FirstRead

    def mark(self, what: str, tensor: Tensor) -> None:
        """Note something about a tensor, and about all tensors at the same position of its memory."""
        self.marks.add((what, key_of(part(tensor)), int(tensor.storage_offset()), tensor.stride()))

    def marked(self, what: str, tensor: Tensor) -> bool:
        """True if that was noted about it."""
        return (what, key_of(part(tensor)), int(tensor.storage_offset()), tensor.stride()) in self.marks

    def note_shape_read(self, value: Tensor) -> None:
        """Note a doubt where a shape that follows from values of the batch is read."""
        if not self.ragged or not value.ndim:
            return
        kind = self.shaped_by_values(value)
        if kind is None or checks_itself():
            return
        module, line, name = reader()
        own_axis = value.ndim == 1 and kind == Rows(0, self.num_samples, ragged=True)
        if not own_axis and not may_measure(self, kind, module, name):
            self._doubt_read(f"a shape that follows from values of the batch, read in {module} line {line}")

    def note_code_inside(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note a doubt where code of others may run inside of a function of torch, and keep numbers of the batch."""
        if not may_have_code_inside(args, kwargs, self.modes):
            return
        values = (*args, *kwargs.values())
        code = code_inside(func, values, self.modes)
        with torch._C.DisableTorchFunction():  # classes of tensors are not asked before their state is known
            depends = bool(code) and code not in self.reads and any(map(self._may_depend, tensors_of(values)))
        if depends:
            self._doubt_read(code)

    def _may_depend(self, tensor: Tensor) -> bool:
        return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or self.type_of(tensor) is not None

    def shaped_by_values(self, tensor: Tensor) -> Type:
        """The type of a tensor whose shape depends on values of the batch; None for other tensors."""
        entry = next(filter(None, map(self.entry_of, pieces_of(part(tensor)))), None)
        kind = entry if isinstance(entry, Mixed) else self.type_of(tensor)  # also of nothing that was selected
        return kind if is_shaped_by_values(kind) else None

    def credited(self, tensor: Tensor, sample_axis: SampleAxis, what: str) -> None:
        """Check a tensor before it is split by samples: it must have these rows, and no doubt; see `credit`."""
        if self.settled:
            return
        with unseen():
            check_credited(self, tensor, sample_axis, what)

    def settle(self, losses_B: Tensor, hooked: bool) -> bool:
        """True if the forward pass proves the backward pass of these losses, which is then not followed."""
        with unseen():
            self.settled = (
                self.clean and not (self.doubts or self.ragged or self.meshes or hooked) and is_plain(losses_B)
            )
        return self.settled

    def declare_parts(self, source: Tensor, offsets: Tensor, positions_NL: Tensor, real_NL: Tensor) -> Tensor:
        """Positions of parts of a tensor, each of one sample: see `declared.declare_parts`."""
        with unseen():
            return declared.declare_parts(self, source, offsets, positions_NL, real_NL)

    def with_rows_of(self, constant: Tensor, other: Tensor, axis: int, *, uniform: bool = True) -> Tensor:
        """A copy of constants with the rows of another tensor: see `declared.with_rows_of`."""
        with unseen():
            return declared.with_rows_of(self, constant, other, axis, uniform=uniform)

    def mark_ragged(self, tensor: Tensor, *, ragged: bool = True) -> None:
        """Note that the number of rows of a new tensor depends on values of the batch, or no longer does."""
        entry = self.entry_of(tensor)
        if isinstance(entry, Stored):
            self.note(part(tensor), replace(entry, ragged=ragged))

    def check_own(self, tensor: Tensor | None, what: str) -> None:
        """Check that a result of a row computed alone does not depend on other rows.

        Raises:
            UnsupportedModel: it does.
        """
        if tensor is None:
            return
        with unseen():
            kind = self.type_of(tensor)
        if isinstance(kind, Mixed):
            raise UnsupportedModel(
                f"Of a row that is computed alone, {what} comes from {kind.reason}: from other rows."
            )

    def shuffle(self) -> None:
        """Note that rows are in an order that depends on several samples from here on."""
        self.shuffled = True

    def assign_rows(self, result: Tensor, rows: Rows) -> bool:
        """Give a new tensor these rows if it is the same for each; return False if it is not the same."""
        same = self.uniform(result, rows, rows.axis)
        if same and self.type_of(result) is None:
            self.note(part(result), stored(rows, part(result)))
        return same

    def note_copies(self, leaf: Tensor, axis: int) -> None:
        """Note that a new tensor has one row for each sample on an axis."""
        own = part(leaf)
        if own.numel():
            self.note(own, stored(Rows(axis, self.num_samples), own))

    def note(self, tensor: Tensor, entry: Entry) -> None:
        """Store the type of the memory of a tensor."""
        if self.clean and carries_gradients(tensor) and is_doubtful(entry):
            self.clean = False
        if entry.shaped if type(entry) is Mixed else type(entry) is Stored and entry.ragged:
            self.ragged = True
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self.shared and key in self.shared and isinstance(entry, Constant):
            entry = Constant.ANY
        known = self.entries.get(key)
        if known is None:
            self.entries[key] = StorageWeakRef(storage), entry
        else:
            self.entries[key] = known[0], entry

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        known = known_operation(func)
        types = [kind for kind in types if kind is not Tensor and kind is not Parameter] if types else types
        if known.shares and not types and not self.ragged:
            return func(*args, **kwargs) if kwargs else func(*args)
        with torch._C.DisableTorchFunction():  # what is asked of tensors here is not part of the loss
            return self._followed(known, func, types, args, kwargs or {})

    def _followed(
        self,
        known: Known,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if known.exchange and not self.alone:  # engines that compute rows alone check collectives themselves
            check_own(func)
        constants = None
        self.clean = self.clean and not saving_hooked()
        if known.written or known.statistics:
            refuse_writes(self, known, args, kwargs)
            constants = copy_before_write(self, known, args)
        self.lifted += known.lifts
        self.given += known.gives
        before = part(args[0]).untyped_storage().nbytes() if known.resizes else 0
        if known.foreign or (known.shapes and (self.alone or self.allowed == _MANY)):
            self._note_unseen_read(known, (*args, *kwargs.values()))
        random = self.recording and known.random
        if known.random and not self.alone and kwargs.get("generator") is not None:
            self.doubts.append(
                f"{known.name} with a generator of its own: if it was seeded, each position has a number"
            )
        if random:
            self._note_draw(known, random_call(func, args, kwargs))
        try:
            result = func(*args, **kwargs)
        except ERRORS as error:  # the loss may catch it, and do other things
            self._note_failure(known, (*args, *kwargs.values()), error)
            raise
        if known.unwritten:
            clear_unwritten(result, before)
        if random:
            self.random_calls[-1] = self.random_calls[-1].with_shape_of(result)
            self.states += [] if self.alone else [self.random_calls[-1].state_now()]
        if types:  # of tensors that are split over processes, the parts are followed
            note_meshes(func, args, self.meshes)
            own_args, own_kwargs, own_result, constants = parts((args, kwargs, result, constants))
            self._type(known, own_args, own_kwargs, own_result, constants, split=True)
        else:
            self._type(known, args, kwargs, result, constants, split=False)
        return result

    def _note_unseen_read(self, known: Known, given: tuple[Any, ...]) -> None:
        """Note a doubt before an operation whose code may keep numbers, or whose result has a shape that tells them."""
        tensors = list(tensors_of(given))
        masked = known.name != "index" or any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])
        if not masked or all(self.type_of(tensor) is None for tensor in tensors):
            return
        if known.foreign:
            self._doubt_read(f"{known.name}, an operation of another library, which may keep numbers of the batch")
        else:
            self._notice()
            self.reads.append(f"{known.name}, the shape of whose result follows from values of the batch")

    def _note_draw(self, known: Known, call: RandomCall) -> None:
        """Note that random numbers are about to be drawn; a doubt if the loss has set the generator.

        It may go back to a state that it had before in this step, as checkpoints do.
        """
        self.random_calls.append(call)
        if not self.alone and not any(torch.equal(call.state, state) for state in reversed(self.states)):
            self.doubts.append(f"{known.name} after a generator was set: it has the same number for each position")

    def _note_failure(self, known: Known, given: tuple[Any, ...], error: Exception) -> None:
        """Note a doubt where an operation failed for values of the batch, on which the rest of the step may depend."""
        if any(self.type_of(tensor) is not None or self.shaped_by_values(tensor) for tensor in tensors_of(given)):
            reason = str(error).splitlines()[0][:80]
            self._doubt_read(f"{known.name}, which failed for values of the batch: {reason}")

    def _type(
        self,
        known: Known,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        constants: Tensor | None,
        *,
        split: bool,
    ) -> None:
        if known.kind is Kind.VIEW:
            type_copies(self, known, args, kwargs, result)
            return
        key = None if split else key_of_call(self, known, args, kwargs)
        if key is not None and self.recalls(key, result):
            self._hear(known, result)
            return
        call = Call.of(self, known.name, args if constants is None else (constants, *args[1:]), kwargs, result)
        written = self.heard is not None and not split and is_keyed_write(self, known, args, kwargs)
        self._type_by_rule(known, call, args, constants)
        kept = not self.numbers_read and (
            self._is_certain(args[0]) if written else key is not None and keep(self, key, call.inputs, result)
        )
        self._hear(known if kept else None, result)
        if split:
            check_complete(self, known, call)

    def type_declared(self, known: Known, call: Call, key: object) -> None:
        """Type what a rule of an engine made without an operation that is seen, and keep the types by a key, if any."""
        self._type_by_rule(known, call, (), None)
        if key is not None and not self.numbers_read:
            keep(self, key, call.inputs, call.out)

    def _is_certain(self, tensor: Tensor) -> bool:
        """True if the memory of a tensor has an entry without a doubt."""
        entry = self.entry_of(tensor)
        return entry is not None and not is_doubtful(entry)

    def _type_by_rule(self, known: Known, call: Call, args: tuple[Any, ...], constants: Tensor | None) -> None:
        """Type all that an operation made or wrote into; `call` has `constants` in place of what was written into."""
        self.numbers_read = False
        if known.exchange and known.kind is Kind.UNKNOWN:
            type_exchanged(self, known, call)
        elif known.written:
            write(self, known, call, args, constants)
        else:
            type_results(self, known, call)

    def recalls(self, key: object, result: Any) -> bool:
        """Note the types of the results of a call that was typed before; False if it was not."""
        coarse = recall(self, key, result)
        self.coarse = self.coarse or bool(coarse)
        return coarse is not None

    def hear(self, names: list[str] | None) -> None:
        """Collect the names of operations from here on; None: no longer."""
        self.heard = names

    def _hear(self, known: Known | None, result: object) -> None:
        if self.heard is not None:
            self.heard.append("" if known is None else known.name if type(result) is Tensor else SEVERAL)

    def store(self, result: Tensor, kind: Type, constant: Constant) -> None:
        """Store the type of a result; `constant` is the kind of constant if it depends on no sample."""
        own = part(result)
        self.coarse |= own.dtype in COARSE_DTYPES
        if kind is None:
            self.note(own, constant)
            return
        if isinstance(kind, Rows) and kind.ragged and not own.numel():
            kind = Mixed("nothing that was selected", shaped=True)
        if isinstance(kind, Mixed):
            self.note(own, kind)
        elif own.numel():
            self.ragged |= kind.ragged
            self.shuffled |= kind.slots is not None
            self.note(
                own, stored(kind, own) if fits(kind, own) else Mixed("a result of another shape than was expected")
            )


def current_trace() -> Trace | None:
    """The innermost active trace; None if there is none."""
    return next((mode for mode in reversed(_get_current_dispatch_mode_stack()) if isinstance(mode, Trace)), None)


@contextmanager
def following(trace: Trace, batch: Batch) -> Iterator[None]:
    """Inside, a trace follows a batch."""
    trace.begin(batch)
    try:
        with trace:
            yield
    finally:
        trace.end()


@contextmanager
def backward_pass(trace: Trace, losses_B: Tensor, *, hooked: bool) -> Iterator[None]:
    """Inside of `following`, follow the backward pass of these losses, unless the forward pass proves it.

    Raises:
        Unsettled: it does not, and operations of the forward pass were not followed.
    """
    settled = trace.settle(losses_B, hooked)
    if trace.skipped and not settled:
        raise Unsettled
    with _pop_mode_temporarily() if settled else nullcontext():
        yield


@contextmanager
def tracing_rows_alone(batch: Batch) -> Iterator[Trace]:
    """Inside, trace rows that are computed alone: memory that depends on one row must not be used by another.

    Raises:
        UnsupportedModel: it is used, here or in a later step.
    """
    trace = Trace(1, alone=True, recording=True)
    with following(trace, batch), PythonValues(trace):
        yield trace


# Losses, and the shapes of batches that they were called with to build what they keep; no result depends on it.
_warmed: MutableMapping[LossFn, set[object]] = WeakIdKeyDictionary()


def state_before(loss_fn: LossFn, params: Params, batch: Batch, *, alone: bool = False) -> tuple[object, ...]:
    """The state of a loss before a step whose rows it may see.

    At the first batch of a shape it is called with zeros, which are nobody's: what it builds for a shape (a mask, a
    table of positions) is no change then. It is stopped where it would be told their numbers.
    """
    warmed, shapes = _warmed.setdefault(loss_fn, set()), (alone, *signature(batch))
    if shapes not in warmed and not in_lockstep():
        warmed.add(shapes)
        zeros = pytree.tree_map(torch.zeros_like, batch)
        leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
        trace = Trace(batch_size(batch), alone=alone, allowed=_MANY)
        with (
            suppress(Exception, FirstRead), warnings.catch_warnings(action="ignore"), cpu_seeds(insecure_key(0)),
            torch_seed(insecure_key(0)), torch.enable_grad(), backward_inside(), following(trace, zeros),
            PythonValues(trace),
        ):  # fmt: skip
            loss_fn(leaves, zeros)
    return python_state(loss_fn)
