"""Recurrent layers: torch.lstm, gru, rnn_tanh and rnn_relu, which nn.LSTM, nn.GRU and nn.RNN call; and single cells.

A layer is two linears over the whole sequence, one of the inputs and one of the states, and what joins them in the
order of time (`walks`). The rule of linear applies to both.

The rows of a PackedSequence, in which samples of different lengths lie one behind the other, are first put into a
padded (T, B, d) with `index_select`, and the results are packed again with another; a mask stops each sample at its end.

Axis letters: T steps, B samples, N rows of packed data, d features, H state, G gates times H, L layers times
directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its usual name)

from dpfunc.engines.rules.walks import GRU, LSTM, RELU, TANH, Kind, before, replay, walk

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Weights:
    """Of one layer in one direction; `proj` makes an LSTM's output narrower than its cell."""

    inputs: Tensor
    state: Tensor
    inputs_bias: Tensor | None = None
    state_bias: Tensor | None = None
    proj: Tensor | None = None


@dataclass(frozen=True)
class Packing:
    """Where the rows of a PackedSequence are in the padded tensor.

    Args:
        rows_TB: the row of each place, T * B; places after the end of a sample have its first row.
        places_N: the place of each row. mask_TB1: where samples have not ended. length: T.
    """

    rows_TB: Tensor
    places_N: Tensor
    mask_TB1: Tensor
    length: int

    def padded(self, data_Nd: Tensor) -> Tensor:
        """(N, d) -> (T, B, d)."""
        return torch.unflatten(torch.index_select(data_Nd, 0, self.rows_TB), 0, (self.length, -1))

    def packed(self, x_TBd: Tensor) -> Tensor:
        """(T, B, d) -> (N, d)."""
        return torch.index_select(x_TBd.flatten(0, 1), 0, self.places_N)


def packing(batch_sizes: Tensor, device: torch.device) -> Packing:
    """From the number of samples that have each time; samples are sorted, the longest first."""
    length, num_samples = len(batch_sizes), int(batch_sizes[0])
    sample_1B = torch.arange(num_samples)[None]
    mask_TB = sample_1B < batch_sizes[:, None]
    starts_T1 = (batch_sizes.cumsum(0) - batch_sizes)[:, None]
    rows_TB = torch.where(mask_TB, starts_T1 + sample_1B, sample_1B).flatten()
    places_N = torch.arange(length * num_samples)[mask_TB.flatten()]
    return Packing(rows_TB.to(device), places_N.to(device), mask_TB[..., None].to(device), length)


def _over_time(
    kind: Kind, x_TBd: Tensor, state: State, weights: Weights, reverse: bool, mask_TB1: Tensor | None
) -> tuple[Tensor, State]:
    """One layer in one direction: the outputs (T, B, H) and the last state."""
    x_TBG = F.linear(x_TBd, weights.inputs, weights.inputs_bias)
    bias, proj = weights.state_bias, weights.proj
    plain = (weights.state.detach(), None if bias is None else bias.detach(), None if proj is None else proj.detach())
    walked = walk(kind, reverse, x_TBG, mask_TB1, plain, state)
    with torch.no_grad():
        states_TBH = before(walked.h_TBP, state[0].to(walked.h_TBP.dtype), reverse)
    own_TBG = F.linear(states_TBH, weights.state, weights.state_bias)
    inner_TBP = None if proj is None or walked.inner_TBH is None else F.linear(walked.inner_TBH, proj)
    h_TBP, *cells = replay(kind, reverse, walked, x_TBG, own_TBG, inner_TBP, state)
    return h_TBP, (h_TBP[0 if reverse else -1], *cells)


@dataclass(frozen=True)
class Layers:
    """The options of a recurrent module."""

    kind: Kind
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool

    def run(
        self, x_TBd: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], pack: Packing | None = None
    ) -> tuple[Tensor, ...]:
        """As torch.lstm and torch.gru: the outputs (T, B, H), then the last states (L, B, H)."""
        directions = 2 if self.bidirectional else 1
        every = _weights(params, self.has_biases, self.num_layers * directions)
        states = list(zip(*(first.unbind(0) for first in ([hx] if isinstance(hx, Tensor) else hx)), strict=True))
        lasts = []
        for layer in range(self.num_layers):
            if layer:
                x_TBd = self._dropped(x_TBd, pack)
            outputs = []
            for index in range(layer * directions, (layer + 1) * directions):
                output, last = _over_time(
                    self.kind, x_TBd, states[index], every[index], index % directions == 1, pack and pack.mask_TB1
                )
                outputs.append(output)
                lasts.append(last)
            x_TBd = torch.cat(outputs, 2) if self.bidirectional else outputs[0]
        return (x_TBd, *(torch.stack(last) for last in zip(*lasts, strict=True)))

    def _dropped(self, x_TBd: Tensor, pack: Packing | None) -> Tensor:
        if not (self.train and self.dropout):
            return x_TBd
        if pack is None:
            return F.dropout(x_TBd, self.dropout, True)
        return pack.padded(F.dropout(pack.packed(x_TBd), self.dropout, True))  # torch's own random numbers


def _weights(params: Sequence[Tensor], has_biases: bool, count: int) -> list[Weights]:
    each = len(params) // count
    no_biases = () if has_biases else (None, None)
    groups = (params[start : start + each] for start in range(0, len(params), each))
    return [Weights(*group[:2], *no_biases, *group[2:]) for group in groups]


def taken_apart(kind: Kind) -> Callable[..., tuple[Tensor, ...]]:
    """What stands in for a recurrent function of torch: the same arguments, the same results."""

    def _padded(
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        layers = Layers(kind, has_biases, num_layers, dropout, train, bidirectional)
        output, *lasts = layers.run(input.transpose(0, 1) if batch_first else input, hx, params)
        return (output.transpose(0, 1) if batch_first else output, *lasts)

    def _packed(
        data: Tensor, batch_sizes: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], *options: Any
    ) -> tuple[Tensor, ...]:
        pack = packing(batch_sizes, data.device)
        output, *lasts = Layers(kind, *options).run(pack.padded(data), hx, params, pack)
        return (pack.packed(output), *lasts)

    def _run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:  # noqa: ANN401  (torch's own arguments)
        is_packed = "batch_sizes" in kwargs or (len(args) > 3 and isinstance(args[3], (list, tuple)))
        return (_packed if is_packed else _padded)(*args, **kwargs)

    return _run


def _lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> State:
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


RECURRENT: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: taken_apart(LSTM),
    torch.gru: taken_apart(GRU),
    torch.rnn_tanh: taken_apart(TANH),
    torch.rnn_relu: taken_apart(RELU),
}
CELLS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: _rnn_cell(torch.tanh),
    torch.rnn_relu_cell: _rnn_cell(torch.relu),
}
