"""What a case of the zoo is, and the small batches and parameters that most cases share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

D, T, VOCAB, LABELS = 3, 3, 6, 2


class Built(NamedTuple):
    """A loss with fresh state, its parameters, and batches for steps that follow each other."""

    loss_fn: Callable[[Any, Any], torch.Tensor]
    params: dict[str, torch.Tensor]
    batches: list[Any]


@dataclass(frozen=True)
class Loss:
    """A loss that mixes rows, or an honest one that looks like it.

    Args:
        name: unique. family: what the attack relies on. build: gives it with fresh state. honest: rows do not
            influence each other. plain, factors: for random losses, the loss without its random numbers, and by what
            these may multiply each entry of the gradient (rows must have gradients on entries of their own).
    """

    name: str
    family: str
    build: Callable[[], Built]
    honest: bool
    plain: Callable[[Any, Any], torch.Tensor] | None = None
    factors: tuple[float, ...] = ()


ZOO: dict[str, Loss] = {}


def params(dtype=torch.float64):
    """Weights (D, D), two vectors (D,), a table (VOCAB, D) and a kernel (D, D, 3)."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"w": (D, D), "u": (D,), "c": (D,), "v": (VOCAB, D)}
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def batch(size, seed=0, dtype=torch.float64, scale=1.0):
    """Rows y (D,) and z (D,), sequences x (T, D) with n real tokens, ids (T,), a label and a coin in [0, 1)."""
    generator = torch.Generator().manual_seed(100 * seed + size)
    randn = partial(torch.randn, generator=generator, dtype=dtype)
    integers = partial(torch.randint, generator=generator)
    return {
        "y": scale * randn(size, D),
        "z": randn(size, D),
        "x": scale * randn(size, T, D),
        "n": integers(1, T + 1, (size,)),
        "ids": integers(1, VOCAB, (size, T)),
        "label": integers(0, LABELS, (size,)),
        "coin": torch.rand(size, generator=generator, dtype=dtype),
    }


def ordered(values, by):
    """The rows of a batch in the order of an index."""
    return {name: value[by] for name, value in values.items()}


def usual(dtype=torch.float64):
    """Two rows, then five, then six."""
    return [batch(size, seed, dtype) for seed, size in enumerate((2, 5, 6))]


def calm(dtype=torch.float64):
    """Small values twice, then large ones."""
    return [batch(size, seed, dtype, scale) for seed, (size, scale) in enumerate(((4, 0.02), (5, 0.02), (5, 3.0)))]


def growing(dtype=torch.float64):
    """Two rows, four, then nine and eleven."""
    return [batch(size, seed, dtype) for seed, size in enumerate((2, 4, 9, 11))]


def presorted(dtype=torch.float64):
    """Rows from long to short, later in any order."""
    first = batch(5, 7, dtype)
    return [ordered(first, first["n"].argsort(descending=True, stable=True)), batch(6, 3, dtype), batch(5, 1, dtype)]


def same_length(dtype=torch.float64):
    """All rows of full length, later of any."""
    first = batch(4, 0, dtype)
    return [{**first, "n": torch.full((4,), T)}, batch(5, 1, dtype), batch(6, 2, dtype)]


def twins(dtype=torch.float64):
    """Rows that are all alike, later not."""
    first = batch(1, 5, dtype)
    return [ordered(first, torch.zeros(3, dtype=torch.long)), batch(5, 1, dtype)]


def add(name, family, build, honest, plain=None, factors=()):
    """A case joins the zoo."""
    if name in ZOO:
        raise ValueError(f"{name} is in the zoo already")
    ZOO[name] = Loss(name, family, build, honest, plain, factors)


def _named(function):
    return function.__name__.strip("_").replace("_", " ")


def case(family, batches=usual, *, dtype=torch.float64, honest=False, plain=None, factors=(), parameters=params):
    """Enter a loss `(params, batch) -> (B,)` without state into the zoo."""

    def enter(function):
        build = lambda: Built(function, parameters(dtype), batches(dtype))
        add(_named(function), family, build, honest, plain, factors)
        return function

    return enter


def fresh(family, batches=usual, *, dtype=torch.float64, honest=False, plain=None, factors=(), parameters=params):
    """Enter a function that makes a loss, whose state lives as long as the loss."""

    def enter(make):
        build = lambda: Built(make(), parameters(dtype), batches(dtype))
        add(_named(make), family, build, honest, plain, factors)
        return make

    return enter


def module(make, seed=0):
    """A module with weights of its own, in float64, and their values by name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = make().double()
    return net, {name: value.detach() for name, value in net.named_parameters()}


def features(p, b):
    """Hidden values (B, D) of each row."""
    return torch.tanh(b["y"] @ p["w"])


def tokens(p, b):
    """Hidden values (B, T, D) of each token."""
    return torch.tanh(b["x"] @ p["w"])


def squares(h):
    """One loss a row, in which no two entries count alike."""
    rows = h.reshape(h.shape[0], -1)
    return (rows.square() + rows * torch.arange(1.0, rows.shape[1] + 1, dtype=rows.dtype).sin()).sum(1)
