"""The engine `vmap(grad(loss))`: rows are apart by construction; rules make it fast and are never needed to be right.

A row is a batch of one at the level of vmap, and the forward and the backward pass run inside of it, at a level of
grad. A mode of torch functions, active during the call only, gives operations on parameters to their rules
(`islands.py`), answers what Python reads (`reads.py`) and draws random numbers of each row (`draws.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from dpfunc._utils.dtensor import is_dtensor
from dpfunc._utils.memory import refuse_out_of_memory
from dpfunc.batches import batch_size
from dpfunc.engines.auto import Decision
from dpfunc.engines.draws import RANDOM, OwnDraws, random_operation
from dpfunc.engines.guards.lockstep import in_lockstep
from dpfunc.engines.guards.loss import check_differentiable, parameters_unchanged
from dpfunc.engines.guards.python_state import note_kept, python_state, refuse_counting, refuse_kept, was_kept
from dpfunc.engines.guards.scope import backward_inside
from dpfunc.engines.islands import FORMS, NATIVE, native, operation, recurrent
from dpfunc.engines.levels import (
    Below,
    Levels,
    custom_functions,
    inside,
    is_gone,
    is_row,
    levels,
    of_rows,
    run_backward,
    transforms_seen,
)
from dpfunc.engines.loop import loop
from dpfunc.engines.per_sample import Dense, PerSample, PerSampleGrad, Zeros, add
from dpfunc.engines.reads import READS, Alone, Diverged, NoRules, Stop
from dpfunc.engines.rules.composite import COMPOSITES, without_dispatch
from dpfunc.engines.rules.recurrent import RECURRENT
from dpfunc.engines.rules.table import Use
from dpfunc.errors import InvalidArgument, UnsupportedModel
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
            transforms do not take run as nodes of the level of gradients, operation by operation.
    """

    rules: bool = True
    own_memory: bool = False
    plain_functions: bool = False


class RowPass(TorchFunctionMode):
    """One forward and backward pass over some rows: every torch function that the loss calls passes here."""

    def __init__(
        self,
        loss_fn: LossFn,
        over: Levels,
        params: Params,
        settings: Settings,
        draws: OwnDraws,
        uses: dict[object, Use],
    ) -> None:
        super().__init__()
        self.loss_fn, self.first_read = loss_fn, ""
        self.kept: tuple[object, ...] = ()
        self._depth = 0
        self.levels, self.settings, self.draws, self.uses = over, settings, draws, uses
        self.budget = DEFAULT_BUDGET
        self.credited: dict[str, list[PerSampleGrad]] = {}
        self.leaves = {name: over.leaf(param) for name, param in params.items()}
        with Below():
            self.anchor = over.leaf(torch.zeros(()))
        self.stopped: Stop | None = None
        self.in_backward = self.is_exact = False
        self._params = {id(leaf): (name, params[name]) for name, leaf in self.leaves.items()}

    def plain(self, leaf: Tensor) -> tuple[str, Tensor] | None:
        """Name and value of a parameter, if this is one."""
        return self._params.get(id(leaf))

    def stop(self, stop: Stop) -> NoReturn:
        """End the pass, also where code of the loss catches the exception."""
        self.stopped = self.stopped or stop
        raise stop

    def reading(self, read: str) -> None:
        """Note what the loss keeps, before Python learns anything of the rows."""
        if not self.first_read:
            with Below():
                self.kept, self.first_read = python_state(self.loss_fn), read

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Refuse a loss that inside changes what it keeps after it has begun to read numbers of rows.

        Compared while the parameters of the pass are still in the modules, as they are at the first read.
        """
        try:
            yield
        finally:
            if self.first_read:
                with Below(), torch._C.DisableTorchFunction():
                    note_kept(self.loss_fn, self.kept, self.first_read)
                if was_kept(self.loss_fn):
                    self.stopped = None  # an error of dpfunc, whatever else has ended the pass
                    refuse_kept(self.loss_fn)

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
        if handler is _FACT:
            return func(*args, **(kwargs or {}))
        for value in args:
            if isinstance(value, Tensor):
                if is_gone(value):
                    self._refuse_gone()
            elif isinstance(value, (list, tuple)):
                for part in value:
                    if isinstance(part, Tensor) and is_gone(part):
                        self._refuse_gone()
        if kwargs:
            for value in kwargs.values():
                if isinstance(value, Tensor) and is_gone(value):
                    self._refuse_gone()
        else:
            kwargs = {}
        try:
            if handler is not None:
                found = handler(self, func, args, kwargs)
                if found is not NotImplemented:
                    return found
            elif isinstance(func, _OF_PYTHON):
                return self._opened(func, args, kwargs)
            return func(*args, **kwargs)
        except ORDINARY as error:
            if self.stopped is None:
                self.stopped = Alone(f"{type(error).__name__}: {(str(error).splitlines() or ['-'])[0]}")
            raise

    def _opened(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Functions of torch that are written in Python, with their parts seen; operations of others are refused."""
        if isinstance(func, (OpOverload, OpOverloadPacket)):
            name = func.namespace if isinstance(func, OpOverload) else func._qualified_op_name.split("::")[0]
            if name not in _OURS:
                self.stop(Alone(f"the operation {func} is of another library, and may mix the rows that it is given"))
            return func(*args, **kwargs)
        if func.__module__ is not None and func.__module__.startswith("torch.") and _dispatches(func):
            with self:
                return without_dispatch(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _refuse_gone(self) -> NoReturn:
        raise UnsupportedModel(
            "The loss uses a tensor that it has kept from an earlier call: numbers of other rows would reach this one. "
            "Compute each loss from its own row and the parameters alone."
        )

    def composite(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An operation that is made of others, with its parts seen."""
        with self:
            return COMPOSITES[func](*args, **kwargs)

    def random(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Random numbers of each row."""
        if kwargs.get("generator") is not None:
            self.stop(Alone("the loss draws from a generator of its own"))
        return random_operation(self.levels, self.draws, func, args, kwargs)

    def nested(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A backward pass inside of the loss."""
        if self.settings.rules and not self.in_backward:
            self.stop(NoRules("the loss has a backward pass of its own"))
        return NotImplemented

    def hooked(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A hook on a parameter, or a node that is given away: hooks get gradients that a rule would not form."""
        if self.settings.rules and (func is _GRAD_FN or self.plain(args[0]) is not None):
            self.stop(NoRules("the loss has a hook on a parameter or a node"))
        return NotImplemented

    def function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A custom function: its own rule for vmap would see all rows."""
        custom = args[0]
        if not custom.generate_vmap_rule and custom.vmap is not torch.autograd.Function.vmap:
            self.stop(Alone(f"{custom.__name__} has a rule for vmap of its own, which sees all rows"))
        return NotImplemented

    def made(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A tensor that the loss makes, with memory for each row."""
        if not self.settings.own_memory or kwargs.get("requires_grad"):
            return NotImplemented
        found = func(*args, **kwargs)
        if not isinstance(found, Tensor) or is_row(found):
            return found
        value = inside(found)
        with Below():
            values_B = value.unsqueeze(0).repeat(self.levels.rows, *(1 for _ in range(value.ndim)))
        return self.levels.row(values_B)


_OF_PYTHON = (type(lambda: None), OpOverload, OpOverloadPacket)
_DISPATCHES: dict[Any, bool] = {}


def _dispatches(func: Any) -> bool:
    found = _DISPATCHES.get(func)
    if found is None:
        code = func.__code__  # a method that calls `super()` comes back as itself
        asks = any(name.startswith("has_torch_function") for name in code.co_names)
        found = _DISPATCHES[func] = asks and "__class__" not in code.co_freevars
    return found


def _operation(mode: RowPass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return operation(mode, func, args, kwargs) if mode.settings.rules else NotImplemented


def _native(mode: RowPass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return native(mode, func, args, kwargs) if mode.settings.rules else NotImplemented


def _recurrent(mode: RowPass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return recurrent(mode, func, args, kwargs) if mode.settings.rules else NotImplemented


def _attention(mode: RowPass, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    found = mode.random(func, args, kwargs)
    return _native(mode, func, args, kwargs) if found is NotImplemented else found


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
    **dict.fromkeys((*_FACTS, Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.numel), _FACT),
    **dict.fromkeys(_NESTED, RowPass.nested),
    **dict.fromkeys(_HOOKING, RowPass.hooked),
    **dict.fromkeys(_FACTORIES, RowPass.made),
    **dict.fromkeys(NATIVE, _native),
    **dict.fromkeys(RANDOM, RowPass.random),
    **READS,
    **dict.fromkeys(COMPOSITES, RowPass.composite),
    **dict.fromkeys(FORMS, _operation),
    **dict.fromkeys(RECURRENT, _recurrent),
    torch.nn.functional.scaled_dot_product_attention: _attention,
    torch._functorch.autograd_function.custom_function_call: RowPass.function,
    Tensor.requires_grad_: _requires_grad,
}


def _one_pass(
    loss_fn: LossFn, params: Params, batch: Batch, positions: Sequence[int], settings: Settings, uses: dict[object, Use]
) -> PerSample:
    """Gradients of rows that go the same way.

    Raises:
        Stop: they do not, or cannot be computed with these settings.
    """
    num_rows = len(positions)
    params = {name: param.detach() for name, param in params.items()}
    with levels(num_rows) as over:
        mode = RowPass(loss_fn, over, params, settings, OwnDraws(positions), uses)
        with Below():
            record = pytree.tree_map(lambda leaf: over.row(leaf.detach().unsqueeze(1)), batch)
        try:
            with backward_inside(), mode, custom_functions(settings.plain_functions), mode.keeping():
                losses_1 = loss_fn(dict(mode.leaves), record)
                if mode.stopped is not None:
                    raise mode.stopped
                mode.begin_backward(losses_1)
                with torch._C.DisableTorchFunction():
                    check_differentiable(losses_1, 1)
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
        losses_B = _all_rows(losses_1.detach(), num_rows)[:, 0]
    grads: dict[str, PerSampleGrad] = {}
    for name, param in params.items():
        parts = mode.credited.get(name, [])
        if name in rest:
            parts = [*parts, Dense(rest[name].detach())]
        grads[name] = add(parts) if parts else Zeros(num_rows, param)
    return PerSample(losses_B.detach(), grads, alone=True)


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


@dataclass(frozen=True)
class Grouped:
    """Gradients of rows that were computed in several passes.

    Args:
        parts: the places of the rows of each pass in the batch, and their gradients.
    """

    parts: Sequence[tuple[Tensor, PerSample]]

    def _joined(self, values: Sequence[Tensor]) -> Tensor:
        order = torch.cat([rows for rows, _ in self.parts]).argsort()
        return torch.cat(list(values))[order.to(values[0].device)]

    @property
    def losses_B(self) -> Tensor:
        return self._joined([part.losses_B for _, part in self.parts])

    def sq_norms(self) -> dict[str, Tensor]:
        found = [part.sq_norms() for _, part in self.parts]
        return {name: self._joined([norms[name] for norms in found]) for name in found[0]}

    def weighted_sum(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weighted sums over all samples: name -> parameter shape."""
        total: dict[str, Tensor] = {}
        for rows, part in self.parts:
            sums = part.weighted_sum({name: value[rows.to(value.device)] for name, value in factors.items()})
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
        if self.number == 2:
            self.kept = python_state(self.loss_fn)

    def check(self) -> None:
        """Refuse a loss that has changed what it keeps since."""
        if self.number > 1:
            refuse_counting(self.loss_fn, self.kept)


@dataclass(frozen=True)
class VmapGrad:
    """Engine that `vmap_grad` returns; it remembers for each loss how its rows could be computed."""

    rules: bool = True
    _settings: MutableMapping[LossFn, Settings] = field(default_factory=WeakIdKeyDictionary, repr=False, compare=False)
    _uses: MutableMapping[LossFn, dict[object, Use]] = field(
        default_factory=WeakIdKeyDictionary, repr=False, compare=False
    )
    _decisions: MutableMapping[LossFn, Decision] = field(default_factory=WeakIdKeyDictionary, repr=False, compare=False)

    def __call__(self, loss_fn: LossFn, params: Params, batch: Batch) -> PerSampleGrads:
        """Gradients of all rows, in one pass where they go the same way."""
        num_rows = batch_size(batch)
        if in_lockstep() or any(is_dtensor(param) for param in params.values()):
            raise UnsupportedModel(
                'The engine "vmap_grad" does not take models that are split over processes (FSDP2, tensor parallel). '
                'Use engine="auto".'
            )
        if not num_rows:
            return loop()(loss_fn, params, batch)
        refuse_kept(loss_fn)
        calls = _Calls(loss_fn, torch.default_generator.get_state())
        todo, done, passes, read = [list(range(num_rows))], list[tuple[list[int], PerSample]](), 0, ""
        before = self._decisions.pop(loss_fn, None)
        with parameters_unchanged(params):
            while todo:
                rows = todo.pop()
                chosen = batch if len(rows) == num_rows else _rows(batch, rows)
                passes += 1
                try:
                    result = self._try(loss_fn, params, chosen, rows, calls)
                except Diverged as stop:
                    read = stop.read
                    if passes + len(todo) + len(stop.groups) > _MAX_PASSES:
                        done.append((rows, self._by_loop(loss_fn, params, chosen, stop.read)))
                    else:
                        todo += [[rows[place] for place in group] for group in stop.groups]
                    continue
                done.append((rows, result))
        calls.check()
        if loss_fn not in self._decisions:
            told = f"{len(done)} groups of rows, which do not agree on what Python reads ({read})"
            self._decide(loss_fn, "groups" if read else "vmap_grad", told if read else "one pass over all rows")
        self._tell(before, self._decisions[loss_fn])
        if len(done) == 1:
            return done[0][1]
        return Grouped([(torch.tensor(rows), part) for rows, part in done])

    def _decide(self, loss_fn: LossFn, engine: str, reason: str) -> None:
        self._decisions[loss_fn] = Decision(engine, reason)

    def _tell(self, before: Decision | None, now: Decision) -> None:
        if before is None or before.engine != now.engine:
            level = logging.WARNING if now.engine == "loop" else logging.INFO
            _log.log(level, "engine %s: %s", now.engine, now.reason)

    def decision(self, loss_fn: LossFn) -> Decision | None:
        """Decision about the last step of a loss function, and why; None before its first batch."""
        return self._decisions.get(loss_fn)

    def _try(self, loss_fn: LossFn, params: Params, batch: Batch, rows: list[int], calls: _Calls) -> PerSample:
        """Gradients of these rows by one pass, or by the loop where no settings compute them."""
        settings = self._settings.get(loss_fn, Settings(self.rules))
        uses = self._uses.setdefault(loss_fn, {})
        reason = ""
        for tried in _from(settings):
            calls.begin()
            try:
                result = _one_pass(loss_fn, params, batch, rows, tried, uses)
            except (NoRules, Alone) as stop:
                reason = str(stop)
                continue
            except Diverged:
                self._settings[loss_fn] = tried
                raise
            except (UnsupportedModel, InvalidArgument):
                raise
            except ORDINARY as error:
                refuse_out_of_memory(error)
                reason = (str(error).splitlines() or ["-"])[0]
                continue
            self._settings[loss_fn] = tried
            return result
        return self._by_loop(loss_fn, params, batch, reason)

    def _by_loop(self, loss_fn: LossFn, params: Params, batch: Batch, reason: str) -> PerSample:
        self._decide(loss_fn, "loop", f"rows alone, since {reason}")
        try:
            return loop()(loss_fn, params, batch)
        except (UnsupportedModel, InvalidArgument):
            raise
        except ORDINARY as error:
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


def _rows(batch: Batch, rows: Sequence[int]) -> Batch:
    return pytree.tree_map(lambda leaf: leaf[torch.tensor(rows, device=leaf.device)], batch)


def vmap_grad(rules: bool = True) -> VmapGrad:
    """`vmap(grad(loss))` over batches of one, with rules that make it fast.

    A row cannot see another one, in whatever the loss, a module, a hook or a custom function does: forward and backward
    pass run inside of torch's vmap. A number that Python reads is answered if all rows agree bit for bit; else rows are
    grouped by it, and each group runs by itself. What cannot be run so is computed by `loop`; `decision(loss_fn)` says
    why. Random numbers of a row are a function of the seed and of its position, not of the other rows.

    Args:
        rules: operations on parameters go to their rules, and large operations to native kernels; else vmap and grad
            do everything. Speed and memory only.

    Returns:
        An engine `(loss_fn, params, batch) -> PerSampleGrads`. Unreleased.

    Raises:
        InvalidArgument: the loss has a wrong shape, or no gradient.
        UnsupportedModel: the loss uses a tensor of rows of an earlier call, or changes what it keeps after it has read
            numbers of rows; no way to compute a row; a model that is split over processes.

    Guarantees:
        equals a loop over single samples (tests/engines/test_parity.py, tests/engines/test_engine_rules.py); a row does
        not depend on those beside it (tests/engines/test_row_programs.py,
        tests/engines/tracing/test_isolation_zoo.py); what torch must do for that (tests/engines/test_levels.py); the
        law of a row's draws (tests/engines/test_vmap_grad.py).

    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> vmap_grad()(loss_fn, {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [0.0, 1.0]])).sq_norms()["w"]
    tensor([25.,  1.])
    """
    return VmapGrad(rules)
