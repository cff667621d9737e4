"""Pictures of a result file: `python -m benchmarks.engines.plots FILE --out docs/results`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.engines.contestants import PLAIN
from benchmarks.results import read

Record = Mapping[str, Any]
PEERS = ("opacus", "jax")
NOT_DRAWN = ("whole-", "jax-privacy/")
MARKERS = "ovsD^P*X"
KINDS = {"time": "time of a step", "memory": "peak memory over the model"}


def contestants(report: Record, cases: Sequence[str]) -> list[str]:
    """Everybody but the plain step who takes part in one of the cases, in the order of the file."""
    return [n for n in dict.fromkeys(n for case in cases for n in report["cases"][case]["contestants"]) if n != PLAIN]


def ratio(report: Record, case: str, contestant: str, kind: str) -> float | None:
    """Time or memory over that of the plain step, if it was measured."""
    return report["cases"][case]["contestants"].get(contestant, {}).get(kind, {}).get("ratio")


def picture(report: Record, cases: Sequence[str], kind: str, path: Path) -> None:
    """Bars for our engines and points for peers, side by side in each case; the plain step is the line at 1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.0, 1.1 * len(cases)), 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [name for name in contestants(report, cases) if not name.startswith(NOT_DRAWN)]
    engines, peers = ([n for n in names if n.startswith(PEERS) == peer] for peer in (False, True))
    width = 0.8 / max(1, len(engines))
    for name in names:
        found = [(at, ratio(report, case, name, kind)) for at, case in enumerate(cases)]
        at = [place for place, value in found if value is not None]
        values = [value for _, value in found if value is not None]
        if name in engines:
            shift = (engines.index(name) + 0.5) * width - 0.4
            axes.bar([place + shift for place in at], values, width=0.9 * width, label=name)
        else:
            number = peers.index(name)
            style = {"linestyle": "none", "marker": MARKERS[number % len(MARKERS)], "markeredgecolor": "white"}
            axes.plot(at, values, label=name, color=str(0.1 + 0.6 * number / len(peers)), markersize=8, **style)
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--", label="without privacy")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks(range(len(cases)), cases, rotation=30, ha="right")
    axes.set_ylabel(f"{KINDS[kind]}, times the plain step")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.16))
    figure.savefig(path, dpi=120)


@click.command(help=__doc__)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--out", default=Path("docs/results"), type=click.Path(path_type=Path, file_okay=False))
def main(file: Path, out: Path) -> None:
    """Write `NAME_time.png` and `NAME_memory.png` for a result file NAME.json."""
    report = read(file)
    out.mkdir(parents=True, exist_ok=True)
    cases = [case for case in report["cases"] if not case.startswith("layer:")]
    written = []
    for kind in KINDS:
        if any(ratio(report, case, PLAIN, kind) is not None for case in cases):
            written.append(out / f"{file.stem}_{kind}.png")
            picture(report, cases, kind, written[-1])
    click.echo("\n".join(map(str, written)))


if __name__ == "__main__":
    main()
