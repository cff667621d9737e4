"""Random losses of a batch: views, indexing, reads, writes in place, random draws, hooks, transforms inside of them.

A program is a list of steps with all choices made; each step takes the values before it and gives another. Values have
the samples on axis 0, (n, 4), and steps may mix them: under an engine that computes rows apart, a row is alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from reference import loop_gradients
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dpfunc.engines import auto
from dpfunc.errors import DPFuncError

D = 4
Step = Callable[[dict[str, Tensor], list[Tensor]], Tensor]


@dataclass(frozen=True)
class Program:
    """Steps of a loss; `draws`: it draws random numbers."""

    steps: tuple[tuple[str, Step], ...]
    draws: bool

    def __call__(self, p: dict[str, Tensor], batch: Tensor) -> Tensor:
        values = [batch]
        for _, step in self.steps:
            value = step(p, values)
            values.append(value if value.shape[-1:] == (D,) else value[..., :1].expand(*value.shape[:-1], D))
        return sum(value.flatten(1).tanh().square().sum(1) for value in values[1:])

    def __str__(self) -> str:
        return "\n".join(name for name, _ in self.steps)


def _uses(rng: random.Random, x: int) -> dict[str, Step]:
    """Uses of the parameters."""
    return {
        "linear": lambda p, v: F.linear(v[x], p["m"], p["b"]),
        "product with a matrix": lambda p, v: v[x] @ p["m"],
        "scaled and shifted": lambda p, v: v[x] * p["b"] + p["b"],
        "norm": lambda p, v: F.layer_norm(v[x], (D,), p["b"], None),
        "look-up": lambda p, v: p["m"][v[x].detach().abs().mul(3).long() % D].mean(-2),
        "embedding": lambda p, v: F.embedding(v[x].detach().abs().mul(3).long() % D, p["m"]).sum(-2),
        "convolution": lambda p, v: F.conv1d(v[x].unsqueeze(1), p["m"][:, None, :3], p["b"], padding=1).sum(1),
        "einsum": lambda p, v: torch.einsum("nd,ed->ne", v[x], p["m"].exp()),
    }


def _values(rng: random.Random, x: int, y: int) -> dict[str, Step]:
    """Views, indices, reductions, among them those over the samples."""
    i, shift = rng.randrange(D), rng.randrange(1, D)
    return {
        "mean over the samples": lambda p, v: v[x] - v[x].mean(0, keepdim=True) * 0.5,
        "turned": lambda p, v: v[x].roll(shift, (-1, 0)[x % 2]),
        "samples turned over": lambda p, v: v[x].flip(0) + v[y],
        "sorted": lambda p, v: v[x].sort(-1).values,
        "selected": lambda p, v: v[x][..., [i, (i + 1) % D, i, shift]],
        "first sample for all": lambda p, v: v[x][:1].expand_as(v[x]) + v[y],
        "cumulative over the samples": lambda p, v: v[x].cumsum(0),
        "reshaped": lambda p, v: v[x].reshape(-1, 2, 2).transpose(1, 2).reshape(-1, D),
        "joined and cut": lambda p, v: torch.cat([v[x], v[y]])[: len(v[x])],
        "softmax over the samples": lambda p, v: v[x].softmax(0) * v[y],
        "product of the samples": lambda p, v: (v[x] @ v[x].T) @ v[y],
        "gathered": lambda p, v: v[x].gather(1, v[y].detach().argsort(1)),
        "strided": lambda p, v: torch.as_strided(v[x].contiguous(), v[x].shape, (D, 1)) * 1.0,
    }


def _written(x: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    h = x.clone()
    write(h)
    return h


def _masked(rng: random.Random, x: int, y: int) -> dict[str, Step]:
    """Masks and positions that depend on values."""
    return {
        "where": lambda p, v: torch.where(v[x] > 0, v[x], v[y] * 0.1),
        "filled": lambda p, v: v[x].masked_fill(v[y] > 0.5, 0.3),
        "set where a mask is": lambda p, v: _written(v[x], lambda h: h.__setitem__(h > 0, 0.25)),
        "scattered by a mask": lambda p, v: v[x].masked_scatter(v[y] > 0, v[y].flatten()),
        "selected by a mask": lambda p, v: v[x] * v[x][v[x] > 0.2].sum(),
        "positions of a mask": lambda p, v: v[x] + (v[y] > 0.1).nonzero().double().sum(),
        "masked select": lambda p, v: v[x] + torch.masked_select(v[y], v[y] < 0).sum(),
    }


def _reads(rng: random.Random, x: int) -> dict[str, Step]:
    """Numbers that Python reads."""
    limit = rng.choice((-10.0, 0.0, 0.4))
    return {
        "any": lambda p, v: v[x] * (2.0 if (v[x].detach() > limit).any() else 0.5),
        "item": lambda p, v: v[x] * (float(round(v[x].detach().sum().item()))),
        "caught": lambda p, v: _caught(v[x], limit),
        "length": lambda p, v: v[x] * (1.0 / len(v[x])),
        "list": lambda p, v: v[x] * (float(max(v[x].detach().sign().long().flatten().tolist()))),
    }


def _caught(x: Tensor, limit: float) -> Tensor:
    try:
        positive = bool((x.detach() > limit).all())
    except Exception:  # noqa: BLE001  (code of users that catches everything)
        positive = True
    return x * 3 if positive else x


def _writes(rng: random.Random, x: int, y: int) -> dict[str, Step]:
    """Writes into memory of the loss."""
    i = rng.randrange(D - 1)
    return {
        "in place": lambda p, v: (v[x] * 1.0).add_(v[y]).mul_(0.5),
        "a column is set": lambda p, v: _written(v[x], lambda h: h[:, i].copy_(v[y][:, i + 1])),
        "a slice is added to": lambda p, v: _written(v[x], lambda h: h[:, i:].add_(1.5)),
        "written into zeros": lambda p, v: _written(torch.zeros(v[x].shape, dtype=v[x].dtype), lambda h: h.add_(v[x])),
        "written into new memory": lambda p, v: _written(torch.zeros_like(v[x]), lambda h: h[:, 1:].copy_(v[y][:, 1:])),
        "index_add": lambda p, v: torch.zeros_like(v[x]).index_add(1, torch.tensor([i, i + 1]), v[y][:, :2]),
    }


def _draws(rng: random.Random, x: int) -> dict[str, Step]:
    """Random numbers."""
    p_ = rng.choice((0.2, 0.5))
    return {
        "dropout": lambda p, v: F.dropout(v[x], p_),
        "noise": lambda p, v: v[x] + torch.randn(v[x].shape, dtype=v[x].dtype),
        "like": lambda p, v: v[x] * torch.rand_like(v[x]),
        "drawn branch": lambda p, v: v[x] * (2.0 if torch.rand([]) < p_ else 1.0),
        "permuted": lambda p, v: v[x][:, torch.randperm(D)],
        "filled with draws": lambda p, v: v[x] + torch.empty_like(v[x]).uniform_(),
        "bernoulli": lambda p, v: v[x] * torch.bernoulli(v[x].detach().sigmoid()),
    }


def _inside(rng: random.Random, x: int, y: int) -> dict[str, Step]:
    """Hooks, checkpoints and transforms of the loss itself."""
    return {
        "hook": lambda p, v: _hooked(v[x]),
        "checkpoint": lambda p, v: checkpoint(lambda h: F.linear(h, p["m"]).tanh(), v[x], use_reentrant=False),
        "gradient inside": lambda p, v: torch.func.grad(lambda h: F.linear(h, p["m"]).tanh().sum())(v[x]),
        "map inside": lambda p, v: torch.func.vmap(lambda row: row * p["b"] + row.mean())(v[x]),
        "forward mode inside": lambda p, v: torch.func.jvp(lambda h: (h * p["b"]).sin(), (v[x],), (v[y],))[1],
        "penalty": lambda p, v: _penalty(p, v[x]),
    }


def _hooked(x: Tensor) -> Tensor:
    h = x * 1.0
    if h.requires_grad:
        h.register_hook(lambda grad: grad * grad.abs().max())
    return h


def _penalty(p: dict[str, Tensor], x: Tensor) -> Tensor:
    h = x.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(F.linear(h, p["m"]).tanh().sum(), h, create_graph=True)
    return grad


_DRAWING = set(_draws(random.Random(0), 0))


def made(seed: int, length: int = 6) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    steps: list[tuple[str, Step]] = []
    for number in range(length):
        x, y = rng.randrange(number + 1), rng.randrange(number + 1)
        families = [_uses(rng, x), _values(rng, x, y), _masked(rng, x, y), _reads(rng, x), _writes(rng, x, y),
                    _draws(rng, x), _inside(rng, x, y)]  # fmt: skip
        family = rng.choices(families, (4, 4, 2, 1, 2, 2, 2))[0] if number else families[0]
        steps.append(rng.choice(sorted(family.items(), key=lambda item: item[0])))
    return Program(tuple(steps), any(name in _DRAWING for name, _ in steps))


def batch_of(seed: int, rows: int = 4) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters and a batch."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    return {"m": draw(D, D) * 0.5, "b": draw(D) * 0.5}, draw(rows, D)


# Loss and gradient of each row, (B, 1 + P): beside the others, and alone.


def credited(loss_fn: Callable[..., Tensor], params: dict[str, Tensor], batch: Tensor) -> tuple[Tensor, str] | None:
    """What `auto` credits to each row, and how it was computed; None where it refuses."""
    engine = auto()
    try:
        found = engine(loss_fn, params, batch.clone())
    except DPFuncError:
        return None
    table = [found.losses_B[:, None].detach()]
    for name in params:
        ones = torch.eye(len(batch), dtype=torch.float64)
        table.append(torch.stack([found.weighted_sum(dict.fromkeys(params, one))[name].flatten() for one in ones]))
    return torch.cat(table, 1), engine.decision(loss_fn).engine


def alone(loss_fn: Callable[..., Tensor], params: dict[str, Tensor], batch: Tensor) -> Tensor | None:
    """The same by ordinary autograd; None where a row fails."""
    try:
        rows = loop_gradients(loss_fn, params, batch.clone())
    except Exception:  # noqa: BLE001  (whatever torch says of a random loss)
        return None
    return torch.stack([torch.cat([loss[None], *(grads[name].flatten() for name in params)]) for loss, grads in rows])
