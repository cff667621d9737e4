"""Print what each engine makes of each case: `python tests/isolation/table.py [part of a name ...]`."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from pathlib import Path

import torch

if __name__ == "__main__":  # the folder of this file has a `zoo` too, which is not that of the tests
    sys.path[0] = str(Path(__file__).parents[1])

from isolation.truth import ENGINES, outcomes, tolerance_of
from isolation.zoo import ZOO


def cell(loss, engine):
    """The worst of all steps: wrong before raised, raised before refused."""
    tolerance = tolerance_of(loss)
    found = outcomes(loss, engine)
    first = next((outcome for outcome in found if outcome.wrong(tolerance)), None)
    first = first or next((outcome for outcome in found if outcome.error), None)
    first = first or next((outcome for outcome in found if outcome.refusal), found[-1])
    return first.told(tolerance)


def main(words, width=44):
    """The table, then the number of wrong cells of each engine and their names."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    chosen = [loss for loss in ZOO.values() if not words or any(w in f"{loss.family}/{loss.name}" for w in words)]
    wrong, raised, start = {engine: [] for engine in ENGINES}, [], time.perf_counter()
    print(" | ".join(("case", "honest", *ENGINES)))
    for loss in chosen:
        cells = [cell(loss, engine) for engine in ENGINES]
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


if __name__ == "__main__":
    main(sys.argv[1:])
