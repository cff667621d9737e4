"""Random numbers of a row are its own: a function of the seed of the step and of its position, whoever is beside it.

Each draw of the loss takes one number of torch's global generator, which is the same for all rows; that number and the
position of a row seed the generator for what the row draws. So a row draws the same in any group, and where a part of
the forward pass is computed again for a checkpoint. Where the loss itself has seeded the generator, a row draws what it
would alone: position 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines.levels import Below, Levels, inside, of_rows

_SELU_ALPHA = 1.7580993408473766  # of torch's alpha dropout


class OwnDraws:
    """The draws of one pass over rows.

    Args:
        positions: of the rows, in the batch.
    """

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = positions
        self._own = {_state()}

    def of_each(self, draw: Callable[[int], Tensor]) -> Tensor:
        """The draws `draw(row)` of all rows, (B, ...), each with the generator in the state of its own."""
        generator = torch.default_generator
        seeded_by_loss = _state() not in self._own
        number = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
        after = generator.get_state()
        self._own.add(hash(after.numpy().tobytes()))
        try:
            found = []
            for row, position in enumerate(self.positions):
                generator.manual_seed(_seed(number, 0 if seeded_by_loss else position))
                found.append(draw(row))
            return torch.stack(found)
        finally:
            generator.set_state(after)


def _state() -> int:
    with Below():
        return hash(torch.default_generator.get_state().numpy().tobytes())


def _seed(number: int, position: int) -> int:
    data = number.to_bytes(8, "little") + position.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def drawn(
    levels: Levels, draws: OwnDraws, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """A random tensor of one row: the function itself, with the plain tensors of each row."""
    own = {id(value): of_rows(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}

    def plain(value: Any, row: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        values_B = own[id(value)]
        return inside(value).detach() if values_B is None else values_B[row].detach()

    def draw(row: int) -> Tensor:
        found: Tensor = func(
            *(plain(value, row) for value in args), **{name: plain(value, row) for name, value in kwargs.items()}
        )
        return found

    with Below(), torch.no_grad():
        values_B = draws.of_each(draw)
    return levels.row(values_B)


def draw_into(
    levels: Levels, draws: OwnDraws, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """Fill a tensor of the loss with random numbers, in place."""
    target = args[0]
    fresh = drawn(
        levels, draws, lambda like, *rest, **named: func(torch.empty_like(like), *rest, **named), args, kwargs
    )
    filled: Tensor = target.copy_(fresh)
    return filled


def _noise(levels: Levels, draws: OwnDraws, input: Tensor, p: float, feature: bool) -> Tensor:
    """1 with probability 1 - p, else 0; one number for each, or for each channel."""
    shape = list(input.shape)
    if feature:
        shape = [*shape[:2], *(1 for _ in shape[2:])]

    def draw(row: int) -> Tensor:
        return torch.empty(shape, dtype=input.dtype, device=input.device).bernoulli_(1 - p)

    with Below(), torch.no_grad():
        values_B = draws.of_each(draw)
    return levels.row(values_B)


def dropout(
    levels: Levels,
    draws: OwnDraws,
    input: Tensor,
    p: float,
    training: bool,
    *,
    feature: bool,
    alpha: bool,
    inplace: bool,
) -> Tensor:
    """Dropout of one row: the same numbers and rounding as torch's own on that row alone."""
    if p == 0 or not training or not input.numel():
        return input
    if p == 1:
        return input.mul_(torch.zeros_like(input)) if inplace else input * torch.zeros_like(input)
    noise = _noise(levels, draws, input, p, feature)
    if not alpha:
        scaled = noise / (1 - p)
        return input.mul_(scaled) if inplace else input * scaled
    a = 1.0 / ((_SELU_ALPHA**2 * p + 1) * (1 - p)) ** 0.5
    shift = (noise - 1) * (_SELU_ALPHA * a) + _SELU_ALPHA * a * p
    scaled = noise * a
    return input.mul_(scaled).add_(shift) if inplace else input * scaled + shift


_Kind = tuple[bool, bool, bool]  # feature, alpha, in place
_DROPOUTS: dict[Any, _Kind] = {
    torch.dropout: (False, False, False),
    torch.dropout_: (False, False, True),
    torch.feature_dropout: (True, False, False),
    torch.feature_dropout_: (True, False, True),
    torch.alpha_dropout: (False, True, False),
    torch.alpha_dropout_: (False, True, True),
    torch.feature_alpha_dropout: (True, True, False),
    torch.feature_alpha_dropout_: (True, True, True),
}
_DRAWING = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (
        "rand", "randn", "randint", "randperm", "normal", "rand_like", "randn_like", "randint_like", "bernoulli",
        "multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet",
    )
    if hasattr(owner, name)
)  # fmt: skip
_FILLING = frozenset(
    getattr(Tensor, name)
    for name in ("bernoulli_", "uniform_", "normal_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_")
)


def _attention(
    levels: Levels, draws: OwnDraws, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention with dropout, from its parts: torch's own draws inside of a kernel."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if boolean else scores + attn_mask
    weights = dropout(levels, draws, scores.softmax(-1), dropout_p, True, feature=False, alpha=False, inplace=False)
    return weights @ value


def random_operation(
    levels: Levels, draws: OwnDraws, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The result of a function that draws; NotImplemented for calls that draw nothing."""
    kind = _DROPOUTS.get(func)
    if kind is not None:
        feature, alpha, inplace = kind
        bound = dict(zip(("input", "p", "train"), args, strict=False), **kwargs)
        p, train = bound["p"], bound["train"]
        return dropout(levels, draws, bound["input"], p, train, feature=feature, alpha=alpha, inplace=inplace)
    if func is F.scaled_dot_product_attention:
        p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return _attention(levels, draws, *args, **kwargs) if p > 0 else NotImplemented
    if func in _FILLING:
        return draw_into(levels, draws, func, args, kwargs)
    return drawn(levels, draws, func, args, kwargs)


RANDOM = frozenset((*_DROPOUTS, *_DRAWING, *_FILLING, F.scaled_dot_product_attention))
