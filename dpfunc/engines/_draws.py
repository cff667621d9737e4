"""Random numbers of a row: a function of the step's seed and the row's position, whatever the other rows are.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

Each draw takes a number of torch's global generator, the same for all rows, which seeds each row together with its
position; position 0 where the loss itself has seeded the generator. Operations without a form here draw from torch's
generators: those of a row alone are in states of that row, and rows that are computed together end their pass.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.nn import functional as F

from dpfunc.engines._levels import NeedsLoop, OutsideTransforms, inside, of_rows

_SELU_ALPHA = 1.7580993408473766  # of torch's alpha dropout


class OwnDraws:
    """The draws of one pass over rows, at whose start torch's generator had the state `seed`.

    Args:
        one_row: the pass has one row, inside of `of_row`.
    """

    def __init__(self, positions: Sequence[int], seed: Tensor, *, one_row: bool = False) -> None:
        self.positions, self._seed, self._one_row = positions, seed, one_row
        # states in which these draws have left torch's generator -> those from which they take their numbers
        self._numbers = {_hash(seed): seed}

    @contextmanager
    def of_row(self) -> Iterator[None]:
        """Context in which torch's generators have the state of one row, for operations without a form here."""
        generators = _generators()
        before = [generator.get_state() for generator in generators]
        try:
            for generator in generators[1:]:
                generator.manual_seed(_seeded(self._seed.numpy().tobytes(), self.positions[0]))
            self._leave(self._seed)
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)

    def _leave(self, numbers: Tensor) -> None:
        """Leave torch's generator in the row's state if there is one row; the next draw gets `numbers` from it."""
        state = numbers
        if self._one_row:
            own = torch.Generator("cpu").manual_seed(_seeded(numbers.numpy().tobytes(), self.positions[0]))
            state = own.get_state()
            state[:8] = numbers[:8]  # what `torch.initial_seed` tells
            torch.default_generator.set_state(state)
        self._numbers[_hash(state)] = numbers

    def check_known(self) -> None:
        """End a pass over several rows if an operation without a form here has drawn: all rows share its draw."""
        state = torch.default_generator.get_state()
        if self._one_row or _hash(state) in self._numbers:
            return
        seed = torch.default_generator.initial_seed()
        if _hash(state) != _hash(torch.Generator("cpu").manual_seed(seed).get_state()):
            raise NeedsLoop("an operation draws random numbers that dpfunc does not know")

    def of_each(self, draw: Callable[[int], Tensor], device: torch.device) -> Tensor:
        """The draws `draw(row)` of all rows on a device, (B, ...), each with its generator in a state of its own."""
        generator = torch.default_generator
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[index]
        numbers = self._numbers.get(_hash(torch.default_generator.get_state()))
        if numbers is None:  # the loss has seeded the generator
            self.check_known()
        elif self._one_row:
            torch.default_generator.set_state(numbers)
        number = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=torch.default_generator))
        self._leave(torch.default_generator.get_state())
        after = generator.get_state()
        try:
            found = []
            for row, position in enumerate(self.positions):
                generator.manual_seed(_seeded(number.to_bytes(8, "little"), 0 if numbers is None else position))
                found.append(draw(row))
            return torch.stack(found)
        finally:
            generator.set_state(after)


def _seeded(data: bytes, position: int) -> int:
    """The seed of a row."""
    digest = hashlib.blake2b(data + position.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _generators() -> list[torch.Generator]:
    """torch's generators, that of the CPU first."""
    return [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]


def without_form(kwargs: Mapping[str, Any]) -> str:
    """Why this module cannot draw for a call row by row; empty if it can."""
    if kwargs.get("out") is not None:
        return "the loss draws into a tensor (out=)"
    own = kwargs.get("generator") not in (None, torch.default_generator)
    return "the loss draws from a generator of its own" if own else ""


def inside_vmap(level: int) -> bool:
    """True inside of a transform of the loss, above this level, other than one of gradients."""
    gradients = (functorch.TransformType.Grad, functorch.TransformType.Jvp)
    return any(each.key() not in gradients for each in (functorch.get_interpreter_stack() or ())[level:])


def _hash(state: Tensor) -> int:
    with OutsideTransforms():
        return hash(state.numpy().tobytes())


Draw = Callable[[Callable[[int], Tensor], torch.device], Tensor]
"""Tensor of one row, from the draws `draw(row)` of all rows on a device."""


def _drawn(own: Draw, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """A random tensor of one row: the function itself, with the plain tensors of each row."""
    rows = {id(value): of_rows(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}

    def plain(value: Any, row: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        values_B = rows[id(value)]
        return inside(value).detach() if values_B is None else values_B[row].detach()

    def draw(row: int) -> Tensor:
        found: Tensor = func(
            *(plain(value, row) for value in args), **{name: plain(value, row) for name, value in kwargs.items()}
        )
        return found

    like = args[0].device if args and isinstance(args[0], Tensor) else torch.get_default_device()
    found = own(draw, torch.device(kwargs.get("device") or like))
    return found.requires_grad_() if kwargs.get("requires_grad") else found


@dataclass(frozen=True)
class DropoutMask:
    """Draws the mask of dropout for a row: one where a number stays, zero where it goes; `share` of them stay.

    No number of the row decides it.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    share: float

    def __call__(self, row: int) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device).bernoulli_(self.share)


def _dropout(
    own: Draw, input: Tensor, p: float, *, feature: bool = False, alpha: bool = False, inplace: bool = False
) -> Tensor:
    """Dropout of one row: the same numbers and rounding as torch's own on that row alone."""
    if p == 0 or not input.numel():
        return input
    multiply = input.mul_ if inplace else input.mul
    if p == 1:
        return multiply(torch.zeros_like(input))
    shape = (*input.shape[:2], *(1 for _ in input.shape[2:])) if feature else input.shape
    kept = own(DropoutMask(shape, input.dtype, input.device, 1 - p), input.device)
    if not alpha:
        return multiply(kept / (1 - p))
    a = 1.0 / ((_SELU_ALPHA**2 * p + 1) * (1 - p)) ** 0.5
    shift = (kept - 1) * (_SELU_ALPHA * a) + _SELU_ALPHA * a * p
    scaled = multiply(kept * a)
    return scaled.add_(shift) if inplace else scaled + shift


_DROPOUTS: dict[Any, dict[str, bool]] = {
    torch.dropout: {},
    torch.dropout_: {"inplace": True},
    torch.feature_dropout: {"feature": True},
    torch.feature_dropout_: {"feature": True, "inplace": True},
    torch.alpha_dropout: {"alpha": True},
    torch.alpha_dropout_: {"alpha": True, "inplace": True},
    torch.feature_alpha_dropout: {"feature": True, "alpha": True},
    torch.feature_alpha_dropout_: {"feature": True, "alpha": True, "inplace": True},
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
    own: Draw, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention with dropout, from its parts: torch's own draws inside of a kernel."""
    softmax = torch.ops.aten._scaled_dot_product_attention_math  # of no features, for its weights
    _, weights = softmax(query, key, value[..., :0], attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return _dropout(own, weights, dropout_p) @ value


def random_operation(
    as_row: Callable[[Tensor], Tensor], draws: OwnDraws,
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
) -> Any:  # fmt: skip
    """The result of a function that draws; NotImplemented for calls that draw nothing."""

    def own(draw: Callable[[int], Tensor], device: torch.device) -> Tensor:
        with OutsideTransforms(), torch.no_grad():
            values_B = draws.of_each(draw, device)
        return as_row(values_B)

    if "generator" in kwargs:  # torch's own one
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    if func in _DROPOUTS:
        bound = dict(zip(("input", "p", "train"), args, strict=False), **kwargs)
        return _dropout(own, bound["input"], bound["p"], **_DROPOUTS[func]) if bound["train"] else bound["input"]
    if func is F.scaled_dot_product_attention:
        p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return _attention(own, *args, **kwargs) if p > 0 else NotImplemented
    if func in _FILLING:
        target: Tensor = args[0]
        fresh = _drawn(own, lambda like, *rest, **named: func(torch.empty_like(like), *rest, **named), args, kwargs)
        return target.copy_(fresh)
    drawn = _drawn(own, func, args, kwargs)
    if func is not torch._standard_gamma:
        return drawn
    shape: Tensor = args[0]  # the one draw that has a gradient; the difference is zero
    return drawn + (shape - shape.detach()) * torch._standard_gamma_grad(shape.detach(), drawn)


RANDOM = frozenset((*_DROPOUTS, *_DRAWING, *_FILLING, F.scaled_dot_product_attention))
