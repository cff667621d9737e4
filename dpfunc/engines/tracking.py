"""Sees every torch function that takes a trained parameter, while one call of an engine lasts, and applies its rule.

Nothing is patched: a TorchFunctionMode is active inside the call. Parameters are found by identity. A value that is
computed from parameters alone (a transposed weight, a table of positions) is tracked like a parameter; its per-sample
gradients go back through ordinary autograd at the end. A use that no rule sees would reach the parameter through
autograd, which is checked: nothing is silently left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpfunc.checks import shorten
from dpfunc.engines.layout import SHARED, UNUSED, Layout
from dpfunc.engines.rules import COMPOSITES, EXPANDING, LIKE_FIRST, POINTWISE, RULES
from dpfunc.engines.rules.composite import opened
from dpfunc.engines.rules.pointwise import copies_for
from dpfunc.engines.rules.table import Rule, Use
from dpfunc.engines.sharded import check_use, unsupported
from dpfunc.engines.taps import catch_any, leaf, watched
from dpfunc.errors import UnsupportedModel
from dpfunc.sharding import is_dtensor, local

Key = tuple[str, str, tuple[int, ...]]
"""Parameter, operation, dimensions of its tensors: uses with the same key have the same layout."""

Layouts = dict[Key, Layout | None]


NESTED = frozenset((torch.autograd.grad, torch.autograd.backward))
SELECTING = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("nonzero", "masked_select", "unique", "unique_consecutive", "argwhere")
    if hasattr(owner, name)
)
REPEATING = frozenset((torch.repeat_interleave, Tensor.repeat_interleave))
# The gradient of what these give is that of their argument, in another order or shape.
TRANSPOSING = frozenset((Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__))  # type: ignore[attr-defined]
RESHAPING = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (
        "view",
        "reshape",
        "flatten",
        "squeeze",
        "unsqueeze",
        "to",
        "type",
        "float",
        "double",
        "half",
        "bfloat16",
    )
    if hasattr(owner, name)
)


class UnknownLayout(Exception):
    """A use that was not seen when the layouts were learnt, or not in this shape; never leaves the engines."""


@dataclass(frozen=True)
class Tracked:
    """A parameter, or a value computed from parameters alone. The tensor requires a gradient.

    Args:
        name: of the parameter. tensor: the value. parent: the identity of the tensor of which this one is the
            transpose or a reshaping.
    """

    name: str
    tensor: Tensor
    parent: int | None = None
    transposed: bool = False


class Recorder(Protocol):
    """What an engine does with uses."""

    def use(self, use: Use, output: Tensor, needed: Mapping[str, Tensor | None]) -> Tensor:
        """A use by a rule; returns the output that the model goes on with."""
        ...

    def copies(self, tracked: Tracked, copies: Tensor, axis: int) -> None:
        """A leaf that holds a private copy of a parameter for each sample, on `axis`."""
        ...

    def derived(self, sources: Sequence[Tracked]) -> None:
        """A value is computed from these."""
        ...

    def unknown(self, key: Key, output: Tensor) -> Tensor:
        """A use whose layout is not known yet; returns the output that the model goes on with."""
        ...


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, also inside of lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found


@dataclass(eq=False)
class Tracker(TorchFunctionMode):
    """The mode. Used once, for one forward and backward pass.

    Args:
        params: leaves that require gradients. num_samples: B. layouts: what is known; None means shared by all samples.
        tracked: identity -> parameters and derived values. ragged: values whose shape depends on values.
        canaries: leaves under results that no loss should depend on.
    """

    params: Mapping[str, Tensor]
    num_samples: int
    layouts: Layouts
    recorder: Recorder
    tracked: dict[int, Tracked] = field(default_factory=dict)
    ragged: dict[int, Tensor] = field(default_factory=dict)
    canaries: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        for name, param in self.params.items():
            self.tracked[id(param)] = Tracked(name, param)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  (whatever the function returns)
        kwargs = {} if kwargs is None else kwargs
        if func is Tensor.__getitem__ and isinstance(args[1], tuple) and len(args[1]) == 1:
            args = (args[0], args[1][0])
        if func is Tensor.unflatten:  # a method in Python, which dynamo cannot trace inside of a mode
            func = torch.unflatten
        if func in NESTED:
            return self._nested(func, args, kwargs)
        if self._selects_rows(func, args) or (self.ragged and self._touches_ragged((*args, *kwargs.values()))):
            return self._ragged(func, args, kwargs)
        if not self._concerned(args) and not (kwargs and self._concerned(kwargs.values())):
            return func(*args, **kwargs)
        tensors = tensors_in((*args, *kwargs.values()))
        found = [self.tracked[id(tensor)] for tensor in tensors if id(tensor) in self.tracked]
        if _name(func) in IN_PLACE and args and id(args[0]) in self.tracked:
            raise no_rule(func, tensors, found)
        if not torch.is_grad_enabled():  # then ordinary autograd takes no gradient either
            return func(*args, **kwargs)
        if func in COMPOSITES:
            with self:
                return COMPOSITES[func](*args, **kwargs)
        if len(found) == len(tensors) and not (func in EXPANDING and self._expands(func, args, kwargs)):
            return self._derive(func, args, kwargs, found)
        return self._use(func, args, kwargs, tensors, found)

    def _nested(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        create_graph = kwargs.get("create_graph", args[4] if len(args) > 4 else False)
        if func is not torch.autograd.grad or create_graph:
            raise UnsupportedModel(
                "The loss differentiates inside of itself, by backward() (as reentrant checkpointing does: use "
                'use_reentrant=False) or with create_graph=True: such gradients would be lost. Use engine="vmap" with '
                "torch.func.grad."
            )
        with self:  # checkpointing repeats uses inside of it
            return opened(func)(*args, **kwargs)

    @staticmethod
    def _selects_rows(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether the shape of the result depends on values."""
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in index)
        if func in REPEATING:
            return any(isinstance(value, Tensor) for value in args[1:])
        return func in SELECTING or (func is torch.where and len(args) == 1)

    def _touches_ragged(self, values: Iterable[Any]) -> bool:
        return any(id(tensor) in self.ragged for tensor in tensors_in(tuple(values)))

    def _ragged(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        if self._concerned(args) or self._concerned(kwargs.values()):
            tensors = tensors_in((*args, *kwargs.values()))
            names = sorted({self.tracked[id(tensor)].name for tensor in tensors if id(tensor) in self.tracked})
            raise UnsupportedModel(
                f"{_name(func)} of parameter {shorten(names)} takes rows that were selected by their values (a mask, "
                "nonzero, unique): how many belong to which sample cannot be told. Multiply by the mask instead of "
                'selecting, or use engine="loop".'
            )
        result = func(*args, **kwargs)
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, Tensor):
                self.ragged[id(value)] = value
        return result

    def _concerned(self, values: Iterable[Any]) -> bool:  # the hot path: called for every torch function
        tracked = self.tracked
        for value in values:
            if id(value) in tracked:
                return True
            if isinstance(value, (list, tuple)) and any(id(item) in tracked for item in value):
                return True
        return False

    @staticmethod
    def _expands(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        with torch.no_grad():
            return bool(func(*args, **kwargs).shape != args[0].shape)

    def _derive(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Sequence[Tracked]
    ) -> Any:  # noqa: ANN401
        result = func(*args, **kwargs)
        name, before = found[0].name, len(self.tracked)
        if is_dtensor(result) and result.requires_grad and id(result) not in self.tracked:
            raise unsupported(_name(func), {"input": found[0].tensor}, {"input": name})
        if isinstance(result, Tensor) and func in TRANSPOSING | RESHAPING and id(result) not in self.tracked:
            parent = id(found[0].tensor)
            if result.requires_grad and (func in RESHAPING or result.ndim == 2):
                self.tracked[id(result)] = Tracked(name, result, parent, func in TRANSPOSING)
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, Tensor) and value.requires_grad and id(value) not in self.tracked:
                self.tracked[id(value)] = Tracked(name, value)
        if len(self.tracked) > before:
            self.recorder.derived(found)
        return result

    def _use(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        found: Sequence[Tracked],
    ) -> Any:  # noqa: ANN401
        key = (found[0].name, _kind(func), tuple(tensor.ndim for tensor in tensors))
        if key not in self.layouts:
            return self.recorder.unknown(key, self._plainly(func, args, kwargs))
        layout = self.layouts[key]
        if layout is UNUSED:
            canary = leaf((), found[0].tensor.dtype, found[0].tensor.device)
            self.canaries[f"{found[0].name} (in {_name(func)})"] = canary
            return watched(self._plainly(func, args, kwargs).clone(), catch_any, [canary])
        if layout is SHARED:
            if any(tensor.requires_grad for tensor in tensors if id(tensor) not in self.tracked):
                raise no_rule(func, tensors, found)
            return self._derive(func, args, kwargs, found)
        if func in POINTWISE or func in EXPANDING or func in LIKE_FIRST:
            return self._pointwise(func, args, kwargs, found, layout, key)
        if func not in RULES:
            raise no_rule(func, tensors, found)
        return self._rule(RULES[func], func, args, kwargs, found, layout, key)

    def _replaced(self, value: Any, by: Mapping[int, Tensor] | None = None) -> Any:  # noqa: ANN401
        if isinstance(value, Tensor) and id(value) in self.tracked:
            return value.detach() if by is None else by[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(self._replaced(item, by) for item in value)
        return value

    def _plainly(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        result: Tensor = func(
            *(self._replaced(value) for value in args), **{name: self._replaced(v) for name, v in kwargs.items()}
        )
        return result

    def _pointwise(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        found: Sequence[Tracked],
        layout: Layout,
        key: Key,
    ) -> Tensor:
        if any(is_dtensor(tracked.tensor) for tracked in found):
            raise unsupported(_name(func), {f.name: f.tensor for f in found}, {f.name: f.name for f in found})
        output = self._shape(func, args, kwargs)
        if not layout.fits(output, self.num_samples):
            raise UnknownLayout(key)
        by: dict[int, Tensor] = {}
        for tracked in found:
            leaf, aligned, axis = copies_for(
                tracked.name, _name(func), tracked.tensor, output, layout, self.num_samples
            )
            self.recorder.copies(tracked, leaf, axis)
            by[id(tracked.tensor)] = aligned
        if func in EXPANDING:
            return by[id(found[0].tensor)].expand(output)
        result: Tensor = func(
            *(self._replaced(v, by) for v in args), **{name: self._replaced(v, by) for name, v in kwargs.items()}
        )
        return result

    def _shape(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Size:
        if func in EXPANDING:
            with torch.no_grad():
                shape: torch.Size = func(*args, **kwargs).shape
                return shape
        if func in LIKE_FIRST:
            first: torch.Size = tensors_in(args)[0].shape
            return first
        shapes = (tensor.shape for tensor in tensors_in((*args, *kwargs.values())))
        return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]

    def _rule(
        self,
        rule: Rule,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        found: Sequence[Tracked],
        layout: Layout,
        key: Key,
    ) -> Tensor:
        bound = rule.bind(args, kwargs)
        wanted = {
            argument: self.tracked[id(value)].name
            for argument, value in bound.items()
            if isinstance(value, Tensor) and id(value) in self.tracked
        }
        needed = {name for argument in wanted for name in rule.needs.get(argument, ())}
        usable = all(isinstance(bound[name], Tensor) or bound[name] is None for name in needed)
        if not usable or len(wanted) < len(found) or not wanted.keys() <= rule.needs.keys() or needed & wanted.keys():
            raise no_rule(func, tensors_in((*args, *kwargs.values())), found)
        output = self._plainly(func, args, kwargs)
        check_use(func, _name(func), bound, wanted, output)
        shapes = {argument: local(bound[argument]).shape for argument in wanted}
        targets = {argument: id(bound[argument]) for argument in wanted}
        options = {name: None if isinstance(value, Tensor) else value for name, value in bound.items()}
        use = Use(rule, _name(func), self.num_samples, wanted, targets, shapes, layout, options, local(output).shape)
        if not layout.fits(use.output, self.num_samples):
            raise UnknownLayout(key)
        tensors = {name: bound[name] if bound[name] is None else local(bound[name]) for name in sorted(needed)}
        return self.recorder.use(use, output, tensors)


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func))


# `x + b`, `b + x`, `x += b` and `torch.add` are one kind: compiled code calls them by other names.
KINDS = {
    form.format(kind): kind
    for kind in ("add", "sub", "mul", "truediv", "matmul")
    for form in ("__{}__", "__r{}__", "__i{}__", "{}_")
}


IN_PLACE = (
    frozenset(name for name in dir(Tensor) if name in KINDS or (name.endswith("_") and not name.endswith("__")))
    - frozenset(f"__{kind}__" for kind in ("add", "sub", "mul", "truediv", "matmul"))
    - frozenset(f"__r{kind}__" for kind in ("add", "sub", "mul", "truediv", "matmul"))
    - {"requires_grad_"}
)


def _kind(func: Callable[..., Any]) -> str:
    name = _name(func)
    return KINDS.get(name, name)


def no_rule(func: Callable[..., Any], tensors: Sequence[Tensor], found: Sequence[Tracked]) -> UnsupportedModel:
    """An error that names the parameter, the operation, the shapes and the way out."""
    names = ", ".join(f"{tracked.name!r} {tuple(tracked.tensor.shape)}" for tracked in found)
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    return UnsupportedModel(
        f"No rule gives per-sample gradients for {_name(func)} of parameter {names}; its tensors have shapes {shapes}. "
        'Use engine="vmap" or "loop", leave the parameter out, or add a rule with dpfunc.engines.register_rule.'
    )
