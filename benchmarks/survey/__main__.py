"""`python -m benchmarks.survey`: the survey, or the cases whose names have a pattern in them."""

from __future__ import annotations

import queue
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from rich.progress import track

from benchmarks.measure import Failed, Process
from benchmarks.results import DOCS, FOLDER, markdown, read, versions, write
from benchmarks.survey.case import Case
from benchmarks.survey.measure import cases

RESULT, PAGE = FOLDER / "survey.json", DOCS / "survey.md"
SAVE_EVERY = 20
GRACE = 20  # seconds over the limit of a case, after which its process is ended
LONGEST = 600  # letters of what an error goes on to list
Row = dict[str, Any]


def run(wanted: Sequence[Case], workers: int, limit: int) -> Iterator[Row]:
    """Rows of all cases, as they come; a process that does not answer in time, or dies, is replaced."""
    spec = {"module": "benchmarks.survey.measure", "limit": limit, "limit_seconds": limit + GRACE}
    free: queue.SimpleQueue[Process | None] = queue.SimpleQueue()
    for _ in range(workers):
        free.put(None)

    def measured(case: Case) -> Row:
        process = free.get()
        try:
            process = process or Process(spec)
            return process.ask(f"answer {case.name}")
        except (Failed, BrokenPipeError) as why:
            if process is not None:
                process.close()
            process = None
            return {**case.about, "left_out": f"the process ended: {why}"}
        finally:
            free.put(process)

    with ThreadPoolExecutor(workers) as pool:
        try:
            yield from pool.map(measured, wanted)
        finally:
            pool.shutdown(cancel_futures=True)
            for _ in range(workers):
                if (process := free.get()) is not None:
                    process.close()


def saved(path: Path) -> dict[str, Row]:
    content = read(path)
    return {row["case"]: row for row in [*content.get("cases", []), *content.get("left_out", [])]}


def save(path: Path, rows: Iterable[Row]) -> None:
    """Write the rows, sorted; what is left out apart."""
    cut = lambda value: value[:LONGEST] if isinstance(value, str) else value
    found: dict[str, list[Row]] = {"cases": [], "left_out": []}
    for row in sorted(rows, key=lambda row: row["case"]):
        found["left_out" if "left_out" in row else "cases"].append({name: cut(value) for name, value in row.items()})
    write(path, {"engines": dict(Counter(row["engine"] for row in found["cases"]).most_common()), **found})


def shortened(text: str, length: int = 160) -> str:
    """A line of a table."""
    line = text.splitlines()[0] if text else ""
    line = line.replace("|", "\\|").replace("<", "&lt;").replace("](", "] (")
    return line if len(line) <= length else line[: length - 3] + "..."


def counts(rows: Sequence[Row]) -> str:
    """A line for each field: how many cases each engine took, and how long a step is."""
    names = [name for name, _ in Counter(row["engine"] for row in rows).most_common()]
    cells: list[list[object]] = []
    for field in [*sorted({row["field"] for row in rows}), "all"]:
        own = [row for row in rows if field in (row["field"], "all")]
        taken = Counter(row["engine"] for row in own)
        ratios, parities = ([row[name] for row in own if name in row] for name in ("ratio", "parity"))
        numbers = [f"{statistics.median(ratios):.1f}", f"{max(ratios):.1f}", f"{max(parities):.1g}"] if ratios else []
        cells.append([field, len(own), *(taken[name] for name in names), *numbers])
    return markdown(["field", "cases", *names, "median ratio", "slowest", "largest difference"], cells)


def by_reason(rows: Iterable[Row]) -> list[list[object]]:
    """A line for each reason, numbers and names after its first colon left out, with the cases it was given for."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        reason = re.sub(r"^(UnsupportedModel|InvalidArgument): (\d+ )?", "", row["reason"])
        reason = reason.split(". ")[0] if row["engine"] == "loop" else re.split(r"[:.] ", reason)[0]
        found.setdefault((row["engine"], shortened(reason)), []).append(row["case"].partition("/")[2])
    return [[*key, ", ".join(names)] for key, names in sorted(found.items())]


def page(rows: Iterable[Row], versions: dict[str, str]) -> str:
    """docs/survey.md: counts, and the cases that are not computed together; survey.json has the others."""
    rows = sorted((row for row in rows if "left_out" not in row), key=lambda row: row["case"])
    slow = [row for row in rows if row["engine"] in ("loop", "refused")]
    said = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "peft"))
    return f"""# Survey of models

What `engine="auto"` does with {len(rows)} small models with random weights, in batches of four rows
({said}).
`python -m benchmarks.survey` writes this page, and every case into [survey.json](../benchmarks/results/survey.json).

- **engine**: that `auto` chose for the loss; *refused*: an error says why.
- **ratio**: time of a step (per-sample norms and a clipped sum) over that of the plain gradient of the mean loss; \
median of three. The models are tiny, so this is overhead, not what large models cost.
- **parity**: largest difference of norms from the loop over single samples, relative to the norm of the sample's \
whole gradient; float32. Models that draw random numbers are compared in eval mode, if they draw none there.
- Models that cannot be built without downloads are not counted; the file of results lists them. Times are those of a \
shared machine: read ratios as rough.

{counts(rows)}

## Refused, or rows alone

{markdown(["engine", "reason", "cases"], by_reason(slow))}
"""


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--only", default="", help="Regular expression, searched in the names of cases.")
@click.option("--workers", default=1, help="Processes.")
@click.option("--limit", default=60, help="Seconds for one case.")
@click.option("--out", default=RESULT, type=click.Path(path_type=Path, dir_okay=False), help="The result file.")
@click.option("--page", "document", default=PAGE, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--append", is_flag=True, help="Keep what --out has of other cases; its page holds both.")
def main(only: str, workers: int, limit: int, out: Path, document: Path, append: bool) -> None:
    known = cases()
    rows = {name: row for name, row in saved(out).items() if name in known} if append else {}
    wanted = [case for name, case in known.items() if re.search(only, name)]

    def keep() -> None:
        save(out, rows.values())
        document.write_text(page(rows.values(), versions()))

    for number, row in enumerate(track(run(wanted, workers, limit), "Cases", total=len(wanted)), 1):
        rows[row["case"]] = row
        if number % SAVE_EVERY == 0:
            keep()
    keep()


if __name__ == "__main__":
    main()
