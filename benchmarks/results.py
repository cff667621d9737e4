"""Result files of all benchmarks, tables on the screen, and tables in the documents between two markers.

A file says on what machine and with which versions it was measured. What was measured is in `cases`, name -> a record
whose `contestants` are those of `measure.compete`; or, where there are no contestants, in `rows`.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.measure import KEEPS, ROOT

Record = Mapping[str, Any]
FOLDER = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
PACKAGES = ("torch", "numpy", "scipy", "randomgen", "opacus", "transformers", "peft", "dpfunc")
END = "<!-- end -->"


def machine(threads: int = 1, device: str = "cpu") -> dict[str, Any]:
    """What the numbers depend on."""
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
    """Of Python and of the packages that are measured."""
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
    """A result file; empty if there is none."""
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a result file."""
    found: list[dict[str, Any]] = read(path).get("rows", [])
    return found


def keep(path: Path, row: Record, place: Callable[[Record], Any]) -> None:
    """Write a row into a result file; one at the same place is replaced, others stay; rows are in order of places."""
    kept = [old for old in rows_of(path) if place(old) != place(row)]
    write(path, {"rows": sorted([*kept, row], key=place)})


def problems(record: Record) -> list[str]:
    """Why figures of a contestant are missing, if they are."""
    states = (record["status"], record.get("memory", {}).get("status", "ok"))
    return [state for state in states if state != "ok"]


def _cells(record: Record) -> list[str]:
    """A contestant: its error, time, CPU time and memory."""
    cells = [f"{record['relative_error']:.0e}" if "relative_error" in record else ""]
    for number in ("time", "cpu"):
        found = record.get(number, {})
        cells.append(f"{1e3 * found['median_seconds']:.2f}" if found else "")
        cells.append(f"{found['ratio']:.2f}" if "ratio" in found else "")
        if number == "time":
            cells.append("{:.2f}..{:.2f}".format(*found["ratio_quartiles"]) if "ratio" in found else "")
    memory, against = record.get("memory", {}), record.get("against", {})
    cells += [
        f"{memory[name]:.{digits}f}" if name in memory else "" for name, digits in (("peak_mib", 1), ("ratio", 2))
    ]
    return [*cells, "{ratio:.3f}".format(**against) if against else ""]


def show(name: str, record: Record) -> Table:
    """All contestants of a case, for the screen."""
    heads = ("contestant", "error", "median ms", "x base", "quartiles", "CPU ms", "x base", "peak MiB", "x base",
             "x old")  # fmt: skip
    missing = [f"{who}: {why}" for who, found in record["contestants"].items() for why in problems(found)]
    table = Table(
        title=f"{name}: {record.get('title', '')}", caption=escape("\n".join(missing)), caption_justify="left"
    )
    for head in heads:
        table.add_column(head, justify="left" if head == "contestant" else "right", no_wrap=True)
    for contestant, found in record["contestants"].items():
        table.add_row(contestant, *_cells(found))
    return table


def row(cells: Iterable[object]) -> str:
    """A row of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def markdown(heads: Sequence[str], rows: Iterable[Iterable[object]], side: str = "---") -> str:
    """A table; `side` aligns all columns but the first."""
    return "\n".join(map(row, [heads, ["---"] + [side] * (len(heads) - 1), *rows]))


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
        block = f"{begin}\n{table}\n{END}"
        text = place.sub(block.replace("\\", r"\\"), text)  # a backslash would name a group
    return text


def fill(page: Path, tables: Mapping[str, str]) -> None:
    """Write tables into a document."""
    page.write_text(filled(page.read_text("utf-8"), tables), "utf-8")
