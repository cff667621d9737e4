"""The rows of the survey as JSON, and as a page of Markdown."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import markdown

Row = dict[str, Any]
LONGEST = 600
HEAD = ("family", "model", "trained", "mode", "padding", "engine", "ratio", "parity", "reason")


def saved(path: Path) -> dict[str, Row]:
    """Rows by case; none if there is no file."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text())
    return {row["case"]: row for row in [*content["cases"], *content["left_out"]]}


def save(path: Path, rows: Iterable[Row], versions: dict[str, str]) -> None:
    rows = [_short(row) for row in sorted(rows, key=lambda row: row["case"])]
    counted = [row for row in rows if "left_out" not in row]
    content = {
        "versions": versions,
        "engines": dict(Counter(row["engine"] for row in counted).most_common()),
        "cases": counted,
        "left_out": [row for row in rows if "left_out" in row],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def _short(row: Row) -> Row:
    """Without what some errors go on to list."""
    return {name: value[:LONGEST] if isinstance(value, str) else value for name, value in row.items()}


def shortened(text: str, length: int = 160) -> str:
    line = text.splitlines()[0] if text else ""
    line = line.replace("|", "\\|").replace("<", "&lt;").replace("](", "] (")
    return line if len(line) <= length else line[: length - 3] + "..."


def table(rows: Iterable[Row]) -> list[str]:
    cells = ([shortened(str(row.get(name, ""))) for name in HEAD] for row in rows)
    return markdown(HEAD, cells).splitlines()


def counts(rows: Sequence[Row]) -> list[str]:
    """A line for each field: how many cases each engine took, and how long a step is."""
    names = [name for name, _ in Counter(row["engine"] for row in rows).most_common()]
    head = ["field", "cases", *names, "median ratio", "slowest", "largest difference"]
    cells: list[list[object]] = []
    fields = sorted({row["field"] for row in rows})
    for field in [*fields, "all"]:
        own = [row for row in rows if field in (row["field"], "all")]
        taken = Counter(row["engine"] for row in own)
        ratios = [row["ratio"] for row in own if "ratio" in row]
        parities = [row["parity"] for row in own if "parity" in row]
        numbers = [f"{statistics.median(ratios):.1f}", f"{max(ratios):.1f}", f"{max(parities):.1g}"] if ratios else []
        cells.append([field, len(own), *(taken[name] for name in names), *numbers])
    return markdown(head, cells).splitlines()


def page(rows: Iterable[Row], versions: dict[str, str]) -> str:
    """docs/survey.md: counts, and the cases that are not computed together; survey.json has the others."""
    rows = sorted((row for row in rows if "left_out" not in row), key=lambda row: row["case"])
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        "# Survey of models",
        "",
        f'What `engine="auto"` does with {len(rows)} small models with random weights, in batches of four rows',
        f"({said}).",
        "`python -m benchmarks.survey` writes this page, and every case into"
        " [survey.json](../benchmarks/results/survey.json).",
        "",
        "- **engine**: that `auto` chose for the loss; *refused*: an error says why.",
        "- **ratio**: time of a step (per-sample norms and a clipped sum) over that of the plain gradient of the mean"
        " loss; median of three. The models are tiny, so this is overhead, not what large models cost.",
        "- **parity**: largest difference of norms from the loop over single samples, relative to the norm of the"
        " sample's whole gradient; float32. Models that draw random numbers are compared in eval mode,"
        " if they draw none there.",
        "- Models that cannot be built without downloads are not counted; the file of results lists them. Times are"
        " those of a shared machine: read ratios as rough.",
        "",
        *counts(rows),
        "",
        "## Refused, or row by row",
        "",
        *table(row for row in rows if row["engine"] in ("loop", "refused")),
    ]
    return "\n".join(lines) + "\n"
