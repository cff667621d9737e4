"""One pass over rows: its two levels, vmap below grad, with all that torch keeps private of them, and its state.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

Each assumption about torch has a test in `tests/engines/test_levels.py`, which fails by name in another version.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch.eager_transforms import grad_increment_nesting
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack as _without_level
from torch._functorch.vmap import lazy_load_decompositions, vmap_increment_nesting  # type: ignore[attr-defined]  # private
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dpfunc._utils.processes import in_lockstep, initialized, is_independent
from dpfunc.engines._per_sample import DeferredGrad, PerSampleGrad
from dpfunc.engines._rules.table import ParameterUse
from dpfunc.types import Params

OutsideTransforms = torch._C._DisableFuncTorch
"""Context in which plain tensors are computed below both levels."""


@dataclass(frozen=True)
class Levels:
    """The open levels of one pass over some rows."""

    rows: int
    vmap: int
    grad: int

    def row(self, values_B: Tensor) -> Tensor:
        """The tensor of one row, from those of all rows on axis 0."""
        batched: Tensor = functorch._wrap_for_grad(functorch._add_batch_dim(values_B, 0, self.vmap), self.grad)
        return batched

    def leaf(self, value: Tensor) -> Tensor:
        """A parameter that is differentiated; the same for all rows."""
        return self.constant(value).requires_grad_()

    def constant(self, value: Tensor) -> Tensor:
        """A tensor that is the same for all rows."""
        made: Tensor = functorch._wrap_for_grad(value, self.grad)
        return made

    def all_rows(self, value: Tensor) -> Tensor:
        """The plain tensors of all rows on axis 0, (B, ...), also of a tensor that is the same for all."""
        values_B = of_rows(value)
        if values_B is not None:
            return values_B
        with OutsideTransforms():
            same: Tensor = inside(value).expand(self.rows, *value.shape)
            return same


transforms_seen = functorch._set_dynamic_layer_keys_included
"""Switch the open levels on or off for the next operations."""


@contextmanager
def custom_functions(plain: bool) -> Iterator[None]:
    """Context in which custom functions that torch's transforms refuse are nodes of the level of gradients.

    torch looks at the levels where such a function is applied: they are seen inside of torch functions only.
    """
    if not plain:
        yield
        return
    before = functorch.get_single_level_autograd_function_allowed()
    functorch.set_single_level_autograd_function_allowed(True)
    transforms_seen(False)
    try:
        yield
    finally:
        transforms_seen(True)
        functorch.set_single_level_autograd_function_allowed(before)


@contextmanager
def outside_levels() -> Iterator[None]:
    """Context in which no level is open. Custom functions run in it, too; `OutsideTransforms` does not cover them."""
    with ExitStack() as stack:
        while functorch.maybe_current_level() is not None:
            stack.enter_context(_without_level())
        yield


def seen_as_compiling() -> AbstractContextManager[None]:
    """Context in which torch answers that code is being transformed (`torch.compiler.is_compiling`), which it is.

    Libraries then do what does not depend on values: Transformers makes its masks without looking whether a row has
    padding, so that no number is read and all rows go the same way. A sharded model communicates as ever.
    """
    by_itself = not initialized() or is_independent()
    return torch.compiler._compile_session_context() if by_itself else nullcontext()


@contextmanager
def levels(num_rows: int) -> Iterator[Levels]:
    """Open both levels. A random operation without a handler is an error: no number is drawn for all rows at once."""
    lazy_load_decompositions()
    before = functorch.get_inplace_requires_grad_allowed()
    functorch.set_inplace_requires_grad_allowed(True)  # the loss may ask for gradients of its inputs
    functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]  # no stub
    try:
        # no_grad: frozen parameters may require gradients, and would keep a graph below both levels
        with (
            torch.no_grad(), vmap_increment_nesting(num_rows, "error") as vmap, grad_increment_nesting() as grad,
            torch.enable_grad(),
        ):  # fmt: skip
            yield Levels(num_rows, vmap, grad)
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)  # type: ignore[attr-defined]  # no stub
        functorch.set_inplace_requires_grad_allowed(before)


def inside(value: Any) -> Any:
    """The tensor without the levels of gradients."""
    while isinstance(value, Tensor) and functorch.is_gradtrackingtensor(value):
        value = functorch.get_unwrapped(value)
    return value


at_a_level = functorch.is_functorch_wrapped_tensor
"""True for a tensor of one of the levels; false for a plain tensor, such as memory that FSDP manages."""


def is_row(value: Any) -> TypeGuard[Tensor]:
    """True for a tensor of one row, false for one that is the same for all rows."""
    return isinstance(value, Tensor) and functorch.is_batchedtensor(inside(value))


def of_rows(value: Any) -> Tensor | None:
    """The plain tensors of all rows on axis 0, (B, ...); None for what is the same for all rows."""
    if not isinstance(value, Tensor):
        return None
    while functorch.is_gradtrackingtensor(value):  # `inside`, which is called for each tensor of each operation
        value = functorch.get_unwrapped(value)
    if not functorch.is_batchedtensor(value):
        return None
    plain: Tensor = functorch.get_unwrapped(value)
    if functorch.is_functorch_wrapped_tensor(plain):
        return None  # of a vmap that the loss runs
    axis = functorch.maybe_get_bdim(value)
    if not axis:
        return plain
    with OutsideTransforms():
        return plain.movedim(axis, 0)


is_dead = functorch.is_dead_tensor_wrapper  # type: ignore[attr-defined]  # no stub
"""True for a tensor of a closed level: from an earlier call, or from a transform of the loss that has ended."""


def is_row_of_earlier(value: Tensor) -> bool:
    """True for a row of an earlier call, whose levels are closed. Torch would treat it as a row of this call."""
    closed = True
    while functorch.is_functorch_wrapped_tensor(value):
        if functorch.is_gradtrackingtensor(value):
            closed = is_dead(value)
        elif functorch.is_batchedtensor(value) and not functorch.is_functorch_wrapped_tensor(
            functorch.get_unwrapped(value)
        ):
            return closed
        value = functorch.get_unwrapped(value)
    return False


class Node(_SingleLevelFunction):
    """A node of the level of gradients only: `forward` and `setup_context`, as in `torch.autograd.Function`.

    torch's transforms also make such a node for each call of a custom function; that takes ten times as long.
    """


def apply_node(node: type[Node], *args: Any) -> Any:
    """Apply a node, whatever levels are open."""
    before = functorch.get_single_level_autograd_function_allowed()
    functorch.set_single_level_autograd_function_allowed(True)
    try:
        return node.apply(*args)  # type: ignore[attr-defined]  # of C
    finally:
        functorch.set_single_level_autograd_function_allowed(before)


def gradients(ends: Sequence[Any], grads: Sequence[Tensor], inputs: Sequence[Any]) -> Sequence[Tensor | None]:
    """As `torch.autograd.grad`, but modes stay active, so that recomputed operations are seen."""
    found: Sequence[Tensor | None] = _engine_run_backward(
        tuple(ends), tuple(grads), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def run_backward(loss: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Gradients of a loss; None for each input where it has none."""
    return gradients((loss,), (torch.ones_like(loss),), inputs) if loss.requires_grad else (None,) * len(inputs)


def _quiet(names: Mapping[str, Any]) -> dict[str, Any]:
    """Versions of these functions that do not dispatch to modes."""
    return {name: (lambda *args, **kwargs: False) for name in names if name.startswith("has_torch_function")}


@functools.cache
def without_dispatch(function: Any) -> Callable[..., Any]:
    """A private copy of a function written in Python that does not dispatch, so that modes get its parts."""
    quiet = _quiet(function.__globals__)
    if "overrides" in function.__code__.co_names:  # torch.nn.init asks by `torch.overrides`
        overrides = SimpleNamespace(**{**vars(torch.overrides), **_quiet(vars(torch.overrides))})
        quiet["torch"] = SimpleNamespace(**{**vars(torch), "overrides": overrides})
    inside = {**function.__globals__, **quiet}
    copy = FunctionType(function.__code__, inside, function.__name__, function.__defaults__, function.__closure__)
    return functools.partial(copy, **(function.__kwdefaults__ or {}))


def parts_of(func: Any) -> Callable[..., Any] | None:
    """A version of the function whose parts dispatch to modes; None for a function that is one operation."""
    of_torch = type(func) is FunctionType and (func.__module__ or "").startswith("torch.")
    return without_dispatch(func) if of_torch and _asks_modes(func) else None


@functools.cache
def _asks_modes(func: FunctionType) -> bool:
    asks = any(name.startswith("has_torch_function") for name in func.__code__.co_names)
    return asks and "__class__" not in func.__code__.co_freevars  # a method that calls `super()` comes back as itself


MOST_RAISED = 100
"""Number of caught errors in one call after which the loss gets made-up answers, so that it ends."""


def made_up_numbers(given: Any, raised: int) -> Any:
    """Arguments with made-up numbers, which change after each error: a loss may wait for any sign and size."""
    number = float((raised % 2) * (-10) ** (raised // 2 % 9))

    def made(value: Tensor) -> Tensor:
        new = torch.full(value.shape, number, device=value.device).to(value.dtype)
        return new.requires_grad_() * 1 if value.requires_grad else new

    with outside_levels(), torch.enable_grad():
        return pytree.tree_map_only(Tensor, made, given)


def is_set_from_inside(args: Sequence[Any]) -> bool:
    """True for data of a deeper level than their tensor, as in `BUFFER.data = row`, which would crash the process."""
    return bool(functorch.maybe_get_level(args[1]) > functorch.maybe_get_level(args[0]))


_DATA: Any = Tensor.data
SETTING_DATA = frozenset((_DATA.__set__,))


class Stop(BaseException):
    """Ends a pass. It is no `Exception`, so a loss that catches every Exception does not catch it."""


class Diverged(Stop):
    """Rows do not agree on what Python reads."""

    def __init__(self, groups: Sequence[Sequence[int]], read: str) -> None:
        super().__init__(read)
        self.groups, self.read = groups, read

    def within(self, places: Sequence[int]) -> list[list[int]]:
        """The groups, by the places in the batch of the rows of the pass."""
        return [[places[row] for row in group] for group in self.groups]


class NeedsLoop(Stop):
    """This engine cannot compute these rows: the loop computes each of them alone."""


class FirstRead(Stop):
    """The loss is about to read numbers of rows before its state was recorded."""


class NoRules(Stop):
    """A backward pass inside of the loss: the pass is repeated without rules and native operations."""


@dataclass(frozen=True)
class PassResult:
    """Results of one pass over rows."""

    losses_B: Tensor
    rest: Mapping[str, Tensor]
    params: Params
    uses: Sequence[ParameterUse]
    aux: Any = None
    by_row: Sequence[str] = ()
    reads: str = ""
    reads_of_constants: str = ""


_ANCHOR = torch.zeros((), device="cpu")


class Pass(TorchFunctionMode):
    """State shared by one pass's handlers, which answer the torch functions that the loss calls.

    Args:
        over: the open levels. params: name -> plain value. leaves: name -> what the loss gets.
        uses: that are known from earlier passes. take: takes the gradients of one use of a parameter, by name.
        counts: name -> uses in the forward pass, with a rule. rules: operations go to their rules.
        allowed: number of times that Python may read numbers of rows; none before the state of the loss is recorded.
    """

    def __init__(
        self, over: Levels, params: Params, leaves: Params, uses: dict[object, ParameterUse],
        take: Callable[[str, PerSampleGrad | DeferredGrad], None], counts: dict[str, int], rules: bool, allowed: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.levels, self.leaves, self.uses, self.take, self.counts = over, leaves, uses, take, counts
        self.rules, self.allowed = rules, allowed
        self._params = {id(leaf): (name, params[name]) for name, leaf in leaves.items()}
        self.anchor = over.leaf(_ANCHOR)
        self.credited: list[ParameterUse] = []
        self.by_row: dict[str, None] = {}
        self.turned: dict[int, tuple[Tensor, Tensor]] = {}
        self.stopped: BaseException | None = None
        self.disagreed: Diverged | None = None
        self.in_backward, self.reads, self.reads_of_constants = False, "", ""

    def plain(self, leaf: object) -> tuple[str, Tensor] | None:
        """Name and value of a parameter, if this is one."""
        return self._params.get(id(leaf))

    def at_levels(self) -> bool:
        """True outside of transforms of the loss."""
        return bool(functorch.maybe_current_level() == self.levels.grad)

    def is_open(self) -> bool:
        """True where an operation may run as its native kernel: outside of transforms of the loss, with gradients."""
        return self.at_levels() and torch.is_grad_enabled()

    def seen(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of a function whose parts come back to this mode."""
        with self:
            return func(*args, **kwargs)

    def stop(self, stop: Stop) -> NoReturn:
        """End the pass, even if the loss catches the exception."""
        self.stopped = self.stopped or stop
        raise stop

    def agree(self, keys: Sequence[Hashable], read: str) -> None:
        """End the pass where rows have different keys. In lockstep, continue with the first row, since others wait.

        It also ends before Python reads a value, if the state of the loss was not recorded before the pass.
        """
        if not self.allowed:
            self.stop(FirstRead(read))
        self.allowed -= 1
        self.reads = self.reads or read
        groups: dict[Hashable, list[int]] = {}
        for row, key in enumerate(keys):
            groups.setdefault(key, []).append(row)
        if len(groups) > 1:
            differ = Diverged(list(groups.values()), read)
            if not in_lockstep():
                self.stop(differ)
            self.disagreed = self.disagreed or differ

    def read_constant(self, read: str) -> Any:
        """Note a read of a tensor that is the same for all rows, which torch answers."""
        self.reads_of_constants = self.reads_of_constants or read
        return NotImplemented

    def expect(self, names: Iterable[str]) -> None:
        """Count uses of parameters whose gradients will come."""
        if not self.in_backward:
            for name in names:
                self.counts[name] = self.counts.get(name, 0) + 1

    def backward_node(self) -> None:
        """End the pass if a node runs in another backward pass than that of the losses."""
        if not self.in_backward and self.stopped is None:  # of a pass that is stopped, nothing is used
            self.stop(NoRules("the loss has a backward pass of its own"))


Handler = Callable[[Any, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Answers a function of torch, `(pass, function, args, kwargs)`; or NotImplemented: the next one is asked."""
