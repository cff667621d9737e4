"""The steps of recurrent layers, in order of time, with their derivatives written out.

torch's own fused layer gives the outputs, without a graph. Then all gates are known at once: one linear of all inputs
and states, or two "shares" of them, so that a rule sees each matrix once, not once a step. `replay` gives the outputs
again as a function of the gates; its backward pass goes back through time and gives the gradient of every step's gates.

Fresh memory of this size takes longer than most functions here: what nobody needs any more is overwritten.

Axis letters: T steps, B samples, H state, P output (H, or narrower), G gates times H.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


def _times(length: int, reverse: bool) -> range:
    return range(length - 1, -1, -1) if reverse else range(length)


def before(all_TBH: Tensor, first_BH: Tensor, reverse: bool) -> Tensor:
    """The state before each step, from the states after each step and the one before all."""
    parts = (all_TBH[1:], first_BH[None]) if reverse else (first_BH[None], all_TBH[:-1])
    return torch.cat(parts)


@dataclass(frozen=True)
class Steps:
    """The steps of a layer in one direction, whose outputs are known.

    Args:
        before_TBP, after_TBP: the state before and after each step. reverse: from the last time to the first.
        projected: outputs are projected.
    """

    before_TBP: Tensor
    after_TBP: Tensor
    reverse: bool
    projected: bool


@dataclass(frozen=True)
class _Walked:
    """Results of a recurrent layer over all steps.

    Args:
        saved: what the backward pass needs, beside the weights. last_BH: the last cell of an LSTM.
        inner_TBH: its outputs before they are projected.
    """

    saved: tuple[Tensor, ...]
    last_BH: Tensor | None = None
    inner_TBH: Tensor | None = None


def _tanh_(x: Tensor) -> Tensor:
    """tanh in place, by `2 sigmoid(2 x) - 1`: torch's own takes longer. 16 bits would lose digits."""
    return x.tanh_() if x.dtype.itemsize < 4 else x.mul_(2).sigmoid_().mul_(2).sub_(1)


def _lstm(shares: Sequence[Tensor], steps: Steps, c_BH: Tensor) -> _Walked:
    """`c = f c + i g`, `h = o tanh(c)`. The gates are overwritten with their values."""
    (gates_TBG,), first_c_BH = shares, c_BH
    i, f, g, o = gates_TBG.chunk(4, 2)
    _tanh_(g)
    for gate in (gates_TBG[..., : -2 * g.shape[2]], o):
        gate.sigmoid_()
    added_TBH = i * g
    keeps, cells = f.unbind(0), list(added_TBH.unbind(0))
    for t in _times(len(cells), steps.reverse):
        c_BH = cells[t].addcmul_(keeps[t], c_BH)
    inner_TBH = o * added_TBH.tanh() if steps.projected else None
    h_TBH = steps.after_TBP if inner_TBH is None else inner_TBH
    return _Walked((gates_TBG, added_TBH, h_TBH, first_c_BH), c_BH.clone(), inner_TBH)


def _in_time(tensors: Sequence[Tensor], reverse: bool) -> Tensor:
    """Stack tensors that were found in the backward pass, in the order of time."""
    return torch.stack(tuple(tensors if reverse else reversed(tensors)))


def _lstm_back(reverse: bool, saved: Sequence[Any], grad_TBP: Tensor, grad_BH: Tensor) -> Sequence[Tensor | None]:
    """The gradients of the gates, of the projection's result, and of the first state."""
    gates_TBG, c_TBH, h_TBH, first_c_BH, weight, proj = saved
    i, f, g, o = gates_TBG.chunk(4, 2)
    shares_TB4H = torch.addcmul(gates_TBG, gates_TBG, gates_TBG, value=-1).unflatten(2, (4, -1))
    shares_TB4H[:, :, 0].mul_(g)
    shares_TB4H[:, :, 1].mul_(before(c_TBH, first_c_BH, reverse))
    torch.addcmul(i, i, g * g, value=-1, out=shares_TB4H[:, :, 2])
    torch.addcmul(h_TBH, h_TBH, o, value=-1, out=shares_TB4H[:, :, 3])  # o (1 - o) tanh(c)
    tanh_TBH = h_TBH / o.clamp_min(torch.finfo(o.dtype).tiny)  # where o is 0, h is
    to_cell_TBH = torch.addcmul(o, h_TBH, tanh_TBH, value=-1)
    grads, keeps, to_cells = (value.unbind(0) for value in (grad_TBP, f, to_cell_TBH))
    of_cells, of_outputs, gates = (
        part.unbind(0) for part in (shares_TB4H[:, :, :3], shares_TB4H[:, :, 3], shares_TB4H.flatten(2))
    )
    outs: list[Tensor] = []
    dh_BP, dc_BH = torch.zeros_like(grads[0]), grad_BH
    for t in reversed(_times(len(c_TBH), reverse)):
        dm_BH = dh_BP + grads[t]
        if proj is not None:
            outs.append(dm_BH)
            dm_BH = dm_BH @ proj
        dc_BH = torch.addcmul(dc_BH, dm_BH, to_cells[t])
        of_cells[t].mul_(dc_BH[:, None])  # slopes become gradients
        of_outputs[t].mul_(dm_BH)
        dh_BP = gates[t] @ weight
        dc_BH = dc_BH * keeps[t]
    shares_TBG = shares_TB4H.flatten(2)
    return shares_TBG, None if proj is None else _in_time(outs, reverse), dh_BP, dc_BH


def _gru(shares: Sequence[Tensor], steps: Steps) -> _Walked:
    """`h = n + z (h - n)`, `n = tanh(x_n + r (W h)_n)`."""
    (x_TBG, own_TBG), size = shares, steps.before_TBP.shape[2]
    gates_TBG = (x_TBG[..., : 2 * size] + own_TBG[..., : 2 * size]).sigmoid_()
    own_TBH = own_TBG[..., 2 * size :]
    n_TBH = _tanh_(torch.addcmul(x_TBG[..., 2 * size :], gates_TBG[..., :size], own_TBH))
    return _Walked((gates_TBG, n_TBH, own_TBH, steps.before_TBP))


def _gru_back(reverse: bool, saved: Sequence[Any], grad_TBH: Tensor) -> Sequence[Tensor | None]:
    gates_TBG, n_TBH, own_TBH, before_TBH, weight, _ = saved
    r, z = gates_TBG.chunk(2, 2)
    new_TBH = (1 - z) * (1 - n_TBH * n_TBH)
    keep_slope_TBH = (before_TBH - n_TBH) * z * (1 - z)
    slopes_TB3H = torch.stack([new_TBH * own_TBH * r * (1 - r), keep_slope_TBH, new_TBH * r], 2)
    length = len(n_TBH)
    grads, keeps, each = grad_TBH.unbind(0), z.unbind(0), slopes_TB3H.unbind(0)
    owns: list[Tensor] = []
    states: list[Tensor] = []
    dh_BH = torch.zeros_like(grads[0])
    for t in reversed(_times(length, reverse)):
        states.append(dh_BH + grads[t])
        owns.append((states[-1][:, None] * each[t]).flatten(1))
        dh_BH = torch.addmm(states[-1] * keeps[t], owns[-1], weight)
    own_TBG = _in_time(owns, reverse)
    size = dh_BH.shape[1]
    return torch.cat([own_TBG[..., : 2 * size], _in_time(states, reverse) * new_TBH], 2), own_TBG, None, dh_BH


def _rnn(shares: Sequence[Tensor], steps: Steps) -> _Walked:
    """`h = activation(x + W h)`: the slope of the activation follows from its result."""
    return _Walked((steps.after_TBP,))


def _rnn_back(
    slope: Callable[[Tensor], Tensor], reverse: bool, saved: Sequence[Any], grad_TBH: Tensor
) -> Sequence[Tensor | None]:
    h_TBH, weight, _ = saved
    grads, each = grad_TBH.unbind(0), slope(h_TBH).unbind(0)
    shares: list[Tensor] = []
    dh_BH = torch.zeros_like(grads[0])
    for t in reversed(_times(len(h_TBH), reverse)):
        shares.append((dh_BH + grads[t]) * each[t])
        dh_BH = shares[-1] @ weight
    return _in_time(shares, reverse), None, dh_BH


@dataclass(frozen=True)
class Kind:
    """A kind of recurrent layer: torch's own function, the values of all gates, and the walk back.

    Args:
        adds: gates are the sum of the share of the inputs and that of the states.
    """

    native: Callable[..., tuple[Tensor, ...]]
    values: Callable[..., _Walked]
    back: Callable[..., Sequence[Tensor | None]]
    adds: bool = True


KINDS = (
    Kind(torch.lstm, _lstm, _lstm_back),
    Kind(torch.gru, _gru, _gru_back, adds=False),
    Kind(torch.rnn_tanh, _rnn, partial(_rnn_back, lambda h: 1 - h * h)),
    Kind(torch.rnn_relu, _rnn, partial(_rnn_back, lambda h: (h > 0).to(h.dtype))),
)


def walk(kind: Kind, steps: Steps, shares: Sequence[Tensor], cell: Sequence[Tensor]) -> _Walked:
    """The gates of all steps, without a graph.

    Args:
        shares: the gates, or the share of the inputs and that of the states; overwritten.
        cell: the first cell of an LSTM.
    """
    dtype = steps.after_TBP.dtype
    shares, cell = ([one.to(dtype) for one in tensors] for tensors in (shares, cell))
    with torch._C.DisableTorchFunction(), torch.no_grad(), torch.autocast(shares[0].device.type, enabled=False):
        return kind.values(shares, steps, *cell)


class _Replay(torch.autograd.Function):
    """Known results, and their derivatives with respect to the inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        back: Callable[..., Sequence[Tensor | None]],
        results: Sequence[Tensor],
        saved: Sequence[Tensor | None],
        *inputs: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.back = back
        ctx.save_for_backward(*saved)
        return tuple(result.clone() for result in results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Go back through time; modes are off, since they would take longer than the operations."""
        with torch._C.DisableTorchFunction(), torch.autocast(grads[0].device.type, enabled=False), torch.no_grad():
            return (None, None, None, *ctx.back(ctx.saved_tensors, *grads))


def replay(
    kind: Kind, steps: Steps, walked: _Walked, inputs: Sequence[Tensor | None], fixed: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The outputs (T, B, P) and, for an LSTM, the last cell (B, H), as functions of tensors that need gradients.

    Args:
        kind, steps: as for `walk`. walked: what it gave. inputs: the shares, what the projection gives, and the first
            states. fixed: the matrix of the states, and that of the projection.
    """
    h_TBP = steps.after_TBP
    results = [value for value in (h_TBP, walked.last_BH) if value is not None]
    saved = (*walked.saved, *(None if value is None else value.to(h_TBP.dtype) for value in fixed))
    applied: tuple[Tensor, ...] = _Replay.apply(  # type: ignore[no-untyped-call]  # `apply` has no types
        partial(kind.back, steps.reverse), results, saved, *inputs
    )
    return applied
