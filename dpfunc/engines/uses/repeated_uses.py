"""Uses of parameters that occur again: what was found about one holds for each with the same key.

A step repeats the uses of the step before. The key of a call has all that the way through a tracker looks at: the
function, the names of the parameters, and shape, strides, dtype and rows of each tensor. So the second time the
function runs as a whole, without a mode that follows its operations, and its result has the rows of the first time.

Only functions of torch are kept, whose operations follow from their arguments, and only if they were one operation with
one result, whose rows follow from the key. Its derivative needs nothing but arguments and result, which the trace knows
if it must follow the backward pass. (Before it, the only argument that is no parameter may be copied: only derivatives
of parameters would need the copy, and torch computes none.)

A call goes the long way wherever somebody else could change what it does: under another mode, a transform of
torch.func, autocast, or hooks on saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfunc.engines.rules import FAMILIES, RULES, Rule
from dpfunc.engines.rules.table import Use
from dpfunc.engines.tracing.backward import saving_hooked
from dpfunc.engines.tracing.repeated import KEPT, keep, key_of_values
from dpfunc.engines.tracing.trace import Trace
from dpfunc.engines.uses.tracked import Recorder, Tracked, version

_OWN: Mapping[Callable[..., Any], Rule] = {op: rule for family in FAMILIES for rule in family.RULES for op in rule.ops}
_ERRORS = (RuntimeError, IndexError, ValueError, TypeError)


class _Known(NamedTuple):
    """A use, and the positions among the values of a call of the parameters and of the tensors that its rule needs."""

    use: Use
    targets: Mapping[str, int]
    needed: Mapping[str, int | None]


_known: dict[object, _Known] = {}


def key_of_use(
    trace: Trace,
    tracked: Mapping[int, Tracked],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> object:
    """The key of a call; None if it goes the long way."""
    if RULES.get(func) is not _OWN.get(func) or not torch.is_grad_enabled() or _is_watched(trace):
        return None
    names = []
    for value in (*args, *kwargs.values()):
        own = tracked.get(id(value))
        if own is not None:
            names.append(own.name)
        elif isinstance(value, Tensor) and value.requires_grad and trace.depends_on_none(value):
            return None  # computed from parameters, unseen
        else:
            names.append("")
    if not any(names):
        return None
    return key_of_values(trace, (func, len(args), *names, *kwargs), (*args, *kwargs.values()))


def _is_watched(trace: Trace) -> bool:
    """True where more than this trace takes part in an operation."""
    return (
        torch._C._len_torch_dispatch_stack() != 1
        or torch._C._len_torch_function_stack() != 0
        or torch._C._is_any_autocast_enabled()
        or torch._C._are_functorch_transforms_active()
        or saving_hooked()
    )


def repeat(
    trace: Trace,
    tracked: Mapping[int, Tracked],
    recorder: Recorder,
    key: object,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Tensor | None:
    """The result of a use that occurred before; None if it did not."""
    known = _known.get(key)
    if known is None:
        return None
    values = (*args, *kwargs.values())
    found = [tracked.get(id(value)) for value in values]
    with torch._C._DisableTorchDispatch():
        plain = [value if own is None else own.plain for value, own in zip(values, found, strict=True)]
        try:
            output: Tensor = func(*plain[: len(args)], **dict(zip(kwargs, plain[len(args) :], strict=True)))
        except _ERRORS:  # the long way notes it
            return None
        if not trace.recalls(key, output):
            return None
        for own in found:
            if own is not None:
                own.used.append(version(own.tensor))
        targets = {argument: id(values[position]) for argument, position in known.targets.items()}
        needed = {name: None if at is None else values[at] for name, at in known.needed.items()}
        return recorder.use(known.use, targets, output, needed)


@contextmanager
def hearing(trace: Trace | None) -> Iterator[Sequence[str]]:
    """Inside, collect the names of operations; see `Trace.heard`."""
    heard: list[str] = []
    if trace is None:
        yield heard
        return
    trace.hear(heard)
    try:
        yield heard
    finally:
        trace.hear(None)


def remember(
    trace: Trace,
    key: object,
    heard: Sequence[str],
    use: Use,
    output: Tensor,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needed: Mapping[str, Tensor | None],
) -> None:
    """Keep a use that was one operation, whose rows follow from the key."""
    places = {**dict(zip(use.rule.names or (), range(len(args)), strict=False)),
              **{name: len(args) + number for number, name in enumerate(kwargs)}}  # fmt: skip
    values = (*args, *kwargs.values())
    tensors = [value for value in values if isinstance(value, Tensor)]
    others = len(tensors) - len(use.wanted)
    names = [name for name in heard if name != "clone" or others > 1]
    if len(names) != 1 or not names[0] or use.sample_axis.guess is not None:
        return
    if any(not tensor.numel() for tensor in (output, *tensors)):
        return
    if len(_known) >= KEPT:
        _known.clear()
    if keep(trace, key, tensors, output):
        positions = {name: None if tensor is None else places[name] for name, tensor in needed.items()}
        _known[key] = _Known(use, {name: places[name] for name in use.wanted}, positions)
