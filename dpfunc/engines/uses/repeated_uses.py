"""Functions that occur again, with parameters or without: what was found about one holds for each with the same key.

A step repeats the calls of the step before. The key of a call has all that the way through a tracker looks at: the
function, the names of the parameters, and shape, strides, dtype and rows of each tensor. So the second time the
function runs as a whole, without a mode that follows its operations, and its result has the rows of the first time.

Only functions of torch are kept, whose operations follow from their arguments, and only if the rows of each operation
follow from the key. The derivative of one operation with one result needs nothing but arguments and result, which the
trace knows if it must follow the backward pass. (Before it, the only argument that is no parameter may be copied: only
derivatives of parameters would need the copy, and torch computes none.) A function of more operations runs as a whole
only where the forward pass proves the backward pass, which is then not followed. If it does not after all, the step is
computed again, and each operation is followed (`Trace.whole`).

A call goes the long way wherever somebody else could change what it does: under another mode, a transform of
torch.func, forward derivatives, autocast, or hooks on saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dpfunc.engines.rules import FAMILIES, RULES, Rule
from dpfunc.engines.rules.table import Use
from dpfunc.engines.tracing.backward import saving_hooked
from dpfunc.engines.tracing.python_values import READING_INSIDE
from dpfunc.engines.tracing.repeated import Answer, answers_for, key_of_values, note_again, put
from dpfunc.engines.tracing.trace import SEVERAL, Trace
from dpfunc.engines.uses.tracked import Recorder, Tracked, tensors_in, version

_OWN: Mapping[Callable[..., Any], Rule] = {op: rule for family in FAMILIES for rule in family.RULES for op in rule.ops}
_ERRORS = (RuntimeError, IndexError, ValueError, TypeError)
_SPACES = (torch, torch.special, torch._C._nn, torch.nn.functional, torch._C.TensorBase, Tensor)


def _is_torchs(value: object) -> bool:
    return (getattr(value, "__module__", None) or "torch").startswith("torch")


# Functions by which torch computes, less those that read numbers, and those that gave nothing but a view, whose keys
# would be of no use.
_repeatable: set[Any] = {
    value
    for space in _SPACES
    for value in vars(space).values()
    if callable(value) and not isinstance(value, type) and _is_torchs(value) and value not in READING_INSIDE
} | set(_OWN)


class _Known(NamedTuple):
    """A call: the types of its result, and its use of parameters.

    Args:
        answers: types. whole: it was more than one operation with one result. use: None if it takes no parameter.
        targets, needed: positions among the values of the call of the parameters, and of the tensors that the rule of
            the use needs, by argument.
    """

    answers: tuple[Answer, ...]
    whole: bool
    use: Use | None
    targets: Mapping[str, int]
    needed: Mapping[str, int | None]


_WITHOUT_PARAMETERS = _Known((), False, None, {}, {})
_known: dict[object, _Known] = {}


def key_of_function(
    trace: Trace,
    tracked: Mapping[int, Tracked],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> object:
    """The key of a call; None if it goes the long way."""
    if func not in _repeatable or RULES.get(func) is not _OWN.get(func) or _is_watched(trace):
        return None
    if kwargs:
        return key_of_values(trace, (func, len(args), *kwargs), (*args, *kwargs.values()), tracked)
    return key_of_values(trace, (func, len(args)), args, tracked)


def _is_watched(trace: Trace) -> bool:
    """True where more than this trace takes part in an operation, or other than it, or no graph is made."""
    return (
        not torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack() != 1
        or torch._C._get_dispatch_stack_at(0) is not trace
        or torch._C._len_torch_function_stack() != 0
        or torch._C._is_any_autocast_enabled()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0  # derivatives beside the numbers, in memory of their own
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
    """The result of a call that occurred before; None if it did not."""
    known = _known.get(key)
    if known is None or (known.whole and not trace.whole):
        return None
    values = (*args, *kwargs.values()) if kwargs else args
    found = () if known.use is None else [tracked.get(id(value)) for value in values]
    with torch._C._DisableTorchDispatch():
        plain = values
        if known.use is not None:
            plain = tuple(value if own is None else own.plain for value, own in zip(values, found, strict=True))
        try:
            if kwargs:
                output: Tensor = func(*plain[: len(args)], **dict(zip(kwargs, plain[len(args) :], strict=True)))
            else:
                output = func(*plain)
        except _ERRORS:  # the long way notes it
            return None
        coarse = note_again(trace, known.answers, output)
        if coarse is None:
            return None
        trace.coarse, trace.skipped = trace.coarse or coarse, trace.skipped or known.whole
        if known.use is None:
            return output
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


def run_and_remember(
    trace: Trace, key: object, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The result of a function without parameters, which is kept if its rows follow from the key."""
    inputs = tensors_in((*args, *kwargs.values()))
    before = _versions(inputs)
    with hearing(trace) as heard:
        output = func(*args, **kwargs)
    if not heard and func not in _OWN:  # a view
        _repeatable.discard(func)
    elif type(output) is Tensor and before is not None and before == _versions(inputs):
        _keep(trace, key, heard, inputs, output)
    return output


def _versions(tensors: Sequence[Tensor]) -> list[int] | None:
    """The number of writes into each; None where torch does not count them."""
    return None if any(tensor.is_inference() for tensor in tensors) else [tensor._version for tensor in tensors]


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
    """Keep a use whose rows follow from the key."""
    places = {**dict(zip(use.rule.names or (), range(len(args)), strict=False)),
              **{name: len(args) + number for number, name in enumerate(kwargs)}}  # fmt: skip
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    others = len(tensors) - len(use.wanted)
    names = [name for name in heard if name != "clone" or others > 1]
    if use.sample_axis.guess is not None:
        return
    targets = {name: places[name] for name in use.wanted}
    positions = {name: None if tensor is None else places[name] for name, tensor in needed.items()}
    _keep(trace, key, names, tensors, output, _Known((), False, use, targets, positions))


def _keep(
    trace: Trace,
    key: object,
    heard: Sequence[str],
    inputs: Sequence[Tensor],
    output: Tensor,
    known: _Known = _WITHOUT_PARAMETERS,
) -> None:
    whole = len(heard) != 1 or heard[0] == SEVERAL
    if not (heard and all(heard)) or (whole and not trace.clean):
        return
    if any(not tensor.numel() for tensor in (output, *inputs)):
        return
    answers = answers_for(trace, inputs, output)
    if answers:
        put(_known, key, known._replace(answers=answers, whole=whole))
