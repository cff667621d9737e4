"""Pictures and a Markdown page from a result file: `python -m benchmarks.engines.plots FILE --out docs/results`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.engines.contestants import JAX_PLAIN, NO_SUM, PLAIN
from benchmarks.engines.report import problems
from benchmarks.pages import markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = Mapping[str, Any]
PEERS = ("opacus", "jax")
NOT_DRAWN = ("whole-", "jax-privacy/")
NOT_PRIVATE = (*NO_SUM, JAX_PLAIN)
MARKERS = "ovsD^P*X"
KINDS = {"time": "time of a step", "memory": "peak memory over the model"}


def contestants(report: Record, cases: Sequence[str]) -> list[str]:
    """Everybody who takes part in one of the cases, in the order of the file."""
    return list(dict.fromkeys(name for case in cases for name in report["cases"][case]["contestants"]))


def ratio(report: Record, case: str, contestant: str, kind: str) -> float | None:
    """Time or memory over that of the plain step, if it was measured."""
    result = report["cases"][case]["contestants"].get(contestant, {})
    return result.get(kind, {}).get("ratio")


def draw(axes: Axes, report: Record, cases: Sequence[str], kind: str) -> None:
    """Bars for our engines and points for peers, side by side in each case; the plain step is the line at 1."""
    names = [n for n in contestants(report, cases) if n != PLAIN and not n.startswith(NOT_DRAWN)]
    engines = [name for name in names if not name.startswith(PEERS)]
    peers = [name for name in names if name.startswith(PEERS)]
    width = 0.8 / max(1, len(engines))
    for number, name in enumerate(engines):
        found = [(at, ratio(report, case, name, kind)) for at, case in enumerate(cases)]
        shown = [(at - 0.4 + (number + 0.5) * width, value) for at, value in found if value is not None]
        axes.bar([at for at, _ in shown], [value for _, value in shown], width=0.9 * width, label=name)
    for number, name in enumerate(peers):
        found = [(at, ratio(report, case, name, kind)) for at, case in enumerate(cases)]
        shown = [(at, value) for at, value in found if value is not None]
        style = {"linestyle": "none", "marker": MARKERS[number % len(MARKERS)], "markeredgecolor": "white"}
        shades = {"color": str(0.1 + 0.6 * number / max(1, len(peers))), "markersize": 8}
        axes.plot([at for at, _ in shown], [value for _, value in shown], label=name, **style, **shades)
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--", label="without privacy")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks(range(len(cases)), [case.removeprefix("layer:") for case in cases], rotation=30, ha="right")
    axes.set_ylabel(f"{KINDS[kind]}, times the plain step")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.16))


def picture(report: Record, cases: Sequence[str], kind: str, path: Path) -> None:
    """One PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.0, 1.1 * len(cases)), 5), layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure.add_subplot(), report, cases, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], side: str = "---:") -> list[str]:
    """Lines of a Markdown table."""
    return [*markdown(heads, rows, side).splitlines(), ""]


def cell(result: Record | None, kind: str, best: float | None) -> str:
    """A ratio, bold where nobody private is better; `x` does not run, `wrong` has a wrong sum, empty not measured."""
    if result is None:
        return ""
    if result["status"] != "ok":
        return "wrong" if result["status"].startswith("wrong") else "x"
    measured = result.get(kind, {})
    if "ratio" not in measured:
        return "" if measured.get("status", "ok") == "ok" else "x"
    text = f"{measured['ratio']:.2f}"
    return f"**{text}**" if best is not None and measured["ratio"] <= best else text


def ratio_rows(report: Record, cases: Sequence[str], kind: str) -> list[list[str]]:
    """A row a case: the plain step in units, everybody else in ratios."""
    rows = []
    for case in cases:
        found = report["cases"][case]["contestants"]
        base = found[PLAIN].get(kind, {})
        unit = f"{1e3 * base['median_seconds']:.1f} ms" if "median_seconds" in base else ""
        if "peak_mib" in base:
            unit = f"{base['peak_mib']:.1f} MiB"
        others = [name for name in contestants(report, cases) if name != PLAIN]
        private = [name for name in others if name not in NOT_PRIVATE]
        ratios = [value for name in private if (value := ratio(report, case, name, kind)) is not None]
        best = min(ratios, default=None)
        rows.append([case, unit, *(cell(found.get(name), kind, best if name in private else None) for name in others)])
    return rows


def reasons(report: Record, cases: Sequence[str]) -> list[str]:
    """Why figures are missing: each reason once, with the cases it is about."""
    about: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for name, result in report["cases"][case]["contestants"].items():
            for why in problems(result):
                about.setdefault((name, why.removeprefix("x: ")), []).append(case)
    return [f"- {name} in {', '.join(where)}: {why}" for (name, why), where in about.items()]


def largest_lines(report: Record) -> list[str]:
    """Tables of the largest batches."""
    lines = []
    for case, record in report["largest_batch"].items():
        lines += [f"## Largest batch of {case} in {record['limit_mib']:g} MiB, model included", ""]
        rows = [
            [name, str(found.get("largest_batch", found.get("status")))]
            for name, found in record["contestants"].items()
        ]
        lines += markdown_table(["contestant", "samples"], rows)
    return lines


def page(report: Record) -> str:
    """The Markdown page."""
    machine, versions = report["machine"], report["versions"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} threads"
    lines = [
        "# Engines: time and memory",
        "",
        f"{where}; {', '.join(f'{name} {number}' for name, number in versions.items())}. Ratios to the step without "
        "privacy, on the same tensors in the same run: time is the median over interleaved rounds of the ratio within "
        "a round, memory the peak of torch's allocator over the built model; for JAX it is the peak resident memory of "
        "its process during a step over what was there before. Bold: the least of all private ones. Every sum was "
        "first compared with a loop over single samples.",
        "",
    ]
    if report["quick"]:
        lines += ["**Tiny sizes: these are no figures.**", ""]
    everything = list(report["cases"])
    groups = {
        "": [case for case in everything if not case.startswith("layer:")],
        " of single layers": [case for case in everything if case.startswith("layer:")],
    }
    for label, cases in groups.items():
        names = [name for name in contestants(report, cases) if name != PLAIN]
        for kind in KINDS:
            if any(ratio(report, case, PLAIN, kind) is not None for case in cases):
                lines += [f"## {kind.capitalize()}{label}", ""]
                lines += markdown_table(["case", PLAIN, *names], ratio_rows(report, cases, kind))
    lines += largest_lines(report)
    missing = reasons(report, everything)
    if missing:
        lines += ["## What did not run", "", *missing, ""]
    about = [[case, record["title"], str(record["batch_size"])] for case, record in report["cases"].items()]
    lines += ["## The cases", "", *markdown_table(["case", "what", "batch"], about, "---")]
    return "\n".join(lines).rstrip() + "\n"


@click.command(help=__doc__)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--out", default=Path("docs/results"), type=click.Path(path_type=Path, file_okay=False))
def main(file: Path, out: Path) -> None:
    """Write `NAME.md`, `NAME_time.png` and `NAME_memory.png` for a result file NAME.json."""
    report = json.loads(file.read_text())
    out.mkdir(parents=True, exist_ok=True)
    written = [out / f"{file.stem}.md"]
    written[0].write_text(page(report))
    for label in ("", "_layers"):
        cases = [case for case in report["cases"] if case.startswith("layer:") == bool(label)]
        for kind in KINDS:
            if any(ratio(report, case, PLAIN, kind) is not None for case in cases):
                written.append(out / f"{file.stem}{label}_{kind}.png")
                picture(report, cases, kind, written[-1])
    click.echo("\n".join(map(str, written)))


if __name__ == "__main__":
    main()
