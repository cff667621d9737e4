"""`python -m benchmarks.survey`: the survey, or the cases whose names have a pattern in them."""

from __future__ import annotations

import argparse
import re
from importlib.metadata import version
from pathlib import Path

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.survey import tables
from benchmarks.survey.runner import ROOT, Row, answer, run
from benchmarks.survey.table import page, save, saved

SAVE_EVERY = 20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.survey", description=__doc__)
    parser.add_argument("--only", default="", help="regular expression, searched in the names of cases")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--limit", type=int, default=60, help="seconds for one case")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/survey.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/survey.md")
    parser.add_argument("--append", action="store_true", help="keep what --out has of other cases; its page holds both")
    parser.add_argument("--missing", action="store_true", help="only cases that --out does not have; with --append")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--engine", default="auto", choices=["auto", "vmap", "ghost"], help="engine to survey")
    parser.add_argument("--every", type=int, default=1, help="only every so many of the cases")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    cases = tables.cases()
    if options.worker:
        return answer(cases, options.limit, options.engine)
    rows = saved(options.out) if options.append else {}
    rows = {name: row for name, row in rows.items() if name in cases}
    wanted = [case for name, case in cases.items() if re.search(options.only, name)]
    wanted = wanted[:: options.every]
    if options.missing:
        wanted = [case for case in wanted if case.name not in rows or "left_out" in rows[case.name]]
    if options.list:
        return print("\n".join(case.name for case in wanted))
    versions = {name: version(name) for name in ("torch", "transformers", "peft")}

    def keep() -> None:
        save(options.out, rows.values(), versions)
        options.page.write_text(page(rows.values(), versions))

    columns = (
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("cases", total=len(wanted), last="")

        def found(row: Row) -> None:
            rows[row["case"]] = row
            progress.update(task, advance=1, last=f"{row['case']}: {row.get('engine', 'left out')}")
            if len(rows) % SAVE_EVERY == 0:
                keep()

        run(wanted, options.workers, options.limit, found, options.engine)
    keep()


if __name__ == "__main__":
    main()
