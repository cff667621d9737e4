"""Recurrent layers, step by step: torch.lstm, gru, rnn_tanh and rnn_relu, which nn.LSTM, nn.GRU and nn.RNN call.

The projection of the inputs is one linear over the whole sequence, that of the state one linear a step: the rule of
linear applies to both, and the uses of one matrix are joined along time.

Axis letters: T steps, B samples, d features, H state, G gates times H, L layers times directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torch.overrides import _get_current_function_mode

from dpfunc.checks import shorten
from dpfunc.errors import UnsupportedModel

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Weights:
    """Of one layer in one direction; `proj` makes an LSTM's output narrower than its cell."""

    inputs: Tensor
    state: Tensor
    inputs_bias: Tensor | None = None
    state_bias: Tensor | None = None
    proj: Tensor | None = None

    def of_inputs(self, x_TBd: Tensor) -> Tensor:
        """The gates' share of the inputs (T, B, G), all steps at once."""
        return F.linear(x_TBd, self.inputs, self.inputs_bias)

    def of_state(self, h_BH: Tensor) -> Tensor:
        """The gates' share of the state (B, G), one step."""
        return F.linear(h_BH, self.state, self.state_bias)


Step = Callable[[Tensor, State, Weights], State]
"""(share of the inputs, state, weights) -> next state; its first tensor is the output."""


def _lstm(x_BG: Tensor, state: State, weights: Weights) -> State:
    h_BH, c_BH = state
    i, f, g, o = (x_BG + weights.of_state(h_BH)).chunk(4, 1)
    c_BH = f.sigmoid() * c_BH + i.sigmoid() * g.tanh()
    h_BH = o.sigmoid() * c_BH.tanh()
    return (h_BH if weights.proj is None else F.linear(h_BH, weights.proj), c_BH)


def _gru(x_BG: Tensor, state: State, weights: Weights) -> State:
    (h_BH,) = state
    size = h_BH.shape[1]
    own_BG = weights.of_state(h_BH)
    r, z = (x_BG[:, : 2 * size] + own_BG[:, : 2 * size]).sigmoid().chunk(2, 1)
    n = (x_BG[:, 2 * size :] + r * own_BG[:, 2 * size :]).tanh()
    return (n + z * (h_BH - n),)


def _rnn(activation: Callable[[Tensor], Tensor], x_BG: Tensor, state: State, weights: Weights) -> State:
    return (activation(x_BG + weights.of_state(state[0])),)


def _over_time(step: Step, x_TBd: Tensor, state: State, weights: Weights, reverse: bool) -> tuple[Tensor, State]:
    """One layer in one direction: the outputs (T, B, H) and the last state."""
    shares = weights.of_inputs(x_TBd).unbind(0)
    outputs = []
    for x_BG in reversed(shares) if reverse else shares:
        state = step(x_BG, state, weights)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


def _over_layers(
    step: Step,
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
    """As torch.lstm and torch.gru: the outputs, then the last states (L, B, H)."""
    directions = 2 if bidirectional else 1
    every = _weights(params, has_biases, num_layers * directions)
    states = list(zip(*(first.unbind(0) for first in ([hx] if isinstance(hx, Tensor) else hx)), strict=True))
    x_TBd = input.transpose(0, 1) if batch_first else input
    lasts = []
    for layer in range(num_layers):
        if layer and train and dropout:
            x_TBd = F.dropout(x_TBd, dropout, True)
        outputs = []
        for index in range(layer * directions, (layer + 1) * directions):
            output, last = _over_time(step, x_TBd, states[index], every[index], reverse=index % directions == 1)
            outputs.append(output)
            lasts.append(last)
        x_TBd = torch.cat(outputs, 2) if bidirectional else outputs[0]
    return (x_TBd.transpose(0, 1) if batch_first else x_TBd, *(torch.stack(last) for last in zip(*lasts, strict=True)))


def _weights(params: Sequence[Tensor], has_biases: bool, count: int) -> list[Weights]:
    each = len(params) // count
    no_biases = () if has_biases else (None, None)
    groups = (params[start : start + each] for start in range(0, len(params), each))
    return [Weights(*group[:2], *no_biases, *group[2:]) for group in groups]


def taken_apart(name: str, step: Step) -> Callable[..., tuple[Tensor, ...]]:
    """What stands in for a recurrent function of torch: the same arguments, the same results.

    Raises:
        UnsupportedModel: a PackedSequence.
    """

    def _run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:  # noqa: ANN401  (torch's own arguments)
        if "batch_sizes" in kwargs or (len(args) > 3 and isinstance(args[3], (list, tuple))):
            raise _packed(name, kwargs.get("params", args[3] if len(args) > 3 else ()))
        return _over_layers(step, *args, **kwargs)

    return _run


def _packed(name: str, params: Sequence[Tensor]) -> UnsupportedModel:
    """Its rows are those of several samples, in the order of their lengths: no axis holds the samples."""
    mode = _get_current_function_mode()  # type: ignore[no-untyped-call]
    tracked = getattr(mode, "tracked", {})  # the engine's, inside of which this runs
    names = [tracked[id(param)].name for param in params if id(param) in tracked]
    return UnsupportedModel(
        f"{name} of parameters {shorten(names)} runs over a PackedSequence, whose rows belong to the samples in no "
        "regular way. Give it the padded batch instead, and take each sample's output at its last position; or use "
        'engine="loop".'
    )


RECURRENT: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: taken_apart("lstm", _lstm),
    torch.gru: taken_apart("gru", _gru),
    torch.rnn_tanh: taken_apart("rnn_tanh", partial(_rnn, torch.tanh)),
    torch.rnn_relu: taken_apart("rnn_relu", partial(_rnn, torch.relu)),
}
