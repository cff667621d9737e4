"""Print what each engine makes of each case: `python tests/_support/isolation/table.py [part of a name ...]`.

With `--markdown docs/results/isolation.md` the table of that page is written anew, for all cases.
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

MARK = "<!-- written by tests/_support/isolation/table.py --markdown -->"


def cell(loss, engine):
    """The worst of all steps: wrong before raised, raised before refused."""
    tolerance = tolerance_of(loss)
    badness = lambda outcome: (outcome.wrong(tolerance), bool(outcome.error), bool(outcome.refusal))
    return max(outcomes(loss, engine), key=badness).told(tolerance)


def word(text):
    """A cell in a word or two: equal, refused at a step, or what is wrong."""
    return text.split(":")[0]


def kind(loss):
    return "honest" if loss.honest else "mixing"


def in_markdown(rows):
    """Counts of each kind of outcome, then the cases that an engine does not compute."""
    count = lambda start, engine, of: sum(cells[engine].startswith(start) for loss, cells in rows if of(loss))
    kinds = [kind(loss) for loss, _ in rows]
    lines = [f"{len(rows)} cases: {kinds.count('honest')} honest, {kinds.count('mixing')} mixing.", ""]
    lines += [f"| cases | {' | '.join(ENGINES)} |", f"|---|{'---|' * len(ENGINES)}"]
    for told in ("honest", "mixing"):
        for start in ("equal", "refused", "RAISED", "WRONG"):
            counts = [str(count(start, engine, lambda loss, told=told: kind(loss) == told)) for engine in ENGINES]
            lines.append(f"| {told}, {start} | {' | '.join(counts)} |")
    lines += ["", f"| not computed | rows | {' | '.join(ENGINES)} |", f"|---|---|{'---|' * len(ENGINES)}"]
    for loss, cells in rows:
        if any(text != "equal" for text in cells.values()):
            lines.append(f"| {loss.name} | {kind(loss)} | {' | '.join(map(word, cells.values()))} |")
    return "\n".join(lines) + "\n"


def on_page(path):
    """Name of each case that is not computed by each engine -> engine -> its word, as a page says."""
    lines = path.read_text().partition("| not computed |")[2].splitlines()[2:]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines if line]
    return {name: dict(zip(ENGINES, words, strict=True)) for name, _, *words in rows}


def main(words, width=44, page=None):
    """Print the outcomes of the cases with one of these words in their names, and write the page."""
    warnings.simplefilter("ignore")  # only the outcome of each case is printed
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = []
    print(" | ".join(("case", "rows", *ENGINES)))
    for loss in ZOO.values():
        name = f"{loss.family}/{loss.name}"
        if not words or any(word in name for word in words):
            rows.append((loss, {engine: cell(loss, engine) for engine in ENGINES}))
            print(" | ".join((name, kind(loss), *(text[:width] for text in rows[-1][1].values()))), flush=True)
    if page is not None:
        text = page.read_text()
        page.write_text(text[: text.index(MARK) + len(MARK)] + "\n\n" + in_markdown(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--markdown"]:
        main([], page=Path(sys.argv[2]))
    else:
        main(sys.argv[1:])
