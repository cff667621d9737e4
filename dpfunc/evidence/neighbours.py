"""Replay of a loop on neighbouring data. All that it may know of its records is in its releases, which are those of a
first run in each later one; so everything else must be the same bit for bit: number of steps, rates, files, lines.

May import: its folder, checkpoint and below. Privacy depends on it: no.
"""

import io
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfunc._utils.digests import digest
from dpfunc._utils.files import replace_file
from dpfunc._utils.validation import integer, refuse, wrong_type
from dpfunc.batches import batch_size, tree_map
from dpfunc.errors import BudgetExhausted, InsecureKeyWarning, InvalidArgument, NoGradientWarning, RunWarning
from dpfunc.evidence.result import replay_values
from dpfunc.evidence.watch import Tape, WatchedStep, described, watched
from dpfunc.plan import Plan
from dpfunc.rng import Key, cpu_seeds, fold_in, insecure_key
from dpfunc.step import DPStep
from dpfunc.types import Batch

Init = Callable[[WatchedStep, Batch, Key], Any]
Step = Callable[[WatchedStep, Batch, Any], Any]
# Runs on data for so many steps; the tape gets what is summed, what there is after each step, and what is left.
Loop = Callable[[Any, int, Tape], None]

# Rounding: sums of other rows are computed in other shapes. Relative to the sensitivity, and to the sum.
_OF_SENSITIVITY, _OF_SUM = 1e-3, 3e-6
_SUM = "the clipped sum"
_SHOWN = 8
_DIGITS = 10  # a number that is written with more was computed
_KEPT = 8  # one record of so many stays where most are left out: a row must be the same in a small batch


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
        """True if nothing moved that may not, or by more than it may."""
        return not self.moved

    def save(self, path: Path | str, source: Path | str, plan: Plan) -> None:
        """Write a file that `certify(..., evidence=[path])` takes, as `dpfunc verify --out` does. UNRELEASED.

        Args:
            path: of the JSON file. source: the script with the loop, of which the file has a digest. plan: its plan.
        """
        replace_file(Path(path), json.dumps(replay_values(self, Path(source), plan, {}), indent=1) + "\n", 0o600)

    def __repr__(self) -> str:
        others = f"what moves: {'; '.join(self.moved)}" if self.moved else "nothing else moves"
        rest = f"; not compared: {'; '.join(self.not_compared)}" if self.not_compared else ""
        return (
            f"Replay({'holds' if self.holds else 'DOES NOT HOLD'}: {self.steps} steps; record {self.record} moves the "
            f"clipped sum by {self.ratio:.3g} of its sensitivity; {others}{rest})"
        )


@dataclass(frozen=True)
class Rows:
    """Records that are no tensors: one an element."""

    rows: tuple[Any, ...] = field(repr=False)


def left_in(folder: Path, lines: str, elsewhere: Iterable[Path] = ()) -> dict[str, object]:
    """Printed lines, files in the folder of a run, and files that it opened for writing elsewhere."""
    left: dict[str, object] = {f"line {n} of what it prints": line for n, line in enumerate(lines.splitlines())}
    inside = {path: str(path.relative_to(folder)) for path in folder.rglob("*")}
    files = inside | {path: str(path) for path in elsewhere if folder not in path.parents}
    return left | {f"file {name}": str(digest(path.read_bytes())) for path, name in files.items() if path.is_file()}


# Python takes no such listener away again, so there is one; it notes nothing while no replay runs.
_opened: list[set[Path]] = []


@cache
def _listen() -> None:
    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and _opened and isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR):
            for known in _opened:
                known.add(Path(os.path.abspath(args[0])))

    sys.addaudithook(note)


@contextmanager
def files_written() -> Iterator[set[Path]]:
    """Files that Python code opens to write inside; what C code opens is not seen (torch.save, for one)."""
    _listen()
    written: set[Path] = set()
    _opened.append(written)
    try:
        yield written
    finally:
        _opened.remove(written)


@contextmanager
def _of_descriptors() -> Iterator[Callable[[], str]]:
    """Context that records output written to file descriptors 1 and 2, past the streams of Python."""
    read: list[bytes] = []
    with tempfile.TemporaryFile() as file:
        before = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        length = partial(os.fstat, file.fileno())
        try:
            yield lambda: (read[0] if read else os.pread(file.fileno(), length().st_size, 0)).decode(errors="replace")
        finally:
            read.append(os.pread(file.fileno(), length().st_size, 0))
            for number, own in zip((1, 2), before, strict=True):
                os.dup2(own, number)
                os.close(own)


@contextmanager
def lines_of() -> Iterator[Callable[[], str]]:
    """Lines that are printed or logged inside; warnings about keys of tests are left out."""
    text, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(text)
    root.addHandler(handler)
    try:
        with _of_descriptors() as more, redirect_stdout(text), redirect_stderr(text), warnings.catch_warnings():
            for known in (InsecureKeyWarning, RunWarning, NoGradientWarning):
                warnings.simplefilter("ignore", known)  # one run with a test's key; alike records may give NaN
            yield lambda: text.getvalue() + more()
    finally:
        root.removeHandler(handler)


def replay(
    dp_step: DPStep, init: Init, step: Step, data: Batch, *, steps: int = 50, candidates: int = 8,
    key: Key | None = None,
) -> Replay:  # fmt: skip
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
        (test_loops_that_hold); what cannot be compared is named (test_what_cannot_be_compared_is_named); dropout is no
        fault (test_dropout_is_no_fault). Not compared: time, memory, files that C code writes elsewhere than in the
        folder of the run, and what is kept outside of carry, files and lines: tensors that the functions take from
        outside are named.

    >>> import dpfunc
    >>> from dpfunc import clipping, sampling
    >>> plan = dpfunc.Plan(sampling.Poisson(50, 0.2), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=5, delta=1e-3)
    >>> dp_step = dpfunc.make_dp_step(lambda params, x: (params["w"] * x).sum(1), plan)
    >>> def init(dp_step, data, key):
    ...     return torch.zeros(2), dp_step.init({"w": torch.zeros(2)}, key)
    >>> def step(dp_step, data, carry):
    ...     w, state = carry
    ...     indices = dp_step.plan.draw(state, state.step)
    ...     grads, state, unreleased = dp_step({"w": w}, dpfunc.take(data, indices), state)
    ...     return w - 0.1 * grads["w"], state
    >>> replay(dp_step, init, step, 9 + torch.rand(50, 2)).holds
    True
    """
    refuse(
        (not isinstance(dp_step, DPStep),
         wrong_type("dp_step to be a step of dpfunc.make_dp_step", "dp_step", dp_step)),
        (getattr(dp_step, "ranks", None) is not None,
         "Expected a step of one process, got ranks. Replay the step with ranks=None."),
    )  # fmt: skip
    integer("steps", steps, minimum=1)
    integer("candidates", candidates, minimum=1)
    loop = partial(_run, dp_step, init, step, fold_in(insecure_key(0) if key is None else key, "replay"))
    return compare(loop, data, steps, candidates, removed=dp_step.plan.adjacency != "replace_one")


def _run(dp_step: DPStep, init: Init, step: Step, key: Key, data: Batch, steps: int, tape: Tape) -> None:
    with (
        tempfile.TemporaryDirectory() as folder, chdir(folder), lines_of() as lines, cpu_seeds(key),
        files_written() as elsewhere,
    ):  # fmt: skip
        own = watched(dp_step, tape)
        carry = init(own, data, key)
        tape.seen.append(described(carry))
        while carry is not None and len(tape.seen) <= steps:
            try:
                carry = step(own, data, carry)
            except BudgetExhausted:  # the plan's last step was taken: an end like None
                carry = None
            tape.seen.append({"the end of the loop": carry is None, **described(carry)})
        outside = {f"{name}, made outside of init and step": object() for name in _values_from_outside(init, step)}
        tape.seen.append(left_in(Path(folder).resolve(), lines(), elsewhere) | outside)


def _values_from_outside(*functions: Any) -> set[str]:
    """Names of tensors, arrays and computed numbers that functions take from outside: no run makes them anew.

    A mean of all records at the level of the module is one; whether it is made of records, nobody can see.
    """
    todo, done, names = [each for each in functions if isinstance(each, FunctionType)], set[int](), set[str]()
    while todo:
        own = todo.pop()
        if id(own) in done:
            continue
        done.add(id(own))
        cells = zip(own.__code__.co_freevars, own.__closure__ or (), strict=True)
        closed = {name: getattr(cell, "cell_contents", None) for name, cell in cells}
        read = {name: own.__globals__[name] for name in _names(own.__code__) & own.__globals__.keys()}
        near = [each for each in read.values() if getattr(each, "__globals__", None) is own.__globals__]
        todo += [each for each in (*closed.values(), *near) if isinstance(each, FunctionType)]
        names |= {
            name for name, value in (closed | read).items()
            if isinstance(value, (Tensor, np.ndarray)) or (isinstance(value, float) and len(repr(value)) > _DIGITS)
        }  # fmt: skip
    return names


def _names(code: CodeType) -> set[str]:
    """Names of globals that code reads, and functions inside of it."""
    return set(code.co_names).union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def compare(loop: Loop, data: Any, steps: int, candidates: int, *, removed: bool = True) -> Replay:
    """The `replay` of a loop that notes its own runs, as the Trainer of a job does.

    Args:
        loop: `(data, steps, tape)`: one whole run, whose plan is `watched_plan(plan, tape)`, and whose steps are of
            `WatchedStep`. data: a pytree of tensors, or `Rows`. steps, candidates: as for `replay`.
        removed: neighbours lack records; else they have others instead.

    Returns, Raises, Guarantees:
        As `replay`, and tests/train/test_evidence.py::test_an_honest_job_holds_and_is_the_recorded_one.
    """
    first = Tape()
    loop(data, steps, first)
    again = Tape(forced=first)
    loop(data, steps, again)
    unsteady = {*_moved(first, again, ())}
    if any(distance > _OF_SUM * size for _, _, distance, _, size in _distances(first, again)):  # more than rounding
        unsteady.add(_SUM)
    everything = torch.arange(len(data.rows) if isinstance(data, Rows) else batch_size(data), device="cpu")

    def run_on(index: Tensor, steps: int, gone: Tensor | None = None) -> Tape:
        """Another run, on the records of these numbers; an error in it is something that only it has."""
        tape = Tape(forced=first, without=gone)
        try:
            loop(_chosen(data, index), steps, tape)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            tape.seen.append({f"an error, {type(error).__name__}: {str(error).splitlines()[0][:100]}": True})
        return tape

    def without(gone: Tensor, steps: int = steps) -> Tape:
        index = everything.clone()
        index[gone] = (gone + 1) % len(index)
        return run_on(index, steps, gone if removed else None)

    record, ratio = _largest(first, candidates, without)
    one, most = torch.tensor([record], device="cpu"), everything[everything % _KEPT != 0]
    neighbour, fewer = without(one), without(most)
    others = {
        "without the record": neighbour,
        "without most of the records": fewer,
        "without records": run_on(everything, steps, everything),
        "with other records": run_on(torch.full_like(everything, record), steps),
    }
    too_far = (
        f"step {number}: {_SUM}{group} by {distance / most:.3g} of its sensitivity"
        for number, group, distance, most, size in _distances(first, neighbour)
        if not distance <= most * (1.0 + _OF_SENSITIVITY) + _OF_SUM * size
    )
    moved = [
        *[f"{_SUM} (on the same data: the loop keeps something from run to run)"] * (_SUM in unsteady),
        *too_far,
        *_other_rows(first, neighbour, one),
        *_other_rows(first, fewer, most),
        *(f"{what} ({name})" for name, other in others.items() for what in _moved(first, other, unsteady)),
    ]
    return Replay(
        len(first.releases), record, max(ratio, _ratio(first, neighbour)), _first_of_each(moved),
        tuple(sorted({_without_step(one) for one in unsteady - {_SUM}})[:_SHOWN]),
    )  # fmt: skip


def _largest(first: Tape, candidates: int, without: Callable[[Tensor, int], Tape]) -> tuple[int, float]:
    """The record of the first batch that moves the sum of that step most, of some of them, and by how much."""
    begin = next((number for number, drawn in enumerate(first.draws) if len(drawn)), None)
    if begin is None:
        raise InvalidArgument(
            f"Expected a record in one of {len(first.draws)} steps, got empty batches: nothing can be compared. Take "
            "more steps."
        )
    drawn = first.draws[begin]
    places = torch.linspace(0, len(drawn) - 1, min(candidates, len(drawn)), device="cpu").round().long()
    tried = drawn[places].unique()
    ratios = torch.tensor(
        [_ratio(first, without(one[None], begin + 1)) for one in tried], dtype=torch.float64, device="cpu"
    )
    return int(tried[ratios.argmax()]), float(ratios.max())


def _chosen(data: Any, index: Tensor) -> Any:
    return (
        Rows(tuple(data.rows[place] for place in index.tolist()))
        if isinstance(data, Rows)
        else tree_map(lambda leaf: leaf[index.to(leaf.device)].clone(), data)
    )


def _distances(first: Tape, other: Tape) -> Iterator[tuple[int, str, float, float, float]]:
    """Step, words for the clip group, distance of the two sums, sensitivity, and norm of the first sum."""
    for number, (one, two) in enumerate(zip(first.releases, other.releases, strict=False)):
        groups = dict.fromkeys(one.clipped.group_of[name] for name in one.clipped.sums)
        for group in groups:
            names = [name for name in one.clipped.sums if one.clipped.group_of[name] == group]
            own, others = (
                torch.cat([each.clipped.sums[name].double().flatten() for name in names]) for each in (one, two)
            )
            words = f" of group {group}" if len(groups) > 1 else ""
            yield number, words, float((own - others).norm()), one.clipped.sensitivities[group], float(own.norm())


def _ratio(first: Tape, other: Tape) -> float:
    return max((distance / most for _, _, distance, most, _ in _distances(first, other)), default=0.0)


def _other_rows(first: Tape, other: Tape, gone: Tensor) -> list[str]:
    """Steps in which rows of other records are not the same, or not in the same order."""
    steps = []
    for number, (one, two, drawn) in enumerate(zip(first.rows, other.rows, first.draws, strict=False)):
        kept = one
        if len(one) == len(drawn):
            stays = (~torch.isin(drawn, gone)).tolist()
            kept = [row for row, stay in zip(one, stays, strict=True) if stay]
            two = two if len(two) != len(one) else [row for row, stay in zip(two, stays, strict=True) if stay]
        if kept != two:
            steps.append(f"step {number}: rows of other records in the batch")
    return steps


def _moved(first: Tape, other: Tape, unsteady: Collection[str]) -> list[str]:
    """Differences other than those of the sums, without differences between two runs on the same data."""
    pairs = enumerate(zip(first.releases, other.releases, strict=False))
    differences = [f"step {n}: {what}" for n, (one, two) in pairs for what in _different(one.facts, two.facts)]
    if len(first.releases) != len(other.releases):
        differences.append(f"number of steps, {len(first.releases)} and {len(other.releases)}")
    *steps, left = zip_longest(first.seen, other.seen, fillvalue=dict[str, object]())
    differences += [f"step {number - 1}: {what}" for number, pair in enumerate(steps) for what in _different(*pair)]
    known = {_without_step(one) for one in unsteady}
    return [one for one in [*differences, *_different(*left)] if _without_step(one) not in known]


def _different(here: Mapping[str, object], there: Mapping[str, object]) -> list[str]:
    return sorted(what for what in here.keys() | there.keys() if here.get(what) != there.get(what))


def _without_step(difference: str) -> str:
    return re.sub(r"^step -?\d+: ", "", difference)


def _first_of_each(moved: list[str]) -> tuple[str, ...]:
    """The first step of each kind of difference, and at most as many as a reader looks at."""
    first: dict[str, str] = {}
    for what in moved:
        first.setdefault(_without_step(what).partition(" (")[0].partition(" by ")[0], what)
    return tuple(list(first.values())[:_SHOWN])
