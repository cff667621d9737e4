"""The record of a private search for `dpfunc ledger show` and `dpfunc ledger check`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click

from dpfunc._utils.validation import unique_json
from dpfunc.accounting.record import COVERED, GUESSABLE, NEIGHBOURS, RECORD_FILE, SELECTION, Record
from dpfunc.accounting.selection_record import SelectionRecord
from dpfunc.cli.output import describe, print_json, print_list, print_rows, print_values

ROUNDING = 1e-6  # relative; other versions of numpy and scipy round in other ways
Row = tuple[str, bool, str]
"""Name of a check, True if it agrees, and what was found."""


def read_search(path: Path) -> SelectionRecord | None:
    """The record of a search, in a file or in a folder; None for anything else.

    Raises:
        InvalidArgument: the record of a search that cannot be read.
    """
    file = path / RECORD_FILE if path.is_dir() else path
    try:
        values = unique_json(file.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(values, dict) or not str(values.get("schema")).startswith(SELECTION):
        return None
    return SelectionRecord.from_json(file.read_bytes())


def note_key(record: Record | SelectionRecord) -> None:
    """Say on stderr if a key that can be guessed protects nothing."""
    if record.noise_key == GUESSABLE:
        click.echo("Warning: nothing is protected: the key of the noise can be guessed (insecure_key).", err=True)


def refuse_method(method: str | None) -> None:
    """Refuse an accountant other than that of a search.

    Raises:
        UsageError: of click.
    """
    if method not in (None, "auto", "rdp"):
        raise click.UsageError(
            f"Expected --method rdp for the record of a search, got {method}: no other one can count it."
        )


def show_search(record: SelectionRecord, delta: float | None, as_json: bool) -> None:
    """Print the record as it was written; or its cost at another delta, computed again."""
    if delta is not None:
        found = record.guarantee(delta)
        if as_json:
            print_json(describe(found))
        else:
            click.echo(str(found))
        return
    if as_json:
        print_json({**json.loads(record.to_json()), "covered": list(COVERED)})
        return
    shape = "Poisson" if record.runs.shape == math.inf else f"negative binomial of shape {record.runs.shape:g}"
    earlier = f", {record.spent.num_steps} steps of earlier runs included" if record.spent.num_steps else ""
    best = "none was released" if record.chosen is None else (
        f"{_values(record.candidates[record.chosen])}; score {record.chosen_score:.4g}"
    )  # fmt: skip
    print_values("What the search has cost", {
        "protected": record.unit,
        "epsilon": f"{record.epsilon:.6g} at delta {record.delta:g}, within the budget {record.target_epsilon:g}"
                   f"{earlier}",
        "neighbours": f"{NEIGHBOURS[record.spent.adjacency]} ({record.spent.adjacency})",
        "computed by": "rdp, for the best of a random number of runs",
        "runs": f"{record.runs.mean:g} on average, {shape}; how many there were is secret",
        "released": best,
        "score": f"{record.score}; noise of standard deviation {record.score_noise:g}",
        "noise source": record.noise_key,
        "data set size": f"{record.dataset_size}, {record.dataset_size_is}",
        "written": f"{record.date}, {', '.join(f'{name} {value}' for name, value in record.versions.items())}",
    })  # fmt: skip
    rows = [
        (_values(values), f"{event.sampling_prob:g}", f"{event.noise_multiplier:g}", str(event.num_steps))
        for values, ledger in zip(record.candidates, record.ledgers, strict=True) for event in ledger.events
    ]  # fmt: skip
    print_rows("Candidates: one run", ("values", "sampling prob", "noise multiplier", "steps"), rows)
    print_list("Covered, and may be published:", COVERED)
    print_list("Not covered by this epsilon:", record.not_covered)
    click.echo("\nAs it was written. Computed again by: dpfunc ledger check")


def _values(values: dict[str, float]) -> str:
    return ", ".join(f"{name}={value:.4g}" for name, value in values.items())


def record_rows(record: Record | SelectionRecord, claim: float, delta: float, sampling: Row) -> list[Row]:
    """Compare the facts of a record with each other, and with a claim; `sampling` is what the steps say."""
    n, budget = record.dataset_size, record.target_epsilon
    return [
        ("key", record.noise_key != GUESSABLE, record.noise_key),
        ("delta", delta * n < 1, f"{delta:g}; 1 / dataset_size is {1 / n:.3g}"),
        sampling,
        *([] if budget is None else [("budget", claim <= budget * (1 + ROUNDING), f"{budget:g}")]),
    ]


def search_rows(record: SelectionRecord, claim: float, delta: float) -> list[Row]:
    """The same of a search, with the values of the candidates and the steps that were counted for them."""
    wrong = []
    for values, ledger in zip(record.candidates, record.ledgers, strict=True):
        q, steps = values.get("batch_size", math.nan) / record.dataset_size, values.get("steps")
        counted = (
            each.sampling_prob == 1 or (math.isclose(each.sampling_prob, q, rel_tol=1e-9) and each.num_steps == steps)
            for each in ledger.events
        )
        wrong += [] if any(counted) else [_values(values)]
    found = f"not as counted: {'; '.join(wrong)}" if wrong else "as counted for each candidate"
    return record_rows(record, claim, delta, ("sampling", not wrong, found))
