"""Recurrent layers of a row: packed sequences are those of one row, and dropout between layers draws as the row does.

A packed sequence of one row is the sequence itself, as long as the row says: rows of one length go together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines.levels import Below, inside, of_rows
from dpfunc.engines.reads import Reader, agreed, bits

NAMES = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
_PACKED = ("input", "batch_sizes", *NAMES[1:-1])


def _read(reader: Reader, value: Tensor, read: str) -> list[int]:
    values_B = of_rows(value)
    if values_B is not None:
        agreed(reader, bits(values_B), read)
        value = values_B[0]
    with Below():
        numbers: list[int] = inside(value).tolist()
        return numbers


def pack(reader: Reader, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`pack_padded_sequence` of one sequence: its steps, and a size of one for each."""
    x, lengths, batch_first = args
    numbers = _read(reader, lengths, func.__name__)
    x_TBd = x.transpose(0, 1) if batch_first else x
    if len(numbers) != 1 or x_TBd.shape[1] != 1 or not 0 < numbers[0] <= len(x_TBd):
        return func(x, torch.tensor(numbers), batch_first)
    return x_TBd[: numbers[0], 0], torch.ones(numbers[0], dtype=torch.int64)


def pad(reader: Reader, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`pad_packed_sequence` of one sequence."""
    data, batch_sizes, batch_first, padding_value, total_length = args
    sizes = _read(reader, batch_sizes, func.__name__)
    if set(sizes) != {1}:
        return func(data, torch.tensor(sizes), *args[2:])
    missing = max(0, total_length - len(sizes))
    padded = torch.cat([data, data.new_full((missing, *data.shape[1:]), padding_value)]) if missing else data
    return padded.unsqueeze(0 if batch_first else 1), torch.tensor([len(sizes)])


def as_padded(reader: Reader, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Arguments of a recurrent layer by name, and True for a packed sequence of one row, as a sequence (T, 1, d)."""
    packed = "batch_sizes" in kwargs or isinstance(args[3], (list, tuple))
    bound = dict(zip(_PACKED if packed else NAMES, args, strict=False), **kwargs)
    if packed and set(_read(reader, bound["batch_sizes"], "batch_sizes")) == {1}:
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
