"""Operations that are made of others: they are decomposed, so that the rules of their parts apply.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

Axis letters: N bags, L ids of the longest bag, d features, B samples, H state, G gates times H.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines._levels import without_dispatch


def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Any:  # fmt: skip
    """Compute embedding_bag from operations that have rules; the gradient is dense, also with `sparse`.

    NotImplemented where torch's kernels have a law of their own: by frequency, and bags that overlap or leave ids out.
    """
    if scale_grad_by_freq:
        return NotImplemented
    ids_NL, real_NL, weights_NL = input, torch.ones_like(input, dtype=torch.bool), per_sample_weights
    if offsets is not None:
        found = _positions(len(input), offsets, include_last_offset)
        if found is None:
            return NotImplemented
        positions_NL, real_NL = found
        ids_NL = _at(input, positions_NL)
        weights_NL = None if per_sample_weights is None else _at(per_sample_weights, positions_NL)
    if padding_idx is not None:
        real_NL = real_NL & (ids_NL != padding_idx % len(weight))
    rows_NLd = F.embedding(ids_NL, weight, None, max_norm, norm_type)
    real_NL1 = real_NL[:, :, None]
    if mode == "max":
        return _largest(rows_NLd, real_NL1)
    rows_NLd = torch.where(real_NL1, rows_NLd, 0.0)
    if weights_NL is not None:
        rows_NLd = rows_NLd * weights_NL[:, :, None].to(rows_NLd.dtype)
    sums_Nd = rows_NLd.sum(1)
    return sums_Nd if mode == "sum" else sums_Nd / real_NL1.sum(1).clamp(min=1)


def _positions(count: int, offsets: Tensor, include_last_offset: bool) -> tuple[Tensor, Tensor] | None:
    """The positions of each bag's ids among all, as many as the longest has; and the mask of those that are its own.

    None where bags do not have each of the ids once, in their order.
    """
    starts_N = offsets[:-1] if include_last_offset else offsets
    ends_N = offsets[1:] if include_last_offset else torch.cat([offsets[1:], offsets.new_full((1,), count)])
    sizes_N = ends_N - starts_N
    usual = (starts_N[0] == 0) & (ends_N[-1] == count) & (sizes_N >= 0).all()
    longest = int(torch.where(usual, sizes_N.max(), -1))
    if longest < 0:
        return None
    positions_NL = starts_N[:, None] + torch.arange(longest, device=offsets.device)
    return positions_NL.clamp(max=max(0, count - 1)), positions_NL < ends_N[:, None]


def _at(values: Tensor, positions_NL: Tensor) -> Tensor:
    return torch.unflatten(torch.index_select(values, 0, positions_NL.flatten()), 0, positions_NL.shape)


def _largest(rows_NLd: Tensor, real_NL1: Tensor) -> Tensor:
    """The maximum of each feature; 0 for an empty bag."""
    if not rows_NLd.shape[1]:
        return rows_NLd.sum(1)
    largest_Nd = rows_NLd.masked_fill(~real_NL1, float("-inf")).max(1).values
    return torch.where(real_NL1.any(1), largest_Nd, 0.0)


def _cell(update: Callable[[Tensor, Tensor, Any], Any]) -> Callable[..., Any]:
    """A single step, from the shares of the input and of the state."""

    def run(
        input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Any:
        state = hx if isinstance(hx, Tensor) else hx[0]
        return update(F.linear(input, w_ih, b_ih), F.linear(state, w_hh, b_hh), hx)

    return run


def _lstm_cell(x_BG: Tensor, own_BG: Tensor, hx: Sequence[Tensor]) -> tuple[Tensor, ...]:
    i, f, g, o = (x_BG + own_BG).chunk(4, 1)
    c_BH = f.sigmoid() * hx[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c_BH.tanh(), c_BH


def gru_step(x_BG: Tensor, own_BG: Tensor, hx: Tensor) -> Tensor:
    """The state after a step of a GRU, from the shares of the input and of the state, and the state before."""
    r, z, n = x_BG.chunk(3, 1)
    own_r, own_z, own_n = own_BG.chunk(3, 1)
    n = (n + (r + own_r).sigmoid() * own_n).tanh()
    return n + (z + own_z).sigmoid() * (hx - n)


def tanh_step(x_BH: Tensor, own_BH: Tensor, hx: Tensor) -> Tensor:
    return torch.tanh(x_BH + own_BH)


def relu_step(x_BH: Tensor, own_BH: Tensor, hx: Tensor) -> Tensor:
    return torch.relu(x_BH + own_BH)


def _whole(*args: Any, options: Any = None, **kwargs: Any) -> Any:
    """`F.linear_cross_entropy` without pieces, whose options only save memory."""
    return without_dispatch(F.linear_cross_entropy)(*args, **kwargs)


COMPOSITES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multi_head_attention_forward: without_dispatch(F.multi_head_attention_forward),
    F.embedding_bag: _embedding_bag,
    torch.lstm_cell: _cell(_lstm_cell),
    torch.gru_cell: _cell(gru_step),
    torch.rnn_tanh_cell: _cell(tanh_step),
    torch.rnn_relu_cell: _cell(relu_step),
    **({F.linear_cross_entropy: _whole} if hasattr(F, "linear_cross_entropy") else {}),
}
