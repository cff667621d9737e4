"""Recurrent layers of a row: packed sequences are those of one row, and dropout between layers draws as the row does.

A packed sequence of one row is the sequence itself, as long as the row says: rows of one length go together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines._islands import ANCHOR, Kernel, Native, Results, Tap, credit_use
from dpfunc.engines._levels import Below, apply_node, inside, of_rows
from dpfunc.engines._numerics import exact
from dpfunc.engines._reads import Handler, Pass, agreed, bits
from dpfunc.engines._rules import RULES
from dpfunc.engines._rules.recurrent import RECURRENT

NAMES = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
_PACKED = ("input", "batch_sizes", *NAMES[1:-1])


def _read(owner: Pass, value: Tensor, read: str) -> list[int]:
    values_B = of_rows(value)
    if values_B is not None:
        agreed(owner, bits(values_B), read)
        value = values_B[0]
    with Below():
        numbers: list[int] = inside(value).tolist()
        return numbers


def _pack(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`pack_padded_sequence` of one sequence: its steps, and a size of one for each."""
    x, lengths, batch_first = args
    numbers = _read(owner, lengths, func.__name__)
    x_TBd = x.transpose(0, 1) if batch_first else x
    if len(numbers) != 1 or x_TBd.shape[1] != 1 or not 0 < numbers[0] <= len(x_TBd):
        return func(x, torch.tensor(numbers), batch_first)
    return x_TBd[: numbers[0], 0], torch.ones(numbers[0], dtype=torch.int64)


def _pad(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`pad_packed_sequence` of one sequence."""
    data, batch_sizes, batch_first, padding_value, total_length = args
    sizes = _read(owner, batch_sizes, func.__name__)
    if set(sizes) != {1}:
        return func(data, torch.tensor(sizes), *args[2:])
    missing = max(0, total_length - len(sizes))
    padded = torch.cat([data, data.new_full((missing, *data.shape[1:]), padding_value)]) if missing else data
    return padded.unsqueeze(0 if batch_first else 1), torch.tensor([len(sizes)])


def _as_padded(owner: Pass, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Arguments of a recurrent layer by name, and True for a packed sequence of one row, as a sequence (T, 1, d)."""
    packed = "batch_sizes" in kwargs or isinstance(args[3], (list, tuple))
    bound = dict(zip(_PACKED if packed else NAMES, args, strict=False), **kwargs)
    if packed and set(_read(owner, bound["batch_sizes"], "batch_sizes")) == {1}:
        del bound["batch_sizes"]
        return {**bound, "input": bound["input"].unsqueeze(1), "batch_first": False}, True
    return bound, False


def layer_by_layer(func: Callable[..., Any], bound: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The layers one after the other, with dropout between them."""
    x, each, directions = bound["input"], len(bound["params"]) // bound["num_layers"], 1 + bound["bidirectional"]
    single = isinstance(bound["hx"], Tensor)
    states, lasts = [bound["hx"]] if single else list(bound["hx"]), []
    for layer in range(bound["num_layers"]):
        own = [state[layer * directions : (layer + 1) * directions] for state in states]
        weights = bound["params"][layer * each : (layer + 1) * each]
        x = F.dropout(x, bound["dropout"], True) if layer else x
        options = (bound["has_biases"], 1, 0.0, False, bound["bidirectional"], bound["batch_first"])
        x, *last = func(x, own[0] if single else own, weights, *options)
        lasts.append(last)
    return (x, *(torch.cat(last) for last in zip(*lasts, strict=True)))


@dataclass(frozen=True)
class _Credited:
    """Run an operation on parameters below both levels; the gradient of its result (T, B, ...) goes to its rule.

    Args:
        names: id of a plain parameter -> its name.
    """

    owner: Pass
    names: Mapping[int, str]

    def __call__(self, func: Callable[..., Tensor], *args: Any) -> Tensor:
        rule, out = RULES[func], func(*args)
        bound = rule.bind(args, {})
        wanted = {name: (self.names[id(value)], value) for name, value in bound.items() if id(value) in self.names}
        if not wanted:
            return out
        use = rule.use(func.__name__, self.owner.levels.rows, wanted, bound, out.shape, axis=1)
        needed = {n: bound[n].detach() for name in wanted for n in rule.needs[name]}
        self.owner.expect(use.wanted.values())

        def credit(grad: Tensor) -> None:
            with torch.no_grad(), exact(grad.device):
                credit_use(self.owner, use, grad.reshape(use.output), needed)

        # the result of a product is a view of one with two axes: a node of that one copies nothing
        whole = out._base
        same = whole is not None and whole.numel() == out.numel() and whole.is_contiguous() and out.is_contiguous()
        base = whole if whole is not None and same else out
        credited: Tensor = apply_node(Tap, base, ANCHOR, credit).view(out.shape)
        return credited


def _natively(owner: Pass, func: Callable[..., Any], bound: Mapping[str, Any]) -> Any:
    """A recurrent layer over time: torch's own kernel and its derivatives below both levels, its gates by their rule.

    A row is a batch of one, on the axis of the batch. NotImplemented for packed rows, and for dropout between layers.

    Args:
        bound: arguments by name.
    """
    given = bound["input"]
    if "batch_sizes" in bound or not owner.is_open() or not isinstance(given, Tensor):
        return NotImplemented
    axis = 0 if bound["batch_first"] else 1
    given_B = of_rows(given)
    if given_B is None or given.ndim != 3 or given.shape[axis] != 1 or (bound["train"] and bound["dropout"]):
        return NotImplemented
    plain: list[Tensor] = []
    credited: dict[int, str] = {}
    for value in bound["params"]:
        known = owner.plain(value)
        if known is None and (value.requires_grad or of_rows(value) is not None):
            return NotImplemented
        plain.append(inside(value) if known is None else known[1].detach())
        if known is not None:
            credited[id(plain[-1])] = known[0]
    single = isinstance(bound["hx"], Tensor)
    states = [bound["hx"]] if single else list(bound["hx"])
    if any(state.ndim != 3 for state in states):
        return NotImplemented
    with Below():
        zeros_B = given_B.new_zeros(owner.levels.rows, 1)
    # states that are the same for all rows, trained ones among them, get an axis of rows
    states = [
        state + owner.levels.row(zeros_B).to(state.dtype) if of_rows(state) is None else state for state in states
    ]
    options = (bound["has_biases"], bound["num_layers"], bound["bidirectional"])

    def call(x_B: Tensor, *states_B: Tensor) -> Results:
        x = x_B.squeeze(1 + axis)  # (B, T, d)
        first = [state_B.squeeze(2).transpose(0, 1).contiguous() for state_B in states_B]  # (L, B, H)
        run, hx = _Credited(owner, credited), first[0] if single else first
        out, *lasts = RECURRENT[func](run, x.transpose(0, 1), hx, plain, *options)
        out = out.transpose(0, 1)
        return (out.unsqueeze(1 + axis), *(last.transpose(0, 1).unsqueeze(2) for last in lasts))

    wanted = [value.requires_grad for value in (given, *states)]
    return apply_node(Native, Kernel(owner, call, wanted), owner.anchor, given, *states)


def _recurrent(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A recurrent layer of a row; NotImplemented where vmap and grad are to do it."""
    bound, packed = _as_padded(owner, args, kwargs)
    if bound["train"] and bound["dropout"] and bound["num_layers"] > 1 and "batch_sizes" not in bound:
        found = owner.seen(layer_by_layer, (func, bound), {})
    else:
        found = _natively(owner, func, bound) if owner.rules else NotImplemented
        if found is NotImplemented and packed:
            found = func(*bound.values())
    if not packed or found is NotImplemented:
        return found
    output, *lasts = found
    return (output.squeeze(1), *lasts)


RECURRENT_LAYERS: Mapping[Any, Handler] = {
    torch._C._VariableFunctions._pack_padded_sequence: _pack,
    torch._C._VariableFunctions._pad_packed_sequence: _pad,
    **dict.fromkeys(RECURRENT, _recurrent),
}
