"""Audit: rows drawn at random are computed alone, and compared with the values of an engine, before any release.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

It detects what levels do not cover: wrong rules, what a loss keeps, operations that torch computes otherwise for rows.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dpfunc._utils.memory import refuse_out_of_memory
from dpfunc._utils.parts import local, shard_like
from dpfunc._utils.processes import failed, in_lockstep, on_any_rank
from dpfunc.batches import row_alone
from dpfunc.engines._guards.kept_state import is_changed, python_state
from dpfunc.engines._numerics import TOLERANCES, accumulation_dtype, lengths, tolerance_of
from dpfunc.engines.loop import RowResult, row_gradients
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.rng import with_generator_state
from dpfunc.types import Batch, LossFn, Params, PerSampleGrads

FIRST_ROWS = 2  # of the first step; two tell if a loss changes what it keeps
_TRIES, _ROUNDING_UNITS = 8, 8  # a row that differs is computed again, with parameters that differ by rounding


class Counts(Protocol):
    """A record of whether the loss changes its own state at each call, e.g. `Audits` of the microbatches."""

    counting: bool

    def note(self, changed: bool) -> None: ...


class Credited(NamedTuple):
    """Gradients that an engine credited to the samples of a batch, and how its rows are computed again."""

    loss_fn: LossFn
    params: Params
    batch: Batch
    per_sample: PerSampleGrads
    sq_norms: Mapping[str, Tensor]
    positions: Sequence[int]
    seed: Tensor  # the state of torch's generator before

    def reference(self, row: int, params: Params | None = None) -> RowResult:
        """The second computation: a row alone, at its position, with its own random numbers and all gradients."""
        params = self.params if params is None else params
        with with_generator_state(self.seed):
            found = row_gradients(self.loss_fn, params, row_alone(self.batch, row), self.positions[row])
        unused = {name: local(param.detach()) for name, param in params.items() if name not in found.grads}
        return found._replace(grads={**found.grads, **{name: torch.zeros_like(part) for name, part in unused.items()}})


def audit(rows: Credited, chosen: Sequence[int], audits: Counts) -> None:
    """Compare losses, norms and a combination of the gradients of the chosen rows with rows computed alone."""
    try:
        problem = _problem(rows, chosen, audits)
    except (RuntimeError, ValueError, IndexError, InvalidArgument) as error:
        failed(error)
        refuse_out_of_memory(error)
        problem = f"its loss cannot be computed alone: {str(error).splitlines()[0]}"
    if on_any_rank(rows.params, bool(problem)):
        raise UnsupportedModel(
            f"A row of this batch was computed alone, and differs from what it has beside the others: "
            f"{problem or 'another process saw it'}. So the loss of a sample depends on the other samples, on earlier "
            "calls, or on its place, or a rule gives a wrong gradient. Likely causes: a loss that keeps something from "
            "call to call, a mean over the tokens of the batch (divide by the sample's own number of tokens), "
            "BatchNorm, padding that the model does not mask (docs/padding.md). Nothing was released and nothing was "
            "spent."
        )


class _Unstable(NamedTuple):
    """Changes of a row by rounding alone, where they are finite: of its loss; name -> norm of that of its gradient."""

    loss: float
    gradients: Mapping[str, float]


_STABLE = _Unstable(0.0, {})


def _problem(rows: Credited, chosen: Sequence[int], audits: Counts) -> str:
    """The first difference that neither rounding nor random numbers explain, in words; empty if there is none."""
    references = _references(rows, chosen, audits)
    dtypes = (rows.per_sample.losses_B.dtype, *(param.dtype for param in rows.params.values()))
    tolerance = tolerance_of(*dtypes, *(dtype for row in references.values() for dtype in row.dtypes))
    problem = _compare(rows, references, {}, tolerance)
    if problem and audits.counting:  # more calls would show its state, not rounding
        return f"{problem}, and the loss changes what it keeps at each call (a counter, a list, a buffer)"
    if not on_any_rank(rows.params, bool(problem)):
        return problem
    unstable = {row: _unstable(rows, row, reference) for row, reference in references.items()}
    problem = _compare(rows, references, unstable, tolerance)
    if not on_any_rank(rows.params, bool(problem)):
        return problem
    # a loss that is another one each time draws random numbers of other libraries
    first, second = rows.reference(chosen[0]).losses_1, rows.reference(chosen[0]).losses_1
    return problem if torch.equal(first.nan_to_num(), second.nan_to_num()) else ""


def _references(rows: Credited, chosen: Sequence[int], audits: Counts) -> dict[int, RowResult]:
    """The chosen rows, computed again alone; the first ones only, if a loss changes what it keeps."""
    references: dict[int, RowResult] = {}
    for number, row in enumerate(chosen):
        compared = number < FIRST_ROWS and not in_lockstep()  # FSDP keeps what it communicates
        watched = compared and (number > 0 or len(chosen) == 1)  # the first of them may build what the second finds
        before = python_state(rows.loss_fn) if watched else ()
        references[row] = rows.reference(row)
        if compared:
            audits.note(watched and is_changed(rows.loss_fn, before))
            if audits.counting and number:
                break
    return references


def _unstable(rows: Credited, row: int, reference: RowResult) -> _Unstable:
    """Measure what rounding of the parameters does to a row alone.

    Where a number lies at the kink of a ReLU, or two are nearly equal under a maximum, the kernels of a batch and those
    of a row alone may decide differently, and a gradient jumps by far more than rounding.
    """
    loss, gradients = 0.0, dict.fromkeys(rows.params, 0.0)
    for number in range(_TRIES):
        again = rows.reference(row, rounded_params(rows.params, _ROUNDING_UNITS, number))
        loss = _larger(loss, float((again.losses_1 - reference.losses_1).abs()))
        for name, grad in again.grads.items():
            gradients[name] = _larger(gradients[name], _norm(grad - reference.grads[name]))
    return _Unstable(loss, gradients)


def _larger(value: float, other: float) -> float:
    return max(value, other) if math.isfinite(other) else value  # an infinite change would allow any difference


def _norm(grad: Tensor) -> float:
    return float(lengths(grad.reshape(1, -1), 1))


def rounded_params(params: Params, units: float, seed: int) -> dict[str, Tensor]:
    """Parameters moved by about so many units of rounding each, the same on all ranks; those of 16 bits stay."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, param in params.items():
        scale = units * torch.finfo(param.dtype).eps if param.dtype in TOLERANCES else 0.0
        noise = scale * torch.randn(
            param.shape, generator=generator, dtype=accumulation_dtype(param.dtype), device="cpu"
        )
        value = param.detach()
        moved[name] = (value + value * shard_like(noise.to(param.device, param.dtype), param)).detach()
    return moved


def _compare(
    rows: Credited, references: Mapping[int, RowResult], unstable: Mapping[int, _Unstable], tolerance: float
) -> str:
    """The first difference, in words; empty if there is none."""
    finite: dict[int, float] = {}
    for row, reference in references.items():
        norms = {name: _norm(reference.grads[name]) for name in rows.params}
        norm, change = math.hypot(*norms.values()), unstable.get(row, _STABLE)
        difference = _compare_losses(rows.per_sample.losses_B[row], reference.losses_1, row, change, tolerance)
        difference = difference or _compare_norms(rows, row, norms, norm, change, tolerance)
        if difference:
            return difference
        if math.isfinite(norm):
            finite[row] = norm
    if not getattr(rows.per_sample, "repeatable", False) or not finite:
        return ""
    return _compare_sums(rows.per_sample, references, finite, unstable, tolerance)


def _compare_losses(together: Tensor, by_itself: Tensor, row: int, change: _Unstable, tolerance: float) -> str:
    beside, own = float(together), float(by_itself)
    allowed = tolerance * max(abs(own), abs(beside), 1e-6) + 2 * change.loss
    if math.isfinite(beside) != math.isfinite(own) or (math.isfinite(own) and abs(beside - own) > allowed):
        return f"row {row} has the loss {own:.6g} alone, {beside:.6g} beside the others"
    return ""


def _compare_norms(
    rows: Credited, row: int, norms: Mapping[str, float], norm: float, change: _Unstable, tolerance: float
) -> str:
    """The first parameter with another norm; `norms` and `norm` are those of the row alone."""
    squares = torch.stack([rows.sq_norms[name][row].double() for name in norms]).tolist()
    beside = all(map(math.isfinite, squares))
    if beside != math.isfinite(norm):
        own_is, beside_is = ("not ", "") if beside else ("", " not")
        return f"the gradient of row {row} is {own_is}finite alone, and beside the others it is{beside_is}"
    for (name, own), square in zip(norms.items(), squares, strict=True) if beside else ():
        given = math.sqrt(max(0.0, square))
        if abs(given - own) > tolerance * norm + 2 * change.gradients.get(name, 0.0) + 1e-12:
            return f"row {row} has a gradient of {name!r} with norm {own:.6g} alone, {given:.6g} beside the others"
    return ""


def _compare_sums(
    per_sample: PerSampleGrads, references: Mapping[int, RowResult], finite: Mapping[int, float],
    unstable: Mapping[int, _Unstable], tolerance: float,
) -> str:  # fmt: skip
    """The first parameter of which a combination of the rows with finite norms is another one."""
    signs_B = torch.zeros_like(per_sample.losses_B, dtype=torch.float32)
    expected: dict[str, Tensor] = {}
    for index, row in enumerate(finite):
        sign = signs_B[row] = -1.0 if index % 2 else 1.0
        for name, grad in references[
            row
        ].grads.items():  # that of the first row as it is: a table of embeddings is large
            expected[name] = torch.add(expected[name], grad, alpha=sign) if name in expected else grad
    combined = per_sample.weighted_sum(dict.fromkeys(expected, signs_B))
    largest = max(finite.values())
    for name, value in expected.items():
        off = _norm(combined[name].to(value.dtype).sub_(value))
        change = sum(row.gradients[name] for row in unstable.values())
        if not off <= 2 * tolerance * largest * len(references) ** 0.5 + 1e-12 + 2 * change:
            rows = sorted(references)
            return f"the gradients of {name!r} of rows {rows} differ by {off:.3g} (norms up to {largest:.3g})"
    return ""
