"""Kill runs at random changes of files, resume them, and compare with runs that nobody killed.

`python tools/kill_fuzz.py` takes some minutes and writes benchmarks/results/kills.json;
tests/checkpoint/test_kills.py is short.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
os.environ["OMP_NUM_THREADS"] = "1"  # before torch: its forks are to have one thread
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "_support")]

from kills import KINDS, fuzz, warm

POINTS = {"plain": 80, "sharded": 80, "trainer": 30, "command": 20}


@click.command(help=__doc__.splitlines()[0])
@click.option("--kinds", default=",".join(KINDS), show_default=True, help="Names with commas.")
@click.option("--times", default=1.0, show_default=True, help=f"This many times {POINTS}.")
@click.option("--seed", default=0, show_default=True, help="Which points.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path),
              default=ROOT / "benchmarks" / "results" / "kills.json", show_default=True)  # fmt: skip
def main(kinds: str, times: float, seed: int, out: Path) -> None:
    """Kill, resume, compare, and write the numbers."""
    begun, names = time.monotonic(), kinds.split(",")
    with tempfile.TemporaryDirectory() as folder:
        warm(names, Path(folder))
        tallies = {}
        for name in names:
            tallies[name] = fuzz(name, max(1, round(times * POINTS[name])), Path(folder), seed)
            click.echo(f"{name}: {tallies[name].values()}")
    found = {name: tally.values() for name, tally in tallies.items()}
    result = {"seed": seed, "seconds": round(time.monotonic() - begun), "kinds": found}
    out.write_text(json.dumps(result, indent=1) + "\n")
    if problems := [problem for tally in tallies.values() for problem in tally.problems]:
        raise click.ClickException("\n".join(problems[:10]))


if __name__ == "__main__":
    main()
