"""Rows alone, by ordinary autograd, and how far an engine's result is from them. Nothing here trusts an engine."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from devices import default_of
from reference import loop_gradients
from torch.utils import _pytree as pytree

from dpfunc import clipping, engines
from dpfunc.clipped import make_clipped_grad
from dpfunc.clipping.rules import SLACK
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.rng import fold_in, insecure_key
from isolation.cases import Loss

ENGINES = ("auto", "vmap", "loop")
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
SEED = 10**6
ORDINARY = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError)


@dataclass(frozen=True)
class Outcome:
    """What came of one step: an error of dpfunc, another error, or a sum that is so far from the truth."""

    step: int
    refusal: str | None = None
    error: str | None = None
    off: float = 0.0

    def wrong(self, tolerance):
        """Whether something was released that rows alone do not give."""
        return self.refusal is None and self.error is None and not self.off <= tolerance

    def told(self, tolerance):
        """One word, or the first line of an error."""
        if self.refusal or self.error:
            return f"{'refused' if self.refusal else 'RAISED'} at step {self.step}: {self.refusal or self.error}"
        return f"WRONG by {self.off:.2g} at step {self.step}" if self.wrong(tolerance) else "equal"


@contextmanager
def seeded(seed):
    """torch's generator with a seed, and as it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would note where it was called
        yield


def row_of(batch, i):
    """A batch of one row, in memory of its own."""
    return pytree.tree_map(lambda leaf: leaf[i : i + 1].clone(), batch)


def tolerance_of(loss: Loss):
    """What rounding may do, by the dtype of the parameters."""
    return max(TOLERANCES[param.dtype] for param in loss.build().params.values())


@cache
def alone(loss: Loss, step: int):
    """Loss and gradients of each row of a step, each with a fresh state; None where a row alone cannot be computed."""
    found = []
    for i in range(len(loss.build().batches[step].y)):
        built = loss.build()
        try:
            with seeded(SEED):
                found += loop_gradients(loss.plain or built.loss_fn, built.params, row_of(built.batches[step], i))
        except ORDINARY:
            return None
    return found


def norm(grads):
    """The norm of one sample's gradient, in float64."""
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))


@cache
def truth_of(loss: Loss):
    """Rows alone, clipped at a bound that few of them pass: sizes count, directions count, and clipping acts.

    The bound, and the clipped sums of all steps; None for a step that rows alone do not have.
    """
    built = loss.build()
    steps = [alone(loss, step) for step in range(len(built.batches))]
    norms = [[norm(grads) for _, grads in rows] for rows in steps if rows is not None]
    finite = [value for row in norms for value in row if math.isfinite(value) and value > 0]
    clip_norm = sorted(finite)[int(0.8 * len(finite))] if finite else 1.0
    if loss.factors:
        clip_norm = 1e3 * max(finite)  # nothing is clipped
    return clip_norm, [None if rows is None else _clipped(rows, clip_norm, built.params) for rows in steps]


def _clipped(rows, clip_norm, params):
    inner = clip_norm * (1.0 - SLACK)
    total = {name: torch.zeros_like(param, dtype=torch.float64) for name, param in params.items()}
    for _, grads in rows:
        size = norm(grads)
        if math.isfinite(size):
            factor = min(1.0, inner / size) if size > 0 else 1.0
            for name, grad in grads.items():
                total[name] += factor * grad.double()
    return total


@cache
def outcomes(loss: Loss, engine: str, device: str = "cpu") -> list[Outcome]:
    """Each batch in turn by one prepared computation; the truth is always of the CPU."""
    built, (clip_norm, sums) = loss.build(), truth_of(loss)
    prepared = make_clipped_grad(built.loss_fn, clipping.Flat(clip_norm), engine=getattr(engines, engine)())
    found = []
    for step, (rows, expected) in enumerate(zip(built.batches, sums, strict=True)):
        try:
            params, rows = pytree.tree_map(lambda leaf: leaf.clone().to(device), (built.params, rows))
            with seeded(SEED), default_of(device):
                clipped, _ = prepared(params, rows, key=fold_in(insecure_key(7), step))
            found.append(Outcome(step, off=_off(loss, clipped.sums, expected, clip_norm)))
        except (UnsupportedModel, InvalidArgument) as error:
            found.append(Outcome(step, refusal=str(error).splitlines()[0]))
        except Exception as error:  # noqa: BLE001  (whatever is said in place of a result)
            found.append(Outcome(step, error=f"{type(error).__name__}: {(str(error) or '-').splitlines()[0]}"))
    return found


def _off(loss, sums, expected, clip_norm):
    """The largest difference, relative to the largest number or to the bound of one row, the larger of them."""
    if expected is None:
        return math.inf  # a row alone has no gradient, so nothing may be released
    got, want = (
        torch.cat([values[n].detach().cpu().double().flatten() for n in expected]) for values in (sums, expected)
    )
    off = torch.stack([(got - factor * want).abs() for factor in (*loss.factors, 0.0 if loss.factors else 1.0)]).amin(0)
    scale = float(want.abs().max())
    return float(off.max()) / (scale if loss.factors else max(clip_norm, scale))


def mixed(loss: Loss) -> float:
    """The largest difference between the loss natively batched and its rows alone, over all batches.

    Compared are the losses, the gradient of each loss, and the gradient of their sum; before that, the rows of the
    first batch one after the other, with one state.
    """
    built, steps = loss.build(), range(len(loss.build().batches))
    if any(alone(loss, step) is None for step in steps):
        return math.inf
    rows = [pytree.tree_map(lambda leaf, i=i: leaf[i : i + 1], built.batches[0]) for i in range(len(alone(loss, 0)))]
    with seeded(SEED):
        losses, tables = zip(*(_together(built.loss_fn, built.params, row) for row in rows), strict=True)
    in_turn = torch.cat([table[:1] for table in tables])
    largest = _difference(torch.cat(losses), torch.cat([in_turn, in_turn.sum(0)[None]]), alone(loss, 0))
    for step in steps:
        for seed in range(1 if loss.honest else 4):  # some mix only where random numbers say so
            if largest > 0.1 and not loss.honest:
                return largest
            if step == seed == 0 or (seed and not step):
                built = loss.build()
            with seeded(SEED + seed):
                found = _together(built.loss_fn, built.params, pytree.tree_map(torch.clone, built.batches[step]))
            largest = max(largest, _difference(*found, alone(loss, step)))
    return largest


def _together(loss_fn, params, rows):
    """Losses, and the gradients of each loss and of their sum: rows of a table."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    losses, table = loss_fn(leaves, rows), []
    for loss in (*losses, losses.sum()):
        grads = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves.values(), grads, strict=True)]
        table.append(torch.cat([grad.flatten() for grad in flat]))
    return losses.detach(), torch.stack(table)


def _difference(losses, together, found):
    rows = torch.stack([torch.cat([grad.flatten() for grad in grads.values()]) for _, grads in found])
    expected = torch.cat([rows, rows.sum(0)[None]])
    alone_B = torch.stack([loss for loss, _ in found])
    off = []
    for got, want in ((losses, alone_B), (together, expected)):
        if not torch.equal(torch.isfinite(got), torch.isfinite(want)):
            return math.inf
        real = torch.isfinite(want)
        if bool(real.any()):
            off.append(float((got - want)[real].abs().max() / want[real].abs().max().clamp(min=1e-3)))
    return max(off, default=0.0)
