"""What imports and commands cost before they do anything: `python benchmarks/startup.py`.

Each round starts a new process for every row, in turn, so that a slow moment of the machine hits all of them. Seconds
are of the processor, of the whole process with its interpreter; the best round is what a machine with nothing else to
do would take. The rows named "after torch" are parts of one process, which has imported torch before.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROUNDS = 7
RESULT = Path(__file__).parent / "results" / "startup.json"
RUN = "import sys; from dpfunc.cli.main import main; sys.argv[0] = 'dpfunc'; main()"
COMMANDS = {
    "dpfunc --help": ["--help"],
    "dpfunc train --help": ["train", "--help"],
    "dpfunc epsilon -q 1": ["epsilon", "-q", "1", "--steps", "10", "--sigma", "5", "--delta", "1e-5"],
    "dpfunc epsilon -n 60000 -b 256": [
        "epsilon", "-n", "60000", "-b", "256", "--epochs", "60", "--sigma", "1.1", "--delta", "1e-5"
    ],
}  # fmt: skip
PROGRAMS = {
    "python": [sys.executable, "-c", ""],
    "import dpfunc": [sys.executable, "-c", "import dpfunc"],
    "import dpfunc.accounting": [sys.executable, "-c", "import dpfunc.accounting"],
    "import torch": [sys.executable, "-c", "import torch"],
    **{name: [sys.executable, "-c", RUN, *arguments] for name, arguments in COMMANDS.items()},
}
PARTS = """
import time
import torch
before = time.process_time()
import dpfunc
between = time.process_time()
for name in dpfunc.__all__:
    getattr(dpfunc, name)
print(between - before, time.process_time() - between)
"""
AFTER_TORCH = ("after torch: import dpfunc", "after torch: all public names")


def seconds(command: list[str]) -> float:
    """Processor seconds of a process."""
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def measure(rounds: int) -> dict[str, list[float]]:
    """The seconds of each row in each round; a first round, in which files are read from the disk, is left out."""
    found: dict[str, list[float]] = {name: [] for name in (*PROGRAMS, *AFTER_TORCH)}
    for number in range(rounds + 1):
        row = {name: seconds(command) for name, command in PROGRAMS.items()}
        printed = subprocess.run([sys.executable, "-c", PARTS], check=True, capture_output=True, text=True).stdout
        row |= dict(zip(AFTER_TORCH, map(float, printed.split()), strict=True))
        if number:
            for name, value in row.items():
                found[name].append(value)
    return found


def main(rounds: int = ROUNDS, result: Path = RESULT) -> None:
    """Measure, print and write the result."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    rows = {
        name: {"best_seconds": round(min(values), 4), "median_seconds": round(statistics.median(values), 4)}
        for name, values in measure(rounds).items()
    }
    for name, row in rows.items():
        print(f"{name:34} {row['best_seconds']:8.3f} {row['median_seconds']:8.3f}")
    machine: dict[str, Any] = {
        "cores": os.cpu_count(),
        "load_1min": load,
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "scipy", "click")},
    }
    result.write_text(json.dumps({"machine": machine, "rounds": rounds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
