"""One forward and backward pass over some rows: a `TorchFunctionMode` sees each function that the loss calls.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree

from dpfunc._utils.memory import refuse_out_of_memory
from dpfunc._utils.parts import is_dtensor
from dpfunc._utils.processes import failed, on_any_process
from dpfunc.batches import own_memory, take, tree_leaves
from dpfunc.engines._batching import by_rows, verified
from dpfunc.engines._book_keeping import WITH_PARAMETERS, registered
from dpfunc.engines._composite import COMPOSITES
from dpfunc.engines._draws import RANDOM, OwnDraws, inside_vmap, random_operation, without_form
from dpfunc.engines._ghost import SwappedParameters
from dpfunc.engines._guards import loss as checks
from dpfunc.engines._guards.operations import UNDECLARED, refuse_undeclared
from dpfunc.engines._guards.row_memory import WRITING, overlaps
from dpfunc.engines._levels import (
    MOST_RAISED,
    Handler,
    Levels,
    NeedsLoop,
    NoRules,
    OutsideTransforms,
    Pass,
    PassResult,
    Stop,
    at_a_level,
    custom_functions,
    inside,
    is_row,
    is_set_from_inside,
    levels,
    made_up_numbers,
    outside_levels,
    parts_of,
    run_backward,
    seen_as_compiling,
    transforms_seen,
)
from dpfunc.engines._libraries import OF_LIBRARIES
from dpfunc.engines._native import WITHOUT_PARAMETERS
from dpfunc.engines._per_sample import Kept
from dpfunc.engines._reads import READS, any_row, numbers, stacked
from dpfunc.engines._recurrent import RECURRENT_LAYERS
from dpfunc.engines._rules import REGISTERED
from dpfunc.engines._rules.table import ParameterUse
from dpfunc.errors import DPFuncError, UnsupportedModel
from dpfunc.types import Batch, LossFn, Params

_Found = TypeVar("_Found")

# What operations of torch, and losses, raise. Other errors of a loss come through as they are.
ORDINARY = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, OSError)

_FACTORIES = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (
        "zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full", "zeros_like", "ones_like",
        "empty_like", "full_like", "tensor", "arange", "eye",
    )
    if hasattr(owner, name)
)  # fmt: skip
_UNWRITTEN = frozenset((torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided))
_WRITES = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor, torch._C._nn)
    for name in dir(owner)
    if (name.endswith("_") and not name.startswith("_")) or (owner is Tensor and name in WRITING)
)
_NESTED = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward))
_GRAD_FN: Any = vars(torch._C.TensorBase)["grad_fn"].__get__
_HOOKING = frozenset((_GRAD_FN, Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook))
_NAMESPACES_OF_TORCH = ("aten", "prims", "prim", "profiler")


@dataclass(frozen=True)
class Settings:
    """Settings of a pass; the next ones are tried where rows cannot be computed so.

    Args:
        rules: operations on parameters go to their rules. own_memory: what the loss makes (zeros, full, ...) has memory
            for each row, into which numbers of the row can be written. plain_functions: custom functions that torch's
            transforms do not take run as nodes of the level of gradients, operation by operation. since: why the
            settings before these did not do.
    """

    rules: bool = True
    own_memory: bool = False
    plain_functions: bool = False
    since: str = field(default="", compare=False)


@dataclass(frozen=True)
class Rows:
    """Rows for one pass, their positions in the batch, and how they draw."""

    loss_fn: LossFn
    params: Params
    batch: Batch
    positions: Sequence[int]
    source: SwappedParameters | None = None
    draws: Callable[[Sequence[int], Tensor], OwnDraws] = OwnDraws

    @property
    def are_split(self) -> bool:
        """True if parameters are split over processes (tensor parallel)."""
        return self.source is None and any(map(is_dtensor, self.params.values()))

    def some(self, places: Sequence[int]) -> Rows:
        """The rows at these places."""
        if len(places) == len(self.positions):
            return self
        batch = take(self.batch, torch.tensor(places, device="cpu"))
        return replace(self, batch=batch, positions=[self.positions[place] for place in places])


class _RowPass(Pass):
    """One forward and backward pass over some rows: it answers every torch function that the loss calls."""

    def __init__(
        self, rows: Rows, over: Levels, params: Params, settings: Settings, uses: dict[object, ParameterUse],
        kept: Kept, allowed: float,
    ) -> None:  # fmt: skip
        leaves = {name: over.leaf(param) for name, param in params.items()}
        super().__init__(over, params, leaves, uses, kept.take, kept.counts, settings.rules, allowed)
        self._modes, self.raised = checks.open_modes(), 0
        self.settings, self._rows, self._seed = settings, rows, torch.default_generator.get_state()
        self._handlers = _HANDLERS_WITH_RULES if settings.rules else _HANDLERS_WITHOUT_RULES
        self._stand_ins = {id(params[name]): leaf for name, leaf in leaves.items()} if rows.source is not None else {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        handlers, kwargs = self._handlers.get(func), kwargs or {}
        if self._stand_ins and func not in _OF_MEMORY:
            stands = self._stand_ins
            args, kwargs = pytree.tree_map_only(
                Tensor, lambda leaf: stands.get(id(leaf), leaf), (tuple(args), dict(kwargs))
            )
        if handlers is _NO_HANDLERS:
            return func(*args, **kwargs)
        try:
            if checks.open_modes() != self._modes and (names := checks.entered_modes(self._modes)):
                self.stop(NeedsLoop(f"the loss enters the mode {names}, which would see all rows at once"))
            own_class = checks.refuse_earlier(args, kwargs)
            if own_class is not None:
                self.stop(NeedsLoop(f"tensors of the class {own_class.__qualname__} compute all rows at once"))
            if REGISTERED and func in REGISTERED and self.rules:
                found = registered(self, func, args, kwargs)
                if found is not NotImplemented:
                    return found
            for handler in (_default(func),) if handlers is None else handlers:
                found = handler(self, func, args, kwargs)
                if found is not NotImplemented:
                    return found
            return NotImplemented  # which the last handler never gives
        except (Stop, DPFuncError, *ORDINARY) as error:  # also where code of the loss catches it
            if self.stopped is None:
                reason = f"{type(error).__name__}: {(str(error).splitlines() or ['-'])[0]}"
                self.stopped = error if isinstance(error, (Stop, DPFuncError)) else NeedsLoop(reason)
            self.raised += 1
            if self.raised > MOST_RAISED:
                return self._made_up_answer(func, args, kwargs)
            raise

    def _made_up_answer(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A made-up answer for a loss that catches each end of its pass and tries again; its results are dropped."""
        if func in _NESTED:  # gradients, of which made-up numbers have none
            return tuple(made_up_numbers(tree_leaves(args[1:2] or kwargs.get("inputs")), self.raised))
        args, kwargs = made_up_numbers((tuple(args), dict(kwargs)), self.raised)
        with outside_levels():
            return func(*args, **kwargs)

    def _by_parts(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Functions of torch that are written in Python, with their parts seen; operations of others are refused."""
        if isinstance(func, (OpOverload, OpOverloadPacket)):
            refuse_undeclared(func)
            name = func.namespace if isinstance(func, OpOverload) else func._qualified_op_name.split("::")[0]
            if name not in _NAMESPACES_OF_TORCH and any_row((args, kwargs)):
                known = OF_LIBRARIES.get(name)
                found = NotImplemented if known is None else known(self, func, args, kwargs)
                if found is not NotImplemented:
                    return found
                self.stop(NeedsLoop(f"the operation {func} is of another library, and may mix rows that it is given"))
            return by_rows(self, func, args, kwargs)
        parts = parts_of(func)
        return by_rows(self, func, args, kwargs) if parts is None else self.seen(parts, args, kwargs)

    @cached_property
    def _draws(self) -> OwnDraws:
        return self._rows.draws(self._rows.positions, self._seed)

    def returned(self, losses_1: Any, aux: Any) -> None:
        """Check what the loss has returned; the backward pass begins."""
        if self.stopped is not None:
            raise self.stopped
        self.in_backward = True
        transforms_seen(True)
        with torch._C.DisableTorchFunction():
            checks.check_depends(checks.check_losses(losses_1).requires_grad, reads=bool(self.reads))
            checks.check_aux(aux)
            if self.settings.plain_functions:  # otherwise torch refuses reentrant checkpoints
                checks.refuse_reentrant((), losses_1)

    def random(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        why = without_form(kwargs)
        if why:
            self.stop(NeedsLoop(why))
        return random_operation(self._drawn, self._draws, func, args, kwargs)

    def _drawn(self, values_B: Tensor) -> Tensor:
        if inside_vmap(self.levels.grad):
            self.stop(NeedsLoop("the loss draws inside of a transform of its own (torch.func.vmap)"))
        return self.levels.row(values_B)

    def check_draws(self) -> None:
        """End the pass where an operation that dpfunc does not know has drawn for all rows together."""
        with OutsideTransforms():  # bytes on the CPU: no device is read
            as_before = torch.default_generator.get_state().numpy().tobytes() == self._seed.numpy().tobytes()
        if "_draws" in vars(self) or not as_before:
            self._draws.check_known()

    def nested(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A backward pass inside of the loss, or of its backward pass: it takes gradients that no rule knows of."""
        if self.rules:
            self.stop(NoRules("the loss has a backward pass of its own"))
        return NotImplemented

    def hooked(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A hook on a parameter, or a node that the loss gets: hooks need gradients that a rule does not form."""
        given = args[0]
        if self.rules and (func is _GRAD_FN or self.plain(given) is not None or id(given) in self.turned):
            self.stop(NoRules("the loss has a hook on a parameter or a node"))
        return NotImplemented

    def custom_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A custom function: a rule for vmap, its own or generated, would see all rows, and this mode not its parts."""
        custom = args[0]
        of_shards = custom.__module__.startswith("torch.distributed.fsdp.")  # which return what they are given
        if (custom.generate_vmap_rule and not of_shards) or custom.vmap is not torch.autograd.Function.vmap:
            self.stop(NeedsLoop(f"{custom.__name__} has a rule for vmap, which sees all rows"))
        return NotImplemented

    def written(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A write in place: none into parameters, whose memory is the caller's."""
        params = [param for _, param in self._params.values() if not is_row(args[0]) and not is_dtensor(param)]
        if overlaps(args[0]):
            self.stop(NeedsLoop(f"{func.__name__} writes into memory that several places share"))
        target = inside(args[0])
        if any(target.untyped_storage()._cdata == param.untyped_storage()._cdata for param in params):
            raise UnsupportedModel(f"The loss writes into a parameter ({func.__name__}). Use out-of-place operations.")
        return NotImplemented

    def factory(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A tensor that the loss makes, with memory for each row; memory that was not written is cleared."""
        if func is torch.arange:
            args, kwargs = numbers(self, (tuple(args), dict(kwargs)))
        if func is torch.tensor and args:
            args = (stacked(self, args[0]), *args[1:])
            func = _copied if is_row(args[0]) else func
        found = func(*args, **kwargs)
        if func in _UNWRITTEN and isinstance(found, Tensor):
            with torch.no_grad():
                found.zero_()  # it may hold numbers of other rows
        return self._with_own_memory(found) if self.settings.own_memory and not kwargs.get("requires_grad") else found

    def _with_own_memory(self, found: Any) -> Any:
        """A tensor that is the same for all rows, with memory for each."""
        if not isinstance(found, Tensor) or is_row(found) or functorch.maybe_current_level() is None:
            return found  # without a level, it is a tensor of torch's tracing
        value = inside(found)
        with OutsideTransforms():
            values_B = value.unsqueeze(0).repeat(self.levels.rows, *[1] * value.ndim)
        return self.levels.row(values_B)


class _PlainFunctions(_RowPass):
    """A pass whose custom functions are nodes of the level of gradients; see `custom_functions` in `_levels.py`."""

    depth = 0

    def check_graph(self, given: Any) -> None:
        """End the pass where a custom function has returned a tensor that no operation has made at these levels."""
        custom = torch.autograd.function.BackwardCFunction
        for value in tree_leaves(given):
            if isinstance(value, Tensor) and not at_a_level(value) and isinstance(value.grad_fn, custom):
                self.stop(NeedsLoop("a custom function returns a tensor that no operation of torch made (from_numpy)"))

    def returned(self, losses_1: Any, aux: Any) -> None:
        with torch._C.DisableTorchFunction():
            self.check_graph(losses_1)
        super().returned(losses_1, aux)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.in_backward:
            return super().__torch_function__(func, types, args, kwargs)
        if self.stopped is None:
            self.check_graph((args, kwargs))
        self.depth += 1
        transforms_seen(True)
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            self.depth -= 1
            transforms_seen(bool(self.depth))


def _copied(
    values: Tensor, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, pin_memory: bool = False
) -> Tensor:
    """`torch.tensor` of a tensor, which vmap does not have."""
    copy = values.detach().to(dtype=dtype, device=device, copy=True)
    return copy.requires_grad_() if requires_grad else copy


# Functions of the memory of parameters, by which `fully_shard` gathers and frees them.
_DATA: Any = Tensor.data
_OF_MEMORY = frozenset((Tensor.untyped_storage, _DATA.__get__, _DATA.__set__, Tensor.set_))


_OF_PYTHON = (type(lambda: None), OpOverload, OpOverloadPacket)


def _data_set(mode: Pass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`weight.data += change` sets the tensor that is there already, after a write in place; levels allow no other."""
    if is_set_from_inside(args):
        mode.stop(NeedsLoop("the loss sets the data of a tensor from outside of it"))
    target, value = (checks.plain_memory(each) for each in args)
    if target is None or value is None or not at_a_level(args[0]):
        return NotImplemented
    same = target.data_ptr() == value.data_ptr() and args[0].shape == args[1].shape
    return None if same and target.stride() == value.stride() else NotImplemented


# Shapes, dtypes and the like, which are the same for all rows: these functions have no handlers.
_METADATA = (
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_leaf", "is_sparse", "is_nested")
    ),
    Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.numel,
)  # fmt: skip
_NO_HANDLERS: tuple[Handler, ...] = ()


def _as_it_is(mode: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(*args, **kwargs)


# Functions that compute nothing of rows by a batching rule of torch, or whose parts the mode sees by themselves.
_UNBATCHED = frozenset((*_NESTED, *_HOOKING, torch._functorch.autograd_function.custom_function_call, _DATA.__set__))
_DIRECT = verified() | _UNBATCHED


def _default(func: Any) -> Handler:
    """The handler of a function that no table names: call it unchanged, call its parts, or go row by row."""
    if func in _DIRECT:
        return _as_it_is
    return _RowPass._by_parts if isinstance(func, _OF_PYTHON) else by_rows


# Handlers of the pass itself. Of several handlers of a function the first answers that does not return NotImplemented.
_PASS_HANDLERS: Mapping[Any, Handler] = {
    **dict.fromkeys(_WRITES, _RowPass.written),
    **dict.fromkeys(_NESTED, _RowPass.nested),
    **dict.fromkeys(_HOOKING, _RowPass.hooked),
    **dict.fromkeys(_FACTORIES | _UNWRITTEN, _RowPass.factory),
    **dict.fromkeys(RANDOM, _RowPass.random),
    torch._functorch.autograd_function.custom_function_call: _RowPass.custom_function,
    Tensor.requires_grad_: lambda mode, func, args, kwargs: args[0] if args[0].requires_grad else NotImplemented,
    _DATA.__set__: _data_set,
    **RECURRENT_LAYERS,
    **dict.fromkeys(COMPOSITES, lambda mode, func, args, kwargs: mode.seen(COMPOSITES[func], args, kwargs)),
    **dict.fromkeys(UNDECLARED, lambda mode, func, args, kwargs: refuse_undeclared(func)),
}


def _handlers_by_function(*tables: Mapping[Any, Handler]) -> dict[Any, tuple[Handler, ...]]:
    functions = _DIRECT.union(*tables)
    found = {func: (*(table[func] for table in tables if func in table), _default(func)) for func in functions}
    return {**found, **dict.fromkeys(_METADATA, _NO_HANDLERS)}


_HANDLERS_WITH_RULES = _handlers_by_function(_PASS_HANDLERS, WITH_PARAMETERS, WITHOUT_PARAMETERS, READS)
_HANDLERS_WITHOUT_RULES = _handlers_by_function(_PASS_HANDLERS, READS)


def run_pass(
    rows: Rows, settings: Settings, uses: dict[object, ParameterUse], kept: Kept, allowed: float
) -> PassResult:
    """Losses of rows that go the same way; their gradients by rules go to `kept`. `allowed`: see `Pass`."""
    num_rows = len(rows.positions)
    checks.forget_gone()
    if rows.source is None:
        params = {name: param.detach() for name, param in rows.params.items()}
    else:  # FSDP holds parts: tensors in place of them
        params = rows.source.leaves(rows.params)
    for kind in set[Any](map(type, tree_leaves((params, rows.batch)))):
        if checks.computes_itself(kind):
            raise NeedsLoop(f"tensors of the class {kind.__qualname__} compute all rows at once")
    kind = _PlainFunctions if settings.plain_functions else _RowPass
    with levels(num_rows) as over:
        mode = kind(rows, over, params, settings, uses, kept, allowed)
        with OutsideTransforms():
            record = pytree.tree_map(lambda leaf: over.row(leaf.unsqueeze(1)), own_memory(rows.batch))
        given = params if rows.source else mode.leaves
        try:
            with seen_as_compiling(), checks.backward_inside(), mode, custom_functions(settings.plain_functions):
                losses_1, aux = checks.split_aux(rows.loss_fn(dict(given), record))
                mode.returned(losses_1, aux)
                found = run_backward(losses_1, (mode.anchor, *mode.leaves.values()))[1:]
        except (*ORDINARY, struct.error) as error:  # struct.unpack makes an error of its own of a Stop inside of it
            refuse_out_of_memory(error)
            if mode.stopped is not None:
                raise mode.stopped from error
            raise
        stopped = mode.stopped or mode.disagreed
        if stopped is not None:
            raise stopped
        with OutsideTransforms():
            mode.check_draws()
        rest = {name: over.all_rows(grad) for name, grad in zip(params, found, strict=True) if grad is not None}
        with OutsideTransforms():
            losses_B = over.all_rows(losses_1)[:, 0].detach()
            if aux is not None:
                aux = pytree.tree_map(lambda leaf: over.all_rows(leaf)[:, 0].detach(), aux)
    read = mode.reads, mode.reads_of_constants
    return PassResult(losses_B, rest, params, mode.credited, aux, tuple(mode.by_row), *read)


def first_settings_that_work(first: Settings, attempt: Callable[[Settings], _Found]) -> tuple[_Found, Settings]:
    """The first result without an error, and its settings; `NeedsLoop`, with the last reason, if there is none."""
    reason, unruled, unseen = "", False, False
    others = product((first.rules, False), (first.own_memory, True), (False, True))
    for tried in dict.fromkeys((first, *(Settings(*flags) for flags in others))):
        if (tried.rules and unruled) or (tried.plain_functions and unseen):
            continue
        try:
            return attempt(tried), replace(tried, since=reason or tried.since)
        except DPFuncError:
            raise
        except (NoRules, NeedsLoop, *ORDINARY) as error:
            failed(error)
            refuse_out_of_memory(error)
            unruled |= isinstance(error, NoRules)
            unseen |= "randomness error mode" in str(error)  # which plain functions would allow
            reason = (str(error).splitlines() or ["-"])[0]
            on_any_process(True)  # the next attempt is another message
    raise NeedsLoop(reason)
