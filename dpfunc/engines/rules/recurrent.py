"""Recurrent layers: torch.lstm, gru, rnn_tanh and rnn_relu, which nn.LSTM, nn.GRU and nn.RNN call; and single cells.

A layer is a linear of inputs and states over the whole sequence (`gates`), or two where they are not just added, and
the steps in the order of time (`walks`).

The rows of a PackedSequence, which has samples of different lengths one after the other, are put into a padded
(T, B, d) by one `index_select`, and the results are packed again by another; a mask stops each sample at its end.

Axis letters: T steps, B samples, N rows of packed data, d features, H state, G gates times H, L layers times
directions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_packed_sequence

from dpfunc.engines.guards.modes import unseen
from dpfunc.engines.rules.gates import gates
from dpfunc.engines.rules.walks import GRU, LSTM, RELU, TANH, Kind, before, declare, replay, walk
from dpfunc.engines.tracing import declared
from dpfunc.engines.tracing.trace import current_trace

_State = tuple[Tensor, ...]


@dataclass(frozen=True)
class _Weights:
    """Weights of one layer in one direction; `proj` makes an LSTM's output narrower than its cell."""

    inputs: Tensor
    state: Tensor
    inputs_bias: Tensor | None = None
    state_bias: Tensor | None = None
    proj: Tensor | None = None


@dataclass(frozen=True)
class _Packing:
    """Positions of the rows of a PackedSequence in the padded tensor.

    Args:
        rows_TB: the row of each position, T * B; positions after the end of a sample have its first row.
        positions_N: the position of each row. mask_TB1: where samples have not ended.
        batch_sizes: number of samples at each time.
    """

    rows_TB: Tensor
    positions_N: Tensor
    mask_TB1: Tensor
    batch_sizes: Tensor

    def padded(self, data_Nd: Tensor) -> Tensor:
        """(N, d) -> (T, B, d)."""
        trace, own = current_trace(), False
        if trace is not None:
            with unseen():
                own = declared.declare_padded(trace, data_Nd, self.batch_sizes, self.rows_TB)
        if trace is None:
            rows_Kd = torch.index_select(data_Nd, 0, self.rows_TB)
        else:
            with torch._C.DisableTorchFunction():
                rows_Kd = _Padded.apply(data_Nd, self.rows_TB, self.positions_N)  # type: ignore[no-untyped-call]  # `apply` has no types
        x_TBd = torch.unflatten(rows_Kd, 0, self.mask_TB1.shape[:2])
        if trace is not None and own:  # all samples have all times now, of which the mask hides some
            trace.mark_ragged(x_TBd, ragged=False)
        return x_TBd

    def followed(self, x_TBd: Tensor) -> _Packing:
        """Give the mask the rows of the samples: it is made of the length of each one."""
        trace = current_trace()
        return (
            self
            if trace is None
            else replace(self, mask_TB1=trace.with_rows_of(self.mask_TB1, x_TBd, 1, uniform=False))
        )

    def packed(self, x_TBd: Tensor) -> Tensor:
        """(T, B, d) -> (N, d)."""
        return torch.index_select(x_TBd.flatten(0, 1), 0, self.positions_N)

    def filled(self, rows_NH: Tensor, lasts_LBH: Tensor, firsts_LBH: Tensor, directions: int) -> Tensor:
        """Outputs (N, H) of a layer -> (T, B, H), for all times.

        After its end a sample keeps its last state; backwards, it has not left its first one.
        """
        outputs = torch.index_select(rows_NH, 0, self.rows_TB).unflatten(0, self.mask_TB1.shape[:2])
        fills = (lasts_LBH[0], firsts_LBH[-1].to(lasts_LBH.dtype))
        pairs = zip(outputs.chunk(directions, 2), fills, strict=False)
        return torch.cat([torch.where(self.mask_TB1, *pair) for pair in pairs], 2)

    def given(self, x_TBd: Tensor) -> Tensor:
        """(T, B, d) -> (N, d), for the loss: the number of rows of a sample depends on values."""
        data_Nd, trace = self.packed(x_TBd), current_trace()
        if trace is not None:
            trace.mark_ragged(data_Nd)
        return data_Nd


class _Padded(torch.autograd.Function):
    """(N, d) -> (K, d), K = T * B positions, of which those after the end of a sample have gradients of zero."""

    @staticmethod
    def forward(ctx: Any, data_Nd: Tensor, rows_K: Tensor, positions_N: Tensor) -> Tensor:
        """Each position has a row of its sample."""
        ctx.save_for_backward(positions_N)
        return torch.index_select(data_Nd, 0, rows_K)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Each row has the gradient of its own position."""
        return torch.index_select(grads[0], 0, ctx.saved_tensors[0]), None, None


class _Ordered(torch.autograd.Function):
    """Rows enter a packed layer, or leave it: outside of it, their order depends on the lengths of all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, changed: bool, is_sorted: bool, doubt: str = "") -> Tensor:
        """Copy rows; `changed`: they leave the layer. `is_sorted`: their order depends on several samples."""
        ctx.axis, ctx.changed, ctx.is_sorted = axis, changed, is_sorted
        return _relabelled(x, axis, changed, is_sorted, doubt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Copy gradients, which leave the layer where values entered it, and the reverse."""
        return _relabelled(grads[0], ctx.axis, not ctx.changed, ctx.is_sorted), None, None, None, None


def _relabelled(x: Tensor, axis: int, changed: bool, is_sorted: bool, doubt: str = "") -> Tensor:
    trace = current_trace()
    if trace is None:
        return x.clone()
    with unseen():
        return declared.ordered(trace, x, axis, changed=changed, is_sorted=is_sorted, doubt=doubt)


def _enter_packed(x: Tensor, axis: int, doubt: str = "") -> Tensor:
    """Rows of the loss enter; see `_Ordered`. The tensor itself without a trace."""
    return _ordered(x, axis, x, False, doubt)


def _leave_packed(x: Tensor, axis: int, sizes: Tensor, doubt: str = "") -> Tensor:
    """Rows leave, in the order of a packed sequence of these sizes."""
    return _ordered(x, axis, sizes, True, doubt)


def _ordered(x: Tensor, axis: int, like: Tensor, changed: bool, doubt: str) -> Tensor:
    trace = current_trace()
    if trace is None:
        return x
    with unseen():
        is_sorted = declared.are_sorted(trace, like)
    with torch._C.DisableTorchFunction():
        return _Ordered.apply(x, axis, changed, is_sorted, doubt)  # type: ignore[no-any-return, no-untyped-call]  # `apply` has no types


def _total_is_given() -> bool:
    """True if the loss gave the length of padded sequences; otherwise the longest sample decides it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is pad_packed_sequence.__code__:
            return frame.f_locals["total_length"] is not None
        frame = frame.f_back
    return False


def _pad_packed(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """torch's `_pad_packed_sequence`, by one index_select, so that the trace can follow the rows."""
    length = max(total_length, len(batch_sizes))
    sizes = torch.cat([batch_sizes, batch_sizes.new_zeros(length - len(batch_sizes))])
    pack = replace(_packing(sizes, data.device), batch_sizes=batch_sizes)
    rows_TBd = pack.padded(data.flatten(1) if data.ndim > 1 else data[:, None])
    mask_TB1 = pack.followed(rows_TBd).mask_TB1
    x_TBd = torch.where(mask_TB1, rows_TBd, padding_value)
    x_TBd = x_TBd.unflatten(2, data.shape[1:] or (1,))
    x_TBd = x_TBd if data.ndim > 1 else x_TBd.squeeze(2)
    doubt = (
        "" if _total_is_given() else "pad_packed_sequence without total_length: the longest sample decides the shape"
    )
    x_TBd = _leave_packed(x_TBd, 1, batch_sizes, doubt)
    lengths_B = _leave_packed(mask_TB1.squeeze(2).sum(0), 0, batch_sizes)
    return (x_TBd.transpose(0, 1) if batch_first else x_TBd), lengths_B.cpu()


def _pack_padded(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """torch's `_pack_padded_sequence`, by one index_select, whose gradient is one operation."""
    with torch.no_grad(), torch._C.DisableTorchFunction():  # checks the lengths
        sizes: Tensor = torch._C._VariableFunctions._pack_padded_sequence(input, lengths, batch_first)[1]
    x_TBd, trace, doubt = input.transpose(0, 1) if batch_first else input, current_trace(), ""
    if trace is not None:
        with unseen():
            doubt = declared.declare_sizes(trace, x_TBd, lengths, sizes)
    x_TBd = _enter_packed(x_TBd, 1, doubt)
    return _packing(sizes, input.device).given(x_TBd), sizes


def _packing(batch_sizes: Tensor, device: torch.device) -> _Packing:
    """Packing from the number of samples at each time; samples are sorted, the longest first."""
    num_samples = int(batch_sizes[0])
    sample_1B = torch.arange(num_samples)[None]
    mask_TB = sample_1B < batch_sizes[:, None]
    starts_T1 = (batch_sizes.cumsum(0) - batch_sizes)[:, None]
    rows_TB = torch.where(mask_TB, starts_T1 + sample_1B, sample_1B).flatten()
    positions = [torch.arange(count) + time * num_samples for time, count in enumerate(batch_sizes.tolist())]
    return _Packing(rows_TB.to(device), torch.cat(positions).to(device), mask_TB[..., None].to(device), batch_sizes)


@dataclass(frozen=True)
class _Layers:
    """The options of a recurrent module, and the packing of its rows if it runs over packed data."""

    kind: Kind
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    pack: _Packing | None = None

    def run(self, x_TBd: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Outputs (T, B, H), then the last states (L, B, H), as torch.lstm and torch.gru return them."""
        directions = 2 if self.bidirectional else 1
        each = len(params) // self.num_layers
        states = [_beginning(state, x_TBd) for state in ([hx] if isinstance(hx, Tensor) else hx)]
        lasts: list[_State] = []
        for layer in range(self.num_layers):
            if layer:
                x_TBd = self._dropped(x_TBd)
            own = [first[layer * directions : (layer + 1) * directions] for first in states]
            weights = params[layer * each : (layer + 1) * each]
            known = self._known(x_TBd, own, weights).chunk(directions, 2)
            outputs = []
            for index, direction in enumerate(_weights(weights, self.has_biases, directions)):
                state = tuple(first[index] for first in own)
                output, last = self._over_time(x_TBd, state, direction, index == 1, known[index])
                outputs.append(output)
                lasts.append(last)
            x_TBd = torch.cat(outputs, 2) if self.bidirectional else outputs[0]
        return (x_TBd, *(torch.stack(last) for last in zip(*lasts, strict=True)))

    def _known(self, x_TBd: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """The outputs of one layer (T, B, H), by torch itself. A mode sees no step: each row goes on alone."""
        options = (self.has_biases, 1, 0.0, False, self.bidirectional)
        with unseen(), torch.no_grad():
            plain = [weight.detach() for weight in weights]
            hx = states[0] if len(states) == 1 else states
            if self.pack is None:
                known_TBH = self.kind.native(x_TBd, hx, plain, *options, False)[0]
            else:
                rows_Nd = self.pack.packed(x_TBd)
                outputs, lasts = self.kind.native(rows_Nd, self.pack.batch_sizes, hx, plain, *options)[:2]
                known_TBH = self.pack.filled(outputs, lasts, states[0], 2 if self.bidirectional else 1)
        mask_TB1 = None if self.pack is None else self.pack.mask_TB1
        declare((known_TBH,), (x_TBd, *states, mask_TB1), weights)
        return known_TBH

    def _over_time(
        self, x_TBd: Tensor, state: _State, weights: _Weights, reverse: bool, known_TBP: Tensor
    ) -> tuple[Tensor, _State]:
        """One layer in one direction: the outputs (T, B, P) and the last state."""
        mask_TB1 = None if self.pack is None else self.pack.mask_TB1
        before_TBP = before(known_TBP, state[0].detach().to(known_TBP.dtype), reverse)
        shares = _shares(self.kind, x_TBd, before_TBP, weights)
        cell = [one.detach() for one in state[1:]]
        inner_TBP, proj = None, weights.proj
        fixed_shares = [share.detach() for share in shares]
        walked = walk(self.kind, reverse, fixed_shares, before_TBP, known_TBP, cell, mask_TB1, proj is not None)
        if proj is not None and walked.inner_TBH is not None:
            inner_TBP = F.linear(walked.inner_TBH, proj)
        fixed = (weights.state.detach(), None if proj is None else proj.detach(), mask_TB1)
        h_TBP, *cells = replay(self.kind, reverse, walked, known_TBP, (*shares, inner_TBP, *state), fixed)
        return h_TBP, (h_TBP[0 if reverse else -1], *cells)

    def _dropped(self, x_TBd: Tensor) -> Tensor:
        if not (self.train and self.dropout):
            return x_TBd
        if self.pack is None:
            return F.dropout(x_TBd, self.dropout, True)
        return self.pack.padded(F.dropout(self.pack.packed(x_TBd), self.dropout, True))  # torch's own random numbers


def _shares(kind: Kind, x_TBd: Tensor, before_TBP: Tensor, weights: _Weights) -> list[Tensor]:
    """The gates of all steps, or the share of the inputs and that of the states where they are not just added."""
    own = (weights.inputs, weights.state, weights.inputs_bias, weights.state_bias)
    if kind.adds:
        return [gates(x_TBd, before_TBP, *own)]
    return [F.linear(x_TBd, *own[::2]), F.linear(before_TBP, *own[1::2])]


def _beginning(state_LBH: Tensor, x_TBd: Tensor) -> Tensor:
    """A first state of constants, zeros for example, with the rows of the samples: each begins with its own."""
    trace = current_trace()
    return state_LBH if trace is None or state_LBH.requires_grad else trace.with_rows_of(state_LBH, x_TBd, 1)


def _weights(params: Sequence[Tensor], has_biases: bool, count: int) -> list[_Weights]:
    each = len(params) // count
    no_biases = () if has_biases else (None, None)
    groups = (params[start : start + each] for start in range(0, len(params), each))
    return [_Weights(*group[:2], *no_biases, *group[2:]) for group in groups]


def _decomposed(kind: Kind) -> Callable[..., tuple[Tensor, ...]]:
    """Replacement of a recurrent function of torch, with the same arguments and results."""

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
        layers = _Layers(kind, has_biases, num_layers, dropout, train, bidirectional)
        output, *lasts = layers.run(input.transpose(0, 1) if batch_first else input, hx, params)
        return (output.transpose(0, 1) if batch_first else output, *lasts)

    def _packed(
        data: Tensor,
        batch_sizes: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[Tensor, ...]:
        pack = _packing(batch_sizes, data.device)
        x_TBd = pack.padded(data)
        pack = pack.followed(x_TBd)
        layers = _Layers(kind, has_biases, num_layers, dropout, train, bidirectional, pack)
        states = [_enter_packed(state, 1) for state in ([hx] if isinstance(hx, Tensor) else hx)]
        output, *lasts = layers.run(x_TBd, states[0] if isinstance(hx, Tensor) else states, params)
        return (pack.given(output), *(_leave_packed(last, 1, batch_sizes) for last in lasts))

    def _run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
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


RECURRENT: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: _decomposed(LSTM),
    torch.gru: _decomposed(GRU),
    torch.rnn_tanh: _decomposed(TANH),
    torch.rnn_relu: _decomposed(RELU),
}
PADDING: dict[Callable[..., Any], Callable[..., Any]] = {
    torch._C._VariableFunctions._pad_packed_sequence: _pad_packed,
    torch._C._VariableFunctions._pack_padded_sequence: _pack_padded,
}
CELLS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: _rnn_cell(torch.tanh),
    torch.rnn_relu_cell: _rnn_cell(torch.relu),
}
