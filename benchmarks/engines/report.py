"""The result file and the tables on the screen."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

Record = Mapping[str, Any]
# glibc keeps what is freed, and gives no block pages of its own
KEEPS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1000000000000"}
PACKAGES = ("torch", "numpy", "opacus", "transformers", "dpfunc")


def with_freed_memory_given_back() -> dict[str, str]:
    """The variables of this process, without those that change what becomes of freed memory."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}


def machine(threads: int, device: str) -> dict[str, Any]:
    """What the numbers depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "torch_threads": threads,
        "freed_memory": "kept" if KEEPS.items() <= os.environ.items() else "as the system has it",
        "gpu": torch.cuda.get_device_name() if device.startswith("cuda") else None,
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that are measured."""
    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def rounded(value: Any) -> Any:
    """Floats to five significant digits, in whatever JSON holds; what is not finite as text."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if abs(value) < float("inf") else str(value)
    if isinstance(value, Mapping):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(entry) for entry in value]
    return value


def write(report: Record, path: Path) -> None:
    """Write the result file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(rounded(report), indent=1) + "\n")
    new.replace(path)


def span(low_high: list[float]) -> str:
    """Quartiles."""
    return f"{low_high[0]:.2f}..{low_high[1]:.2f}"


def cells(result: Record) -> list[str]:
    """One row of a case's table."""
    error = result.get("relative_error")
    shown = ["" if error is None else f"{error:.0e}"]
    if "time" in result:
        time = result["time"]
        shown += [f"{1e3 * time['median_seconds']:.1f}", f"{time['ratio']:.2f}", span(time["ratio_quartiles"])]
    else:
        shown += ["", "", ""]
    memory = result.get("memory", {})
    if "peak_mib" in memory:
        ratio = f"{memory['ratio']:.2f}" if "ratio" in memory else ""
        shown += [f"{memory['peak_mib']:.1f}", ratio, f"{memory['resident_mib']:.0f}"]
    else:
        shown += ["", "", ""]
    return shown


def problems(result: Record) -> list[str]:
    """Why figures are missing, if they are."""
    states = (result["status"], result.get("memory", {}).get("status", "ok"))
    return [state for state in states if state != "ok"]


def case_table(name: str, record: Record) -> Table:
    """All contestants of a case."""
    sizes = f"B={record['batch_size']}, {record['trained_parameters']} of {record['parameters']} parameters"
    missing = [f"{who}: {why}" for who, result in record["contestants"].items() for why in problems(result)]
    table = Table(
        title=f"{name}: {record['title']} ({sizes})", caption=escape("\n".join(missing)), caption_justify="left"
    )
    heads = ("contestant", "error", "median ms", "x plain", "quartiles", "peak MiB", "x plain", "resident MiB")
    for head in heads:
        table.add_column(head, justify="left" if head == "contestant" else "right", no_wrap=True)
    for contestant, result in record["contestants"].items():
        table.add_row(contestant, *cells(result))
    return table


def largest_table(record: Record) -> Table:
    """The largest batch of each contestant."""
    table = Table("contestant", "largest batch", "MiB", title=f"{record['case']} in {record['limit_mib']:g} MiB")
    for contestant, result in record["contestants"].items():
        if result["status"] == "ok":
            table.add_row(contestant, str(result["largest_batch"]), f"{result['total_mib']:.0f}")
        else:
            table.add_row(contestant, escape(result["status"]), "")
    return table
