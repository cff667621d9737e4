"""The engine `vmap(grad(loss))`: rows are apart by construction; rules make it fast and are never needed to be right.

A row is a batch of one at the level of vmap, and the forward and the backward pass run inside of it, at a level of
grad. A mode of torch functions, active during the call only, gives operations on parameters to their rules
(`islands.py`), answers what Python reads (`reads.py`) and draws random numbers of each row (`draws.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from dpfunc._utils.dtensor import is_dtensor
from dpfunc._utils.memory import refuse_out_of_memory
from dpfunc.batches import batch_size
from dpfunc.engines import four_bits
from dpfunc.engines.cross_entropy import cross_entropy
from dpfunc.engines.draws import RANDOM, OwnDraws, positions_of, random_operation
from dpfunc.engines.ghost import Ghost, Measured, Source, Weighted, differs
from dpfunc.engines.guards.earlier_rows import UNDECLARED, forget_gone, refuse_earlier, refuse_undeclared
from dpfunc.engines.guards.lockstep import failed, in_lockstep, on_any_process
from dpfunc.engines.guards.loss import (
    check_differentiable,
    parameters_unchanged,
    refuse_reentrant,
    unfollowed_code_is_an_error,
)
from dpfunc.engines.guards.python_state import note_kept, python_state, refuse_counting, refuse_kept, was_kept
from dpfunc.engines.guards.scope import backward_inside
from dpfunc.engines.islands import (
    FORMS,
    NATIVE,
    OTHER_FORMS,
    TURNING,
    native,
    operation,
    other_form,
    recurrent,
    registered,
    turned,
)
from dpfunc.engines.levels import (
    Below,
    Levels,
    below_both,
    custom_functions,
    inside,
    is_row,
    levels,
    of_rows,
    run_backward,
    transforms_seen,
)
from dpfunc.engines.loop import is_warm, rows_alone, warm_up
from dpfunc.engines.numerics import exact, precision_now
from dpfunc.engines.opened import opened
from dpfunc.engines.per_sample import Dense, PerSample, PerSampleGrad, Zeros, add
from dpfunc.engines.reads import READS, Alone, Diverged, NoRules, Stop, numbers, stacked
from dpfunc.engines.rules import REGISTERED
from dpfunc.engines.rules.composite import COMPOSITES
from dpfunc.engines.rules.recurrent import RECURRENT
from dpfunc.engines.rules.table import Use
from dpfunc.engines.sequences import as_padded, layer_by_layer, pack, pad
from dpfunc.errors import DPFuncError, UnsupportedModel
from dpfunc.types import Batch, LossFn, Params, PerSampleGrads

_log = logging.getLogger("dpfunc")

DEFAULT_BUDGET = 2**30
# What operations of torch, and losses, raise. Other errors of a loss come through as they are.
ORDINARY = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, OSError)
# Passes over one batch after which rows that still do not agree are computed alone.
_MAX_PASSES = 64

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
    for owner in (torch, Tensor)
    for name in dir(owner)
    if name.endswith("_") and not name.startswith("_")
)
_NESTED = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward))
_GRAD_FN: Any = vars(torch._C.TensorBase)["grad_fn"].__get__
_HOOKING = frozenset((_GRAD_FN, Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook))
_OURS = ("aten", "prims", "prim", "profiler")


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


class FirstRead(Stop):
    """The loss is about to be told numbers of rows, before it has built what it keeps for their shape."""


@dataclass(frozen=True)
class Decision:
    """How the rows of the last step of a loss function were computed, and why.

    Args:
        engine: `"one pass"`, `"groups"` (of rows that agree on what Python reads) or `"loop"`. reason: in words.

    >>> Decision("one pass", "all rows together")
    Decision(engine='one pass', reason='all rows together')
    """

    engine: str
    reason: str


class Sink(Protocol):
    """What becomes of the gradients of a pass.

    Args:
        counts: name -> uses of the parameter in the forward pass, with a rule.
    """

    counts: dict[str, int]

    def take(self, name: str, grad: PerSampleGrad) -> None:
        """Take the gradients of one use of a parameter, in the backward pass."""
        ...


@dataclass(frozen=True)
class Rows:
    """Rows of a batch for one pass.

    Args:
        loss_fn, params: as for an engine. batch: the rows. positions: their places in the batch. source: of tensors
            that a module swaps in itself; None where parameters are arguments.
    """

    loss_fn: LossFn
    params: Params
    batch: Batch
    positions: Sequence[int]
    source: Source | None = None

    def some(self, places: Sequence[int]) -> Rows:
        """The rows at these places."""
        if len(places) == len(self.positions):
            return self
        chosen = torch.tensor(places)
        batch = pytree.tree_map(lambda leaf: leaf[chosen.to(leaf.device)], self.batch)
        return replace(self, batch=batch, positions=[self.positions[place] for place in places])


@dataclass(frozen=True)
class Passed:
    """What one pass over rows gives.

    Args:
        losses_B: of the rows. rest: gradients (B, *shape) by vmap and grad, of uses without a rule. params: without
            graph. disagreed: rows that do not agree on what Python reads, so that the pass counts for nothing.
        uses: that went to rules, in the order of the backward pass.
    """

    losses_B: Tensor
    rest: Mapping[str, Tensor]
    params: Params
    disagreed: Diverged | None
    uses: Sequence[Use]


class RowPass(TorchFunctionMode):
    """One forward and backward pass over some rows: every torch function that the loss calls passes here."""

    def __init__(
        self,
        rows: Rows,
        over: Levels,
        params: Params,
        settings: Settings,
        uses: dict[object, Use],
        sink: Sink,
    ) -> None:
        super().__init__()
        self.loss_fn, self.first_read, self.warm = rows.loss_fn, "", is_warm(rows.loss_fn, rows.batch)
        self.take, self.counts = sink.take, sink.counts
        self.disagreed: Diverged | None = None
        self.kept: tuple[object, ...] = ()
        self.unchanged = False
        self._depth = 0
        self.levels, self.settings, self.draws, self.uses = over, settings, OwnDraws(positions_of(rows.positions)), uses
        self.budget = DEFAULT_BUDGET
        self.noted: list[Use] = []
        self.turned: dict[int, tuple[Tensor, Tensor]] = {}
        self.leaves = {name: over.leaf(param) for name, param in params.items()}
        with Below():
            self.anchor = over.leaf(torch.zeros(()))
        self.stopped: Stop | DPFuncError | None = None
        self.in_backward = self.is_exact = False
        self._params = {id(leaf): (name, params[name]) for name, leaf in self.leaves.items()}
        self._stands = {id(params[name]): leaf for name, leaf in self.leaves.items()} if rows.source is not None else {}

    def plain(self, leaf: Tensor) -> tuple[str, Tensor] | None:
        """Name and value of a parameter, if this is one."""
        return self._params.get(id(leaf))

    def stop(self, stop: Stop) -> NoReturn:
        """End the pass, also where code of the loss catches the exception."""
        self.stopped = self.stopped or stop
        raise stop

    def expect(self, names: Iterable[str]) -> None:
        """Count uses of parameters of the forward pass."""
        if not self.in_backward:
            for name in names:
                self.counts[name] = self.counts.get(name, 0) + 1

    def differ(self, stop: Diverged) -> None:
        """End the pass where rows differ; in lockstep it goes on with the first row, since others wait for it."""
        if in_lockstep():
            self.disagreed = self.disagreed or stop
        else:
            self.stop(stop)

    def reading(self, read: str) -> None:
        """Note what the loss keeps, before Python learns anything of the rows."""
        if not self.warm:
            self.stop(FirstRead())
        if not self.first_read and not in_lockstep():  # FSDP keeps what it communicates
            with Below():
                self.kept, self.first_read = python_state(self.loss_fn), read

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Refuse a loss that inside changes what it keeps after it has begun to read numbers of rows.

        The first read was before the parameters of the pass were in the modules, or after: see `comparing`.
        """
        try:
            yield
        finally:
            if self.first_read and not self.unchanged:
                with Below(), torch._C.DisableTorchFunction():
                    note_kept(self.loss_fn, self.kept, self.first_read)
                if was_kept(self.loss_fn):
                    self.stopped = None  # an error of dpfunc, whatever else has ended the pass
                    refuse_kept(self.loss_fn)

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Compare what the loss keeps while the parameters of the pass are still in the modules."""
        try:
            yield
        finally:
            if self.first_read:
                with Below(), torch._C.DisableTorchFunction():
                    self.unchanged = python_state(self.loss_fn) == self.kept

    def begin_backward(self, losses: object) -> None:
        """Note that the backward pass of the losses begins."""
        self.in_backward = True
        transforms_seen(True)
        self.is_exact = isinstance(losses, Tensor) and _is_exact(losses.device)

    def backward_node(self) -> None:
        """End the pass where a node runs in a backward pass that is not that of the losses."""
        if not self.in_backward:
            self.stop(NoRules("the loss has a backward pass of its own"))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not self.settings.plain_functions or self.in_backward:
            return self._answer(func, args, kwargs)
        self._depth += 1
        transforms_seen(True)
        try:
            return self._answer(func, args, kwargs)
        finally:
            self._depth -= 1
            transforms_seen(bool(self._depth))

    def _answer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        handler = _HANDLERS.get(func)
        if self._stands and func not in _OF_MEMORY:
            args, kwargs = pytree.tree_map_only(Tensor, self._standing, (tuple(args), dict(kwargs or {})))
        if handler is _FACT:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        try:
            refuse_earlier(args, kwargs)
            if func in REGISTERED and self.settings.rules:
                found = registered(self, func, args, kwargs, self._seen)
                if found is not NotImplemented:
                    return found
            if handler is not None:
                found = handler(self, func, args, kwargs)
                if found is not NotImplemented:
                    return found
            elif isinstance(func, _OF_PYTHON):
                return self._opened(func, args, kwargs)
            return func(*args, **kwargs)
        except DPFuncError as error:
            self.stopped = self.stopped or error  # also where code of the loss catches it
            raise
        except ORDINARY as error:
            if self.stopped is None:
                self.stopped = Alone(f"{type(error).__name__}: {(str(error).splitlines() or ['-'])[0]}")
            raise

    def _standing(self, value: Tensor) -> Tensor:
        return self._stands.get(id(value), value)

    def _opened(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Functions of torch that are written in Python, with their parts seen; operations of others are refused."""
        if isinstance(func, (OpOverload, OpOverloadPacket)):
            refuse_undeclared(func)
            name = func.namespace if isinstance(func, OpOverload) else func._qualified_op_name.split("::")[0]
            if name not in _OURS and any(map(is_row, pytree.tree_leaves((args, kwargs)))):
                known = _OF_LIBRARIES.get(name)
                found = NotImplemented if known is None else known(self.levels, func, args, kwargs)
                if found is not NotImplemented:
                    return found
                self.stop(Alone(f"the operation {func} is of another library, and may mix the rows that it is given"))
            return func(*args, **kwargs)
        parts = opened(func)
        if parts is None:
            return func(*args, **kwargs)
        with self:
            return parts(*args, **kwargs)

    def _seen(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self:
            return func(*args, **kwargs)

    def composite(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An operation that is made of others, with its parts seen."""
        with self:
            return COMPOSITES[func](*args, **kwargs)

    def random(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Random numbers of each row."""
        if kwargs.get("generator") is not None:
            self.stop(Alone("the loss draws from a generator of its own"))
        return random_operation(self.levels.row, self.draws, func, args, kwargs)

    def nested(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A backward pass inside of the loss."""
        if self.settings.rules and not self.in_backward:
            self.stop(NoRules("the loss has a backward pass of its own"))
        return NotImplemented

    def hooked(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A hook on a parameter, or a node that is given away: hooks get gradients that a rule would not form."""
        given = args[0]
        if self.settings.rules and (func is _GRAD_FN or self.plain(given) is not None or id(given) in self.turned):
            self.stop(NoRules("the loss has a hook on a parameter or a node"))
        return NotImplemented

    def function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A custom function: its own rule for vmap would see all rows."""
        custom = args[0]
        if not custom.generate_vmap_rule and custom.vmap is not torch.autograd.Function.vmap:
            self.stop(Alone(f"{custom.__name__} has a rule for vmap of its own, which sees all rows"))
        return NotImplemented

    def written(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A write in place: none into parameters, whose memory is the caller's."""
        target = None if is_row(args[0]) else inside(args[0])
        if target is not None and any(_is_memory_of(target, param) for _, param in self._params.values()):
            raise UnsupportedModel(f"The loss writes into a parameter ({func.__name__}). Use out-of-place operations.")
        return NotImplemented

    def made(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A tensor that the loss makes, with memory for each row; that nobody has written into is cleared."""
        if func is torch.arange:
            args, kwargs = numbers(self, (tuple(args), dict(kwargs)))
        if func is torch.tensor and args:
            args = (stacked(self, args[0]), *args[1:])
            func = _copied if is_row(args[0]) else func
        found = func(*args, **kwargs)
        if func in _UNWRITTEN and isinstance(found, Tensor):
            with torch.no_grad():
                found.zero_()  # it may hold numbers of other rows
        if not self.settings.own_memory or kwargs.get("requires_grad"):
            return found
        if not isinstance(found, Tensor) or is_row(found):
            return found
        value = inside(found)
        with Below():
            values_B = value.unsqueeze(0).repeat(self.levels.rows, *(1 for _ in range(value.ndim)))
        return self.levels.row(values_B)


def _copied(
    values: Tensor, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, pin_memory: bool = False
) -> Tensor:
    """`torch.tensor` of a tensor, which vmap does not have."""
    copy = values.detach().to(dtype=dtype, device=device, copy=True)
    return copy.requires_grad_() if requires_grad else copy


# Functions of the memory of parameters, by which `fully_shard` gathers and frees them.
_DATA: Any = Tensor.data
_OF_MEMORY = frozenset((Tensor.untyped_storage, _DATA.__get__, _DATA.__set__, Tensor.set_))


def _is_memory_of(target: Tensor, param: Tensor) -> bool:
    return not is_dtensor(param) and target.untyped_storage()._cdata == param.untyped_storage()._cdata


_OF_PYTHON = (type(lambda: None), OpOverload, OpOverloadPacket)


def _experts(over: Levels, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The products of experts of Transformers where code is transformed, by torch's own operation."""
    if func.__name__.split(".")[0] != "grouped_mm_fallback":
        return NotImplemented
    bound = dict(zip(("input", "weight", "offs"), args, strict=False), **kwargs)
    return torch.nn.functional.grouped_mm(bound["input"], bound["weight"], offs=bound["offs"])


_OF_LIBRARIES = {"bitsandbytes": four_bits.product, "transformers": _experts}


def _operation(mode: RowPass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return operation(mode, func, args, kwargs) if mode.settings.rules else NotImplemented


def _native(mode: RowPass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return native(mode, func, args, kwargs) if mode.settings.rules else NotImplemented


def _recurrent(mode: RowPass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    bound, packed = as_padded(mode, args, kwargs)
    if bound["train"] and bound["dropout"] and bound["num_layers"] > 1 and "batch_sizes" not in bound:
        found = mode._seen(layer_by_layer, (func, bound), {})
    else:
        found = recurrent(mode, func, bound) if mode.settings.rules else NotImplemented
        if found is NotImplemented and packed:
            found = func(*bound.values())
    if not packed or found is NotImplemented:
        return found
    output, *lasts = found
    return (output.squeeze(1), *lasts)


def _other_form(mode: RowPass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    found = other_form(mode, func, args, kwargs) if mode.settings.rules else NotImplemented
    return READS[func](mode, func, args, kwargs) if found is NotImplemented and func in READS else found


def _attention(mode: RowPass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    found = mode.random(func, args, kwargs)
    return _native(mode, func, args, kwargs) if found is NotImplemented else found


def _cross_entropy(mode: RowPass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return cross_entropy(mode.levels, args, kwargs) if mode.settings.rules else NotImplemented


def _undeclared(mode: RowPass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return refuse_undeclared(func)


def _requires_grad(mode: RowPass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args[0].requires_grad else NotImplemented


def _fact(mode: RowPass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Shapes, dtypes and the like: the same for all rows."""
    return NotImplemented


_FACT = _fact
_FACTS = tuple(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_leaf", "is_sparse", "is_nested")
)
Handler = Callable[[RowPass, Any, Sequence[Any], Mapping[str, Any]], Any]
_HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(_WRITES, RowPass.written),
    **dict.fromkeys((*_FACTS, Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.numel), _FACT),
    **dict.fromkeys(_NESTED, RowPass.nested),
    **dict.fromkeys(_HOOKING, RowPass.hooked),
    **dict.fromkeys(_FACTORIES | _UNWRITTEN, RowPass.made),
    **dict.fromkeys(NATIVE, _native),
    **dict.fromkeys(RANDOM, RowPass.random),
    **READS,
    **dict.fromkeys(COMPOSITES, RowPass.composite),
    **dict.fromkeys(FORMS, _operation),
    **dict.fromkeys(OTHER_FORMS, _other_form),
    **dict.fromkeys(TURNING, turned),
    **dict.fromkeys(RECURRENT, _recurrent),
    torch._C._VariableFunctions._pack_padded_sequence: pack,
    torch._C._VariableFunctions._pad_packed_sequence: pad,
    torch.nn.functional.scaled_dot_product_attention: _attention,
    torch.nn.functional.cross_entropy: _cross_entropy,
    torch._functorch.autograd_function.custom_function_call: RowPass.function,
    Tensor.requires_grad_: _requires_grad,
    **dict.fromkeys(UNDECLARED, _undeclared),
}


def one_pass(rows: Rows, settings: Settings, uses: dict[object, Use], sink: Sink) -> Passed:
    """Losses of rows that go the same way; their gradients by rules go into the sink.

    Raises:
        Stop: they do not, or cannot be computed with these settings.
    """
    num_rows = len(rows.positions)
    forget_gone()
    tensors = rows.params if rows.source is None else rows.source.leaves(rows.params)
    params = {name: param.detach() for name, param in tensors.items()} if rows.source is None else tensors
    with levels(num_rows) as over:
        mode = RowPass(rows, over, params, settings, uses, sink)
        with Below():
            record = pytree.tree_map(lambda leaf: over.row(leaf.detach().unsqueeze(1)), rows.batch)
        given = mode.leaves if rows.source is None else tensors
        try:
            plain = custom_functions(settings.plain_functions)
            with mode.keeping(), backward_inside(), mode, plain, mode.comparing():
                losses_1 = rows.loss_fn(dict(given), record)
                if mode.stopped is not None:
                    raise mode.stopped
                mode.begin_backward(losses_1)
                with torch._C.DisableTorchFunction():
                    check_differentiable(losses_1, 1)
                    if settings.plain_functions:  # otherwise torch refuses reentrant checkpoints
                        refuse_reentrant((), losses_1)
                    loss = losses_1.sum()
                found = run_backward(loss, (mode.anchor, *mode.leaves.values()))[1:]
        except ORDINARY as error:
            refuse_out_of_memory(error)
            if mode.stopped is not None:
                raise mode.stopped from error
            raise
        if mode.stopped is not None:
            raise mode.stopped
        rest = {name: _all_rows(grad, num_rows) for name, grad in zip(params, found, strict=True) if grad is not None}
        with Below():
            losses_B = _all_rows(losses_1, num_rows)[:, 0].detach()
    return Passed(losses_B, rest, params, mode.disagreed, mode.noted)


@dataclass
class _Kept:
    """Gradients of one pass, each formed or as factors."""

    counts: dict[str, int] = field(default_factory=dict)
    pieces: dict[str, list[PerSampleGrad]] = field(default_factory=dict)

    def take(self, name: str, grad: PerSampleGrad) -> None:
        self.pieces.setdefault(name, []).append(grad)

    def finish(self, passed: Passed) -> PerSample:
        """The gradients of all parameters."""
        grads: dict[str, PerSampleGrad] = {}
        for name, param in passed.params.items():
            parts = self.pieces.get(name, [])
            if name in passed.rest:
                parts = [*parts, Dense(passed.rest[name])]
            grads[name] = add(parts) if parts else Zeros(len(passed.losses_B), param)
        return PerSample(passed.losses_B, grads)


def _is_exact(device: torch.device) -> bool:
    """True if products are not shortened anyway, and nothing must be done for it."""
    return (
        device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and torch.get_float32_matmul_precision() == "highest"
    )


def _all_rows(value: Tensor, num_rows: int) -> Tensor:
    values_B = of_rows(value)
    if values_B is None:
        plain = inside(value)
        with Below():
            same: Tensor = plain.expand(num_rows, *plain.shape)
            return same
    return values_B


_Samples = PerSample | Ghost


class _Part(NamedTuple):
    """Rows of one pass: places in the batch, and gradients. `counted` is false where they stand for no rows."""

    rows: Sequence[int]
    samples: _Samples
    counted: bool = True


@dataclass(frozen=True)
class Grouped:
    """Gradients of rows that were computed in several passes."""

    parts: Sequence[_Part]

    @property
    def alone(self) -> bool:
        """True if each row was computed alone."""
        return all(part.samples.alone for part in self.parts)

    @property
    def repeatable(self) -> bool:
        """True if weighted sums can be taken more than once without another pass."""
        return all(isinstance(part.samples, PerSample) for part in self.parts)

    def _joined(self, values: Sequence[Tensor]) -> Tensor:
        """The values of the rows of each part that counts, in the order of the batch."""
        order = torch.tensor([row for part in self.parts if part.counted for row in part.rows]).argsort()
        own = [value for part, value in zip(self.parts, values, strict=True) if part.counted]
        return torch.cat(own)[order.to(values[0].device)]

    @property
    def losses_B(self) -> Tensor:
        return self._joined([part.samples.losses_B for part in self.parts])

    def sq_norms(self) -> dict[str, Tensor]:
        """Squared norms of the gradients of each sample: name -> (B,)."""
        found = [part.samples.sq_norms() for part in self.parts]
        return {name: self._joined([norms[name] for norms in found]) for name in found[0]}

    def weighted_sum(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weighted sums over all samples: name -> parameter shape."""
        total: dict[str, Tensor] = {}
        for rows, part, counted in self.parts:
            sums = part.weighted_sum(
                {name: value[list(rows)] if counted else value.new_zeros(len(rows)) for name, value in factors.items()}
            )
            total = {name: total[name] + value for name, value in sums.items()} if total else sums
        return total


class _Calls:
    """Calls of a loss for one batch: their number follows from the rows, so that nothing may change with it."""

    def __init__(self, loss_fn: LossFn, seed: Tensor) -> None:
        self.loss_fn, self.seed, self.number = loss_fn, seed, 0
        self.kept: tuple[object, ...] = ()

    def begin(self) -> None:
        """Begin a call: rows draw the same in each; what the loss keeps is noted before the second one."""
        torch.default_generator.set_state(self.seed)
        self.number += 1
        if self.number == 2 and not in_lockstep():
            self.kept = python_state(self.loss_fn)

    def check(self) -> None:
        """Refuse a loss that has changed what it keeps since."""
        if self.number > 1 and not in_lockstep():
            refuse_counting(self.loss_fn, self.kept)


@dataclass(frozen=True)
class VmapGrad:
    """Engine of `auto`, `vmap` and `ghost`; it remembers for each loss how its rows could be computed.

    Args:
        rules: operations on parameters go to their rules. two_passes: norms in the first pass, sums in the second.
        source: see `ghost.Source`. told: gets each pass whose gradients are kept.
    """

    rules: bool = True
    two_passes: bool = False
    source: Source | None = field(default=None, repr=False)
    by_position: ClassVar[bool] = True  # random numbers of a row are a function of the seed and of its position
    told: Callable[[Passed], None] | None = field(default=None, repr=False, compare=False)
    _settings: MutableMapping[LossFn, Settings] = field(default_factory=WeakIdKeyDictionary, repr=False, compare=False)
    _uses: MutableMapping[LossFn, dict[object, Use]] = field(
        default_factory=WeakIdKeyDictionary, repr=False, compare=False
    )
    _together: MutableMapping[LossFn, frozenset[str]] = field(
        default_factory=WeakIdKeyDictionary, repr=False, compare=False
    )
    _decisions: MutableMapping[LossFn, Decision] = field(default_factory=WeakIdKeyDictionary, repr=False, compare=False)

    def __call__(self, loss_fn: LossFn, params: Params, batch: Batch) -> PerSampleGrads:
        """Gradients of all rows, in one pass where they go the same way."""
        num_rows = batch_size(batch)
        if not num_rows:
            return rows_alone(loss_fn, params, batch, ())
        refuse_kept(loss_fn)
        calls = _Calls(loss_fn, torch.default_generator.get_state())
        before = self._decisions.pop(loss_fn, None)
        every = Rows(loss_fn, params, batch, range(num_rows), self.source)
        with parameters_unchanged(params):
            if self.source is None and any(is_dtensor(param) for param in params.values()):
                reason = "parameters are split over processes (tensor parallel)"
                parts = [_Part(range(num_rows), self._by_loop(every, calls.seed, reason))]
            else:
                parts = self._parts(every, calls)
        calls.check()
        if loss_fn not in self._decisions:
            slower = self._settings[loss_fn].since if self.rules and not self._settings[loss_fn].rules else ""
            self._decide(loss_fn, "one pass", f"all rows together{slower and f', without rules, since {slower}'}")
        self._tell(before, self._decisions[loss_fn])
        return parts[0].samples if len(parts) == 1 else Grouped(parts)

    def _parts(self, every: Rows, calls: _Calls) -> list[_Part]:
        """Passes over rows that agree with each other. In lockstep all processes run as many."""
        todo: list[Sequence[int]] = [every.positions]
        done, passes, read = list[_Part](), 0, ""
        while on_any_process(bool(todo)):
            if passes == _MAX_PASSES:
                rest = every.positions if in_lockstep() else [row for places in todo for row in places]
                last = _Part(
                    rest,
                    self._by_loop(every.some(rest), calls.seed, f"rows do not agree on what Python reads ({read})"),
                )
                return [last] if in_lockstep() else [*done, last]
            counted, places = bool(todo), todo.pop() if todo else [0]
            rows, passes = every.some(places), passes + 1
            try:
                found = self._try(rows, calls)
            except Alone as stop:
                if in_lockstep():
                    return [_Part(every.positions, self._by_loop(every, calls.seed, str(stop)))]
                found = self._by_loop(rows, calls.seed, str(stop))
            if isinstance(found, Diverged):
                todo += [[places[place] for place in group] for group in found.groups] if counted else []
                read = found.read
            else:
                done.append(_Part(places, found, counted))
        if read and every.loss_fn not in self._decisions:
            told = f"{len(done)} groups of rows, which do not agree on what Python reads ({read})"
            self._decide(every.loss_fn, "groups", told)
        return done

    def _decide(self, loss_fn: LossFn, engine: str, reason: str) -> None:
        self._decisions[loss_fn] = Decision(engine, reason)

    def _tell(self, before: Decision | None, now: Decision) -> None:
        if before is None or before.engine != now.engine:
            level = logging.WARNING if now.engine == "loop" else logging.INFO
            _log.log(level, "engine %s: %s", now.engine, now.reason)

    def decision(self, loss_fn: LossFn) -> Decision | None:
        """Decision about the last step of a loss function, and why; None before its first batch."""
        return self._decisions.get(loss_fn)

    def _try(self, rows: Rows, calls: _Calls) -> _Samples | Diverged:
        """Gradients of these rows by the first settings that compute them; or the groups in which they can be computed.

        Raises:
            Alone: no settings do.
        """
        loss_fn, reason = rows.loss_fn, ""
        for tried in _from(self._settings.get(loss_fn, Settings(self.rules))):
            calls.begin()
            try:
                found = self._pass(rows, tried, calls)
            except FirstRead:
                warm_up(loss_fn, rows.params, rows.batch)
                return self._try(rows, calls)
            except Diverged as stop:
                found = stop
            except DPFuncError:
                raise
            except (NoRules, Alone, *ORDINARY) as error:
                failed(error)
                refuse_out_of_memory(error)
                reason = (str(error).splitlines() or ["-"])[0]
                on_any_process(True)  # the next attempt is another message
                continue
            self._settings[loss_fn] = replace(tried, since=reason) if reason else tried
            # rows alone, which an audit needs, are not computed where a module swaps its parameters in itself
            return found if self.source is None or isinstance(found, Diverged) else replace(found, alone=True)
        raise Alone(reason)

    def _pass(self, rows: Rows, settings: Settings, calls: _Calls) -> _Samples | Diverged:
        """One pass over rows; with `two_passes` the first one, and the second for each sum."""
        uses = self._uses.setdefault(rows.loss_fn, {})
        if not self.two_passes or not settings.rules:
            kept = _Kept()
            passed = one_pass(rows, settings, uses, kept)
            if passed.disagreed is None and self.told is not None:
                self.told(passed)
            return passed.disagreed or kept.finish(passed)
        while True:
            together = self._together.get(rows.loss_fn, frozenset())
            measured = Measured(together)
            passed = one_pass(rows, settings, uses, measured)
            if passed.disagreed is not None:
                return passed.disagreed
            with exact(passed.losses_B.device), torch.no_grad():
                missed = measured.rest(passed.rest, passed.params, len(rows.positions))
            if not missed:
                around = precision_now(passed.losses_B.device)
                again = partial(self._weigh, rows, settings, measured, calls.seed, around)
                return Ghost(passed.losses_B, measured.sq_norms, measured.unused, again)
            self._together[rows.loss_fn] = together | missed
            calls.begin()

    def _weigh(
        self,
        rows: Rows,
        settings: Settings,
        measured: Measured,
        seed: Tensor,
        around: Callable[[], AbstractContextManager[None]],
        factors: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Weighted sums, by another pass with the same random numbers and precision."""
        weighted, after = Weighted(measured, factors, self._reduced), torch.default_generator.get_state()
        torch.default_generator.set_state(seed)
        try:
            with parameters_unchanged(rows.params), around():
                passed = one_pass(rows, settings, self._uses[rows.loss_fn], weighted)
        except Stop as stop:
            raise differs(rows.params) from stop
        finally:
            torch.default_generator.set_state(after)
        if passed.disagreed is not None:
            raise differs(rows.params)
        with exact(passed.losses_B.device), torch.no_grad():
            weighted.rest(passed.rest, passed.params, len(rows.positions))
        return {name: weighted.sums[name] for name in rows.params}

    def _reduced(self, name: str, total: Tensor) -> Tensor:
        if self.source is None:
            return total
        with below_both(), torch._C.DisableTorchFunction():  # in the backward pass of a level, and of a mode
            return self.source.reduced(name, total)

    def _by_loop(self, rows: Rows, seed: Tensor, reason: str) -> PerSample:
        self._decide(rows.loss_fn, "loop", f"rows alone, since {reason}")
        torch.default_generator.set_state(seed)
        try:
            with unfollowed_code_is_an_error():
                return rows_alone(rows.loss_fn, rows.params, rows.batch, positions_of(rows.positions))
        except DPFuncError:
            raise
        except RuntimeError as error:
            refuse_out_of_memory(error)
            raise UnsupportedModel(
                f"The loss of a row alone cannot be computed: {type(error).__name__}: {error} (Before: {reason}.)"
            ) from error


def _from(first: Settings) -> list[Settings]:
    """The settings to try, in this order."""
    tried = [first]
    for rules, own_memory, plain in product((first.rules, False), (first.own_memory, True), (False, True)):
        settings = Settings(rules, own_memory, plain)
        if settings not in tried:
            tried.append(settings)
    return tried


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
        An engine `(loss_fn, params, batch) -> PerSampleGrads`. Unreleased.

    Raises:
        InvalidArgument, UnsupportedModel: as `auto`.

    Guarantees:
        those of `auto`.

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
