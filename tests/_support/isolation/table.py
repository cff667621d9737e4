"""Print what each engine makes of each case: `python tests/_support/isolation/table.py [part of a name ...]`.

With `--markdown docs/results/isolation.md` the table of that page is written anew, for all cases.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from pathlib import Path

import torch

if __name__ == "__main__":  # the folder of this file has a `zoo` too, which is not that of the tests
    sys.path[:1] = [str(Path(__file__).parents[number]) for number in (1, 2)]

from isolation.truth import ENGINES, outcomes, tolerance_of
from isolation.zoo import ZOO

MARK = "<!-- written by tests/_support/isolation/table.py --markdown -->"


def cell(loss, engine):
    """The worst of all steps: wrong before raised, raised before refused."""
    tolerance = tolerance_of(loss)
    found = outcomes(loss, engine)
    first = next((outcome for outcome in found if outcome.wrong(tolerance)), None)
    first = first or next((outcome for outcome in found if outcome.error), None)
    first = first or next((outcome for outcome in found if outcome.refusal), found[-1])
    return first.told(tolerance)


def word(text):
    """A cell in a word or two: equal, refused at a step, or what is wrong."""
    return text.split(":")[0]


def in_markdown(rows, names):
    """Counts of each kind of outcome, counts of each family, then the cases that an engine does not compute."""
    lines = [f"{len(rows)} cases: {sum(loss.honest for loss, _ in rows)} honest, "
             f"{sum(not loss.honest for loss, _ in rows)} mixing.", ""]  # fmt: skip
    lines += [f"| cases | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for honest, told in ((True, "honest"), (False, "mixing")):
        for start in ("equal", "refused", "RAISED", "WRONG"):
            counts = [sum(loss.honest == honest and cells[i].startswith(start) for loss, cells in rows)
                      for i in range(len(names))]  # fmt: skip
            lines.append(f"| {told}, {start} | {' | '.join(map(str, counts))} |")
    lines += ["", f"| family | rows | cases | {', '.join(names)}: equal |", "|---|---|---|---|"]
    for family, honest in dict.fromkeys((loss.family, loss.honest) for loss, _ in rows):
        own = [cells for loss, cells in rows if (loss.family, loss.honest) == (family, honest)]
        equal = ", ".join(str(sum(cells[i] == "equal" for cells in own)) for i in range(len(names)))
        lines.append(f"| {family} | {'honest' if honest else 'mixing'} | {len(own)} | {equal} |")
    lines += ["", f"| not computed | rows | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for loss, cells in rows:
        if any(text != "equal" for text in cells):
            kind = "honest" if loss.honest else "mixing"
            lines.append(f"| {loss.name} | {kind} | {' | '.join(word(text) for text in cells)} |")
    return "\n".join(lines) + "\n"


def on_page(path, names=ENGINES):
    """Name of each case that is not computed by each engine -> engine -> its word, as a page says."""
    lines = path.read_text().partition("| not computed |")[2].splitlines()[2:]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines if line]
    return {name: dict(zip(names, words, strict=True)) for name, _, *words in rows}


def write_markdown(path, rows):
    """Replace what follows the mark in a page."""
    page = path.read_text()
    path.write_text(page[: page.index(MARK) + len(MARK)] + "\n\n" + in_markdown(rows, ENGINES))


def main(words, width=44, page=None):
    """The table, then the number of wrong cells of each engine and their names."""
    warnings.simplefilter("ignore")  # only the outcome of each case is printed
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    chosen = [loss for loss in ZOO.values() if not words or any(w in f"{loss.family}/{loss.name}" for w in words)]
    wrong, raised, start = {engine: [] for engine in ENGINES}, [], time.perf_counter()
    rows = []
    print(" | ".join(("case", "honest", *ENGINES)))
    for loss in chosen:
        cells = [cell(loss, engine) for engine in ENGINES]
        rows.append((loss, cells))
        print(" | ".join((f"{loss.family}/{loss.name}", str(loss.honest), *(text[:width] for text in cells))))
        for engine, text in zip(ENGINES, cells, strict=True):
            if text.startswith("WRONG"):
                wrong[engine].append(f"{loss.name}{' (honest)' if loss.honest else ''}: {text}")
            elif text.startswith("RAISED") or (loss.honest and engine == "auto" and text != "equal"):
                raised.append(f"{engine}, {loss.name}: {text}")
    for engine, names in wrong.items():
        print(f"\n{engine}: {len(names)} of {len(chosen)} wrong")
        print("\n".join(f"  {name}" for name in names))
    print(f"\nother errors, and honest losses that auto does not compute: {len(raised)}")
    print("\n".join(f"  {text}" for text in raised))
    print(f"\n{time.perf_counter() - start:.0f} s")
    if page is not None:
        write_markdown(page, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--markdown"]:
        main([], page=Path(sys.argv[2]))
    else:
        main(sys.argv[1:])
