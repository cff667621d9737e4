"""Costs of each strategy: trained parameters, memory and norm of the DP noise, computed from shapes alone."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor, nn

from dpfunc._utils.validation import integer
from dpfunc.errors import InvalidArgument
from dpfunc.hf._facts import quantised_layers
from dpfunc.hf.vision_language._strategies import language_layers, trained_parameters

_GIB = 2**30
_MEANING = {
    "full": "noise in every weight; for large batches and much data",
    "lora": "noise in the adapters only; the usual choice",
    "qlora": "as lora; the base is rounded once, without data",
    "projector": "adapts what is seen, not what is said",
}


class StrategyCost(NamedTuple):
    """Trained parameters d and memory of one strategy, without activations; sqrt(d), the norm of a step's noise."""

    name: str
    trained: int
    base_bytes: int
    """All weights, with half a byte for each of those that `"qlora"` packs."""
    training_bytes: int
    """The trained copy, the released gradient and two moments of Adam; in float32 the sum before and after the noise"""
    noise_norm: float


def strategy_costs(model: nn.Module, *, rank: int) -> tuple[StrategyCost, ...]:
    """Costs of each strategy for a model, with adapters of a rank; a model on the meta device is enough.

    >>> from dpfunc.hf.vision_language.tiny_llava import tiny_llava
    >>> {cost.name: cost.trained for cost in strategy_costs(tiny_llava(), rank=2)}
    {'full': 10968, 'lora': 992, 'qlora': 992, 'projector': 544}
    """
    integer("rank", rank, minimum=1)
    if quantised_layers(model):
        raise InvalidArgument("Expected weights in float, got quantised ones. Load the model without quantization.")
    own = dict(model.named_parameters())
    packed = {f"{name}.weight": model.get_parameter(f"{name}.weight") for name in language_layers(model)}
    weights = sum(parameter.nbytes for parameter in own.values())
    in_4_bits = weights - sum(own[name].nbytes - own[name].numel() // 2 for name in packed.keys() & own.keys())
    item = max(map(Tensor.element_size, own.values()))
    found = []
    for name in _MEANING:
        size = sum(rank * sum(weight.shape) for weight in packed.values())
        if name in ("full", "projector"):
            size = sum(own[parameter].numel() for parameter in trained_parameters(model, name))
        held = in_4_bits if name == "qlora" else weights
        found.append(StrategyCost(name, size, held, size * (4 * item + 8), math.sqrt(size)))
    return tuple(found)


def strategy_table(model: nn.Module, *, rank: int, noise_multiplier: float, expected_batch_size: float) -> str:
    """The strategies side by side, as a table in Markdown.

    The last number is `noise_multiplier * sqrt(d) / expected_batch_size`: the norm of the noise in a step, over the
    norm that the clipped sum has if all samples agree. It depends on the strategy; epsilon does not.

    >>> from dpfunc.hf.vision_language.tiny_llava import tiny_llava
    >>> print(strategy_table(tiny_llava(), rank=2, noise_multiplier=1.0, expected_batch_size=10).splitlines()[-1])
    | projector | 544 | 4.2 % | 0.0 | 0.0 | 2.3 | adapts what is seen, not what is said |
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    lines = [
        "| strategy | trained | share | weights, GiB | training adds, GiB | noise / signal | |",
        "|---|---|---|---|---|---|---|",
    ]
    for cost in strategy_costs(model, rank=rank):
        ratio = noise_multiplier * cost.noise_norm / expected_batch_size
        lines.append(
            f"| {cost.name} | {cost.trained:,} | {100 * cost.trained / total:.1f} % | {cost.base_bytes / _GIB:.1f} | "
            f"{cost.training_bytes / _GIB:.1f} | {ratio:.2g} | {_MEANING[cost.name]} |"
        )
    return "\n".join(lines)
