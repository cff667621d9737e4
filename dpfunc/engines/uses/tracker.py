"""Tracks trained parameters through the torch functions of one call of an engine, and applies the rule of each use.

Nothing is patched: a TorchFunctionMode is active inside the call. Parameters are found by identity. A value that is
computed from parameters alone (a transposed weight, a table of positions) is tracked like a parameter; its per-sample
gradients go back through ordinary autograd at the end. A use that no rule sees would reach the parameter through
autograd, which is checked: no use is left out without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpfunc._utils.dtensor import is_dtensor, local
from dpfunc._utils.validation import shorten
from dpfunc.engines.rules import COMPOSITES, EXPANDING, JOINING, LIKE_FIRST, RULES
from dpfunc.engines.rules.composite import without_dispatch
from dpfunc.engines.rules.pointwise import copies_for, is_pointwise
from dpfunc.engines.rules.recurrent import PADDING
from dpfunc.engines.rules.table import Rule, Use
from dpfunc.engines.tracing.python_values import SIZES, name_of, noting_reads
from dpfunc.engines.tracing.sample_axis_discovery import DiscoveryRecorder, Key, NoSampleAxis, SampleAxes
from dpfunc.engines.tracing.trace import Trace
from dpfunc.engines.uses.gradient_taps import catch_any, leaf, watched
from dpfunc.engines.uses.repeated_uses import hearing, key_of_function, remember, repeat, run_and_remember
from dpfunc.engines.uses.sample_axis import SampleAxis
from dpfunc.engines.uses.tensor_parallel import check_use, unsupported
from dpfunc.engines.uses.torch_functions import (
    CHECKING,
    CONVERTING,
    HOOKING,
    HOOKS,
    NESTED,
    RESHAPING,
    TRANSPOSING,
    WATCHED,
    kind_of,
    writes,
)
from dpfunc.engines.uses.tracked import Recorder, Tracked, no_rule, tensors_in, version
from dpfunc.errors import UnsupportedModel


@dataclass(eq=False)
class Tracker(TorchFunctionMode):
    """Mode that tracks parameters. Used once, for one forward and backward pass.

    Args:
        params: leaves that require gradients. num_samples: B. sample_axes: finds the sample axis of a result.
        tracked: identity -> parameters and derived values.
        sentinels: leaves under results that no loss should depend on. hidden: a parameter was used under no_grad.
        hooked: something was put into the backward pass, or could have been.
    """

    params: Mapping[str, Tensor]
    num_samples: int
    sample_axes: SampleAxes
    recorder: Recorder
    tracked: dict[int, Tracked] = field(default_factory=dict)
    sentinels: dict[str, Tensor] = field(default_factory=dict)
    hidden: bool = False
    hooked: bool = False
    _trace: Trace | None = None
    _key: object = None

    def __post_init__(self) -> None:
        super().__init__()
        if isinstance(self.sample_axes, DiscoveryRecorder) and type(self.sample_axes.trace) is Trace:
            self._trace = self.sample_axes.trace  # uses that occur again are known; not where any values must do
        for name, param in self.params.items():
            self.tracked[id(param)] = Tracked(name, param)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if self._trace is not None:
            key = self._key = key_of_function(self._trace, self.tracked, func, args, kwargs)
            if key is not None:
                result = repeat(self._trace, self.tracked, self.recorder, key, func, args, kwargs)
                if result is not None:
                    return result
        if isinstance(self.sample_axes, DiscoveryRecorder):
            return noting_reads(self.sample_axes.trace, self._called, func, args, kwargs)
        return self._called(func, args, kwargs)

    def _called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of any function, which may take a parameter."""
        if func is Tensor.__getitem__ and isinstance(args[1], tuple) and len(args[1]) == 1:
            args = (args[0], args[1][0])
        if func is Tensor.unflatten:  # a method in Python, which dynamo cannot trace inside of a mode
            func = torch.unflatten
        if func in HOOKING:
            self.hooked = True
        if func in NESTED:
            self.hooked = True
            return self._nested(func, args, kwargs)
        if func in WATCHED:
            return self._read_or_check(func, args, kwargs)
        if func in PADDING and not torch.compiler.is_compiling():  # takes no parameter, and copies slices
            with self:
                return PADDING[func](*args, **kwargs)
        if func in CONVERTING and len(args) > 1 and isinstance(args[1], Tensor):  # its values do not matter
            args = (args[0], args[1].device, args[1].dtype, *args[2:])
            func = Tensor.to
        if func in RULES or is_pointwise(func):
            self._track_untracked(args)
        if not self._has_tracked(args) and not (kwargs and self._has_tracked(kwargs.values())):
            if self._trace is None or self._key is None:
                return func(*args, **kwargs)
            return run_and_remember(self._trace, self._key, func, args, kwargs)
        return self._with_parameters(func, args, kwargs)

    def _with_parameters(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a function that takes a parameter, or a value computed from parameters alone."""
        tensors = tensors_in((*args, *kwargs.values()))
        found = [self.tracked[id(tensor)] for tensor in tensors if id(tensor) in self.tracked]
        if func in HOOKS and id(args[0]) in self.tracked:
            raise UnsupportedModel(
                f"The loss puts a hook on {shorten([found[0].name])}, or on a value computed from it, which would not "
                'see per-sample gradients. Change the loss instead of the gradient, or use engine="loop".'
            )
        if func is Tensor.__setitem__ and len(found) == 1 and id(args[2]) in self.tracked and _fills(*args):
            with self:  # the values are the same wherever the mask is true
                return args[0].copy_(torch.where(_expanded_mask(*args[:2]), args[2], args[0]))
        if self._writes(func, args, kwargs) and not self._may_write(args[0], tensors, found):
            raise no_rule(func, tensors, found)
        if not torch.is_grad_enabled():  # then ordinary autograd takes no gradient either
            self.hidden = True
            return func(*args, **kwargs)
        if func in COMPOSITES and func not in RULES:
            with self:
                return COMPOSITES[func](*args, **kwargs)
        if len(found) == len(tensors) and not (func in EXPANDING and self._expands(func, args, kwargs)):
            return self._derive(func, args, kwargs, found)
        return self._use(func, args, kwargs, tensors, found)

    def _track_untracked(self, values: Iterable[Any]) -> None:
        """Track values of parameters that no torch function made: by a custom Function, or written into zeros."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        for value in values:
            custom = (
                isinstance(value, Tensor)
                and value.requires_grad
                and not value.is_leaf
                and id(value) not in self.tracked
            )
            if custom and self.sample_axes.constant(value):
                self.tracked[id(value)] = Tracked("a value of parameters", value)
                self.recorder.derived([self.tracked[id(param)] for param in self.params.values()])  # any of them

    def _nested(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        create_graph = kwargs.get("create_graph", args[4] if len(args) > 4 else False)
        if func is not torch.autograd.grad or create_graph:
            raise UnsupportedModel(
                "The loss differentiates inside of itself, by backward() (as reentrant checkpointing does: use "
                'use_reentrant=False) or with create_graph=True: such gradients would be lost. Use engine="vmap" with '
                "torch.func.grad."
            )
        with self:  # checkpointing repeats uses inside of it
            return without_dispatch(func)(*args, **kwargs)

    def _read_or_check(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Functions that give numbers of tensors to Python, or check them, without an operation that shows it."""
        if func in CHECKING:
            with self.sample_axes.ignoring_reads(func, args, kwargs):
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in SIZES:
            self.sample_axes.note_shape_read(args[0])
        else:
            self.sample_axes.note_read(name_of(func), args[0], result)
        return result

    def _writes(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """True if a function writes into a parameter, or into a value computed from parameters alone."""
        return bool(writes(func, kwargs) and args and id(args[0]) in self.tracked)

    def _may_write(self, target: Tensor, tensors: Sequence[Tensor], found: Sequence[Tracked]) -> bool:
        """True if the target was computed from parameters alone, as the other tensors, and was not used yet."""
        own = self.tracked[id(target)]
        return target.requires_grad and not target.is_leaf and not own.used and len(found) == len(tensors)

    def _has_tracked(self, values: Iterable[Any]) -> bool:  # the hot path: called for every torch function
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
    ) -> Any:
        result = func(*args, **kwargs)
        name, before = found[0].name, len(self.tracked)
        if is_dtensor(result) and result.requires_grad and id(result) not in self.tracked:
            raise unsupported(name_of(func), {"input": found[0].tensor}, {"input": name})
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
    ) -> Any:
        key = (found[0].name, kind_of(func), tuple(tensor.ndim for tensor in tensors))
        others = [tensor for tensor in tensors if id(tensor) not in self.tracked]
        guess: SampleAxis | None = None
        if func not in EXPANDING and self.sample_axes.shared(key, others):
            private = any(tensor.requires_grad for tensor in others)
            guess = self._guess(func, args, kwargs, found, key, private)
            if guess is None and private:
                raise no_rule(func, tensors, found)
            if guess is None:
                return self._derive(func, args, kwargs, found)
        try:
            result = self._by_rule(func, args, kwargs, tensors, found, key, guess)
            if guess is not None and not self.sample_axes.assign_rows(key, result, guess):
                raise no_rule(func, tensors, found)
            return result
        except UnsupportedModel:
            if guess is None or any(tensor.requires_grad for tensor in others):
                raise
            self.sample_axes.drop_guess(key)
            return self._derive(func, args, kwargs, found)
        except NoSampleAxis:
            plain = self._run_detached(func, args, kwargs)
            if self.sample_axes.constant(plain):  # a part of a table, at a number that Python was given
                return self._derive(func, args, kwargs, found)
            sentinel = leaf((), found[0].tensor.dtype, found[0].tensor.device)
            sentinel = self.sentinels.setdefault(f"{found[0].name} (in {name_of(func)})", sentinel)
            return watched(plain.clone(), catch_any, [sentinel])

    def _guess(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        found: Sequence[Tracked],
        key: Key,
        private: bool,
    ) -> SampleAxis | None:
        """Sample axis to assume in the result of a use that depends on no sample."""
        if func not in RULES and not is_pointwise(func) and func not in LIKE_FIRST:
            return None
        if func in RULES:
            result = self._run_detached(func, args, kwargs)
            after = tuple(result.shape) if isinstance(result, Tensor) else ()
            before: tuple[int, ...] = ()
        else:
            after = tuple(self._shape(func, args, kwargs))
            shapes = [tuple(tracked.tensor.shape) for tracked in found]
            longest = max(len(shape) for shape in shapes)  # dynamo does not know max(..., key=len)
            before = next(shape for shape in shapes if len(shape) == longest)
        return self.sample_axes.guessed(key, before, after, private)

    def _by_rule(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        found: Sequence[Tracked],
        key: Key,
        guess: SampleAxis | None,
    ) -> Any:
        for tracked in found:
            tracked.used.append(version(tracked.tensor))
        joins = func in JOINING and self._of_one(key, tensors)
        if is_pointwise(func) or func in EXPANDING or func in LIKE_FIRST or joins:
            return self._pointwise(func, args, kwargs, found, key, guess)
        if func not in RULES or any(tensor.is_complex() for tensor in tensors):
            raise no_rule(func, tensors, found)
        return self._rule(RULES[func], func, args, kwargs, found, key, guess)

    def _of_one(self, key: Key, tensors: Sequence[Tensor]) -> bool:
        """True if all tensors but the parameters belong to one sample."""
        others = [tensor for tensor in tensors if id(tensor) not in self.tracked]
        sample_axis = (
            None if torch.compiler.is_compiling() else self.sample_axes.broadcast(key, others, tensors[0].ndim)
        )
        return sample_axis is not None and sample_axis.is_one_sample()

    def _detached(self, value: Any, by: Mapping[int, Tensor] | None = None) -> Any:
        if isinstance(value, Tensor) and id(value) in self.tracked:
            return value.detach() if by is None else by[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(self._detached(item, by) for item in value)
        return value

    def _run_detached(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        by: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Run a function on tracked values without their graph, or on what stands `by` their ids in their stead."""
        result: Tensor = func(
            *(self._detached(v, by) for v in args), **{name: self._detached(v, by) for name, v in kwargs.items()}
        )
        return result

    def _pointwise(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        found: Sequence[Tracked],
        key: Key,
        guess: SampleAxis | None,
    ) -> Tensor:
        if any(is_dtensor(tracked.tensor) for tracked in found):
            raise unsupported(name_of(func), {f.name: f.tensor for f in found}, {f.name: f.name for f in found})
        output = self._shape(func, args, kwargs)
        sample_axis = guess or self._sample_axis(func, args, kwargs, found, key, output)
        if sample_axis is None:
            return self._derive(func, args, kwargs, found)  # type: ignore[no-any-return]  # as the function
        by: dict[int, Tensor] = {}
        for tracked in found:
            leaf, aligned, axis = copies_for(
                tracked.name, name_of(func), tracked.tensor, output, sample_axis, self.num_samples
            )
            if func in EXPANDING and not torch.compiler.is_compiling():
                leaf = leaf.detach().contiguous().requires_grad_()  # memory of its own, which the trace can follow
                self.sample_axes.note_copies(leaf, axis)
                aligned = sample_axis.expand_copies(leaf, self.num_samples)
            of_one = sample_axis.ids if sample_axis.is_one_sample() else None
            self.recorder.copies(tracked, leaf, SampleAxis(axis, ids=of_one, guess=sample_axis.guess))
            by[id(tracked.tensor)] = aligned
        if func in EXPANDING:
            return by[id(found[0].tensor)].expand(output)
        return self._run_detached(func, args, kwargs, by)

    def _sample_axis(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        found: Sequence[Tracked],
        key: Key,
        output: torch.Size,
    ) -> SampleAxis | None:
        """Sample axis in the result of an operation that broadcasts; None if it has none."""
        if func in EXPANDING:
            return self.sample_axes.expanded(key, tuple(found[0].tensor.shape), tuple(output))
        values = args[:1] if func in LIKE_FIRST else (*args, *kwargs.values())
        others = [tensor for tensor in tensors_in(values) if id(tensor) not in self.tracked]
        return self.sample_axes.broadcast(key, others, len(output))

    def _shape(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Size:
        if func in EXPANDING:
            with torch.no_grad():
                shape: torch.Size = func(*args, **kwargs).shape
                return shape
        if func in LIKE_FIRST or func in JOINING:
            first: torch.Size = tensors_in(args)[0].shape
            return first
        shapes = (tensor.shape for tensor in tensors_in((*args, *kwargs.values())))
        return torch.Size(torch.broadcast_shapes(*shapes))

    def _rule(
        self,
        rule: Rule,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        found: Sequence[Tracked],
        key: Key,
        guess: SampleAxis | None,
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
        with hearing(self._trace) as heard:
            output = self._run_detached(func, args, kwargs)
        check_use(func, name_of(func), bound, wanted, output)
        shapes = {argument: local(bound[argument]).shape for argument in wanted}
        targets = {argument: id(bound[argument]) for argument in wanted}
        options = {name: None if isinstance(value, Tensor) else value for name, value in bound.items()}
        sample_axis = guess or self.sample_axes.of(key, output)
        use = Use(rule, name_of(func), self.num_samples, wanted, shapes, sample_axis, options, local(output).shape)
        tensors = {name: bound[name] if bound[name] is None else local(bound[name]) for name in sorted(needed)}
        if self._trace is not None and self._key is not None:
            remember(self._trace, self._key, heard, use, output, args, kwargs, tensors)
        return self.recorder.use(use, targets, output, tensors)


def _fills(target: Tensor, index: Any, value: Tensor) -> bool:
    """True if `target[index] = value` fills the positions of a mask with one slice."""
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
    return is_mask and target.requires_grad and value.ndim <= target.ndim - index.ndim


def _expanded_mask(target: Tensor, mask: Tensor) -> Tensor:
    """A mask of the leading axes, beside all axes."""
    return mask.reshape(*mask.shape, *[1] * (target.ndim - mask.ndim))
