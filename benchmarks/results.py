"""Result files of all benchmarks, tables on the screen, and tables in the documents between two markers.

A file says on what machine and with which versions it was measured. What was measured is in `cases`, name -> a record
whose `contestants` are those of `measure.compete`; or, where there are no contestants, in `rows`.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from benchmarks.measure import KEEPS, ROOT

Record = Mapping[str, Any]
FOLDER = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
PACKAGES = ("torch", "numpy", "scipy", "randomgen", "opacus", "transformers", "peft", "dpfunc")
END = "<!-- end -->"


def machine(threads: int = 1, device: str = "cpu") -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    gpu = None
    if device.startswith("cuda"):
        import torch

        gpu = torch.cuda.get_device_name()
    return {
        "cpu": models[0] if models else platform.processor(), "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2), "torch_threads": threads,
        "freed_memory": "kept" if KEEPS.items() <= os.environ.items() else "as the system has it", "gpu": gpu,
    }  # fmt: skip


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def rounded(value: Any, digits: int = 5) -> Any:
    """Floats to some significant digits, in whatever JSON holds; what is not finite as text."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if abs(value) < float("inf") else str(value)
    if isinstance(value, Mapping):
        return {key: rounded(entry, digits) for key, entry in value.items()}
    return [rounded(entry, digits) for entry in value] if isinstance(value, (list, tuple)) else value


def write(path: Path, content: Record, *, threads: int = 1, device: str = "cpu", digits: int = 5) -> None:
    """Write a result file, whole or not at all; machine and versions are those of now, if `content` has none."""
    content = {"machine": machine(threads, device), "versions": versions(), **content}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(rounded(content, digits), indent=1) + "\n", "utf-8")
    new.replace(path)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return read(path).get("rows", [])


def keep(path: Path, row: Record, place: Callable[[Record], Any]) -> None:
    """Write a row into a result file; one at the same place is replaced, others stay; rows are in order of places."""
    kept = [old for old in rows_of(path) if place(old) != place(row)]
    write(path, {"rows": sorted([*kept, row], key=place)})


def _cells(record: Record) -> list[str]:
    """A contestant: its error, time, CPU time and memory."""
    time, cpu, memory, against = (record.get(name, {}) for name in ("time", "cpu", "memory", "against"))
    numbers = (
        (record, "relative_error", "{:.0e}"), (time, "median_seconds", "{:.2f}"), (time, "ratio", "{:.2f}"),
        (time, "ratio_quartiles", "{0[0]:.2f}..{0[1]:.2f}"), (cpu, "median_seconds", "{:.2f}"),
        (cpu, "ratio", "{:.2f}"), (memory, "peak_mib", "{:.1f}"), (memory, "ratio", "{:.2f}"),
        (against, "ratio", "{:.3f}"),
    )  # fmt: skip
    scale = {"median_seconds": 1e3}
    return [form.format(scale.get(key, 1) * of[key]) if key in of else "" for of, key, form in numbers]


def show(name: str, record: Record) -> Table:
    """All contestants of a case, for the screen; and why figures are missing, if they are."""
    contestants = record["contestants"].items()
    states = [
        (who, state) for who, one in contestants for state in (one["status"], one.get("memory", {}).get("status"))
    ]
    missing = "\n".join(f"{who}: {state}" for who, state in states if state not in ("ok", None))
    table = Table(title=f"{name}: {record.get('title', '')}", caption=escape(missing), caption_justify="left")
    for head in ("contestant", "error", "median ms", "x base", "quartiles", "CPU ms", "x base", "peak MiB", "x base",
                 "x old"):  # fmt: skip
        table.add_column(head, justify="left" if head == "contestant" else "right", no_wrap=True)
    for who, found in contestants:
        table.add_row(who, *_cells(found))
    return table


def printed(heads: Iterable[str], rows: Iterable[Iterable[object]], width: int | None = None) -> None:
    table = Table(*heads)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=width).print(table)


def listed(text: str, known: Collection[str], every: Collection[str] = ()) -> list[str]:
    """Names from `a,b,c`, all of them known; `all` are those of `every`."""
    names = list(every) if text == "all" else [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [name for name in names if name not in known]:
        raise click.BadParameter(f"no case {', '.join(unknown)}. There are {', '.join(known)}.")
    return names


def question(
    doc: str, result: Path, known: Collection[str], measure: Callable[[str, int, bool], Record],
    every: Collection[str] = (), rounds: int = 5, threads: int = 1,
) -> click.Command:  # fmt: skip
    """A command that measures cases, each by `measure(case, rounds, quick)`, prints a table of each, and writes all.

    Args:
        doc: of the file. result: where the result goes. known: names of cases. every: those that are measured if none
            is named; all if empty. rounds: timed ones. threads: of torch, for the result.
    """

    @click.command(help=doc.splitlines()[0], context_settings={"show_default": True})
    @click.option("--cases", default="all", callback=lambda _, option, text: listed(text, known, every or known))
    @click.option("--rounds", default=rounds, type=click.IntRange(1))
    @click.option("--quick", is_flag=True, help="Tiny sizes, to see that everything works; not for figures.")
    @click.option("--out", default=result, type=click.Path(dir_okay=False, path_type=Path))
    def main(cases: list[str], rounds: int, quick: bool, out: Path) -> None:
        console, found = Console(), {}
        for case in track(cases, "Cases", console=Console(stderr=True)):
            found[case] = measure(case, rounds, quick)
            console.print(show(case, found[case]))
        write(out, {"quick": quick, "rounds": rounds, "cases": found}, threads=threads)

    return main


def markdown(heads: Sequence[str], rows: Iterable[Iterable[object]], side: str = "---") -> str:
    """A table; `side` aligns all columns but the first."""
    lines = [heads, ["---"] + [side] * (len(heads) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


def filled(text: str, tables: Mapping[str, str]) -> str:
    """A document with each table in its place: `<!-- name -->`, the table, `<!-- end -->`.

    Raises:
        ValueError: a table has no place in the document.
    """
    for name, table in tables.items():
        begin = f"<!-- {name} -->"
        place = re.compile(re.escape(begin) + r"\n.*?" + re.escape(END), re.DOTALL)
        if not place.search(text):
            raise ValueError(f"Expected {begin} in the document.")
        text = place.sub(lambda _, block=f"{begin}\n{table}\n{END}": block, text)
    return text


def fill(page: Path, tables: Mapping[str, str]) -> None:
    page.write_text(filled(page.read_text("utf-8"), tables), "utf-8")
