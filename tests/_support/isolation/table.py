"""Print what each engine makes of each case, and write docs/results/isolation.md: `python tests/_support/isolation/table.py`.

With parts of names, `table.py part ...`, these cases are printed and nothing is written.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import torch

if __name__ == "__main__":  # the folder of this file has a `zoo` too, which is not that of the tests
    sys.path[:1] = [str(Path(__file__).parents[number]) for number in (1, 2)]

from isolation.truth import ENGINES, outcomes, tolerance_of
from isolation.zoo import ZOO

PAGE = Path(__file__).parents[3] / "docs" / "results" / "isolation.md"
MARK = "<!-- written by tests/_support/isolation/table.py -->"


def cell(loss, engine):
    """The worst of all steps: wrong before raised, raised before refused."""
    tolerance = tolerance_of(loss)
    badness = lambda outcome: (outcome.wrong(tolerance), bool(outcome.error), bool(outcome.refusal))
    return max(outcomes(loss, engine), key=badness).told(tolerance)


def word(text):
    """A cell in a word or two: equal, refused at a step, or what is wrong."""
    return text.split(":")[0]


def in_markdown(rows):
    """Counts of each kind of outcome, then the cases that an engine does not compute."""
    kinds = [kind for _, kind, _ in rows]
    lines = [f"{len(rows)} cases: {kinds.count('honest')} honest, {kinds.count('mixing')} mixing.", ""]
    lines += [f"| cases | {' | '.join(ENGINES)} |", f"|---|{'---|' * len(ENGINES)}"]
    for told in ("honest", "mixing"):
        for start in ("equal", "refused", "RAISED", "WRONG"):
            found = [[text.startswith(start) for text in cells] for _, kind, cells in rows if kind == told]
            lines.append(f"| {told}, {start} | {' | '.join(str(sum(column)) for column in zip(*found, strict=True))} |")
    lines += ["", f"| not computed | rows | {' | '.join(ENGINES)} |", f"|---|---|{'---|' * len(ENGINES)}"]
    lines += [
        f"| {name} | {kind} | {' | '.join(map(word, cells))} |" for name, kind, cells in rows if {*cells} != {"equal"}
    ]
    return "\n".join(lines) + "\n"


def on_page():
    """Name of each case that is not computed by each engine -> its words, as the page says."""
    lines = PAGE.read_text().partition("| not computed |")[2].splitlines()[2:]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines if line]
    return {name: words for name, _, *words in rows}


def main(words):
    warnings.simplefilter("ignore")  # only the outcome of each case is printed
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = []
    for loss in ZOO.values():
        if not words or any(word in f"{loss.family}/{loss.name}" for word in words):
            cells = [cell(loss, engine) for engine in ENGINES]
            rows.append((loss.name, "honest" if loss.honest else "mixing", cells))
            print(loss.family, *rows[-1][:2], *(text[:44] for text in cells), sep=" | ", flush=True)
    if not words:
        text = PAGE.read_text()
        PAGE.write_text(text[: text.index(MARK) + len(MARK)] + "\n\n" + in_markdown(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
