"""What keeping freed memory saves: `python -m benchmarks.freed_memory`.

Memory that glibc has given back to the system comes back page by page, zeroed, one page fault each. How much is given
back depends on what is freed last, so that equal steps take different times. The step without privacy and the clipped
sum run in processes as the system has it, and in others with the variables of `benchmarks.measure.KEEPS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.engines.cases import ALL_CASES
from benchmarks.measure import compete
from benchmarks.results import FOLDER, question

RESULT = FOLDER / "freed_memory.json"
STEPS, MEMORIES = {"plain": "plain", "private": "auto"}, ("given back", "kept")
HEADS = ("case", "step", "given back, ms", "kept, ms", "saved", "page faults", "kept", "resident, MiB", "kept")


def measure(case: str, rounds: int, quick: bool) -> dict[str, Any]:
    spec = {
        "module": "benchmarks.engines.contestants", "cases": "benchmarks.engines.cases", "case": case, "quick": quick,
        "device": "cpu",
    }  # fmt: skip
    specs = {
        f"{step}, {freed}": {**spec, "contestant": contestant, "freed": freed}
        for step, contestant in STEPS.items() for freed in MEMORIES
    }  # fmt: skip
    contestants = compete(specs, rounds, base="plain, given back")
    return {"title": ALL_CASES[case].title, "rounds": rounds, "contestants": contestants}


def rows(cases: Mapping[str, Any]) -> list[list[str]]:
    lines = []
    for case, record in cases.items():
        for step in STEPS:
            both = [record["contestants"][f"{step}, {freed}"] for freed in MEMORIES]
            given, kept = (1e3 * each["time"]["median_seconds"] for each in both)
            counts = [f"{each[number]:.0f}" for number in ("page_faults", "resident_mib") for each in both]
            lines.append([case, step, f"{given:.0f}", f"{kept:.0f}", f"{100 * (1 - kept / given):.0f} %", *counts])
    return lines


main = question(__doc__, RESULT, ALL_CASES, measure, ("w1", "bert", "w4", "w2n", "w3"))

if __name__ == "__main__":
    main()
