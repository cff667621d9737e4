"""How probable it is that the audit of rows finds a fault: `python -m benchmarks.audit_power` fills docs/trust.md.

Nothing is drawn. How many rows a step compares is asked of `dpfunc.engines.microbatches.Audits`, on average over
its chance; the rest is the hypergeometric law: r of B rows, drawn without replacement, miss all b faulty ones with
probability C(B - b, r) / C(B, r). For small r that is near (1 - b / B)^r. The fault begins after the first step, and
sizes of batches do not change; it must be larger than the tolerance of the comparison.
"""

from __future__ import annotations

import math

from benchmarks.results import DOCS, fill, markdown
from dpfunc.engines.microbatches import Audits

PAGE = DOCS / "trust.md"
SIZES, SHARES, STEPS, WANTED, CHANCES = (32, 256, 8192), (0.0, 0.01, 0.1, 1.0), (1, 100, 1000, 10000), 0.99, 1000


def missed(size: int, faulty: int, drawn: int) -> float:
    """The probability that no faulty row is drawn."""
    return 0.0 if faulty + drawn > size else math.comb(size - faulty, drawn) / math.comb(size, drawn)


def missed_later(size: int, faulty: int) -> float:
    """The same of a later step, over equal distances of its chance."""
    audits = Audits(steps=1)
    drawn = [audits.due(size, (number + 0.5) / CHANCES) for number in range(CHANCES)]
    return sum(missed(size, faulty, each) for each in drawn) / CHANCES


def percent(value: float, certain: bool) -> str:
    """A probability in percent, never rounded up to certainty."""
    return "> 99.9 %" if value > 0.999 and not certain else f"{math.floor(1000 * value) / 10:g} %"


def table() -> str:
    rows = []
    for size in SIZES:
        for share in SHARES:  # 0: one row
            faulty = max(1, round(share * size))
            if share and faulty == 1:
                continue
            miss = missed_later(size, faulty)
            found = (1.0 - missed(size, faulty, Audits().due(size, 1.0)), *(1.0 - miss**steps for steps in STEPS))
            name = f"{percent(share, True)} ({faulty})" if share else "one row (1)"
            needed = 1 if miss <= 1.0 - WANTED else math.ceil(math.log(1.0 - WANTED) / math.log(miss))
            rows.append([size, name, *(percent(value, faulty == size) for value in found), needed])
    heads = ("B", "faulty rows", "first step", *(f"{steps} step{'s' * (steps > 1)}" for steps in STEPS), "99 % after")
    return markdown(heads, rows)


def tables() -> dict[str, str]:
    return {"audits": table()}


if __name__ == "__main__":
    fill(PAGE, tables())
