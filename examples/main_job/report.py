"""What a run leaves behind: the table, privacy_accounting.json, metrics and plots."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loop import Run
from rich.console import Console
from rich.table import Table

import dpfunc
from dpfunc.evidence import certify


@dataclass(frozen=True)
class Row:
    """One line of the result table."""

    name: str
    accuracy: float
    num_test: int
    epsilon_prv: float | None
    epsilon_rdp: float | None
    trained_parameters: int
    seconds: float
    peak_mib: float


def wilson(accuracy: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % confidence interval of a proportion (Wilson 1927)."""
    centre = (accuracy + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(accuracy * (1 - accuracy) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return centre - half, centre + half


class PeakMemory:
    """Peak resident memory since the last reset, in MiB (Linux; elsewhere the peak of the whole process)."""

    def reset(self) -> None:
        """Start again from the present size."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return

    def mib(self) -> float:
        """The peak."""
        try:
            status = Path("/proc/self/status").read_text()
            return int(status.split("VmHWM:")[1].split()[0]) / 1024
        except (OSError, IndexError):
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def print_table(rows: list[Row], delta: float, notes: list[str]) -> None:
    """The result, for people."""
    table = Table(title="Test accuracy and what it cost")
    columns = ("", "test accuracy", "95 % interval", "epsilon (auto)", "epsilon (rdp)", "trained", "seconds", "MiB")
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    for row in rows:
        low, high = wilson(row.accuracy, row.num_test)
        epsilons = [
            "-" if e is None else ("none" if math.isinf(e) else f"{e:.2f}") for e in (row.epsilon_prv, row.epsilon_rdp)
        ]
        table.add_row(
            row.name, f"{row.accuracy:.3f}", f"{low:.3f} - {high:.3f}", *epsilons,
            f"{row.trained_parameters:,}", f"{row.seconds:.0f}", f"{row.peak_mib:.0f}",
        )  # fmt: skip
    console = Console(width=120)
    console.print(table)
    console.print(
        f"epsilon at delta = {delta:g}. auto is tight, rdp is an independent upper bound; the smaller one holds."
    )
    for note in notes:
        console.print(f"- {note}")


def epsilons(ledger: dpfunc.Ledger | None, delta: float) -> tuple[float, float]:
    """Epsilon by two accountants; infinite without privacy."""
    if ledger is None:
        return math.inf, math.inf
    tight, rdp = (dpfunc.epsilon(ledger, delta, method).epsilon for method in ("auto", "rdp"))
    return tight, rdp


def write_run(
    folder: Path, rows: list[Row], settings: dict[str, Any], adapter: dpfunc.lora.LoRA, run: Run,
    evidence: Sequence[Path] = (),
) -> None:  # fmt: skip
    """What a run cost and learnt, and its certificate; the table and the settings, for programs."""
    (folder / "privacy_accounting.json").write_text(run.record.to_json() + "\n")
    (folder / "ledger.json").write_text(run.state.ledger.to_json() + "\n")
    dpfunc.lora.save_adapter(folder / "adapter.safetensors", adapter, run.params)
    certify(folder, evidence=evidence)
    results = [
        {
            **{k: (None if isinstance(v, float) and math.isinf(v) else v) for k, v in asdict(row).items()},
            "interval": wilson(row.accuracy, row.num_test),
        }
        for row in rows
    ]
    kept = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    (folder / "metrics.json").write_text(json.dumps({"results": results, "settings": kept}, indent=2) + "\n")
