"""The commands `dpfunc ledger show` and `dpfunc ledger check`: what runs have cost, from the files that they left."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dpfunc import accounting
from dpfunc.accounting import Ledger
from dpfunc.accounting.accountant import ACCOUNTANTS
from dpfunc.accounting.record import COVERED, GUESSABLE, NEIGHBOURS, RECORD_FILE, Record, SelectionRecord, listed
from dpfunc.checkpoint._prior_ledgers import read_cost
from dpfunc.checkpoint.journal import read_steps, steps_ledger
from dpfunc.cli._output import describe, json_option, print_json, print_list, print_rows, print_values
from dpfunc.errors import InvalidArgument

_ROUNDING = 1e-6  # relative; other versions of numpy and scipy round in other ways
_Row = tuple[str, bool, str]
"""Name of a check, True if it agrees, and what was found."""
_METHODS = click.Choice(ACCOUNTANTS)
# What a file lacks that is no record.
_MISSING = {
    "delta": "has no delta of its own: choose one below 1 / number of records.",
    "epsilon": "claims no epsilon of its own: name the one to check.",
}
_path_argument = click.argument("path", type=click.Path(exists=True, path_type=Path))


@dataclass(frozen=True)
class _Source:
    """Cost of a run as its files state it.

    Args:
        path: of the file that was read. ledger: all that it counts; of a search what came before it.
        record: None for a ledger or a journal.
        uncounted: steps in the journals of the same folder that the ledger does not count; None without a journal.
    """

    path: Path
    ledger: Ledger
    record: Record | SelectionRecord | None = None
    uncounted: int | None = None

    def guarantee(self, delta: float, method: str | None) -> accounting.Guarantee:
        """The cost, computed again; without a method as it was recorded. That of a search is counted by rdp alone."""
        if not isinstance(self.record, SelectionRecord):
            recorded = "auto" if self.record is None else self.record.accountant
            return accounting.epsilon(self.ledger, delta, method or recorded)
        if method not in (None, "auto", "rdp"):
            raise click.UsageError(
                f"Expected --method rdp for the record of a search, got {method}: no other one can count it."
            )
        return self.record.guarantee(delta)


def _read_source(path: Path) -> _Source:
    """Read a record, a ledger or a journal, or what there is of them in the folder of a run."""
    file = _file_of(path) if path.is_dir() else path
    found = read_cost(file)
    if isinstance(found, Ledger):
        return _Source(file, found)
    if isinstance(found, SelectionRecord):
        return _Source(file, found.spent, found)
    journals = file.parent.glob("*journal.jsonl")
    runs = [run for journal in journals for run in read_steps(journal, missing="empty").values()]
    return _Source(file, found.ledger, found, found.ledger.lacks(steps_ledger(runs)) if runs else None)


def _file_of(folder: Path) -> Path:
    """The file in the folder of a run that says most: the record, else the journal, else the ledger."""
    journals = sorted(folder.glob("*journal.jsonl"))
    candidates: list[Path] = [folder / RECORD_FILE, *(journals if len(journals) == 1 else ()), folder / "ledger.json"]
    for file in candidates:
        if file.is_file():
            return file
    raise InvalidArgument(
        f"Expected the folder of a run, with {RECORD_FILE}, one journal (*journal.jsonl) or ledger.json in it, got "
        f"{str(folder)!r} with {len(journals) or 'none'} of them. Name the file."
    )


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
    at = _given(source, "delta", delta)
    if source.record is not None and delta is None and method is None:
        _show_record(source.record, as_json)
        return
    guarantee = source.guarantee(at, method or "auto")
    spent = None if isinstance(source.record, SelectionRecord) else source.ledger
    if as_json:
        print_json({**describe(guarantee), **_steps(spent)})
        return
    if spent is not None:
        _print_events(f"{spent.num_steps} steps, {spent.adjacency}", [("", spent)])
    click.echo(str(guarantee))


def _steps(spent: Ledger | None) -> dict[str, Any]:
    if spent is None:
        return {}
    return {"num_steps": spent.num_steps, "events": [dataclasses.asdict(event) for event in spent.events]}


def _given(source: _Source, name: str, value: float | None) -> float:
    """The value of an option, or else that of the record."""
    if value is None and source.record is None:
        raise click.UsageError(f"Missing option '--{name}' / '-{name[0]}'. {str(source.path)!r} {_MISSING[name]}")
    return float(getattr(source.record, name)) if value is None else value


def _note(source: _Source) -> None:
    """Say on stderr what a reader of the numbers must know first."""
    if source.record is not None and source.record.noise_key == GUESSABLE:
        click.echo("Warning: nothing is protected: the key of the noise can be guessed (insecure_key).", err=True)
    if source.path.parent.name.startswith("checkpoint-"):
        text = "Note: this is the record of a checkpoint. The cost of the finished run is in the folder above it."
        click.echo(text, err=True)
    if source.uncounted:
        click.echo(
            f"Warning: the journal beside {source.path.name} has {source.uncounted} steps that it does not count: the "
            "true cost is higher. Name the journal.",
            err=True,
        )


def _show_record(record: Record | SelectionRecord, as_json: bool) -> None:
    """Print a record as it was written."""
    if as_json:
        print_json({**json.loads(record.to_json()), "covered": list(COVERED)})
        return
    budget = "" if record.target_epsilon is None else f", within the budget {record.target_epsilon:g}"
    if isinstance(record, SelectionRecord):
        kind, own, earlier = "search", _about_search(record), record.spent.num_steps
        title, counted = "Candidates: one run", list(zip(map(listed, record.candidates), record.ledgers, strict=True))
    else:
        kind, own, earlier = "run", _about_run(record), 0
        title, counted = f"{record.ledger.num_steps} steps, {record.ledger.adjacency}", [("", record.ledger)]
    adjacency = counted[0][1].adjacency
    included = f", {earlier} steps of earlier runs included" if earlier else ""
    print_values(f"What the {kind} has cost", {
        "protected": record.unit,
        "epsilon": f"{record.epsilon:.6g} at delta {record.delta:g}{budget}{included}",
        "neighbours": f"{NEIGHBOURS[adjacency]} ({adjacency})",
        **own,
        "data set size": f"{record.dataset_size}, {record.dataset_size_is}",
        "written": f"{record.date}, {', '.join(f'{name} {value}' for name, value in record.versions.items())}",
    })  # fmt: skip
    _print_events(title, counted)
    print_list("Covered, and may be published:", COVERED)
    print_list("Not covered by this epsilon:", record.not_covered)
    click.echo("\nAs it was written. Computed again by: dpfunc ledger check")


def _about_run(record: Record) -> dict[str, str]:
    return {
        "computed by": f"{record.accountant} ({record.note}); rdp: {record.epsilon_rdp:.6g}",
        "steps": f"{record.global_step} of {record.num_steps}, {record.epoch:.4g} passes over the data",
        "noise": f"{record.mechanism}, {record.noise_multiplier:.6g} times the sensitivity",
        "noise source": f"{record.noise_source}, {record.noise_key}",
        "clipping": f"{record.clip}, norm at most {record.max_grad_norm:g}",
        "rows": record.rows,
        "batches": record.batches,
        "sampling": f"{record.sampler}, probability {record.sampling_prob:.6g}, expected batch size "
                    f"{record.expected_batch_size:g}",
    }  # fmt: skip


def _about_search(record: SelectionRecord) -> dict[str, str]:
    shape = "Poisson" if record.runs.shape == math.inf else f"negative binomial of shape {record.runs.shape:g}"
    best = "none was released"
    if record.chosen is not None:
        best = f"{listed(record.candidates[record.chosen])}; score {record.chosen_score:.4g}"
    return {
        "computed by": "rdp, for the best of a random number of runs",
        "runs": f"{record.runs.mean:g} on average, {shape}; how many there were is secret",
        "released": best,
        "score": f"{record.score}; noise of standard deviation {record.score_noise:g}",
        "noise source": record.noise_key,
    }


def _print_events(title: str, ledgers: Iterable[tuple[str, Ledger]]) -> None:
    """Print what was counted; the first column, which names a ledger, only if it has a name."""
    rows = [
        (name, f"{event.sampling_prob:g}", f"{event.noise_multiplier:g}", str(event.num_steps))
        for name, ledger in ledgers for event in ledger.events
    ]  # fmt: skip
    named = 0 if rows and rows[0][0] else 1
    header = ("values", "sampling prob", "noise multiplier", "steps")
    print_rows(title, header[named:], [row[named:] for row in rows])


@ledger.command("check")
@_path_argument
@click.option("--epsilon", "-e", type=float, help="Claim to check; by default that of the record.")
@click.option("--delta", "-d", type=float, help="Delta of the claim; by default that of the record.")
@click.option("--method", type=_METHODS, help="How epsilon is computed. By default as it was recorded, else auto.")
@json_option
def _check_ledger(path: Path, epsilon: float | None, delta: float | None, method: str | None, as_json: bool) -> None:
    """Compute epsilon again from the steps that were counted, and compare it with what is claimed.

    PATH is as for `dpfunc ledger show`. Of a folder, the journal is compared as well. The exit code is 0 if all agrees,
    else 1.

    Example: dpfunc ledger check runs/mails
    """
    source = _read_source(path)
    _note(source)
    claim, at = _given(source, "epsilon", epsilon), _given(source, "delta", delta)
    found = source.guarantee(at, method)
    rows = [_compare(claim, found), *_consistent(source, claim, at)]
    agrees = all(fine for _, fine, _ in rows)
    if as_json:
        checks = [{"check": name, "agrees": fine, "found": text} for name, fine, text in rows]
        claimed = None if math.isinf(claim) else claim
        print_json({"agrees": agrees, "claimed_epsilon": claimed, **describe(found), "checks": checks})
    else:
        print_rows("Checks", ("", "", "found"), [(name, "ok" if fine else "WRONG", text) for name, fine, text in rows])
        click.echo("All agrees." if agrees else "Do not publish the claim: see WRONG.")
    if not agrees:
        sys.exit(1)


def _compare(claim: float, found: accounting.Guarantee) -> _Row:
    """Compare a claimed epsilon with the one that the counted steps cost."""
    computed = f"claimed {claim:.6g}, computed {found.epsilon:.6g} by {found.method} at delta {found.delta:g}"
    if claim < found.epsilon * (1 - _ROUNDING):
        return "epsilon", False, f"{computed}: the claim is too small"
    if claim > found.epsilon * (1 + _ROUNDING):
        return "epsilon", True, f"{computed}: the claim is an upper bound"
    return "epsilon", True, computed


def _consistent(source: _Source, claim: float, delta: float) -> list[_Row]:
    """Compare the facts of a record with each other, with a claim, and with the journal beside it."""
    rows: list[_Row] = []
    if source.uncounted is not None:
        found = f"{source.uncounted} of its steps are not counted" if source.uncounted else "all its steps are counted"
        rows.append(("journal", source.uncounted == 0, found))
    record = source.record
    if record is None:
        return rows
    n, budget = record.dataset_size, record.target_epsilon
    rows += [
        ("key", record.noise_key != GUESSABLE, record.noise_key),
        ("delta", delta * n < 1, f"{delta:g}; 1 / dataset_size is {1 / n:.3g}"),
        _sampling(record),
    ]
    return rows if budget is None else [*rows, ("budget", claim <= budget * (1 + _ROUNDING), f"{budget:g}")]


def _sampling(record: Record | SelectionRecord) -> _Row:
    """Compare the settings, of the last step or of each candidate, with the steps that were counted."""
    n = record.dataset_size

    def is_counted(values: Mapping[str, float], ledger: Ledger) -> bool:
        q, steps = values.get("batch_size", math.nan) / n, values.get("steps")
        return any(
            e.sampling_prob == 1 or (math.isclose(e.sampling_prob, q, rel_tol=1e-9) and e.num_steps == steps)
            for e in ledger.events
        )

    if isinstance(record, SelectionRecord):
        own = zip(record.candidates, record.ledgers, strict=True)
        wrong = [listed(values) for values, ledger in own if not is_counted(values, ledger)]
        found = f"not as counted: {'; '.join(wrong)}" if wrong else "as counted for each candidate"
        return "sampling", not wrong, found
    size, q, sigma, events = (
        record.expected_batch_size, record.sampling_prob, record.noise_multiplier, record.ledger.events
    )  # fmt: skip
    counted = not events or any(e.sampling_prob in (q, 1.0) and e.noise_multiplier == sigma for e in events)
    found = f"{size:g} of {n} expected, probability {q:.6g}, noise {sigma:.6g}"
    return "sampling", math.isclose(q * n, size, rel_tol=1e-9) and counted, found
