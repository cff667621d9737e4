"""Audit: rows drawn at random are computed alone, and compared with the values of an engine, before any release.

A trace proves that nothing flows from one sample to another. It does not follow what depends on the size of the batch
as a Python number, or on random numbers of other libraries; and it relies on the rules for per-sample gradients. The
audit detects errors of all these kinds, in the rows that it draws.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfunc._utils.memory import refuse_out_of_memory
from dpfunc._utils.validation import shorten
from dpfunc.batches import batch_size, rows, signature
from dpfunc.engines.evidence import NOTHING_FOUND, Evidence
from dpfunc.engines.guards.lockstep import failed, in_lockstep, on_any_process, on_any_rank
from dpfunc.engines.guards.random_calls import OtherRandomCalls, RandomCall, replayed
from dpfunc.engines.guards.row_independence import rounded_params
from dpfunc.engines.loop import loop
from dpfunc.engines.numerics import COARSE, tolerance_of
from dpfunc.engines.per_sample import PerSample
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.rng import Key, fold_in, insecure_key, secure_key, torch_seed
from dpfunc.types import Batch, LossFn, Params

# Of proven steps: at most one row in so many, as long as rows alone take this share of the time; and one row at least
# in so many steps.
ROWS_IN = 100
TIME_SHARE = 0.01
STEPS_IN = 20
# Of a step that is not proven: at least so many rows, and one in so many.
_UNPROVEN_ROWS = 8
_UNPROVEN_IN = 8
FIRST_ROWS = 2
# A row that differs is computed again so many times, with parameters that differ by so many units of rounding.
_TRIES = 8
_ROUNDING_UNITS = 8


@dataclass
class Audits:
    """Schedule of the audits of a loss function. No result depends on it.

    Args:
        since: steps since the last one. sizes: batches, by their shapes, that were audited once: what depends on the
            size of a batch shows in the first batch of that size. random: whether the last step drew random numbers.
        coarse: whether it had numbers of 16 bits.
        saved: seconds that audits may take now. row_seconds: time of the last row alone; 0 before the first.
    """

    since: int = STEPS_IN
    random: bool = False
    coarse: bool = False
    sizes: set[object] = field(default_factory=set)
    saved: float = 0.0
    row_seconds: float = 0.0

    def note(self, credited: Credited | None) -> None:
        """Remember whether the step drew random numbers, and whether it had numbers of 16 bits."""
        self.random = credited is not None and bool(credited.evidence.random_calls)
        self.coarse = credited is not None and credited.evidence.coarse

    def due(self, batch: Batch, evidence: Evidence = NOTHING_FOUND, seconds: float = 0.0) -> int:
        """Choose how many rows of this batch to compute alone: more for a step with doubts or untraced tensors.

        Args:
            batch, evidence: of the step. seconds: that the engine took.
        """
        count = batch_size(batch)
        self.saved += TIME_SHARE * seconds
        if on_any_process(bool(evidence.doubts)):  # all processes compute the same number of rows
            return min(count, max(_UNPROVEN_ROWS, -(-count // _UNPROVEN_IN)))
        if evidence.changes:  # the number of calls is the same in each step
            return 1
        size = (count, *signature(batch))
        wanted, new, untraced = count // ROWS_IN, size not in self.sizes, evidence.untraced
        if in_lockstep():  # each process has a clock, sizes and tensors of its own
            new = untraced = False
        elif not new:
            wanted = min(wanted, int(self.saved / self.row_seconds) if self.row_seconds else 0)
        wanted = max(wanted, self._least(new, untraced))
        self.since = 0 if wanted else self.since + 1
        self.sizes.add(size)
        return min(count, wanted)

    def _least(self, new: bool, untraced: bool) -> int:
        """Rows to compute alone whatever they cost: of a new size of batch, with untraced tensors, or now and then."""
        if not new and not untraced and self.since < STEPS_IN - 1:
            return 0
        return FIRST_ROWS if untraced or not self.sizes else 1

    @contextmanager
    def choose_rows(
        self, key: Key | None, batch: Batch, evidence: Evidence = NOTHING_FOUND, seconds: float = 0.0
    ) -> Iterator[list[int]]:
        """Rows of this batch to compute alone, which is done inside and timed; see `due`.

        Args:
            key: of the step, see `_random_rows`. batch, evidence, seconds: as for `due`.
        """
        wanted = self.due(batch, evidence, seconds)
        start = time.perf_counter()
        yield _random_rows(key, batch_size(batch), wanted)
        self.paid(wanted, time.perf_counter() - start)

    def paid(self, number: int, seconds: float) -> None:
        """Remember what this number of rows alone took."""
        if number:
            self.row_seconds = seconds / number
            self.saved = max(0.0, self.saved - seconds)


def _random_rows(key: Key | None, count: int, wanted: int) -> list[int]:
    """Rows of a batch, drawn from the key without replacement, so that nobody can predict them."""
    if not wanted:
        return []
    source = secure_key() if key is None else fold_in(key, "audit")
    chosen: list[int] = []
    number = 0
    while len(chosen) < wanted:
        row = int.from_bytes(fold_in(source, number).secret[:8], "little") % count
        number += 1
        if row not in chosen:
            chosen.append(row)
    return chosen


@dataclass(frozen=True)
class Credited:
    """Losses and norms that an engine credited to the samples of a batch, and all that an audit needs.

    Args:
        losses_B: their losses. sq_norms: name -> squared norms (B,). evidence: about the step.
        per_sample: gives weighted sums of rows; None where they can be taken once only.
    """

    losses_B: Tensor
    sq_norms: Mapping[str, Tensor]
    evidence: Evidence
    per_sample: PerSample | None

    def tolerance(self, params: Params) -> float:
        """The relative difference that rounding may make."""
        dtypes = (param.dtype for param in params.values())
        return COARSE if self.evidence.coarse else tolerance_of(self.losses_B.dtype, *dtypes)


def credited_by(per_sample: Any, sq_norms: Mapping[str, Tensor]) -> Credited | None:
    """Collect the values to audit; None where each row was computed alone."""
    if not hasattr(per_sample, "evidence") or getattr(per_sample, "alone", False):
        return None
    own = per_sample if isinstance(per_sample, PerSample) else None
    return Credited(per_sample.losses_B, sq_norms, per_sample.evidence, own)


def audit(loss_fn: LossFn, params: Params, batch: Batch, credited: Credited, chosen: Sequence[int]) -> None:
    """Compare losses, norms and a combination of the gradients of the chosen rows with rows computed alone.

    Raises:
        UnsupportedModel: they differ; naming what, and by how much. A step with doubts whose rows cannot be computed
            alone again, too.
    """
    if not chosen:
        return
    try:
        problem = _problem(loss_fn, params, batch, credited, chosen)
    except OtherRandomCalls as error:
        failed(error)
        problem = "alone it draws other random numbers" if credited.evidence.doubts else ""
    except (RuntimeError, ValueError, IndexError, InvalidArgument) as error:
        failed(error)
        refuse_out_of_memory(error)
        problem = f"its loss cannot be computed alone: {str(error).splitlines()[0]}"
    if _on_any_rank(problem, params):
        doubts = shorten(list(dict.fromkeys(credited.evidence.doubts)))
        doubts = f" The trace doubts the step as well: {doubts}." if credited.evidence.doubts else ""
        raise UnsupportedModel(
            f"A row of this batch was computed alone, and differs from what it has beside the others: "
            f"{problem or 'another process saw it'}. So the loss of a sample depends on the other samples, on its "
            "place, or on the size of the batch, or a rule gives a wrong gradient."
            + doubts
            + " Likely causes: a mean over the "
            "tokens of the batch (divide by the sample's own number of tokens), a division by the size of the batch, "
            "BatchNorm, padding that the model does not mask (docs/padding.md). Nothing was released and nothing was "
            "spent."
        )


def _on_any_rank(problem: str, params: Params) -> bool:
    (found,) = on_any_rank(params, bool(problem))
    return found


def _problem(loss_fn: LossFn, params: Params, batch: Batch, credited: Credited, chosen: Sequence[int]) -> str:
    """The first difference that neither rounding nor random numbers explain, in words; empty if there is none."""
    alone = {row: _alone(loss_fn, params, batch, credited.evidence.random_calls, row) for row in chosen}
    problem = _compare(params, credited, alone, {})
    if problem and credited.evidence.changes:  # more calls would show its state, not rounding
        return f"{problem}, and the loss changes what it keeps at each call (a counter, a list, a buffer)"
    if not _on_any_rank(problem, params):
        return problem
    unstable = {row: _unstable(loss_fn, params, batch, credited, row, alone[row]) for row in chosen}
    problem = _compare(params, credited, alone, unstable)
    if not _on_any_rank(problem, params) or _repeats(loss_fn, params, batch, credited, chosen[0]) or not problem:
        return problem
    return "its loss differs from call to call, with equal random numbers" if credited.evidence.doubts else ""


def _alone(loss_fn: LossFn, params: Params, batch: Batch, random_calls: Sequence[RandomCall], row: int) -> PerSample:
    count = batch_size(batch)
    with torch_seed(insecure_key(row)), replayed(random_calls, row, count):
        return loop()(loss_fn, params, rows(batch, row, row + 1))


def _repeats(loss_fn: LossFn, params: Params, batch: Batch, credited: Credited, row: int) -> bool:
    """True if the loss of a row alone is the same twice: it is not with random numbers of other libraries."""
    first, second = (_alone(loss_fn, params, batch, credited.evidence.random_calls, row).losses_B for _ in range(2))
    return bool(torch.equal(first.nan_to_num(), second.nan_to_num()))


class _Unstable(NamedTuple):
    """Changes of a row by rounding alone, where they are finite: of its loss; name -> norm of that of its gradient."""

    loss: float
    gradients: Mapping[str, float]


_STABLE = _Unstable(0.0, {})


def _unstable(
    loss_fn: LossFn, params: Params, batch: Batch, credited: Credited, row: int, alone: PerSample
) -> _Unstable:
    """Measure what rounding of the parameters does to a row alone.

    Where a number lies at the kink of a ReLU, or two are nearly equal under a maximum, the kernels of a batch and those
    of a row alone may decide differently, and a gradient jumps by far more than rounding.
    """
    loss, gradients = 0.0, dict.fromkeys(params, 0.0)
    for number in range(_TRIES):
        again = _alone(
            loss_fn, rounded_params(params, _ROUNDING_UNITS, number), batch, credited.evidence.random_calls, row
        )
        loss = _larger(loss, float((again.losses_B[0] - alone.losses_B[0]).abs()))
        for name, grad in again.grads.items():
            off = float(torch.linalg.vector_norm((grad.dense()[0] - alone.grads[name].dense()[0]).flatten()))
            gradients[name] = _larger(gradients[name], off)
    return _Unstable(loss, gradients)


def _larger(value: float, other: float) -> float:
    return max(value, other) if math.isfinite(other) else value  # an infinite change would allow any difference


def _explained(change: float, scale: float, credited: Credited) -> float:
    """Difference that rounding explains; in a step that is not proven at most what 16 bits would."""
    return min(2 * change, COARSE * scale) if credited.evidence.doubts else 2 * change


def _compare(
    params: Params, credited: Credited, alone: Mapping[int, PerSample], unstable: Mapping[int, _Unstable]
) -> str:
    """The first difference, in words; empty if there is none."""
    tolerance = credited.tolerance(params)
    for row, single in alone.items():
        together, by_itself = float(credited.losses_B[row]), float(single.losses_B[0])
        finite = torch.isfinite(credited.losses_B[row]), torch.isfinite(single.losses_B[0])
        scale = max(abs(by_itself), abs(together), 1e-6)
        allowed = tolerance * scale + _explained(unstable.get(row, _STABLE).loss, scale, credited)
        if bool(finite[0] != finite[1]) or (bool(finite[0]) and abs(together - by_itself) > allowed):
            return f"row {row} has the loss {by_itself:.6g} alone, {together:.6g} beside the others"
    return _compare_gradients(params, credited, alone, unstable, tolerance)


def _compare_gradients(
    params: Params,
    credited: Credited,
    alone: Mapping[int, PerSample],
    unstable: Mapping[int, _Unstable],
    tolerance: float,
) -> str:
    finite: dict[int, float] = {}
    for row, single in alone.items():
        squares = {name: value[0] for name, value in single.sq_norms().items()}
        norm = float(torch.stack(list(squares.values())).sum().sqrt())
        difference = _compare_norms(params, credited, row, squares, norm, unstable.get(row, _STABLE), tolerance)
        if difference:
            return difference
        if math.isfinite(norm):
            finite[row] = norm
    if credited.per_sample is None or not finite:
        return ""
    return _compare_sums(params, credited, credited.per_sample, alone, finite, unstable, tolerance)


def _compare_norms(
    params: Params,
    credited: Credited,
    row: int,
    squares: Mapping[str, Tensor],
    norm: float,
    unstable: _Unstable,
    tolerance: float,
) -> str:
    """The first parameter with another norm; `squares` and `norm` are those of the row alone."""
    given = torch.stack([credited.sq_norms[name][row].to(squares[name].dtype) for name in params])
    beside = bool(torch.isfinite(given).all())
    if beside != math.isfinite(norm):
        alone_is, beside_is = ("not ", "") if beside else ("", " not")
        return f"the gradient of row {row} is {alone_is}finite alone, and beside the others it is{beside_is}"
    for name, value in zip(params, given, strict=True) if beside else ():
        off = abs(float(value.clamp(min=0).sqrt() - squares[name].sqrt()))
        if off > tolerance * norm + _explained(unstable.gradients.get(name, 0.0), norm, credited) + 1e-12:
            return (
                f"row {row} has a gradient of {name!r} with norm {float(squares[name].sqrt()):.6g} alone, "
                f"{float(value.clamp(min=0).sqrt()):.6g} beside the others"
            )
    return ""


def _compare_sums(
    params: Params,
    credited: Credited,
    per_sample: PerSample,
    alone: Mapping[int, PerSample],
    finite: Mapping[int, float],
    unstable: Mapping[int, _Unstable],
    tolerance: float,
) -> str:
    """The first parameter of which a combination of the rows with finite norms is another one."""
    signs_B = torch.zeros_like(credited.losses_B, dtype=torch.float32)
    expected: dict[str, Tensor] = {}
    for index, row in enumerate(finite):
        sign = signs_B[row] = -1.0 if index % 2 else 1.0
        for name, grad in alone[row].grads.items():
            part = grad.dense()[0]  # of the first row as it is: a table of embeddings is large
            expected[name] = torch.add(expected[name], part, alpha=sign) if name in expected else part
    combined = per_sample.weighted_sum(dict.fromkeys(params, signs_B))
    scale = max(finite.values()) * len(alone) ** 0.5
    for name, value in expected.items():
        off = float(torch.linalg.vector_norm(combined[name].to(value.dtype).sub_(value).flatten()))
        change = sum(row.gradients[name] for row in unstable.values())
        if not off <= 2 * tolerance * scale + 1e-12 + _explained(change, scale, credited):
            return (
                f"the gradients of {name!r} of rows {sorted(alone)} differ by {off:.3g} "
                f"(norms up to {max(finite.values()):.3g})"
            )
    return ""
