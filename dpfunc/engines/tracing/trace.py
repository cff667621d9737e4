"""Follows through every operation of a step, forward and backward, which sample each number depends on.

A TorchDispatchMode: it sees what runs below torch's Python functions, also inside of custom autograd functions, of
hooks and of functions of torch that are made of others. A step in which the loss of each sample, and each gradient that
is credited to it, has rows without a doubt is proven: nothing of one sample has reached what is credited to another.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from dpfunc.engines.collectives import check_own, communicates, note_meshes
from dpfunc.engines.draws import Draw, drawn, draws_numbers
from dpfunc.engines.layout import Layout
from dpfunc.engines.tracing import rows as rows_module
from dpfunc.engines.tracing.call import Call, Type, assumed, broadcast, combined, tensors_of
from dpfunc.engines.tracing.families import EXCHANGES, FAMILIES
from dpfunc.engines.tracing.python_values import PythonValues
from dpfunc.engines.tracing.rows import WHOLE, Mixed, Rows, Stored, located, reach, same_ids, same_slots, stored
from dpfunc.errors import UnsupportedModel
from dpfunc.sharding import is_dtensor
from dpfunc.types import Batch


class Misplaced(Exception):
    """The gradient shows that a guess about a use was wrong; never leaves the engines."""


def agrees(kind: Type, layout: Layout) -> bool:
    """Whether a gradient has the rows that its use has."""
    if not isinstance(kind, Rows):
        return False
    return (kind.axis, kind.pre, kind.post) == (layout.axis, layout.pre, layout.post) and same_ids(kind.ids, layout.ids)


class Constant(Enum):
    """Memory made in this step that does not depend on the batch."""

    EQUAL = "all numbers are the same"
    RANDOM = "random numbers, each with the same law"
    ANY = "anything else"


Entry = Stored | Mixed | Constant


class Kind(Enum):
    """What is known of an operation before its arguments are."""

    VIEW = 0
    POINTWISE = 1
    FAMILY = 2
    UNKNOWN = 3
    FILLED = 4
    RANDOM = 5


@dataclass(frozen=True)
class Known:
    """An operation.

    Args:
        kind: how its result is typed. name: without overload. handler: of a family. written: arguments, by position or
            name, that it writes into. random: it draws random numbers. exchange: it communicates.
    """

    kind: Kind
    name: str
    handler: Callable[[Call], Any] | None
    written: tuple[int | str, ...]
    random: bool = False
    exchange: bool = False


FILLED = frozenset(
    [
        "zeros",
        "ones",
        "full",
        "empty",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "scalar_tensor",
        "empty_strided",
        "new_empty_strided",
        "_efficientzerotensor",
        "fill_",
        "zero_",
        "empty_permuted",
    ]
)
RANDOM = frozenset(
    [
        "rand",
        "randn",
        "randint",
        "rand_like",
        "randn_like",
        "randint_like",
        "bernoulli_",
        "uniform_",
        "normal_",
        "random_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "cauchy_",
        "bernoulli",
        "normal",
    ]
)
ALIASES = frozenset(
    [
        "_unsafe_view",
        "unsafe_split",
        "unsafe_chunk",
        "unsafe_split_with_sizes",
        "detach",
        "detach_",
        "alias",
        "set_",
        "resize_",
        "_conj",
        "_neg_view",
        "as_strided_",
    ]
)
# Collectives of torch's own wrappers; those that only wait give their argument back.
EXCHANGING = frozenset(("_c10d_functional", "_c10d_functional_autograd", "_dtensor"))
WAITING = frozenset(("wait_tensor", "_wrap_tensor_autograd"))
# What keeps "true for all, so true for each" and "false for any, so false for each".
AGREEING = frozenset(("all", "any", "clone", "_to_copy"))
# Their results have the shape of their first argument, whatever they write into it.
PLACING = frozenset(
    [
        "index_put",
        "_unsafe_index_put",
        "_index_put_impl",
        "index_add",
        "index_copy",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "masked_scatter",
        "slice_scatter",
        "select_scatter",
    ]
)
# They write statistics into arguments 3 and 4, which their schema does not say.
WRITING_STATISTICS = frozenset(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"))
# Functions of libraries that ask the batch which of several equal ways to take: an attention mask that masks nothing is
# left out, for example.
TRUSTED = (
    ("dpfunc.engines.rules.*", "*"), ("transformers.masking_utils", "*"), ("transformers.modeling_attn_mask_utils", "*"),
    # Checks: they raise, or nothing follows from them but a message.
    ("transformers.utils.import_utils", "torch_compilable_check"), ("transformers.models.*", "*.get_placeholder_mask"),
    ("transformers.models.xlm.*", "get_masks"), ("transformers.models.flaubert.*", "get_masks"),
    ("transformers.models.xlm.*", "XLMModel.forward"), ("transformers.models.flaubert.*", "FlaubertModel.forward"),
    # "All examples must have the same number of <eos> tokens": raises; the rest views the rows of each sample.
    *((f"transformers.models.{kind}.*", "*ForSequenceClassification.forward") for kind in
      ("bart", "mbart", "plbart", "bigbird_pegasus", "led", "mvp", "t5", "mt5", "umt5", "longt5")),
    # Shapes of logits, by which they are only reshaped.
    ("dpfunc.integrations.losses", "*"),
)  # fmt: skip
# Functions that draw a mask for each sample, with numbers of other libraries and the length of the sample's own row.
DRAWING = (("transformers.models.*", "*._mask_hidden_states"), ("transformers.models.*", "_compute_mask_indices"))
# Families that know what to do with rows in an order that depends on several samples.
ORDERED = frozenset(
    [
        "index",
        "_unsafe_index",
        "index_put",
        "_unsafe_index_put",
        "_index_put_impl",
        "index_add",
        "index_copy",
        "index_select",
        "sort",
        "_pack_padded_sequence",
        "_pack_padded_sequence_backward",
    ]
)
INTEGERS = 8
COPYING = frozenset(("clone", "_to_copy", "contiguous"))
COARSE_DTYPES = frozenset((torch.bfloat16, torch.float16))
# Frames between the one who reads a number and the operation.
PLUMBING = ("torch", "dpfunc.engines", "contextlib", "functools", "typing_extensions")

# Between the one who reads a shape and the trace.
WATCHING = (
    "dpfunc.engines.tracing.trace",
    "dpfunc.engines.tracing.places",
    "dpfunc.engines.tracking",
    "torch.overrides",
)
CHECKING_SHAPES = ("torch.nn.modules.rnn", "torch.nn.utils.rnn")

_known: dict[Any, Known] = {}


def known_operation(func: Any) -> Known:  # noqa: ANN401  (an OpOverload)
    """What is known of an operation, found out once."""
    found = _known.get(func)
    if found is None:
        found = _known[func] = _look_up(func)
    return found


def _look_up(func: Any) -> Known:  # noqa: ANN401
    if not isinstance(func, torch._ops.OpOverload):
        return Known(Kind.UNKNOWN, str(func), None, ())
    schema, name = func._schema, func._schema.name.rpartition("::")[2]
    arguments = schema.arguments
    written = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    found = _kind_of(func, name, written)
    return replace(found, random=draws_numbers(func), exchange=communicates(func))


def _kind_of(func: Any, name: str, written: tuple[int | str, ...]) -> Known:  # noqa: ANN401
    own = func.namespace in ("aten", "prims")
    plain = name.rstrip("_") if not name.startswith("__") else name
    if name == "lift_fresh":  # a tensor made of Python numbers
        return Known(Kind.UNKNOWN, name, None, ())
    if name in FILLED:
        return Known(Kind.FILLED, name, None, written)
    if name in RANDOM:
        return Known(Kind.RANDOM, name, None, written)
    if func.namespace in EXCHANGING and plain in EXCHANGES:
        return Known(Kind.FAMILY, name, EXCHANGES[plain], written)
    if func.is_view or name in ALIASES or (func.namespace in EXCHANGING and name in WAITING):
        return Known(Kind.VIEW, name, None, ())
    if own and plain in FAMILIES:
        return Known(Kind.FAMILY, name, FAMILIES[plain], written)
    pointwise = torch.Tag.pointwise in func.tags
    if not pointwise and own:
        packet = getattr(torch.ops.aten, plain, None)
        pointwise = packet is not None and any(
            torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
        )
    return Known(Kind.POINTWISE if pointwise else Kind.UNKNOWN, name, None, written)


# What the batches of earlier steps left in memory that is still in use; weak references, no result depends on them.
_left: dict[int, StorageWeakRef] = {}


def _forget_freed() -> None:
    for key in [key for key, reference in _left.items() if reference.expired()]:
        del _left[key]


FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"


def part(tensor: Tensor) -> Tensor:
    """The tensor itself; this process's part of one that is split; the memory of one that is still on its way."""
    kind = type(tensor)
    if kind is Tensor or kind is Parameter or not has_own_dispatch(kind):
        return tensor
    if is_dtensor(tensor):
        return part(tensor._local_tensor)
    if kind.__module__ == FUNCTIONAL_COLLECTIVES:
        return part(tensor.elem)  # type: ignore[attr-defined]
    return tensor


def has_own_dispatch(kind: type) -> bool:
    """Whether tensors of a class have operations of their own, and perhaps no memory that can be followed."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined, no-any-return]


def parts(values: Any) -> Any:  # noqa: ANN401  (arguments of an operation)
    """Arguments or results with this process's part of each tensor that is split."""
    return pytree.tree_map_only(Tensor, part, values)


@dataclass(eq=False)
class Trace(TorchDispatchMode):
    """The mode, for one forward and backward pass over one batch.

    Args:
        num_samples: B. entries: what each memory depends on, and a weak reference that keeps its identity.
        doubts: why the step is not proven. reads: those of them that are numbers given to Python, which may keep them. draws: its random numbers, if they are recorded.
        ragged: shapes follow from values of the batch. coarse: there are numbers of 16 bits. alone: the pass computes each row alone; then it is only followed whether something of the batch is kept.
        strangers: memory that was not seen being made: parameters, constants of the loss.
        integers: the last integers of the samples' own, such as experts. shuffled: rows are in an order that
            depends on several samples. held: constants before they were written into.
        meshes: on which layers are split that were computed.
    """

    num_samples: int
    entries: dict[int, tuple[StorageWeakRef, Entry]] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    recording: bool = False
    alone: bool = False
    ragged: bool = False
    coarse: bool = False
    strangers: dict[int, StorageWeakRef] = field(default_factory=dict)
    integers: deque[Tensor] = field(default_factory=lambda: deque(maxlen=INTEGERS))
    shuffled: bool = False
    held: Tensor | None = None
    meshes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        _forget_freed()

    def begin(self, batch: Batch) -> None:
        """Axis 0 of every leaf of the batch holds the samples."""
        for leaf in pytree.tree_leaves(batch):
            own = part(leaf)
            if not own.numel():
                continue
            if self.alone:
                self._note(own, Stored(own.storage_offset() * own.element_size(), 1 << 62, 1, None, "", reach(own)))
                continue
            if own.stride(0) == 0:
                self.doubts.append("a batch whose rows share their memory")
                continue
            held = stored(Rows(0, self.num_samples), own)
            held.end = reach(own)
            self._note(own, held)

    def end(self) -> None:
        """What is left of the batch in memory must not be used by a later step."""
        for key, (reference, entry) in self.entries.items():
            if not isinstance(entry, Constant) and not reference.expired():
                _left[key] = reference

    # -- what tensors depend on

    def type_of(self, tensor: Tensor) -> Type:
        """The type of a tensor, from the memory that it lies in."""
        own = part(tensor)
        if type(own) is not Tensor and has_own_dispatch(type(own)):
            return Rows(WHOLE, 1) if self.alone else Mixed(f"a {type(own).__name__}, which is not followed")
        if own.layout is not torch.strided:
            return Rows(WHOLE, 1) if self.alone else Mixed("a tensor that is not strided, which is not followed")
        key = _key(own)
        entry = self.entries.get(key)
        if entry is None:
            if key in _left and not _left[key].expired():
                raise UnsupportedModel(
                    f"The loss uses a tensor {tuple(tensor.shape)} that was computed from another batch (a memory bank, a "
                    "running mean, a cache): its records would reach the gradients of this one. Compute it from the "
                    "batch of this step, or from what was released."
                )
            if key not in self.strangers:
                self.strangers[key] = StorageWeakRef(own.untyped_storage())
            return None
        if isinstance(entry[1], Constant) or not own.numel():
            return None
        if isinstance(entry[1], Mixed):
            return entry[1]
        found = located(entry[1], own, self.num_samples)
        if found is None:
            return Mixed(f"a view {tuple(tensor.shape)} across samples")
        return found

    def uniform(self, tensor: Tensor, rows: Rows, axis: int) -> bool:
        """Whether a tensor without rows is the same for each of them."""
        own = part(tensor)
        if axis < 0 or axis >= own.ndim or own.shape[axis] == 1 or own.stride(axis) == 0:
            return True
        entry = self.entries.get(_key(own))
        if entry is not None and entry[1] in (Constant.EQUAL, Constant.RANDOM):
            return True
        return rows_module.uniform(own, rows, axis)

    def remember(self, values: Tensor) -> None:
        """Keep integers of the samples' own, one a row: what a later operation computes by segments is compared with them."""
        self.integers.append(values)

    def own(self, values: Tensor, rows: Rows) -> bool:
        """Whether integers, one a row, were seen before as numbers of each row's own sample."""
        for seen in reversed(self.integers):
            kind = self.type_of(seen)
            if not isinstance(kind, Rows) or kind.doubt or kind.axis != 0 or seen.shape != values.shape:
                continue
            if rows_module.alike(kind, rows) and bool((seen == values).all()):
                return True
        return False

    def taken(self, what: str, value: Tensor, result: object) -> None:
        """A number of the batch becomes a Python value, on which the rest of the step may depend."""
        kind = self.type_of(value)
        if kind is None or (isinstance(kind, Mixed) and kind.agrees is not None and bool(result) == kind.agrees):
            return
        module, line, name = _reader()
        if not _listed(TRUSTED, module, name) and not _listed(DRAWING, module, name):
            self.reads.append(f"{what} of numbers of the batch, in {module} line {line}")
            self.doubts.append(self.reads[-1])

    def measured(self, value: Tensor) -> None:
        """The shape of a tensor was looked at, which may follow from values of the batch."""
        if not self.ragged or value.layout is not torch.strided:
            return
        entry = self.entries.get(_key(part(value)))
        kind = entry[1] if entry is not None and isinstance(entry[1], Mixed) else self.type_of(value)
        if (isinstance(kind, Rows) and kind.ragged) or (isinstance(kind, Mixed) and kind.shaped):
            if _checks_itself():
                return
            module, line, name = _reader()
            own_axis = value.ndim == 1 and isinstance(kind, Rows) and kind == Rows(0, self.num_samples, ragged=True)
            if not own_axis and not _listed(TRUSTED, module, name):
                self.doubts.append(f"a shape that follows from values of the batch, read in {module} line {line}")

    def credited(self, tensor: Tensor, layout: Layout, what: str) -> None:
        """A tensor is about to be split by samples: it must have these rows, and no doubt."""
        with unseen():
            self._check_credited(tensor, layout, what)

    def _check_credited(self, tensor: Tensor, layout: Layout, what: str) -> None:
        kind = self.type_of(tensor)
        if layout.guess is not None and kind is not None and not agrees(kind, layout):
            raise Misplaced(layout.guess)
        if kind is None:
            whole = Rows(layout.axis, self.num_samples, layout.pre, layout.post)
            if layout.ids is None and not self.uniform(tensor, whole, layout.axis):
                self.doubts.append(f"{what} differs between positions of the batch and does not depend on it")
        elif isinstance(kind, Mixed):
            self.doubts.append(f"{what} comes from {kind.reason}")
        elif (kind.axis, kind.pre, kind.post) != (layout.axis, layout.pre, layout.post):
            self.doubts.append(f"{what} has its samples elsewhere than expected")
        elif not same_ids(kind.ids, layout.ids) or not same_slots(kind, Rows(0, 1, slots=layout.slots, of=layout.of)):
            self.doubts.append(f"{what} has its samples in another order")
        elif kind.doubt:
            self.doubts.append(f"{what} comes from {kind.doubt}")

    def declare_parts(self, source: Tensor, cuts: Tensor, places_NL: Tensor, real_NL: Tensor) -> Tensor:
        """Places (N, L) of N parts of a tensor that is cut into parts in order, each of one sample: seen by value.

        Args:
            source: what is cut. cuts: where each part begins, and where the last one ends, (N + 1,).

        Returns:
            The places; those of an empty part are the first one of its sample.
        """
        with unseen():
            kind, count = self.type_of(source), self.num_samples
            if (
                self.alone
                or not isinstance(kind, Rows)
                or kind.axis != 0
                or not len(places_NL)
                or len(places_NL) % count
            ):
                return places_NL
            each, samples = len(places_NL) // count, rows_module.spread(kind)
            starts_B = torch.searchsorted(samples, torch.arange(count))
            cuts_Bm = cuts[:-1].cpu().reshape(count, each)
            # the parts of a sample are all of its numbers, whatever others hold
            outer = torch.equal(cuts_Bm[:, 0], starts_B) and int(cuts[-1]) == len(samples)
            if not outer or not self._own_cuts(cuts_Bm - starts_B[:, None]):
                return places_NL
            firsts_N1 = starts_B.repeat_interleave(each)[:, None].to(places_NL.device)
            places_NL = torch.where(real_NL.any(1, keepdim=True), places_NL, firsts_N1).clamp(
                max=max(0, len(samples) - 1)
            )
            wanted_N1 = torch.arange(count).repeat_interleave(each)[:, None]
            if bool((samples[places_NL.cpu()] == wanted_N1).all()):
                for tensor in (places_NL, real_NL):
                    self._note(tensor, stored(Rows(0, count, 1, each, None, kind.doubt), tensor))
            return places_NL

    def _own_cuts(self, cuts_Bm: Tensor) -> bool:
        """Whether places within each sample are the same for all samples, or were seen as numbers of its own."""
        same = bool((cuts_Bm == cuts_Bm[:1]).all())
        return cuts_Bm.shape[1] == 1 or same or self.own(cuts_Bm, Rows(0, self.num_samples))

    def with_rows_of(self, constant: Tensor, other: Tensor, axis: int, *, uniform: bool = True) -> Tensor:
        """A copy of constants with the rows that another tensor has on an axis.

        Args:
            uniform: they must be the same for each row; False for what follows from the number of rows of each sample.
        """
        with unseen():
            kind = self.type_of(other)
            if self.alone or not isinstance(kind, Rows) or kind.axis != axis or self.type_of(constant) is not None:
                return constant
            if not _fits(kind, constant) or (uniform and not self.uniform(constant, kind, axis)):
                return constant
            made = constant.clone(memory_format=torch.contiguous_format)
            self._note(made, stored(kind, made))
            return made

    def mark_ragged(self, tensor: Tensor) -> None:
        """The number of rows of a new tensor depends on values of the batch."""
        entry = self.entries.get(_key(part(tensor)))
        if entry is not None and isinstance(entry[1], Stored):
            self.ragged = True
            self._note(part(tensor), replace(entry[1], ragged=True))

    def ordered(self, tensor: Tensor, axis: int, *, changed: bool, doubt: str = "") -> Tensor:
        """A copy that says, or no longer says, that its rows are in an order that depends on several samples.

        Packed sequences are sorted by length. Inside of a recurrent layer each row goes on alone, wherever it is.
        """
        with unseen():
            kind = self.type_of(tensor)
            made = tensor.clone(memory_format=torch.contiguous_format)
            if kind is None or self.alone:
                self._note(made, Constant.ANY if kind is None else stored(Rows(WHOLE, 1), made))
                return made
            if isinstance(kind, Rows) and kind.axis == axis and _fits(kind, made):
                kind = kind._replace(
                    slots=None, of=0, ragged=kind.ragged and not changed
                )  # what leaves has a row for each sample
                if changed and kind.ids is not None:
                    slots, of = rows_module.slots_of(kind, self.num_samples)
                    kind = (
                        kind._replace(slots=slots, of=of)
                        if of == self.num_samples
                        else kind.doubted("samples of some rows")
                    )
                    self.shuffled = True
                kind = kind.doubted(doubt) if doubt else kind
            elif isinstance(kind, Rows):
                kind = (
                    Mixed("packed rows on another axis")
                    if kind.axis != WHOLE or kind.slots is not None
                    else kind.doubted(doubt)
                    if doubt
                    else kind
                )
            self._note(made, stored(kind, made) if isinstance(kind, Rows) else kind)
            return made

    def check_own(self, tensor: Tensor | None, what: str) -> None:
        """Of a row computed alone: a result must not reach over the memory of the row.

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

    def copied(self, leaf: Tensor, axis: int) -> None:
        """A new tensor has one row for each sample on an axis."""
        own = part(leaf)
        if own.numel():
            self._note(own, stored(Rows(axis, self.num_samples), own))

    def equal_rows(self, tensor: Tensor) -> None:
        """Declare that a new tensor is the same for each sample."""
        self._note(tensor, Constant.EQUAL)

    def _note(self, tensor: Tensor, entry: Entry) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self.entries.get(key)
        self.entries[key] = (StorageWeakRef(storage) if known is None else known[0], entry)

    # -- the mode

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  (whatever the operation returns)
        with torch._C.DisableTorchFunction():  # what is asked of tensors here is not part of the loss
            return self._followed(func, types, args, kwargs)

    def _followed(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        known = _known.get(func) or known_operation(func)
        if known.exchange and not self.alone:  # who computes rows alone has a guard of its own
            check_own(func)
        if known.written:
            self._refuse_writes(known, args, kwargs or {})
        before = self._before(known, args)
        if self.recording and known.random:
            self.draws.append(drawn(func, args, kwargs or {}))
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:  # the loss may catch it, and do other things
            if any(self.type_of(tensor) is not None for tensor in tensors_of((*args, *(kwargs or {}).values()))):
                self.doubts.append(
                    f"{known.name}, which failed for values of the batch: {str(error).splitlines()[0][:80]}"
                )
            raise
        if self.recording and known.random:
            self.draws[-1] = self.draws[-1].of(result)
        if types:  # of tensors that are split over processes, the parts are followed
            note_meshes(func, args, self.meshes)
            self._type(known, *parts((args, kwargs or {}, result, before)), split=True)
        else:
            self._type(known, args, kwargs or {}, result, before)
        return result

    def _type(
        self,
        known: Known,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,  # noqa: ANN401
        before: Tensor | None,
        split: bool = False,
    ) -> None:
        if known.kind is Kind.VIEW:
            self._copied(known, args, kwargs, result)
            return
        call = Call(self, known.name, args if before is None else (before, *args[1:]), kwargs, result)
        if known.exchange and known.kind is Kind.UNKNOWN:
            self._exchanged(known, call)
        elif known.written:
            self._write(known, call, args)
        else:
            self._type_results(known, call)
        if split and not self.alone:
            self._check_complete(known, call)

    def _exchanged(self, known: Known, call: Call) -> None:
        """A collective without an entry: what takes part in it, and depends on the batch, is mixed."""
        tensors = [*call.tensors(), *tensors_of([call.out])]
        if any(self.type_of(tensor) is not None for tensor in tensors):
            for tensor in tensors:
                self._note(part(tensor), Mixed(f"{known.name} over processes"))

    def _check_complete(self, known: Known, call: Call) -> None:
        """A split tensor that does not have all samples may be put together with others where nobody looks."""
        for kind in map(self.type_of, call.tensors()):
            if isinstance(kind, Rows) and (
                kind.axis == WHOLE or kind.ids is not None or kind.count != self.num_samples
            ):
                for result in tensors_of([call.out]):
                    self._note(part(result), Mixed(f"{known.name} of a split tensor with a part of the samples"))
                return

    def _copied(self, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> None:  # noqa: ANN401
        """Views that are copies: of tensors of inference mode, `reshape` and `to` are operations of their own."""
        if (
            isinstance(results, Tensor)
            and args
            and isinstance(args[0], Tensor)
            and _key(part(results)) == _key(part(args[0]))
        ):
            return
        inputs = list(tensors_of((*args, *kwargs.values())))
        for result in tensors_of([results]):
            if not any(_key(part(result)) == _key(part(tensor)) for tensor in inputs):
                kind = self.type_of(inputs[0]) if inputs else None
                moved = kind is not None and result.shape != inputs[0].shape
                self._store(result, Mixed(f"{known.name}, which copies") if moved else kind, Constant.ANY)

    def _type_results(self, known: Known, call: Call) -> None:
        results = list(call.out) if isinstance(call.out, (list, tuple)) else [call.out]
        if known.kind is Kind.FILLED or known.kind is Kind.RANDOM:
            kind: Type = None
            entry = Constant.EQUAL if known.kind is Kind.FILLED else Constant.RANDOM
            if known.name in ("bernoulli", "normal"):
                kind = self._pointwise(call)
                entry = Constant.RANDOM if self._lawful(call.tensors()) else Constant.ANY
            elif self.ragged:  # how many there are depends on values
                same = (tensor for tensor in call.tensors() if tensor.shape == results[0].shape)
                kind = next((kind for kind in map(self._shaped, same) if kind is not None), None)
            for result in tensors_of(results):
                self._store(result, kind, entry)
            return
        inputs = call.tensors()
        if all(self.type_of(tensor) is None for tensor in inputs):
            constant = self._constant(known, inputs)
            for result in tensors_of(results):
                if _key(part(result)) not in self.entries:
                    self._note(part(result), constant)
            return
        kinds = self._types(known, call, len(results))
        for result, kind in zip(results, kinds, strict=True):
            if isinstance(result, Tensor):
                self._store(result, kind, Constant.ANY)
        if known.name in WRITING_STATISTICS and call.args[5] is True:
            for statistic in tensors_of(call.args[3:5]):
                if _key(part(statistic)) in self.entries:
                    self._note(part(statistic), Mixed(f"statistics of {known.name}"))

    def _shaped(self, tensor: Tensor) -> Type:
        """The type of a tensor whose shape depends on values."""
        entry = self.entries.get(_key(part(tensor)))
        kind = entry[1] if entry is not None and isinstance(entry[1], Mixed) else self.type_of(tensor)
        return kind if (kind.ragged if isinstance(kind, Rows) else kind is not None and kind.shaped) else None

    def _lawful(self, inputs: Sequence[Tensor]) -> bool:
        """Whether numbers drawn with these parameters all have the same law."""
        entries = [self.entries.get(_key(part(tensor))) for tensor in inputs if tensor.numel() > 1]
        return all(entry is not None and entry[1] in (Constant.EQUAL, Constant.RANDOM) for entry in entries)

    def _constant(self, known: Known, inputs: Sequence[Tensor]) -> Constant:
        """Elementwise functions of equal, and of equally random, numbers are such again."""
        if known.name in ("lift_fresh", "lift_fresh_copy"):  # made of Python or NumPy numbers
            module, _, name = _reader()
            return Constant.RANDOM if _listed(DRAWING, module, name) else Constant.ANY
        if known.kind is not Kind.POINTWISE and known.name not in COPYING:
            return Constant.ANY
        found = [self.entries.get(_key(part(tensor))) for tensor in inputs if tensor.numel() > 1]
        kinds = [entry[1] if entry is not None else Constant.ANY for entry in found]
        if any(kind is not Constant.EQUAL and kind is not Constant.RANDOM for kind in kinds):
            return Constant.ANY
        return Constant.RANDOM if Constant.RANDOM in kinds else Constant.EQUAL

    def _types(self, known: Known, call: Call, count: int) -> list[Type]:
        if self.alone and known.name not in ("_local_scalar_dense", "equal"):
            return [Rows(WHOLE, 1) if self._whole(call) else Mixed(known.name)] * count
        if known.kind is Kind.POINTWISE:
            kind: Any = self._pointwise(call)
        elif known.handler is not None:
            kind = known.handler(call)
        else:
            kind = assumed(call, f"{known.name}, which is not in the table of operations")
        kinds = kind if isinstance(kind, list) else [kind] * count
        if self.ragged and known.name.rstrip("_") not in PLACING and any(map(self._shaped, call.tensors())):
            kinds = [found._replace(shaped=True) if isinstance(found, Mixed) else found and found._replace(ragged=True)
                     for found in kinds]  # fmt: skip
        if known.name not in AGREEING:
            kinds = [found._replace(agrees=None) if isinstance(found, Mixed) and found.agrees is not None else found
                     for found in kinds]  # fmt: skip
        if self.shuffled and known.name.rstrip("_") not in ORDERED:
            kinds = self._still_shuffled(call, kinds)
        return kinds if len(kinds) == count else (kinds + [Mixed(known.name)] * count)[:count]

    def _still_shuffled(self, call: Call, kinds: list[Type]) -> list[Type]:
        """An operation that does not say that its result is in another order than its arguments were has a doubt."""
        given = (self.type_of(tensor) for tensor in call.tensors())
        if all(not isinstance(kind, Rows) or kind.slots is None for kind in given):
            return kinds
        reason = f"{call.name} of rows whose order depends on several samples"
        return [kind.doubted(reason) if isinstance(kind, Rows) and kind.slots is None else kind for kind in kinds]

    def _whole(self, call: Call) -> bool:
        """Of a row alone: nothing reaches over its own memory."""
        return not any(isinstance(self.type_of(tensor), Mixed) for tensor in call.tensors())

    def _pointwise(self, call: Call) -> Type:
        out = call.out if isinstance(call.out, Tensor) else next(iter(tensors_of([call.out])))
        kind = combined(call, [broadcast(tensor, out.ndim) for tensor in call.tensors()])
        if call.name == "add" and isinstance(kind, Rows) and kind.doubt and not out.is_floating_point():
            for tensor in call.tensors():  # places of the samples' own, to which those of the samples are added
                own = self.type_of(tensor)
                if isinstance(own, Rows) and not own.doubt and own.axis == 0:
                    self.remember(tensor)
        return kind

    def _store(self, result: Tensor, kind: Type, constant: Constant) -> None:
        own = part(result)
        if own.dtype in COARSE_DTYPES:
            self.coarse = True
        if kind is None:
            self._note(own, constant)
        elif isinstance(kind, Mixed) or (kind.ragged and not own.numel()):
            kind = kind if isinstance(kind, Mixed) else Mixed("nothing that was selected", shaped=True)
            self.ragged = self.ragged or kind.shaped
            self._note(own, kind)
        elif own.numel():
            self.ragged = self.ragged or kind.ragged
            self.shuffled = self.shuffled or kind.slots is not None
            self._note(
                own, stored(kind, own) if _fits(kind, own) else Mixed("a result of another shape than was expected")
            )

    # -- writes in place

    def _before(self, known: Known, args: tuple[Any, ...]) -> Tensor | None:
        """What a tensor of constants held before numbers of the batch are computed into it: whether it is equal for each."""
        if 0 not in known.written or known.kind is not Kind.POINTWISE or not isinstance(args[0], Tensor) or self.alone:
            return None
        entry = self.entries.get(_key(part(args[0])))
        if entry is None or entry[1] is not Constant.ANY or all(self.type_of(t) is None for t in tensors_of(args[1:])):
            return None
        own = part(args[0]).detach()
        self.held = own.new_empty(0).set_(own.untyped_storage().clone())  # type: ignore[no-untyped-call]
        held = self.held.as_strided(own.shape, own.stride(), own.storage_offset())
        self._note(held, Constant.ANY)
        return held

    def _was_uniform(self, made: Stored) -> bool:
        """Whether each row of this memory was the same before the last write."""
        held, self.held = self.held, None
        if held is None:
            return False
        numbers = held.view(torch.uint8)[made.base :]
        if len(numbers) != made.step * made.count:
            return False
        rows = numbers.view(made.count, made.step)
        return bool((rows == rows[:1]).all())

    def _refuse_writes(self, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before anything is written: into the caller's batch, or values of the batch into memory from outside."""
        for place in known.written:
            given = args[place] if isinstance(place, int) and place < len(args) else kwargs.get(str(place))
            for target in tensors_of([given]):
                own = part(target)
                if own.layout is not torch.strided or not own.numel():
                    continue
                found = self.entries.get(_key(own))
                if found is not None and isinstance(found[1], Stored) and found[1].end:
                    raise UnsupportedModel(
                        f"The loss writes into a tensor of its batch ({known.name}), which others share. Clone it first."
                    )
                if found is None:
                    self._refuse_outside(known, target, args, kwargs)

    def _refuse_outside(self, known: Known, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.type_of(target)  # refuses what an earlier step has left
        if any(self.type_of(tensor) is not None for tensor in tensors_of((*args, *kwargs.values()))):
            raise UnsupportedModel(
                f"The loss writes values of the batch ({known.name}) into a tensor {tuple(target.shape)} that was made "
                "outside of it (a buffer, a memory bank, a codebook): records of one step would reach the gradients "
                "of the next. Use out-of-place operations, model.eval(), or replace the layer."
            )

    def _write(self, known: Known, call: Call, args: tuple[Any, ...]) -> None:
        targets = [args[place] if isinstance(place, int) else call.kwargs.get(place) for place in known.written]
        flat = list(tensors_of(targets))
        if known.kind in (Kind.FILLED, Kind.RANDOM):
            given = [tensor for tensor in call.tensors() if not any(tensor is target for target in flat)]
            kinds: list[Type] = [
                combined(call, [broadcast(tensor, target.ndim) for tensor in given]) for target in flat
            ]
        elif known.name == "copy_":
            kinds = [combined(call, [broadcast(call.args[1], call.args[0].ndim)])]
        elif all(self.type_of(tensor) is None for tensor in call.tensors()):
            kinds = [None] * len(flat)
        else:
            kinds = self._types(known, call, len(flat))
        made = self._constant(known, call.tensors())
        for target, kind in zip(flat, kinds, strict=True):
            self._overwrite(part(target), kind, known, made)
        for result in tensors_of([call.out]):
            if not any(result is target for target in flat) and _key(part(result)) not in self.entries:
                self._store(result, kinds[0], Constant.ANY)

    def _overwrite(self, target: Tensor, kind: Type, known: Known, made: Constant) -> None:
        key = _key(target)
        known_entry = self.entries.get(key)
        if known_entry is None and kind is None:
            return
        entry = Constant.ANY if known_entry is None else known_entry[1]
        if isinstance(kind, Rows) and not _fits(kind, target):
            kind = Mixed("a result of another shape than was expected")
        if self.alone and isinstance(kind, Rows) and not isinstance(entry, Mixed):
            self._note(target, stored(kind, target))
            return
        whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
        if (isinstance(entry, Stored) and entry.ragged) or (isinstance(entry, Mixed) and entry.shaped):
            if whole and kind is None:  # its shape still depends on values
                return
            kind = self._shaped_by(target, entry, kind)
        if kind is None:
            self._overwrite_by_constant(target, entry, known, whole, made)
        elif isinstance(kind, Mixed):
            self._note(target, kind if whole or not isinstance(entry, Stored) else _doubted(entry, kind.reason))
        else:
            self._note(target, self._joined(target, kind, entry, whole))

    def _shaped_by(self, target: Tensor, entry: Stored | Mixed, kind: Type) -> Type:
        """What is written into a tensor whose shape depends on values: its own rows, or it is mixed."""
        if isinstance(kind, Mixed):
            return kind._replace(shaped=True)
        there = located(entry, target, self.num_samples) if isinstance(entry, Stored) else None
        if kind is None or (there is not None and there.axis == kind.axis and rows_module.alike(there, kind)):
            return kind
        return Mixed("a write into a tensor whose shape depends on values of the batch", shaped=True)

    def _overwrite_by_constant(self, target: Tensor, entry: Entry, known: Known, whole: bool, made: Constant) -> None:
        if isinstance(entry, Constant):
            kept = {Kind.FILLED: Constant.EQUAL, Kind.RANDOM: Constant.RANDOM}.get(known.kind, made)
            self._note(target, kept if whole else Constant.ANY)
        elif whole and known.kind in (Kind.FILLED, Kind.RANDOM):
            self._note(target, Constant.EQUAL if known.kind is Kind.FILLED else Constant.RANDOM)
        elif isinstance(entry, Stored) and not self.alone:
            there = located(entry, target, self.num_samples)
            if there is not None and there.doubt:
                self._note(target, _doubted(entry, there.doubt))
                return
            every = there is not None and there.count == entry.count and (there.axis != WHOLE or entry.count == 1)
            drawn = known.kind is Kind.FILLED or known.kind is Kind.RANDOM or made is not Constant.ANY
            if not every or there is None or not (drawn or rows_module.uniform(target, there, there.axis)):
                self._note(target, _doubted(entry, "a write of constants that differ between places in the batch"))

    def _joined(self, target: Tensor, kind: Rows, entry: Entry, whole: bool) -> Entry:
        """What the memory of a tensor is after rows were written into it."""
        if self.alone:
            return entry if isinstance(entry, Mixed) else stored(Rows(WHOLE, 1), target)
        if isinstance(entry, Mixed):
            return stored(kind, target) if whole else entry
        if isinstance(entry, Constant):
            made = stored(kind, target) if whole else self._beginning(target, kind)
            if made is None:
                return Mixed("a write into a part of a tensor")
            if not whole and entry is not Constant.EQUAL and not self._was_uniform(made):
                made.doubt = made.doubt or "a write into a tensor whose other values differ between positions"
            return made
        there = located(entry, target, self.num_samples)
        if there is None or there.axis != kind.axis or not rows_module.alike(there, kind):
            return stored(kind, target) if whole else Mixed("a write over other samples")
        return _doubted(entry, kind.doubt) if kind.doubt else entry

    def _beginning(self, target: Tensor, kind: Rows) -> Stored | None:
        """Rows of all of a tensor, from those of the first part that is written."""
        whole = target._base if target._base is not None else target
        if kind.axis != WHOLE and kind.ids is None and kind.count == self.num_samples:
            made = stored(kind, target)
            made.base = whole.storage_offset() * whole.element_size()
            return made
        ids = rows_module.spread(kind) if kind.axis != WHOLE else kind.ids
        for axis, length in enumerate(whole.shape):  # one sample, or some: the axis on which they lie at their places
            if length != self.num_samples or ids is None:
                continue
            made = stored(Rows(axis, length, doubt=kind.doubt), whole)
            there = located(made, target, self.num_samples)
            if there is not None and there.axis == kind.axis and rows_module.alike(there, kind):
                return made
        return None


def _fits(kind: Rows, tensor: Tensor) -> bool:
    """Whether a tensor has the shape that its rows say."""
    if kind.axis == WHOLE:
        return True
    return kind.axis < tensor.ndim and tensor.shape[kind.axis] == kind.pre * kind.count * kind.post


def _doubted(entry: Stored, reason: str) -> Stored:
    return replace(entry, doubt=entry.doubt or reason)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0  # type: ignore[no-any-return]


def _listed(listed: Sequence[tuple[str, str]], module: str, name: str) -> bool:
    return any(fnmatch(module, place) and fnmatch(name, function) for place, function in listed)


def _reader() -> tuple[str, int, str]:
    """Module and line of the code that reads a number, and its function."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "?"))
        if module.startswith("dpfunc.engines.rules"):
            return module, frame.f_lineno, frame.f_code.co_qualname
        if not any(module == prefix or module.startswith(f"{prefix}.") for prefix in PLUMBING):
            return module, frame.f_lineno, frame.f_code.co_qualname
        frame = frame.f_back  # type: ignore[assignment]
    return "?", 0, ""


def _checks_itself() -> bool:
    """Whether a shape is read by torch's recurrent layers, which only check it, or by an engine, and not by the loss."""
    frame = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "?"))
        if module not in WATCHING:
            return module in CHECKING_SHAPES or module.startswith("dpfunc.engines.")
        frame = frame.f_back  # type: ignore[assignment]
    return False


def current_trace() -> Trace | None:
    """The trace around the caller, if there is one."""
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Trace)]
    return modes[-1] if modes else None


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, the engine's own operations on plain tensors are not followed."""
    if torch.compiler.is_compiling():
        yield
        return
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        yield


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
def kept_apart(batch: Batch) -> Iterator[Trace]:
    """Inside, rows are computed alone; what they leave in memory is not used by others, also of later steps.

    Raises:
        UnsupportedModel: it is.
    """
    trace = Trace(1, alone=True, recording=True)
    with following(trace, batch), PythonValues(trace):
        yield trace
