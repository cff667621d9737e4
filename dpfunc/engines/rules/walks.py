"""The steps of recurrent layers, in order of time, with their derivatives written out.

The results of a layer are known after `walk`, which builds no graph. Then the gates' share of the state is one linear of
all states, so that a rule sees the matrix of the states once, not once a step; `replay` gives the results again with
that share as an input. Its backward pass goes back through time and gives the gradient of every step's share.

Axis letters: T steps, B samples, H state, P output (H, or narrower), G gates times H.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

Saved = Sequence[Tensor | None]


def steps(length: int, reverse: bool) -> range:
    """The times of a walk, in its order."""
    return range(length - 1, -1, -1) if reverse else range(length)


def before(all_TBH: Tensor, first_BH: Tensor, reverse: bool) -> Tensor:
    """The state before each step, from the states after each step and the one before all."""
    parts = (all_TBH[1:], first_BH[None]) if reverse else (first_BH[None], all_TBH[:-1])
    return torch.cat(parts)


def _masks(mask_TB1: Tensor | None, length: int) -> Sequence[Tensor | None]:
    return [None] * length if mask_TB1 is None else mask_TB1.unbind(0)


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.stack([tensor for tensor in tensors if tensor is not None])


@dataclass(frozen=True)
class Walked:
    """What a walk finds out.

    Args:
        h_TBP: the outputs. saved: what the backward pass needs. last_BH: the last cell of an LSTM.
        inner_TBH: the outputs before they are projected.
    """

    h_TBP: Tensor
    saved: Saved
    last_BH: Tensor | None = None
    inner_TBH: Tensor | None = None


Plain = tuple[Tensor, Tensor | None, Tensor | None]
"""The matrix of the state, its bias, and the matrix of the projection; no gradients."""


def lstm(x_TBG: Tensor, mask_TB1: Tensor | None, plain: Plain, reverse: bool, h_BP: Tensor, c_BH: Tensor) -> Walked:
    """`c = f c + i g`, `h = o tanh(c)`."""
    weight, bias, proj = plain
    length, first_c_BH = len(x_TBG), c_BH
    shares = (x_TBG if bias is None else x_TBG + bias).unbind(0)
    masks = _masks(mask_TB1, length)
    hs, cs, gates, news = ([None] * length for _ in range(4))
    for t in steps(length, reverse):
        gates_BG = torch.addmm(shares[t], h_BP, weight.T)
        open_BG = gates_BG.sigmoid()
        i_BH, f_BH, _, o_BH = open_BG.chunk(4, 1)
        new_BH = gates_BG.chunk(4, 1)[2].tanh()
        next_c_BH = torch.addcmul(i_BH * new_BH, f_BH, c_BH)
        next_h_BP = o_BH * next_c_BH.tanh()
        if proj is not None:
            next_h_BP = next_h_BP @ proj.T
        mask = masks[t]
        c_BH = next_c_BH if mask is None else torch.where(mask, next_c_BH, c_BH)
        h_BP = next_h_BP if mask is None else torch.where(mask, next_h_BP, h_BP)
        hs[t], cs[t], gates[t], news[t] = h_BP, c_BH, open_BG, new_BH
    c_TBH, gates_TBG = _stacked(cs), _stacked(gates)
    saved = (gates_TBG, _stacked(news), c_TBH, first_c_BH, weight, proj, mask_TB1)
    inner_TBH = None if proj is None else gates_TBG.chunk(4, 2)[3] * c_TBH.tanh()
    return Walked(_stacked(hs), saved, c_BH, inner_TBH)


def lstm_back(reverse: bool, saved: Sequence[Any], grad_TBP: Tensor, grad_BH: Tensor) -> Sequence[Tensor | None]:
    """The gradients of both shares, of the projection's result, and of the first state."""
    gates_TBG, new_TBH, c_TBH, first_c_BH, weight, proj, mask_TB1 = saved
    i, f, _, o = gates_TBG.chunk(4, 2)
    tanh_TBH, before_TBH = c_TBH.tanh(), before(c_TBH, first_c_BH, reverse)
    slopes = [new_TBH * i * (1 - i), before_TBH * f * (1 - f), i * (1 - new_TBH * new_TBH), tanh_TBH * o * (1 - o)]
    slopes_TB4H, to_cell_TBH = torch.stack(slopes, 2), o * (1 - tanh_TBH * tanh_TBH)
    if mask_TB1 is not None:
        slopes_TB4H, to_cell_TBH = slopes_TB4H * mask_TB1[..., None], to_cell_TBH * mask_TB1
        f = torch.where(mask_TB1, f, 1.0)
    length, masks = len(c_TBH), _masks(mask_TB1, len(c_TBH))
    grads, keeps, to_cells, each = (value.unbind(0) for value in (grad_TBP, f, to_cell_TBH, slopes_TB4H))
    gates, outs = [None] * length, [None] * length
    dh_BP, dc_BH = torch.zeros_like(grads[0]), grad_BH
    for t in reversed(steps(length, reverse)):
        dh_BP, mask = dh_BP + grads[t], masks[t]
        outs[t] = dh_BP if mask is None else dh_BP * mask
        dm_BH = dh_BP if proj is None else outs[t] @ proj
        dc_BH = torch.addcmul(dc_BH, dm_BH, to_cells[t])
        gates[t] = (torch.stack((dc_BH, dc_BH, dc_BH, dm_BH), 1) * each[t]).flatten(1)
        dh_BP = gates[t] @ weight if mask is None else torch.addmm(dh_BP * ~mask, gates[t], weight)
        dc_BH = dc_BH * keeps[t]
    shares_TBG = _stacked(gates)
    return shares_TBG, shares_TBG, None if proj is None else _stacked(outs), dh_BP, dc_BH


def gru(x_TBG: Tensor, mask_TB1: Tensor | None, plain: Plain, reverse: bool, h_BH: Tensor) -> Walked:
    """`h = n + z (h - n)`, `n = tanh(x_n + r (W h)_n)`."""
    weight, bias, _ = plain
    length, size, first_h_BH = len(x_TBG), h_BH.shape[1], h_BH
    opens, news = x_TBG[..., : 2 * size].unbind(0), x_TBG[..., 2 * size :].unbind(0)
    masks = _masks(mask_TB1, length)
    hs, gates, ns, owns = ([None] * length for _ in range(4))
    for t in steps(length, reverse):
        own_BG = h_BH @ weight.T if bias is None else torch.addmm(bias, h_BH, weight.T)
        gates[t] = (opens[t] + own_BG[:, : 2 * size]).sigmoid()
        r_BH, z_BH = gates[t].chunk(2, 1)
        owns[t] = own_BG[:, 2 * size :]
        ns[t] = torch.addcmul(news[t], r_BH, owns[t]).tanh()
        next_BH, mask = torch.addcmul(ns[t], z_BH, h_BH - ns[t]), masks[t]
        h_BH = next_BH if mask is None else torch.where(mask, next_BH, h_BH)
        hs[t] = h_BH
    h_TBH = _stacked(hs)
    return Walked(h_TBH, (_stacked(gates), _stacked(ns), _stacked(owns), h_TBH, first_h_BH, weight, mask_TB1))


def gru_back(reverse: bool, saved: Sequence[Any], grad_TBH: Tensor) -> Sequence[Tensor | None]:
    """The gradients of both shares and of the first state."""
    gates_TBG, n_TBH, own_TBH, h_TBH, first_h_BH, weight, mask_TB1 = saved
    r, z = gates_TBG.chunk(2, 2)
    new_TBH = (1 - z) * (1 - n_TBH * n_TBH)
    keep_slope_TBH = (before(h_TBH, first_h_BH, reverse) - n_TBH) * z * (1 - z)
    if mask_TB1 is not None:
        new_TBH, keep_slope_TBH, z = new_TBH * mask_TB1, keep_slope_TBH * mask_TB1, torch.where(mask_TB1, z, 1.0)
    slopes_TB3H = torch.stack([new_TBH * own_TBH * r * (1 - r), keep_slope_TBH, new_TBH * r], 2)
    length = len(h_TBH)
    grads, keeps, each = grad_TBH.unbind(0), z.unbind(0), slopes_TB3H.unbind(0)
    owns, states = [None] * length, [None] * length
    dh_BH = torch.zeros_like(grads[0])
    for t in reversed(steps(length, reverse)):
        states[t] = dh_BH + grads[t]
        owns[t] = (states[t][:, None] * each[t]).flatten(1)
        dh_BH = torch.addmm(states[t] * keeps[t], owns[t], weight)
    own_TBG = _stacked(owns)
    size = dh_BH.shape[1]
    return torch.cat([own_TBG[..., : 2 * size], _stacked(states) * new_TBH], 2), own_TBG, None, dh_BH


def rnn(
    activation: Callable[[Tensor], Tensor],
    x_TBG: Tensor,
    mask_TB1: Tensor | None,
    plain: Plain,
    reverse: bool,
    h_BH: Tensor,
) -> Walked:
    """`h = activation(x + W h)`."""
    weight, bias, _ = plain
    length = len(x_TBG)
    shares = (x_TBG if bias is None else x_TBG + bias).unbind(0)
    masks = _masks(mask_TB1, length)
    hs = [None] * length
    for t in steps(length, reverse):
        next_BH, mask = activation(torch.addmm(shares[t], h_BH, weight.T)), masks[t]
        h_BH = hs[t] = next_BH if mask is None else torch.where(mask, next_BH, h_BH)
    h_TBH = _stacked(hs)
    return Walked(h_TBH, (h_TBH, weight, mask_TB1))


def rnn_back(
    slope: Callable[[Tensor], Tensor], reverse: bool, saved: Sequence[Any], grad_TBH: Tensor
) -> Sequence[Tensor | None]:
    """The gradients of both shares and of the first state."""
    h_TBH, weight, mask_TB1 = saved
    length, masks = len(h_TBH), _masks(mask_TB1, len(h_TBH))
    slopes_TBH = slope(h_TBH) if mask_TB1 is None else slope(h_TBH) * mask_TB1
    grads, each, shares = grad_TBH.unbind(0), slopes_TBH.unbind(0), [None] * length
    dh_BH = torch.zeros_like(grads[0])
    for t in reversed(steps(length, reverse)):
        dh_BH, mask = dh_BH + grads[t], masks[t]
        shares[t] = dh_BH * each[t]
        dh_BH = shares[t] @ weight if mask is None else torch.addmm(dh_BH * ~mask, shares[t], weight)
    shares_TBG = _stacked(shares)
    return shares_TBG, shares_TBG, None, dh_BH


@dataclass(frozen=True)
class Kind:
    """A kind of recurrent layer: its walk, and the walk back."""

    forth: Callable[..., Walked]
    back: Callable[..., Sequence[Tensor | None]]


LSTM = Kind(lstm, lstm_back)
GRU = Kind(gru, gru_back)
TANH = Kind(partial(rnn, torch.tanh), partial(rnn_back, lambda h: 1 - h * h))
RELU = Kind(partial(rnn, torch.relu), partial(rnn_back, lambda h: (h > 0).to(h.dtype)))


def walk(
    kind: Kind, reverse: bool, x_TBG: Tensor, mask_TB1: Tensor | None, plain: Plain, state: Sequence[Tensor]
) -> Walked:
    """Go through time, without a graph. A mode sees this call, and not the steps.

    Args:
        kind: of layer. reverse: from the last time to the first. x_TBG: the gates' share of the inputs.
        mask_TB1: False where a sample has no such time: its state stays as it is. plain: weights.
        state: the first state, (B, P) and, for an LSTM, (B, H).
    """
    if has_torch_function((x_TBG, *state)):
        seen = (x_TBG, *state)
        result: Walked = handle_torch_function(walk, seen, kind, reverse, x_TBG, mask_TB1, plain, state)
        return result
    dtype = torch.promote_types(x_TBG.dtype, state[0].dtype)
    with torch.no_grad(), torch.autocast(x_TBG.device.type, enabled=False):
        weight, bias, proj = (None if value is None else value.to(dtype) for value in plain)
        return kind.forth(x_TBG.to(dtype), mask_TB1, (weight, bias, proj), reverse, *(one.to(dtype) for one in state))


class Replay(torch.autograd.Function):
    """Known results, and their derivatives with respect to the inputs."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        back: Callable[..., Sequence[Tensor | None]],
        num_results: int,
        num_saved: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Tensors: the results, those to save, then the inputs."""
        ctx.back, ctx.num_known = back, num_results + num_saved
        ctx.save_for_backward(*tensors[num_results : num_results + num_saved])
        return tuple(result.clone() for result in tensors[:num_results])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Back through time."""
        with torch.autocast(grads[0].device.type, enabled=False):
            return (*(None for _ in range(3 + ctx.num_known)), *ctx.back(ctx.saved_tensors, *grads))


def replay(
    kind: Kind,
    reverse: bool,
    walked: Walked,
    x_TBG: Tensor,
    own_TBG: Tensor,
    inner_TBP: Tensor | None,
    state: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """The outputs (T, B, P) of a walk and, for an LSTM, the last cell (B, H), as functions of tensors that need gradients.

    Args:
        kind, reverse, x_TBG, state: as for `walk`. walked: what it gave. own_TBG: the gates' share of the state.
        inner_TBP: what the projection gives, if there is one.
    """
    if has_torch_function((x_TBG, own_TBG, *state)):
        seen = (x_TBG, own_TBG, *state)
        found: tuple[Tensor, ...] = handle_torch_function(
            replay, seen, kind, reverse, walked, x_TBG, own_TBG, inner_TBP, state
        )
        return found
    results = [value for value in (walked.h_TBP, walked.last_BH) if value is not None]
    inputs = (x_TBG, own_TBG, inner_TBP, *state)
    back = partial(kind.back, reverse)
    applied: tuple[Tensor, ...] = Replay.apply(  # type: ignore[no-untyped-call]
        back, len(results), len(walked.saved), *results, *walked.saved, *inputs
    )
    return applied
