"""Replay of a loop on neighbouring data: the clipped sum moves by at most its sensitivity, and nothing else moves.

A run is taken once, and its releases are kept. Then it is taken again on other data with the same keys, and each of its
steps releases what it released the first time. All that a private loop may know of its records is in the releases, so
everything else must be the same bit for bit: how many steps there are, rates, ledger, files, lines.
"""

from __future__ import annotations

import io
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dpfunc._utils.digests import digest
from dpfunc._utils.validation import integer, wrong_type
from dpfunc.batches import batch_size, tree_map
from dpfunc.errors import BudgetExhausted, InsecureKeyWarning, InvalidArgument, NoGradientWarning, RunWarning
from dpfunc.evidence._watch import Release, Tape, WatchedStep, described, watched
from dpfunc.rng import Key, cpu_seeds, fold_in, insecure_key
from dpfunc.step import DPStep
from dpfunc.types import Batch

Init = Callable[[WatchedStep, Batch, Key], Any]
Step = Callable[[WatchedStep, Batch, Any], Any]
# Rounding: sums of other rows are computed in other shapes. Relative to the sensitivity, and to the sum.
_OF_SENSITIVITY, _OF_SUM = 1e-3, 3e-6


@dataclass(frozen=True)
class Replay:
    """The result of `replay`.

    Args:
        steps: of the loop. record: that moved the sum most, of those that were tried.
        ratio: the largest distance of two clipped sums, over their sensitivity, in any step and clip group.
        moved: what else moved, or by more than it may; empty if nothing did.
        not_compared: what differs between two runs on the same data, such as times in log lines.

    >>> Replay(steps=5, record=3, ratio=0.98, moved=(), not_compared=())
    Replay(holds: 5 steps; record 3 moves the clipped sum by 0.98 of its sensitivity; nothing else moves)
    """

    steps: int
    record: int
    ratio: float
    moved: tuple[str, ...]
    not_compared: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Nothing was found."""
        return not self.moved

    def __repr__(self) -> str:
        """The verdict in one line."""
        others = f"what moves: {'; '.join(self.moved)}" if self.moved else "nothing else moves"
        rest = f"; not compared: {'; '.join(self.not_compared)}" if self.not_compared else ""
        return (
            f"Replay({'holds' if self.holds else 'DOES NOT HOLD'}: {self.steps} steps; record {self.record} moves the "
            f"clipped sum by {self.ratio:.3g} of its sensitivity; {others}{rest})"
        )


class Loop(Protocol):
    """A loop that runs on data and on their neighbours."""

    @property
    def adjacency(self) -> str:
        """Of the plan."""

    def run(self, data: Any, steps: int, tape: Tape) -> Tape:
        """Run so many steps; the tape gets what is summed, what there is after each step, and what is left."""


@dataclass(frozen=True)
class Rows:
    """Records that are no tensors: one an element."""

    rows: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True)
class _Loop:
    """A loop of a user, and how it is run."""

    dp_step: DPStep
    init: Init
    step: Step
    key: Key = field(repr=False)

    @property
    def adjacency(self) -> str:
        return self.dp_step.plan.adjacency

    def run(self, data: Batch, steps: int, tape: Tape) -> Tape:
        """Run the loop in an empty folder; note what it has after each step, and what it leaves."""
        with tempfile.TemporaryDirectory() as folder, chdir(folder), lines_of() as lines, cpu_seeds(self.key):
            step = watched(self.dp_step, tape)
            carry = self.init(step, data, self.key)
            tape.seen.append(described(carry))
            while carry is not None and len(tape.seen) <= steps:
                carry = self._next(step, data, carry)
                tape.seen.append({"the end of the loop": carry is None, **described(carry)})
            tape.seen.append(left_in(Path(folder), lines()))
        return tape

    def _next(self, step: WatchedStep, data: Batch, carry: Any) -> Any:
        try:
            return self.step(step, data, carry)
        except BudgetExhausted:  # the plan's last step was taken: an end like None
            return None


def left_in(folder: Path, lines: list[str]) -> dict[str, object]:
    """Lines and files that a run leaves."""
    left = {f"line {number} of what it prints": line for number, line in enumerate(lines)}
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {**left, **{f"file {path.relative_to(folder)}": str(digest(path.read_bytes())) for path in files}}


@contextmanager
def lines_of() -> Iterator[Callable[[], list[str]]]:
    """Lines that are printed or logged inside; warnings about keys of tests are left out."""
    text, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(text)
    root.addHandler(handler)
    try:
        with redirect_stdout(text), redirect_stderr(text), warnings.catch_warnings():
            warnings.simplefilter("ignore", InsecureKeyWarning)  # keys of replays protect nothing
            warnings.simplefilter("ignore", RunWarning)  # the runs are one run, several times
            warnings.simplefilter("ignore", NoGradientWarning)  # where all records are one, gradients may be NaN
            yield lambda: text.getvalue().splitlines()
    finally:
        root.removeHandler(handler)


def replay(
    dp_step: DPStep,
    init: Init,
    step: Step,
    data: Batch,
    *,
    steps: int = 50,
    candidates: int = 8,
    key: Key | None = None,
) -> Replay:
    """Run a loop on its data and on neighbours with the same keys, and report what moves.

    Each candidate record of the first batch is left out (replaced by another one, with replace_one) for one step; the
    one that moves the clipped sum most is left out for all steps. Then most of the records are left out, then all, and
    then all records are this one: the clipped sum may move as it likes, and nothing else may. Every step releases what
    it released in the first run, so that a difference does not spread.

    Args:
        dp_step: of one process. Its journal is not written.
        init: `(dp_step, data, key) -> carry`: all that the loop has before its first step, parameters, state of
            `dp_step.init`, optimizer, ... Nothing is kept from run to run elsewhere.
        step: `(dp_step, data, carry) -> carry`: one step of the loop, with the given `dp_step` (another plan: by
            `dataclasses.replace(dp_step, plan=...)`); None, or `BudgetExhausted`, at its end.
        data: pytree of tensors, one row a record. Rows are changed; private data stay in this process.
        steps: at most so many are taken. candidates: records to try.
        key: of the runs, guessable by default: results of a replay are for you, not to be published.

    Returns:
        A `Replay`; UNRELEASED: it says how far a record moves a sum.

    Raises:
        InvalidArgument: an argument outside its domain, or no record is drawn in these steps.
        DPFuncError: what the loop itself raises in its first run. An error in a later run is one thing that moved.

    Guarantees:
        faults are found (tests/evidence/test_neighbours.py::test_faults_are_found), loops without fault hold
        (test_loops_that_hold). Not compared: time, memory, and what is kept outside of carry, files and lines.

    >>> import dpfunc
    >>> from dpfunc import clipping, sampling
    >>> plan = dpfunc.Plan(sampling.Poisson(50, 0.2), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=5, delta=1e-3)
    >>> dp_step = dpfunc.make_dp_step(lambda params, x: (params["w"] * x).sum(1), plan)
    >>> def init(dp_step, data, key):
    ...     params = {"w": torch.zeros(2)}
    ...     return params, dp_step.init(params, key)
    >>> def step(dp_step, data, carry):
    ...     params, state = carry
    ...     indices = dp_step.plan.draw(state, state.step)
    ...     grads, state, unreleased = dp_step(params, dpfunc.take(data, indices), state)
    ...     params = {name: value - 0.1 * grads[name] for name, value in params.items()}
    ...     return None if state.step == state.limit else (params, state)
    >>> replay(dp_step, init, step, 9 + torch.rand(50, 2)).holds
    True
    """
    _check(dp_step, steps, candidates)
    root = insecure_key(0) if key is None else key
    return compare(_Loop(dp_step, init, step, fold_in(root, "replay")), data, steps, candidates)[0]


def compare(loop: Loop, data: Any, steps: int, candidates: int) -> tuple[Replay, Tape]:
    """The replay of a loop on a pytree of tensors or on `Rows`, and the tape of its first run; see `replay`."""
    first = loop.run(data, steps, Tape())
    again = loop.run(data, steps, Tape(forced=first))
    unsteady = {*_moved(first, again, ()), *([_SUM] if _sum_differs(first, again) else [])}
    record, ratio = _largest(loop, data, first, candidates)
    one, most = torch.tensor([record]), torch.arange(_size(data))
    most = most[most % _KEPT != 0]
    neighbour, fewer = (_neighbour(loop, data, steps, first, gone) for gone in (one, most))
    others = {
        "without the record": neighbour,
        "without most of the records": fewer,
        "without records": _again(loop, data, steps, Tape(forced=first, nobody=True)),
        "with other records": _again(loop, _all_alike(data, record), steps, Tape(forced=first)),
    }
    moved = [f"{_SUM} (on the same data: the loop keeps something from run to run)"] if _SUM in unsteady else []
    moved += _too_far(first, neighbour) + _other_rows(first, neighbour, one) + _other_rows(first, fewer, most)
    moved += [f"{what} ({name})" for name, other in others.items() for what in _moved(first, other, unsteady)]
    found = Replay(
        len(first.releases), record, max(ratio, _ratio(first, neighbour)), _first_of_each(moved),
        tuple(sorted(unsteady - {_SUM})[:_SHOWN]),
    )  # fmt: skip
    return found, first


_SUM = "the clipped sum"
_SHOWN = 8
_KEPT = 8  # one record of so many stays where most are left out: a row must be the same in a small batch


def _check(dp_step: object, steps: int, candidates: int) -> None:
    if not isinstance(dp_step, DPStep):
        raise wrong_type("dp_step to be a step of dpfunc.make_dp_step", "dp_step", dp_step)
    if dp_step.ranks is not None:
        raise InvalidArgument("Expected a step of one process, got ranks. Replay the step with ranks=None.")
    integer("steps", steps, minimum=1)
    integer("candidates", candidates, minimum=1)


def _largest(loop: Loop, data: Any, first: Tape, candidates: int) -> tuple[int, float]:
    """The record of the first batch that moves the sum of that step most, of some of them, and by how much."""
    begin = next((number for number, drawn in enumerate(first.draws) if len(drawn)), None)
    if begin is None:
        raise InvalidArgument(
            f"Expected a record in one of {len(first.draws)} steps, got empty batches: nothing can be compared. Take "
            "more steps."
        )
    drawn = first.draws[begin]
    places = torch.linspace(0, len(drawn) - 1, min(candidates, len(drawn))).round().long()
    ratio_of = {
        one: _ratio(first, _neighbour(loop, data, begin + 1, first, torch.tensor([one])))
        for one in drawn[places].unique().tolist()
    }
    record = max(ratio_of, key=lambda one: ratio_of[one])
    return record, ratio_of[record]


def _neighbour(loop: Loop, data: Any, steps: int, first: Tape, gone: Tensor) -> Tape:
    """The run on data without some records, or with others in their place."""
    removed = loop.adjacency != "replace_one"
    index = torch.arange(_size(data))
    index[gone] = (gone + 1) % len(index)
    return _again(loop, _chosen(data, index), steps, Tape(forced=first, without=gone if removed else None))


def _size(data: Any) -> int:
    return len(data.rows) if isinstance(data, Rows) else batch_size(data)


def _chosen(data: Any, index: Tensor) -> Any:
    """Data whose records are those at these places."""
    if isinstance(data, Rows):
        return Rows(tuple(data.rows[place] for place in index.tolist()))
    return tree_map(lambda leaf: leaf[index.to(leaf.device)].clone(), data)


def _all_alike(data: Any, record: int) -> Any:
    return _chosen(data, torch.full((_size(data),), record))


def _again(loop: Loop, data: Any, steps: int, tape: Tape) -> Tape:
    """Another run; an error in it is something that it has, and the first run has not."""
    try:
        return loop.run(data, steps, tape)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        tape.seen.append({f"an error, {type(error).__name__}: {str(error).splitlines()[0][:100]}": True})
        return tape


def _distances(first: Release, other: Release) -> dict[str, tuple[float, float, float]]:
    """Group -> distance of the two sums, sensitivity, norm of the first sum; `all` is of all groups together."""
    squares: dict[str, list[float]] = {}
    for name, value in first.clipped.sums.items():
        moved = float((value.double() - other.clipped.sums[name].double()).square().sum())
        so_far = squares.setdefault(first.clipped.group_of[name], [0.0, 0.0])
        so_far[0] += moved
        so_far[1] += float(value.double().square().sum())
    found = {
        group: (math.sqrt(moved), first.clipped.sensitivities[group], math.sqrt(size))
        for group, (moved, size) in squares.items()
    }
    return {f"of group {group}" if len(found) > 1 else "": values for group, values in found.items()}


def _ratio(first: Tape, other: Tape) -> float:
    """The largest distance over its sensitivity, in all steps."""
    pairs = zip(first.releases, other.releases, strict=False)
    return max((d / s for one, two in pairs for d, s, _ in _distances(one, two).values()), default=0.0)


def _too_far(first: Tape, other: Tape) -> list[str]:
    """Steps in which the sums are farther apart than their sensitivity."""
    return [
        f"step {number}: {_SUM} {group}{' ' if group else ''}by {distance / sensitivity:.3g} of its sensitivity"
        for number, (one, two) in enumerate(zip(first.releases, other.releases, strict=False))
        for group, (distance, sensitivity, size) in _distances(one, two).items()
        if not distance <= sensitivity * (1.0 + _OF_SENSITIVITY) + _OF_SUM * size
    ]


def _other_rows(first: Tape, other: Tape, gone: Tensor) -> list[str]:
    """Steps in which rows of other records are not the same, or not in the same order."""
    found = []
    for number, (one, two, drawn) in enumerate(zip(first.rows, other.rows, first.draws, strict=False)):
        kept = one
        if len(one) == len(drawn):
            place = {*torch.nonzero(torch.isin(drawn, gone))[:, 0].tolist()}
            kept = [row for index, row in enumerate(one) if index not in place]
            two = two if len(two) == len(kept) else [row for index, row in enumerate(two) if index not in place]
        if kept != two:
            found.append(f"step {number}: rows of other records in the batch")
    return found


def _sum_differs(first: Tape, again: Tape) -> bool:
    """True if the sums of two runs on the same data differ by more than rounding."""
    pairs = zip(first.releases, again.releases, strict=False)
    return any(d > _OF_SUM * size for one, two in pairs for d, _, size in _distances(one, two).values())


def _moved(first: Tape, other: Tape, unsteady: Collection[str]) -> list[str]:
    """Differences beside the sums, without those that there are on the same data as well."""
    found: list[str] = []
    for number, (one, two) in enumerate(zip(first.releases, other.releases, strict=False)):
        found += [f"step {number}: {what}" for what in _public_facts(one, two)]
    if len(first.releases) != len(other.releases):
        found.append(f"number of steps, {len(first.releases)} and {len(other.releases)}")
    nothing: dict[str, object] = {}
    pairs = list(zip_longest(first.seen, other.seen, fillvalue=nothing))
    for number, pair in enumerate(pairs[:-1]):
        found += [f"step {number - 1}: {what}" for what in _different(*pair)]
    found += _different(*pairs[-1])  # what is left at the end
    known = {_what(one) for one in unsteady}
    return [one for one in found if _what(one) not in known]


def _different(here: Mapping[str, object], there: Mapping[str, object]) -> list[str]:
    """Places that have not the same value."""
    return sorted(what for what in here.keys() | there.keys() if here.get(what) != there.get(what))


def _what(found: str) -> str:
    """A finding without its step."""
    return found.partition(": ")[2] if found.startswith("step ") else found


def _public_facts(one: Release, two: Release) -> list[str]:
    """Parts of a release, beside its sum, that must not depend on records."""
    facts: Mapping[str, bool] = {
        "sensitivity": one.clipped.sensitivities == two.clipped.sensitivities,
        "clip groups": one.clipped.group_of == two.clipped.group_of,
        "key of the noise": one.key == two.key,
    }
    return [what for what, same in facts.items() if not same]


def _first_of_each(moved: list[str]) -> tuple[str, ...]:
    """The first step of each thing that moves, and no more than a reader looks at."""
    found: dict[str, str] = {}
    for what in moved:
        found.setdefault(_what(what).partition(" (")[0].partition(" by ")[0], what)
    return tuple(list(found.values())[:_SHOWN])
