"""Pictures of a result file: `python -m benchmarks.engines.plots FILE --out docs/results`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import pictures
from benchmarks.engines.contestants import PLAIN
from benchmarks.results import read

Record = Mapping[str, Any]
KINDS = {"time": "Time of a step", "memory": "Peak memory over the model"}
# Of each, the best of its modes is drawn.
DRAWN = {
    "Opacus, best mode": (("opacus-hooks", "opacus-ghost", "opacus-functorch"), "s", pictures.THEIRS, 9),
    "dpfunc": (("auto",), "o", pictures.OURS, 6),
}


def ratio(report: Record, case: str, contestant: str, kind: str) -> float | None:
    """Time or memory over that of the plain step, if it was measured."""
    return report["cases"][case]["contestants"].get(contestant, {}).get(kind, {}).get("ratio")


def picture(report: Record, cases: Sequence[str], kind: str, path: Path) -> None:
    """A line for each case, with a point for dpfunc and one for the best mode of Opacus; the plain step is at 1."""
    with pictures.figure(path, f"{KINDS[kind]}, times the plain step", 1.4 + 0.27 * len(cases)) as axes:
        most = 1.0
        for label, (modes, marker, color, size) in DRAWN.items():
            found = [[ratio(report, case, mode, kind) for mode in modes] for case in cases]
            best = [min((value for value in values if value is not None), default=None) for values in found]
            most = max([most, *(value for value in best if value is not None)])
            places = [place for place, value in enumerate(best) if value is not None]
            axes.plot([best[place] for place in places], places, marker, color=color, label=label, markersize=size)
        axes.axvline(1.0, color=pictures.PLAIN, linewidth=1, linestyle="--", label="without privacy")
        axes.set_xscale("log", base=2)
        axes.set_xticks([tick for tick in (0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 16) if tick <= 1.1 * most])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.set_yticks(range(len(cases)), cases)
        axes.invert_yaxis()
        axes.grid(axis="y", color="0.9")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.06), ncols=2, frameon=False)


@click.command(help=__doc__)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--out", default=Path("docs/results"), type=click.Path(path_type=Path, file_okay=False))
def main(file: Path, out: Path) -> None:
    """Write `NAME_time.svg` and `NAME_memory.svg` for a result file NAME.json."""
    report = read(file)
    out.mkdir(parents=True, exist_ok=True)
    cases = [case for case in report["cases"] if not case.startswith("layer:")]
    written = []
    for kind in KINDS:
        if any(ratio(report, case, PLAIN, kind) is not None for case in cases):
            written.append(out / f"{file.stem}_{kind}.svg")
            picture(report, cases, kind, written[-1])
    click.echo("\n".join(map(str, written)))


if __name__ == "__main__":
    main()
