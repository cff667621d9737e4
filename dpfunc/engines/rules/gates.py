"""The gates of recurrent layers: `y = x W^T + b + h U^T + c`, of inputs x and of the states h before each step.

Both matrices see one gradient. So there is one product of matrices, and what both norms need of that gradient is
computed once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from dpfunc.engines.cost import Costs, matrix
from dpfunc.engines.per_sample import Outer, PerSampleGrad
from dpfunc.engines.rules.linear import column_sum
from dpfunc.engines.rules.table import REQUIRED, Grads, Rule, Use


def gates(
    input: Tensor,
    state: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Gates of all steps (T, B, G), as a linear of inputs (T, B, d) and states (T, B, H), which are joined."""
    tensors = [tensor for tensor in (input, state, w_ih, w_hh, b_ih, b_hh) if tensor is not None]
    if has_torch_function(tensors):
        made: Tensor = handle_torch_function(gates, tensors, input, state, w_ih, w_hh, b_ih, b_hh)
        return made
    bias = b_ih if b_ih is None or b_hh is None else b_ih + b_hh
    return F.linear(torch.cat([input, state], -1), torch.cat([w_ih, w_hh], 1), bias)


def _gates(use: Use, grad: Tensor, input: Tensor, state: Tensor, **_: Any) -> Grads:
    """`y = x W^T + b + h U^T + c`."""
    grads: dict[str, PerSampleGrad] = {}
    g_BTG = use.positions(grad)
    products: list[tuple[Tensor, Tensor]] | None = [] if {"w_ih", "w_hh"} <= use.wanted.keys() else None
    for name, side in (("w_ih", input), ("w_hh", state)):
        if name in use.wanted:
            grads[name] = Outer(g_BTG, use.positions(side), tuple(use.shapes[name]), products=products)
    biases = [name for name in ("b_ih", "b_hh") if name in use.wanted]
    return {**grads, **dict.fromkeys(biases, column_sum(use, grad))} if biases else grads


def _costs(use: Use) -> Costs:
    """Costs of both matrices as one: their inputs are joined."""
    shapes = use.shapes.values()
    positions = use.output.numel() // max(1, use.num_samples * use.output[-1])
    return matrix(positions, use.output[-1], max(1, sum(math.prod(shape[1:]) for shape in shapes if len(shape) == 2)))


_ARGUMENTS = {"input": REQUIRED, "state": REQUIRED, "w_ih": REQUIRED, "w_hh": REQUIRED, "b_ih": None, "b_hh": None}
_NEEDS: dict[str, tuple[str, ...]] = {"w_ih": ("input",), "w_hh": ("state",), "b_ih": (), "b_hh": ()}
RULES = (Rule((gates,), _ARGUMENTS, _gates, _NEEDS, _costs),)
