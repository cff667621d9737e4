"""Recurrent layers: torch.lstm, gru, rnn_tanh and rnn_relu, which nn.LSTM, nn.GRU and nn.RNN call; and single cells.

A layer is a linear of inputs and of the states before each step, over the whole sequence (`gates`), or two where they
are not just added, and the steps in the order of time (`walks`).

Axis letters: T steps, B samples, d features, H state, P output (H, or narrower), G gates times H, L layers times
directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines._cost import Costs, matrix
from dpfunc.engines._per_sample import Outer, PerSampleGrad
from dpfunc.engines._rules.linear import column_sum
from dpfunc.engines._rules.table import REQUIRED, Grads, Rule, Use
from dpfunc.engines._rules.walks import KINDS, Kind, Steps, before, replay, walk

_State = tuple[Tensor, ...]


def gates(
    input: Tensor, state: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """Gates of all steps (T, B, G), as a linear of inputs (T, B, d) and states (T, B, H), which are joined.

    Both matrices see one gradient. So there is one product of matrices, and what both norms need of that gradient is
    computed once.
    """
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


@dataclass(frozen=True)
class _Weights:
    """Weights of one layer in one direction; `proj` makes an LSTM's output narrower than its cell."""

    inputs: Tensor
    state: Tensor
    inputs_bias: Tensor | None = None
    state_bias: Tensor | None = None
    proj: Tensor | None = None


def _layers(
    kind: Kind, run: Callable[..., Tensor], x_TBd: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor],
    has_biases: bool, num_layers: int, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """A recurrent function of torch on (T, B, d): outputs (T, B, P), then the last states (L, B, H).

    Args:
        run: of an operation on parameters, `gates` or `linear`, and its arguments.
    """
    directions, each = 2 if bidirectional else 1, len(params) // num_layers
    states = [hx] if isinstance(hx, Tensor) else hx
    lasts: list[_State] = []
    for layer in range(num_layers):
        own = [first[layer * directions : (layer + 1) * directions] for first in states]
        weights = params[layer * each : (layer + 1) * each]
        with torch._C.DisableTorchFunction(), torch.no_grad():  # the outputs, by torch itself
            options = (has_biases, 1, 0.0, False, bidirectional, False)
            known = kind.native(x_TBd, own[0] if len(own) == 1 else own, weights, *options)[0].chunk(directions, 2)
        outputs = []
        for index, direction in enumerate(_weights(weights, has_biases, directions)):
            state = tuple(first[index] for first in own)
            output, last = _over_time(kind, run, x_TBd, state, direction, index == 1, known[index])
            outputs.append(output)
            lasts.append(last)
        x_TBd = torch.cat(outputs, 2) if bidirectional else outputs[0]
    return (x_TBd, *(torch.stack(last) for last in zip(*lasts, strict=True)))


def _over_time(
    kind: Kind, run: Callable[..., Tensor], x_TBd: Tensor, state: _State, weights: _Weights, reverse: bool,
    known_TBP: Tensor,
) -> tuple[Tensor, _State]:  # fmt: skip
    """One layer in one direction: the outputs (T, B, P) and the last state."""
    before_TBP = before(known_TBP, state[0].detach().to(known_TBP.dtype), reverse)
    own = (weights.inputs, weights.state, weights.inputs_bias, weights.state_bias)
    if kind.adds:
        shares = [run(gates, x_TBd, before_TBP, *own)]
    else:
        shares = [run(F.linear, x_TBd, *own[::2]), run(F.linear, before_TBP, *own[1::2])]
    inner_TBP, proj = None, weights.proj
    steps = Steps(before_TBP, known_TBP, reverse, proj is not None)
    walked = walk(kind, steps, [share.detach() for share in shares], [cell.detach() for cell in state[1:]])
    if proj is not None and walked.inner_TBH is not None:
        inner_TBP = run(F.linear, walked.inner_TBH, proj)
    h_TBP, *cells = replay(kind, steps, walked, (*shares, inner_TBP, *state), (weights.state.detach(), proj))
    return h_TBP, (h_TBP[0 if reverse else -1], *cells)


def _weights(params: Sequence[Tensor], has_biases: bool, count: int) -> list[_Weights]:
    each = len(params) // count
    no_biases = () if has_biases else (None, None)
    groups = (params[start : start + each] for start in range(0, len(params), each))
    return [_Weights(*group[:2], *no_biases, *group[2:]) for group in groups]


def _cell(update: Callable[[Tensor, Tensor, Any], Any]) -> Callable[..., Any]:
    """A single step, from the shares of the input and of the state."""

    def run(
        input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Any:
        state = hx if isinstance(hx, Tensor) else hx[0]
        return update(F.linear(input, w_ih, b_ih), F.linear(state, w_hh, b_hh), hx)

    return run


def _lstm_cell(x_BG: Tensor, own_BG: Tensor, hx: Sequence[Tensor]) -> _State:
    i, f, g, o = (x_BG + own_BG).chunk(4, 1)
    c_BH = f.sigmoid() * hx[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c_BH.tanh(), c_BH


def _gru_cell(x_BG: Tensor, own_BG: Tensor, hx: Tensor) -> Tensor:
    r, z, n = x_BG.chunk(3, 1)
    own_r, own_z, own_n = own_BG.chunk(3, 1)
    n = (n + (r + own_r).sigmoid() * own_n).tanh()
    return n + (z + own_z).sigmoid() * (hx - n)


_ARGUMENTS = {"input": REQUIRED, "state": REQUIRED, "w_ih": REQUIRED, "w_hh": REQUIRED, "b_ih": None, "b_hh": None}
_NEEDS: dict[str, tuple[str, ...]] = {"w_ih": ("input",), "w_hh": ("state",), "b_ih": (), "b_hh": ()}
RULES = (Rule((gates,), _ARGUMENTS, _gates, _NEEDS, _costs),)
RECURRENT: dict[Callable[..., Any], Callable[..., tuple[Tensor, ...]]] = {
    kind.native: partial(_layers, kind) for kind in KINDS
}
CELLS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm_cell: _cell(_lstm_cell),
    torch.gru_cell: _cell(_gru_cell),
    torch.rnn_tanh_cell: _cell(lambda x_BH, own_BH, hx: torch.tanh(x_BH + own_BH)),
    torch.rnn_relu_cell: _cell(lambda x_BH, own_BH, hx: torch.relu(x_BH + own_BH)),
}
