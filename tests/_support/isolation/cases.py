"""What a case of the zoo is, how tables of cases are entered, and the small batches and parameters that most share."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

D, T, VOCAB, LABELS = 3, 3, 6, 2
DOUBLE = torch.float64


# Rows y and z (D,), sequences x (T, D) with n real tokens, ids (T,), a label and a coin in [0, 1).
Batch = namedtuple("Batch", "y z x n ids label coin")


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


def params(dtype=DOUBLE):
    """Weights (D, D), two vectors (D,) and a table (VOCAB, D)."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"w": (D, D), "u": (D,), "c": (D,), "v": (VOCAB, D)}
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def batch(size, seed=0, dtype=DOUBLE, scale=1.0):
    """Random rows."""
    generator = torch.Generator().manual_seed(100 * seed + size)
    randn = partial(torch.randn, generator=generator, dtype=dtype)
    integers = partial(torch.randint, generator=generator)
    return Batch(
        y=scale * randn(size, D), z=randn(size, D), x=scale * randn(size, T, D), n=integers(1, T + 1, (size,)),
        ids=integers(1, VOCAB, (size, T)), label=integers(0, LABELS, (size,)),
        coin=torch.rand(size, generator=generator, dtype=dtype),
    )  # fmt: skip


def ordered(values, by):
    """The rows of a batch in the order of an index."""
    return Batch(*(value[by] for value in values))


def sized(*sizes):
    """Batches of these sizes."""
    return lambda dtype=DOUBLE: [batch(size, seed, dtype) for seed, size in enumerate(sizes)]


usual, growing = sized(2, 5, 6), sized(2, 4, 9, 11)


def calm(dtype=DOUBLE):
    """Small values twice, then large ones."""
    return [batch(size, seed, dtype, scale) for seed, (size, scale) in enumerate(((4, 0.02), (5, 0.02), (5, 3.0)))]


def presorted(dtype=DOUBLE):
    """Rows from long to short, later in any order."""
    first = batch(5, 7, dtype)
    return [ordered(first, first.n.argsort(descending=True, stable=True)), batch(6, 3, dtype), batch(5, 1, dtype)]


def same_length(dtype=DOUBLE):
    """All rows of full length, later of any."""
    return [batch(4, 0, dtype)._replace(n=torch.full((4,), T)), batch(5, 1, dtype), batch(6, 2, dtype)]


# Hidden values (B, D) of each row, (B, T, D) of each token, and (B, D) of rows where values are small at first.
features = lambda p, b: torch.tanh(b.y @ p["w"])
tokens = lambda p, b: torch.tanh(b.x @ p["w"])
small = lambda p, b: torch.tanh(0.3 * b.y @ p["w"])


def squares(h):
    """One loss a row, in which no two entries count alike."""
    rows = h.reshape(h.shape[0], -1)
    return (rows.square() + rows * torch.arange(1.0, rows.shape[1] + 1, dtype=rows.dtype).sin()).sum(1)


def _loss_of(change, of):
    def loss_fn(p, b):
        out = change(of(p, b), b, p)
        return out if out.dim() == 1 else squares(out)

    return loss_fn


def add(name, family, build, honest, plain=None, factors=()):
    """A case joins the zoo."""
    if name in ZOO:
        raise ValueError(f"{name} is in the zoo already")
    ZOO[name] = Loss(name, family, build, honest, plain, factors)


def fresh(family, batches=usual, of=features, *, name=None, dtype=DOUBLE, honest=False, **random):
    """Enter a function that makes a case, whose state lives as long as the loss."""

    def enter(make):
        build = lambda: Built(_loss_of(make(), of), params(dtype), batches(dtype))
        add(name or make.__name__.replace("_", " "), family, build, honest, **random)
        return make

    return enter


def case(family, batches=usual, of=features, **options):
    """Enter a function `(h, b, p) -> (B,)`, or `-> (B, ...)` whose squares are the losses.

    Args:
        family: what the attack relies on. batches: sizes, values and order. of: gives h, the hidden values, of
            parameters p and batch b. options: as for `fresh`.
    """
    return lambda change: table(family, {change.__name__.replace("_", " "): change}, batches, of, **options) or change


def table(family, changes, *args, **options):
    """Enter cases by name, each as `case` does."""
    for name, change in changes.items():
        fresh(family, *args, name=name, **options)(lambda change=change: change)


def module(make, seed=0):
    """A module with weights of its own, in float64, and the values of the trained ones by name."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net = make().double()
    return net, {name: value.detach() for name, value in net.named_parameters() if value.requires_grad}


def modules(family, cases, batches=usual, honest=False):
    """Enter cases by name, each a function that makes a module and one that calls it: `(net, b) -> (B, ...)`."""
    for name, (make, call) in cases.items():

        def build(make=make, call=call):
            net, parameters = module(make)
            run = lambda p: lambda *args: torch.func.functional_call(net, p, args)
            return Built(lambda p, b: squares(call(run(p), b)), parameters, batches())

        add(name, family, build, honest)
