"""The tables that every clip rule, grouping and sampler joins: adding one is adding a line."""

from __future__ import annotations

import torch

from dpfunc import clipping
from dpfunc.sampling import CappedPoisson, CyclicPoisson, FixedSize, Poisson, RandomAllocation, Shuffled, ShuffledOnce
from dpfunc.types import Schedule

NAMES = ("body.a.weight", "body.a.bias", "body.b.weight", "head.weight")
SHAPES = {"body.a.weight": (3, 2), "body.a.bias": (3,), "body.b.weight": (2, 3), "head.weight": (4,)}
SIZE = sum(torch.Size(shape).numel() for shape in SHAPES.values())

GROUPINGS = {
    "all": clipping.AllParameters(),
    "layer": clipping.PerLayer(),
    "parameter": clipping.PerParameter(),
    "blocks": clipping.Blocks(2),
    "mapping": clipping.ByName({name: "head" if name.startswith("head") else "body" for name in NAMES}),
}

# name -> (rule for a bound and a grouping, its factor by norm n and bound c: the formula written again)
RULES = {
    "flat": (lambda c, g: clipping.Flat(clip_norm=c, groups=g), lambda n, c: min(1.0, c / n) if n > 0 else 1.0),
    "auto_s": (lambda c, g: clipping.Automatic(clip_norm=c, groups=g), lambda n, c: c / (n + 0.01)),
    "auto_v": (lambda c, g: clipping.auto_v(clip_norm=c, groups=g), lambda n, c: c / n if n > 0 else 0.0),
    "threshold": (
        lambda c, g: clipping.Threshold(clip_norm=c, threshold=2.0, groups=g),
        lambda n, c: c / 2.0 if n <= 2.0 else 0.0,
    ),
    "normalized": (lambda c, g: clipping.normalized(c, regularizer=0.1, groups=g), lambda n, c: c / (0.1 + n)),
    "psac": (
        lambda c, g: clipping.PSAC(clip_norm=c, regularizer=0.1, groups=g),
        lambda n, c: c / (n + 0.1 / (n + 0.1)),
    ),
}


def params(dtype=torch.float32):
    """Parameters of the shapes above."""
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}


def linear_loss(params, batch):
    """A loss whose gradient for a row is the row itself: gradients can be chosen freely."""
    return sum((params[name] * batch[name]).flatten(1).sum(1) for name in params)


def as_batch(rows_BP):
    """Rows of SIZE numbers as a batch of gradients."""
    pieces = torch.split(rows_BP, [torch.Size(shape).numel() for shape in SHAPES.values()], dim=1)
    return {
        name: piece.reshape(len(rows_BP), *shape) for (name, shape), piece in zip(SHAPES.items(), pieces, strict=True)
    }


def flat(sums):
    """All sums as one float64 vector."""
    return torch.cat([value.double().flatten() for value in sums.values()])


def random_rows(seed, num_rows, scale=1.0, dtype=torch.float32):
    """Rows with norms spread over several orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.exp(torch.randn(num_rows, 1, generator=generator) * 2)
    return (torch.randn(num_rows, SIZE, generator=generator) * lengths * scale).to(dtype)


# Samplers that draw; `InOrder` has tests of its own.
SAMPLERS = {
    "poisson": Poisson(1000, 0.05),
    "poisson of a schedule": Poisson(1000, Schedule(((3, 0.01), (4, 0.1)))),
    "poisson over many chunks": Poisson(200_000, 0.01),
    "fixed size": FixedSize(1000, 50),
    "capped": CappedPoisson(1000, 0.05, 48),
    "random allocation": RandomAllocation(1000, 16),
    "shuffled": Shuffled(1000, 64),
    "shuffled once": ShuffledOnce(1000, 50),
    "cyclic": CyclicPoisson(1000, 0.05, 8),
}
