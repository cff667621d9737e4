"""How probable it is that the audit of rows finds a fault: `python benchmarks/audit_power.py`.

Nothing is drawn. How many rows a step compares is asked of `dpfunc.engines.guards.audit.Audits` itself; the rest is the
hypergeometric law: r of B rows, drawn without replacement, miss all b faulty ones with probability
C(B - b, r) / C(B, r). For small r that is near (1 - b / B)^r.

The fault begins right after an audit, and sizes of batches do not change: the worst case. A fault counts as found if
its row is drawn, so it must be larger than the tolerance of the comparison. "proven" is a step whose rows alone take so
much time that one in `STEPS_IN` steps is compared, the least; "large" one whose rows alone take 1 / B of a step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import torch

from dpfunc.engines.guards.audit import STEPS_IN, Audits

RESULT = Path(__file__).parents[1] / "docs" / "results" / "audit_power.json"
SIZES = (32, 256, 1024, 8192)
SHARES = ("one row", 0.01, 0.1, 1.0)
STEPS = (1, STEPS_IN, 100, 1000)
WANTED = 0.99
MOST = 10**6
KINDS = ("proven", "large", "audit")


def missed(size: int, faulty: int, drawn: int) -> float:
    """The probability that no faulty row is drawn."""
    if faulty + drawn > size:
        return 0.0
    return math.comb(size - faulty, drawn) / math.comb(size, drawn)


def drawn_in(size: int, kind: str) -> Iterator[int]:
    """Rows that are compared in step 0, 1, 2, ..., all of one size."""
    audits, batch = Audits(), torch.zeros(size, 1)
    while True:
        rows = audits.due(batch, ("a doubt",) if kind == "audit" else (), seconds=1.0 if kind == "large" else 0.0)
        yield rows
        audits.paid(rows, rows / size)


def found_after(size: int, faulty: int, kind: str, steps: tuple[int, ...]) -> dict[int, float]:
    """The probability that a fault which begins in the step after the first one is found within so many steps."""
    miss, found = 1.0, {}
    for step, drawn in zip(range(1, max(steps) + 1), islice(drawn_in(size, kind), 1, None), strict=False):
        miss *= missed(size, faulty, drawn)
        if step in steps:
            found[step] = 1.0 - miss
    return found


def steps_for(size: int, faulty: int, kind: str, wanted: float = WANTED) -> int | None:
    """Steps until the fault is found with this probability; None if they are more than MOST."""
    miss = 1.0
    for step, drawn in zip(count(1), islice(drawn_in(size, kind), 1, None), strict=False):
        miss *= missed(size, faulty, drawn)
        if miss <= 1.0 - wanted:
            return step
        if step >= MOST:
            return None
    return None


def faulty_rows(size: int, share: str | float) -> int:
    """A share of a batch in rows, one at least."""
    return 1 if isinstance(share, str) else max(1, round(share * size))


def results() -> list[dict[str, object]]:
    """A row for each kind of step, size and share of faulty rows."""
    table = []
    for kind in KINDS:
        for size in SIZES:
            drawn = list(islice(drawn_in(size, kind), 1000))
            for share in SHARES:
                faulty = faulty_rows(size, share)
                if isinstance(share, float) and faulty == 1:
                    continue
                table.append({
                    "step": kind, "batch": size, "faulty": faulty, "share": share,
                    "rows_in_first_step": drawn[0], "rows_in_1000_steps": sum(drawn),
                    "found_in_first_step": 1.0 - missed(size, faulty, drawn[0]),
                    "found_after": found_after(size, faulty, kind, STEPS),
                    "steps_for_99_percent": steps_for(size, faulty, kind),
                })  # fmt: skip
    return table


def percent(value: float, certain: bool) -> str:
    """A probability in percent, never rounded up to certainty."""
    if value > 0.999 and not certain:
        return "> 99.9 %"
    return f"{math.floor(1000 * value) / 10:g} %"


def main() -> None:
    """The table in Markdown; the numbers in a file."""
    table = results()
    RESULT.write_text(json.dumps({"results": table}, indent=1) + "\n")
    for kind in KINDS:
        print(
            f"\n{kind}\n\n| B | faulty rows | first step | "
            + " | ".join(f"{k} steps" for k in STEPS)
            + " | 99 % after |"
        )
        print("|---|---|---|" + "---|" * (len(STEPS) + 1))
        for row in table:
            if row["step"] == kind:
                certain = row["faulty"] == row["batch"]
                share = row["share"] if isinstance(row["share"], str) else percent(row["share"], certain)
                cells = [percent(row["found_after"][k], certain) for k in STEPS]
                needed = row["steps_for_99_percent"]
                print(
                    f"| {row['batch']} | {share} ({row['faulty']}) | {percent(row['found_in_first_step'], certain)} | "
                    f"{' | '.join(cells)} | {needed if needed else 'more'} |"
                )


if __name__ == "__main__":
    main()
