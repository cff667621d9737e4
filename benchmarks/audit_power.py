"""How probable it is that the audit of rows finds a fault: `python -m benchmarks.audit_power`.

Nothing is drawn. How many rows a step compares is asked of `dpfunc.engines._guards.audit.Audits`, on average over
its chance; the rest is the hypergeometric law: r of B rows, drawn without replacement, miss all b faulty ones with
probability C(B - b, r) / C(B, r). For small r that is near (1 - b / B)^r.

The fault begins after the first step, and sizes of batches do not change. A fault counts as found if its row is drawn,
so it must be larger than the tolerance of the comparison. "small" is a step whose row alone takes as long as the batch,
so that about one in 100 steps compares one; "large" one whose rows alone take 1 / B of a step; "counting" one of a loss
that changes what it keeps, which compares one row each.
"""

from __future__ import annotations

import json
import math

from benchmarks.results import DOCS, markdown
from dpfunc.engines._guards.audit import Audits

RESULT = DOCS / "results" / "audit_power.json"
SIZES = (32, 256, 1024, 8192)
SHARES = ("one row", 0.01, 0.1, 1.0)
STEPS = (1, 100, 1000, 10000)
WANTED = 0.99
KINDS = ("small", "large", "counting")
CHANCES = 1000


def missed(size: int, faulty: int, drawn: int) -> float:
    """The probability that no faulty row is drawn."""
    if faulty + drawn > size:
        return 0.0
    return math.comb(size - faulty, drawn) / math.comb(size, drawn)


def first_rows(size: int) -> int:
    """Rows that the first step compares."""
    return Audits().due(size, 0.0, 0.0)


def drawn_later(size: int, kind: str) -> list[int]:
    """Rows that a later step compares, at equal distances of its chance."""
    audits = Audits(steps=1, counting=kind == "counting", row_seconds=1.0 / size if kind == "large" else 1.0)
    return [audits.due(size, 1.0, (number + 0.5) / CHANCES) for number in range(CHANCES)]


def missed_later(size: int, faulty: int, kind: str) -> float:
    """The probability that a later step draws no faulty row."""
    return sum(missed(size, faulty, drawn) for drawn in drawn_later(size, kind)) / CHANCES


def steps_for(miss: float) -> int:
    """Steps until the fault is found with the wanted probability."""
    return 1 if miss <= 1.0 - WANTED else math.ceil(math.log(1.0 - WANTED) / math.log(miss))


def faulty_rows(size: int, share: str | float) -> int:
    """A share of a batch in rows, one at least."""
    return 1 if isinstance(share, str) else max(1, round(share * size))


def results() -> list[dict[str, object]]:
    """A row for each kind of step, size and share of faulty rows."""
    table = []
    for kind in KINDS:
        for size in SIZES:
            first, later = first_rows(size), drawn_later(size, kind)
            for share in SHARES:
                faulty = faulty_rows(size, share)
                if isinstance(share, float) and faulty == 1:
                    continue
                miss = missed_later(size, faulty, kind)
                table.append({
                    "step": kind, "batch": size, "faulty": faulty, "share": share, "rows_in_first_step": first,
                    "rows_in_later_steps": sum(later) / CHANCES,
                    "found_in_first_step": 1.0 - missed(size, faulty, first),
                    "found_after": {step: 1.0 - miss**step for step in STEPS},
                    "steps_for_99_percent": steps_for(miss),
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
    heads = ("B", "faulty rows", "first step", *(f"{k} steps" for k in STEPS), "99 % after")
    for kind in KINDS:
        rows = []
        for row in table:
            if row["step"] == kind:
                certain = row["faulty"] == row["batch"]
                share = row["share"] if isinstance(row["share"], str) else percent(row["share"], certain)
                found = [row["found_in_first_step"], *(row["found_after"][k] for k in STEPS)]
                shown = [percent(value, certain) for value in found]
                rows.append([row["batch"], f"{share} ({row['faulty']})", *shown, row["steps_for_99_percent"]])
        print(f"\n{kind}\n\n{markdown(heads, rows)}")


if __name__ == "__main__":
    main()
