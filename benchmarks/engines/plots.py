"""Pictures of a result file: `python -m benchmarks.engines.plots FILE --out docs/results`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import pictures
from benchmarks.engines.contestants import OPACUS
from benchmarks.results import read

KINDS = {"time": "Time of a step", "memory": "Peak memory over the model"}
# Of each, the best of its modes is drawn.
DRAWN = {"Opacus, best mode": (OPACUS, "s", pictures.THEIRS, 9), "dpfunc": (("auto",), "o", pictures.OURS, 6)}


def best(case: Mapping[str, Any], modes: Sequence[str], kind: str) -> float | None:
    """The least time or memory of some contestants over that of the plain step, if it was measured."""
    ratios = [case["contestants"].get(mode, {}).get(kind, {}).get("ratio") for mode in modes]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def picture(cases: Mapping[str, Any], kind: str, path: Path) -> None:
    """A line for each case, with a point for dpfunc and one for the best mode of Opacus; the plain step is at 1."""
    with pictures.figure(path, f"{KINDS[kind]}, times the plain step", 1.4 + 0.27 * len(cases)) as axes:
        most = 1.0
        for label, (modes, marker, color, size) in DRAWN.items():
            ratios = [best(case, modes, kind) for case in cases.values()]
            found = {place: ratio for place, ratio in enumerate(ratios) if ratio is not None}
            most = max([most, *found.values()])
            axes.plot(list(found.values()), list(found), marker, color=color, label=label, markersize=size)
        axes.axvline(1.0, color=pictures.PLAIN, linewidth=1, linestyle="--", label="without privacy")
        axes.set_xscale("log", base=2)
        axes.set_xticks([tick for tick in (0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 16) if tick <= 1.1 * most])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.set_yticks(range(len(cases)), list(cases))
        axes.invert_yaxis()
        axes.grid(axis="y", color="0.9")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.06), ncols=2, frameon=False)


@click.command(help=__doc__)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--out", default=Path("docs/results"), type=click.Path(path_type=Path, file_okay=False))
def main(file: Path, out: Path) -> None:
    """Write `NAME_time.svg` and `NAME_memory.svg` for a result file NAME.json."""
    out.mkdir(parents=True, exist_ok=True)
    cases = {name: case for name, case in read(file)["cases"].items() if not name.startswith("layer:")}
    for kind in KINDS:
        if any(best(case, ("plain",), kind) is not None for case in cases.values()):
            picture(cases, kind, out / f"{file.stem}_{kind}.svg")
            click.echo(out / f"{file.stem}_{kind}.svg")


if __name__ == "__main__":
    main()
