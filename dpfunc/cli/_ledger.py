"""The commands `dpfunc ledger show` and `dpfunc ledger check`: what runs have cost, from the files that they left.

May import: its folder, train and below. Privacy depends on it: no.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from dpfunc._utils.validation import expect, refuse
from dpfunc.accounting import Event, Guarantee, Ledger
from dpfunc.accounting import record as known
from dpfunc.accounting.accountant import ACCOUNTANTS, upper
from dpfunc.accounting.record import COVERED, GUESSABLE, NEIGHBOURS, RECORD_FILE, Record, SelectionRecord, listed
from dpfunc.checkpoint.costs import read_cost
from dpfunc.checkpoint.journal import Taken, read_steps, steps_ledger
from dpfunc.cli._output import describe, json_option, print_checks, print_json, print_list, print_rows, print_values

_ROUNDING = 1e-6  # relative; other versions of numpy and scipy round in other ways
_Row = tuple[str, bool, str]  # name of a check, True if it agrees, and what was found
_METHODS = click.Choice(ACCOUNTANTS)
_SETTINGS = {
    "noise_source": known.SOURCES.values(),
    "clip": known.CLIPS,
    "rows": known.ROWS,
    "batches": (known.COMPARED, known.ELSEWHERE),
}
# What a file lacks that is no record.
_MISSING = {
    "delta": "has no delta of its own: choose one below 1 / number of records.",
    "epsilon": "claims no epsilon of its own: name the one to check.",
}
_path_argument = click.argument("path", type=click.Path(exists=True, path_type=Path))


@dataclass(frozen=True)
class _Source:
    """Cost of a run as its files state it."""

    path: Path  # of the file that was read
    ledger: Ledger  # all that it counts; of a search what came before it
    record: Record | SelectionRecord | None = None
    # Steps in the journals of the same folder that the ledger does not count; None without a journal.
    uncounted: int | None = None
    # Runs in these journals, and the steps that each has taken.
    runs: Mapping[str, Mapping[int, Taken]] = field(default_factory=dict)

    def parts(self) -> list[tuple[str, Ledger]]:
        """The ledgers of the runs in the journals, and of what these have counted besides, each with its name."""
        if not self.runs or self.uncounted:
            return [("", self.ledger)]
        earlier = self.ledger.beyond(steps_ledger(self.runs.values()))
        parts = [(name, steps_ledger([taken])) for name, taken in self.runs.items()]
        return [*parts, *([("earlier runs", earlier)] if earlier.events else [])]

    def guarantee(self, delta: float, method: str) -> Guarantee:
        """The cost, computed again, never by the method that a file names. That of a search is counted by rdp alone."""
        if not isinstance(self.record, SelectionRecord):
            return self.ledger.epsilon(delta, method)
        if method not in ("auto", "rdp"):
            raise click.UsageError(
                f"Expected --method rdp for the record of a search, got {method}: no other one can count it."
            )
        return self.record.guarantee(delta)


def _read_source(path: Path) -> _Source:
    """Read a record, a ledger or a journal; or, in the folder of a run, the first of record, journal and ledger."""
    journals = sorted((path if path.is_dir() else path.parent).glob("*journal.jsonl"))
    path = _file_of(path, journals) if path.is_dir() else path
    cost = read_cost(path)
    if isinstance(cost, Ledger):
        return _Source(path, cost, runs=read_steps(path) if path.suffix == ".jsonl" else {})
    if isinstance(cost, SelectionRecord):
        return _Source(path, cost.spent, cost)
    runs = read_steps(*journals, missing="empty")  # of a journal and its older copy, all steps
    uncounted = cost.ledger.lacks(steps_ledger(runs.values())) if runs else None
    return _Source(path, cost.ledger, cost, uncounted, runs)


def _file_of(folder: Path, journals: list[Path]) -> Path:
    files: list[Path] = [folder / RECORD_FILE, *(journals if len(journals) == 1 else ()), folder / "ledger.json"]
    there = [file for file in files if file.is_file()]
    refuse(
        (not there,
         f"Expected the folder of a run, with {RECORD_FILE}, one journal (*journal.jsonl) or ledger.json in it, "
         f"got {str(folder)!r} with {len(journals) or 'none'} of them. Name the file."),
    )  # fmt: skip
    return there[0]


@click.group()
def ledger() -> None:
    """Show and check what runs have cost, from the files that they left.

    A run leaves a record (privacy_accounting.json), a journal (.jsonl) or a ledger (.json). None of them holds private
    data. Nothing is changed.
    """


@ledger.command("show")
@_path_argument
@click.option("--delta", "-d", type=float, help="Delta, below 1 / number of records. A record has its own.")
@click.option("--method", type=_METHODS, help="How epsilon is computed. By default as it was recorded, else auto.")
@json_option
def _show_ledger(path: Path, delta: float | None, method: str | None, as_json: bool) -> None:
    """Show the privacy cost of a run, and what it covers and does not.

    PATH is a record (privacy_accounting.json), a journal (.jsonl), a ledger (.json), or the folder of a run.

    Example: dpfunc ledger show runs/mails
    """
    source = _read_source(path)
    _note(source)
    at, spent = _given(source, "delta", delta), source.ledger
    if source.record is not None and delta is None and method is None:
        _show_record(source.record, source.parts(), as_json)
        return
    guarantee, counted = source.guarantee(at, method or "auto"), not isinstance(source.record, SelectionRecord)
    if as_json:
        steps = {"num_steps": spent.num_steps, "events": _described([("", spent)]), "runs": _described(source.parts())}
        print_json({**describe(guarantee), **(steps if counted else {})})
        return
    if counted:
        _print_events(f"{spent.num_steps} steps, {spent.adjacency}", "run", source.parts())
    click.echo(str(guarantee))


def _given(source: _Source, name: str, value: float | None) -> float:
    """The value of an option, or else that of the record."""
    if value is None and source.record is None:
        raise click.UsageError(f"Missing option '--{name}' / '-{name[0]}'. {str(source.path)!r} {_MISSING[name]}")
    return float(getattr(source.record, name)) if value is None else value


def _note(source: _Source) -> None:
    """Say on stderr what a reader of the numbers must know first."""
    for holds, text in (
        (source.record is not None and source.record.noise_key == GUESSABLE,
         "Warning: nothing is protected: the key of the noise can be guessed (insecure_key)."),
        (source.path.parent.name.startswith("checkpoint-"),
         "Note: this is the record of a checkpoint. That of the finished run is in the folder above."),
        (source.uncounted,
         f"Warning: the journal beside {source.path.name} has {source.uncounted} steps that it does not count: the "
         "true cost is higher. Name the journal."),
    ):  # fmt: skip
        if holds:
            click.echo(text, err=True)


def _described(parts: Iterable[tuple[str, Ledger]]) -> list[dict[str, object]]:
    """The events of ledgers as values, each with the name of its run, if there is one."""
    return [{**asdict(event), **({"run": name} if name else {})} for name, ledger in parts for event in ledger.events]


def _show_record(record: Record | SelectionRecord, parts: Sequence[tuple[str, Ledger]], as_json: bool) -> None:
    """Print a record as it was written, and the run of each of its events, as the journals beside it have them."""
    if as_json:
        print_json({**json.loads(record.to_json()), "covered": list(COVERED), "runs": _described(parts)})
        return
    included = "" if record.target_epsilon is None else f", within the budget {record.target_epsilon:g}"
    if isinstance(record, SelectionRecord):
        kind, named, adjacency = "search", "values", record.spent.adjacency
        title, counted = "Candidates: one run", list(zip(map(listed, record.candidates), record.ledgers, strict=True))
        if record.spent.num_steps:
            included += f", {record.spent.num_steps} steps of earlier runs included"
        best = (
            "none was released"
            if record.chosen is None
            else f"{listed(record.candidates[record.chosen])}; score {record.chosen_score:.4g}"
        )
        own = {
            "computed by": "rdp, for the best of a random number of runs",
            "runs": f"{record.runs.mean:g} on average, {known.law_in_words(record.runs)}; how many there were is "
            "secret",
            "released": best,
            "score": f"{record.score}; noise of standard deviation {record.score_noise:g}",
            "noise source": record.noise_key,
        }
    else:
        kind, named, adjacency = "run", "run", record.ledger.adjacency
        title, counted = f"{record.ledger.num_steps} steps, {adjacency}", [*parts]
        last = " at the end" if record.clip in known.CHANGING else ""
        own = {
            "computed by": f"{record.accountant} ({record.note}); rdp: {upper(record.epsilon_rdp)}",
            "steps": f"{record.global_step} of {record.num_steps}, {record.epoch:.4g} passes over the data",
            "noise": f"{record.mechanism}, {record.noise_multiplier:.6g} times the sensitivity",
            "noise source": f"{record.noise_source}, {record.noise_key}",
            "clipping": f"{record.clip}, norm at most {record.max_grad_norm:g}{last}",
            "rows": record.rows,
            "batches": record.batches,
            "sampling": f"{record.sampler}, probability {record.sampling_prob:.6g}, expected batch size "
            f"{record.expected_batch_size:g}",
        }
    print_values(f"What the {kind} has cost", {
        "protected": record.unit,
        "epsilon": f"{upper(record.epsilon)} at delta {record.delta:g}{included}",
        "neighbours": f"{NEIGHBOURS[adjacency]} ({adjacency})",
        **own,
        "data set size": f"{record.dataset_size}, {record.dataset_size_is}",
        "written": f"{record.date}, {', '.join(f'{name} {value}' for name, value in record.versions.items())}",
    })  # fmt: skip
    _print_events(title, named, counted)
    print_list("Covered, and may be published:", COVERED)
    print_list("Not covered by this epsilon:", record.not_covered)
    click.echo("\nAs it was written. Computed again by: dpfunc ledger check")


def _print_events(title: str, column: str, ledgers: Iterable[tuple[str, Ledger]]) -> None:
    """Print what was counted; the first column, which names a ledger, only if it has a name."""
    rows = [
        (name, f"{event.sampling_prob:g}", f"{event.noise_multiplier:g}", str(event.num_steps))
        for name, ledger in ledgers for event in ledger.events
    ]  # fmt: skip
    named = 0 if rows and rows[0][0] else 1
    header = (column, "sampling prob", "noise multiplier", "steps")
    print_rows(title, header[named:], [row[named:] for row in rows])


@ledger.command("check")
@_path_argument
@click.option("--epsilon", "-e", type=float, help="Claim to check; by default that of the record.")
@click.option("--delta", "-d", type=float, help="Delta of the claim; by default that of the record.")
@click.option("--method", type=_METHODS, default="auto", show_default=True, help="How epsilon is computed.")
@json_option
def _check_ledger(path: Path, epsilon: float | None, delta: float | None, method: str, as_json: bool) -> None:
    """Compute epsilon again from the steps that were counted, and compare it with what is claimed.

    PATH is as for `dpfunc ledger show`. Of a record each field is computed again, or is one that dpfunc writes; of a
    folder, the journal is compared as well. Date, unit, budget, bound of the gradients, passes over the data and
    versions are statements of its author. The exit code is 0 if all agrees, else 1.

    Example: dpfunc ledger check runs/mails
    """
    source = _read_source(path)
    _note(source)
    claim, at = _given(source, "epsilon", epsilon), _given(source, "delta", delta)
    expect(claim >= 0, "0 <= epsilon <= inf", "epsilon", claim)
    guarantee = source.guarantee(at, method)
    rows = _compare(source, claim, at, guarantee)
    checks = [{"check": name, "agrees": fine, "found": text} for name, fine, text in rows]
    claimed = {"claimed_epsilon": None if math.isinf(claim) else claim, **describe(guarantee)}
    print_checks(rows, {**claimed, "checks": checks}, as_json, "Do not publish the claim")


def _compare(source: _Source, claim: float, delta: float, cost: Guarantee) -> list[_Row]:
    """Compare a claim with what the counted steps cost, and the facts of a record with each other and its journal."""
    computed = f"claimed {claim:.6g}, computed {upper(cost.epsilon)} by {cost.method} at delta {cost.delta:g}"
    low, high = cost.epsilon * (1 - _ROUNDING), cost.epsilon * (1 + _ROUNDING)
    said = ": the claim is too small" if claim < low else ": the claim is an upper bound" if claim > high else ""
    rows: list[_Row] = [("epsilon", claim >= low, f"{computed}{said}")]
    if source.uncounted is not None:
        lacks = f"{source.uncounted} of its steps are not counted" if source.uncounted else "all its steps are counted"
        rows.append(("journal", source.uncounted == 0, lacks))
    record = source.record
    if record is None:
        return rows
    n, budget = record.dataset_size, record.target_epsilon
    rows += [
        ("key", record.noise_key != GUESSABLE, record.noise_key),
        ("delta", delta * n < 1, f"{delta:g}; 1 / dataset_size is {1 / n:.3g}"),
        _sampling(record),
        _limits(record, source.ledger.adjacency),
        *(_of_search(record) if isinstance(record, SelectionRecord) else _of_run(record, source.runs)),
    ]
    return rows if budget is None else [*rows, ("budget", claim <= budget * (1 + _ROUNDING), f"{budget:g}")]


def _limits(record: Record | SelectionRecord, adjacency: str) -> _Row:
    """Compare what is not covered with what no run covers, and with what this record publishes."""
    publishes = adjacency == "add_remove" and record.dataset_size_is == known.SIZES[0]
    fine, always = publishes == (known.EXACT_SIZE in record.not_covered), [*known.NOT_COVERED]
    if isinstance(record, SelectionRecord):
        always = [*known.SEARCH_NOT_COVERED, *always]
        fine = fine and (known.OTHER_STEPS in record.not_covered or not record.spent.events)
    fine = fine and [*record.not_covered[-len(always) :]] == always
    return "not covered", fine, "all that no run covers" if fine else "sentences that each such record has are missing"


def _of_run(record: Record, runs: Mapping[str, Mapping[int, Taken]]) -> list[_Row]:
    """Compute again what follows from the steps of a run, and look for words that dpfunc does not write."""
    again = known.recorded(record.ledger, record.delta, record.epsilon, record.accountant, _ROUNDING)
    rdp = record.ledger.epsilon(record.delta, "rdp").epsilon
    own = max(runs[record.run]) + 1 if record.run in runs else "none of this run"
    return [
        ("accountant", again is not None and again.note == record.note, f"{record.accountant}: {record.note}"),
        (
            "epsilon_rdp", math.isclose(record.epsilon_rdp, rdp, rel_tol=_ROUNDING),
            f"claimed {record.epsilon_rdp:.6g}, computed {rdp:.6g}",
        ),
        *_settings(vars(record), record.ledger.events),
        ("steps", not runs or own == record.global_step, f"{record.global_step}; in the journal {own}"),
    ]  # fmt: skip


def _of_search(record: SelectionRecord) -> list[_Row]:
    """Look for words that dpfunc does not write; of runs of which none was released no settings are told."""
    events = [event for ledger in record.ledgers for event in ledger.events]
    settings = [] if record.settings is None else _settings(record.settings, events)
    return [("score", record.score in known.SCORES, record.score), *settings]


def _settings(values: Mapping[str, str], events: Iterable[Event]) -> list[_Row]:
    """Compare the settings of runs with the words of dpfunc, and their sampler with the events."""
    unknown = [name for name, words in _SETTINGS.items() if values[name] not in words]
    unknown += [] if known.is_proven(values["mechanism"]) else ["mechanism"]
    return [
        ("settings", not unknown, f"not of dpfunc: {', '.join(unknown)}" if unknown else "those of dpfunc"),
        ("sampler", known.claims_law(values["sampler"], events), values["sampler"]),
    ]


def _sampling(record: Record | SelectionRecord) -> _Row:
    """Compare the settings, of the last step or of each candidate, with the steps that were counted."""
    n = record.dataset_size

    def is_counted(values: Mapping[str, float], ledger: Ledger) -> bool:
        q, steps = values.get("batch_size", math.nan) / n, values.get("steps")
        return any(
            (q < e.sampling_prob == 1) or (math.isclose(e.sampling_prob, q, rel_tol=1e-9) and e.num_steps == steps)
            for e in ledger.events
        )

    if isinstance(record, SelectionRecord):
        wrong = [
            listed(values)
            for values, ledger in zip(record.candidates, record.ledgers, strict=True)
            if not is_counted(values, ledger)
        ]
        words = f"not as counted: {'; '.join(wrong)}" if wrong else "as counted for each candidate"
        return "sampling", not wrong, words
    size, q, sigma, events = (
        record.expected_batch_size, record.sampling_prob, record.noise_multiplier, record.ledger.events
    )  # fmt: skip
    groups = record.sampler == "CyclicPoisson"  # whose records are drawn with another probability, in some steps
    counted = not events or any(
        (e.sampling_prob in (q, 1.0) or (groups and e.sampling_prob > q)) and e.noise_multiplier == sigma
        for e in events
    )
    words = f"{size:g} of {n} expected, probability {q:.6g}, noise {sigma:.6g}"
    return "sampling", math.isclose(q * n, size, rel_tol=1e-9) and counted, words
