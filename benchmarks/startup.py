"""What imports and commands cost before they do anything: `python -m benchmarks.startup`.

Each round starts a new process for every row, in turn. Seconds are of the processor, of the whole process with its
interpreter; the best round is what a machine with nothing else to do would take. The rows named "after torch" are parts
of one process, which has imported torch before.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from functools import partial

from benchmarks.measure import in_turn
from benchmarks.results import FOLDER, printed, write

ROUNDS = 7
RUN = "import sys; from dpfunc.cli.main import main; sys.argv[0] = 'dpfunc'; main()"
COMMANDS = (
    "--help",
    "train --help",
    "epsilon -q 1 --steps 10 --sigma 5 --delta 1e-5",
    "epsilon -n 60000 -b 256 --epochs 60 --sigma 1.1 --delta 1e-5",
)
CODES = {"python": "", **{code: code for code in ("import dpfunc", "import dpfunc.accounting", "import torch")}}
PROGRAMS = {
    **{name: [sys.executable, "-c", code] for name, code in CODES.items()},
    **{f"dpfunc {re.split(' --(?!help)', each)[0]}": [sys.executable, "-c", RUN, *each.split()] for each in COMMANDS},
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


def seconds(command: list[str]) -> list[float]:
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return [after.children_user - before.children_user + after.children_system - before.children_system]


def parts() -> list[float]:
    said = subprocess.run([sys.executable, "-c", PARTS], check=True, capture_output=True, text=True).stdout
    return list(map(float, said.split()))


def main() -> None:
    found = in_turn({**{name: partial(seconds, each) for name, each in PROGRAMS.items()}, "parts": parts}, ROUNDS)
    values = {name: [each for (each,) in one] for name, one in found.items() if name != "parts"}
    values |= dict(zip(AFTER_TORCH, zip(*found["parts"], strict=True), strict=True))
    rows = {
        name: {"best_seconds": round(min(each), 4), "median_seconds": round(statistics.median(each), 4)}
        for name, each in values.items()
    }
    printed(("program", "best seconds", "median seconds"), ([name, *row.values()] for name, row in rows.items()))
    write(FOLDER / "startup.json", {"rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
