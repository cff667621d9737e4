"""Recurrent layers: torch.lstm, gru, rnn_tanh and rnn_relu, which nn.LSTM, nn.GRU and nn.RNN call; and single cells.

A layer is a linear of inputs and states over the whole sequence (`gates`), or two where they are not just added, and
the steps in the order of time (`walks`).

Axis letters: T steps, B samples, d features, H state, P output (H, or narrower), G gates times H, L layers times
directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines.rules.gates import gates
from dpfunc.engines.rules.walks import GRU, LSTM, RELU, TANH, Kind, before, replay, walk

_State = tuple[Tensor, ...]


@dataclass(frozen=True)
class _Weights:
    """Weights of one layer in one direction; `proj` makes an LSTM's output narrower than its cell."""

    inputs: Tensor
    state: Tensor
    inputs_bias: Tensor | None = None
    state_bias: Tensor | None = None
    proj: Tensor | None = None


def _layers(kind: Kind) -> Callable[..., tuple[Tensor, ...]]:
    """A recurrent function of torch on (T, B, d): outputs (T, B, P), then the last states (L, B, H)."""

    def run(
        x_TBd: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
        bidirectional: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
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
                output, last = _over_time(kind, x_TBd, state, direction, index == 1, known[index])
                outputs.append(output)
                lasts.append(last)
            x_TBd = torch.cat(outputs, 2) if bidirectional else outputs[0]
        return (x_TBd, *(torch.stack(last) for last in zip(*lasts, strict=True)))

    return run


def _over_time(
    kind: Kind, x_TBd: Tensor, state: _State, weights: _Weights, reverse: bool, known_TBP: Tensor
) -> tuple[Tensor, _State]:
    """One layer in one direction: the outputs (T, B, P) and the last state."""
    before_TBP = before(known_TBP, state[0].detach().to(known_TBP.dtype), reverse)
    shares = _shares(kind, x_TBd, before_TBP, weights)
    cell = [one.detach() for one in state[1:]]
    inner_TBP, proj = None, weights.proj
    walked = walk(kind, reverse, [share.detach() for share in shares], before_TBP, known_TBP, cell, proj is not None)
    if proj is not None and walked.inner_TBH is not None:
        inner_TBP = F.linear(walked.inner_TBH, proj)
    h_TBP, *cells = replay(
        kind, reverse, walked, known_TBP, (*shares, inner_TBP, *state), (weights.state.detach(), proj)
    )
    return h_TBP, (h_TBP[0 if reverse else -1], *cells)


def _shares(kind: Kind, x_TBd: Tensor, before_TBP: Tensor, weights: _Weights) -> list[Tensor]:
    """The gates of all steps, or the share of the inputs and that of the states where they are not just added."""
    own = (weights.inputs, weights.state, weights.inputs_bias, weights.state_bias)
    if kind.adds:
        return [gates(x_TBd, before_TBP, *own)]
    return [F.linear(x_TBd, *own[::2]), F.linear(before_TBP, *own[1::2])]


def _weights(params: Sequence[Tensor], has_biases: bool, count: int) -> list[_Weights]:
    each = len(params) // count
    no_biases = () if has_biases else (None, None)
    groups = (params[start : start + each] for start in range(0, len(params), each))
    return [_Weights(*group[:2], *no_biases, *group[2:]) for group in groups]


def _lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> _State:
    h_BH, c_BH = hx
    i, f, g, o = (F.linear(input, w_ih, b_ih) + F.linear(h_BH, w_hh, b_hh)).chunk(4, 1)
    c_BH = f.sigmoid() * c_BH + i.sigmoid() * g.tanh()
    return o.sigmoid() * c_BH.tanh(), c_BH


def _gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    r, z, n = F.linear(input, w_ih, b_ih).chunk(3, 1)
    own_r, own_z, own_n = F.linear(hx, w_hh, b_hh).chunk(3, 1)
    n = (n + (r + own_r).sigmoid() * own_n).tanh()
    return n + (z + own_z).sigmoid() * (hx - n)


def _rnn_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def _run(
        input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Tensor:
        return activation(F.linear(input, w_ih, b_ih) + F.linear(hx, w_hh, b_hh))

    return _run


RECURRENT: dict[Callable[..., Any], Callable[..., tuple[Tensor, ...]]] = {
    torch.lstm: _layers(LSTM),
    torch.gru: _layers(GRU),
    torch.rnn_tanh: _layers(TANH),
    torch.rnn_relu: _layers(RELU),
}
CELLS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: _rnn_cell(torch.tanh),
    torch.rnn_relu_cell: _rnn_cell(torch.relu),
}
