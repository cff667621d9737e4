"""Costs of each strategy: trained parameters, memory and norm of the DP noise, computed from shapes alone."""

import math

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


def strategy_table(model: nn.Module, *, rank: int, noise_multiplier: float, expected_batch_size: float) -> str:
    """The strategies side by side, with adapters of a rank, as a table in Markdown; a meta model is enough.

    Training adds the trained copy, the released gradient and two moments of Adam, and in float32 the sum before and
    after the noise. The last number is `noise_multiplier * sqrt(trained) / expected_batch_size`: the norm of the noise
    in a step, over the norm that the clipped sum has if all samples agree.

    >>> from dpfunc.hf.vision_language.tiny_llava import tiny_llava
    >>> print(strategy_table(tiny_llava(), rank=2, noise_multiplier=1.0, expected_batch_size=10).splitlines()[-1])
    | projector | 544 | 4.2 % | 0.0 | 0.0 | 2.3 | adapts what is seen, not what is said |
    """
    integer("rank", rank, minimum=1)
    if quantised_layers(model):
        raise InvalidArgument("Expected weights in float, got quantised ones. Load the model without quantization.")
    own = dict(model.named_parameters())
    packed = {f"{name}.weight": model.get_parameter(f"{name}.weight") for name in language_layers(model)}
    total, weights = sum(map(Tensor.numel, own.values())), sum(parameter.nbytes for parameter in own.values())
    in_4_bits = weights - sum(own[name].nbytes - own[name].numel() // 2 for name in packed.keys() & own.keys())
    item = max(map(Tensor.element_size, own.values()))
    lines = [
        "| strategy | trained | share | weights, GiB | training adds, GiB | noise / signal | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, meaning in _MEANING.items():
        size = sum(rank * sum(weight.shape) for weight in packed.values())
        if name in ("full", "projector"):
            size = sum(own[parameter].numel() for parameter in trained_parameters(model, name))
        held, adds = in_4_bits if name == "qlora" else weights, size * (4 * item + 8)
        ratio = noise_multiplier * math.sqrt(size) / expected_batch_size
        lines.append(
            f"| {name} | {size:,} | {100 * size / total:.1f} % | {held / _GIB:.1f} | {adds / _GIB:.1f} | "
            f"{ratio:.2g} | {meaning} |"
        )
    return "\n".join(lines)
