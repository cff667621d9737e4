"""Pictures and a Markdown page from a result file: `python -m benchmarks.engines.plots FILE --out docs/results`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.engines.contestants import JAX_PLAIN, PLAIN, WHOLE_PLAIN
from benchmarks.results import markdown, problems, read

Record = Mapping[str, Any]
PEERS = ("opacus", "jax")
NOT_DRAWN = ("whole-", "jax-privacy/")
NOT_PRIVATE = (PLAIN, WHOLE_PLAIN, JAX_PLAIN)
MARKERS = "ovsD^P*X"
KINDS = {"time": "time of a step", "memory": "peak memory over the model"}


def contestants(report: Record, cases: Sequence[str]) -> list[str]:
    """Everybody but the plain step who takes part in one of the cases, in the order of the file."""
    return [n for n in dict.fromkeys(n for case in cases for n in report["cases"][case]["contestants"]) if n != PLAIN]


def ratio(report: Record, case: str, contestant: str, kind: str) -> float | None:
    """Time or memory over that of the plain step, if it was measured."""
    return report["cases"][case]["contestants"].get(contestant, {}).get(kind, {}).get("ratio")


def groups(report: Record) -> Iterator[tuple[str, list[str], list[str]]]:
    """A label, the cases and what of them was measured: of whole models, and of single layers."""
    for label in ("", "layers"):
        cases = [case for case in report["cases"] if case.startswith("layer:") == bool(label)]
        yield label, cases, [k for k in KINDS if any(ratio(report, case, PLAIN, k) is not None for case in cases)]


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


def ratio_rows(report: Record, cases: Sequence[str], kind: str) -> Iterator[list[str]]:
    """A row a case: the plain step in units, everybody else in ratios."""
    names = contestants(report, cases)
    for case in cases:
        found = report["cases"][case]["contestants"]
        base = found[PLAIN].get(kind, {})
        unit = f"{1e3 * base['median_seconds']:.1f} ms" if "median_seconds" in base else ""
        unit = f"{base['peak_mib']:.1f} MiB" if "peak_mib" in base else unit
        private = [name for name in names if name not in NOT_PRIVATE]
        best = min((r for n in private if (r := ratio(report, case, n, kind)) is not None), default=None)
        yield [case, unit, *(cell(found.get(name), kind, best if name in private else None) for name in names)]


def reasons(report: Record) -> list[str]:
    """Why figures are missing: each reason once, with the cases it is about."""
    about: dict[tuple[str, str], list[str]] = {}
    for case, record in report["cases"].items():
        for name, result in record["contestants"].items():
            for why in problems(result):
                about.setdefault((name, why.removeprefix("x: ")), []).append(case)
    return [f"- {name} in {', '.join(where)}: {why}" for (name, why), where in about.items()]


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
    for label, cases, kinds in groups(report):
        for kind in kinds:
            heads = ["case", PLAIN, *contestants(report, cases)]
            table = markdown(heads, ratio_rows(report, cases, kind), "---:")
            lines += [f"## {kind.capitalize()}{' of single layers' if label else ''}", "", table, ""]
    if missing := reasons(report):
        lines += ["## What did not run", "", *missing, ""]
    about = [[case, record["title"], record["batch_size"]] for case, record in report["cases"].items()]
    lines += ["## The cases", "", markdown(["case", "what", "batch"], about)]
    return "\n".join(lines) + "\n"


@click.command(help=__doc__)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--out", default=Path("docs/results"), type=click.Path(path_type=Path, file_okay=False))
def main(file: Path, out: Path) -> None:
    """Write `NAME.md`, `NAME_time.png` and `NAME_memory.png` for a result file NAME.json."""
    report = read(file)
    out.mkdir(parents=True, exist_ok=True)
    written = [out / f"{file.stem}.md"]
    written[0].write_text(page(report))
    _, cases, kinds = next(groups(report))  # of whole models
    for kind in kinds:
        written.append(out / f"{file.stem}_{kind}.png")
        picture(report, cases, kind, written[-1])
    click.echo("\n".join(map(str, written)))


if __name__ == "__main__":
    main()
