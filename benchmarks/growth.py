"""Growth of time and memory with the work: `python -m benchmarks.growth`.

Llama-style decoders in which one size grows and the others stay: positions, samples, parameters, rank. At each point
the clipped sum of `auto` and the step without privacy, with LoRA and with all parameters; the best round counts. An
exponent p says that cost grows as size^p: the slope of a line through the three largest points, in logarithms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import pictures
from benchmarks.engines import nets
from benchmarks.engines.cases import Case
from benchmarks.engines.runner import Settings, measure_cases, measures
from benchmarks.results import DOCS, FOLDER, fill, markdown

RESULT, PAGE, PICTURE = FOLDER / "growth.json", DOCS / "performance.md", DOCS / "results" / "growth.svg"
FITTED = 3
TUNINGS = {"LoRA": True, "all parameters": False}
NUMBERS = {"time": "best_seconds", "memory": "peak_mib"}
CONTESTANTS = ("plain", "auto")


@dataclass(frozen=True)
class Axis:
    """A size that grows.

    Args:
        title: for tables. sizes: values -> what of the decoder they change. fixed: the rest; `samples` is the size of
            the batch. tunings: LoRA or all parameters; a rank has no meaning without LoRA.
    """

    title: str
    sizes: Mapping[int, Mapping[str, int]]
    fixed: Mapping[str, int]
    tunings: tuple[str, ...] = tuple(TUNINGS)

    def case(self, size: int, tuning: str) -> Case:
        numbers = {"vocabulary": 500, **self.fixed, **self.sizes[size]}
        samples, hidden = numbers.pop("samples"), 16 * round(numbers["width"] / 6)  # 8 / 3 of it, as in Llama
        sizes = {"hidden": hidden, "norm": "rms", "lora": TUNINGS[tuning], **numbers}
        return Case(f"{self.title}: {size}, {tuning}", nets.decoder, samples, sizes, {**sizes, "layers": 1})


WIDTHS = ((128, 5), (256, 4), (384, 6), (640, 6), (1024, 8), (1536, 11))
AXES = {
    "T": Axis("positions", {size: {"length": size} for size in (128, 256, 512, 1024, 2048, 4096)},
        {"samples": 2, "layers": 2, "width": 256}),
    "B": Axis("samples", {size: {"samples": size} for size in (1, 4, 16, 64, 256, 1024)},
        {"length": 32, "layers": 2, "width": 128}),
    "P": Axis("parameters of the layers", {12 * width * width * layers: {"width": width, "layers": layers} for width,
        layers in WIDTHS}, {"samples": 2, "length": 32}),
    "r": Axis("rank", {size: {"rank": size} for size in (1, 4, 16, 64)}, {"samples": 8, "length": 128, "layers": 4,
        "width": 384}, ("LoRA",)),
}  # fmt: skip
ALL_CASES = {
    f"{name}/{tuning}/{size}": axis.case(size, tuning)
    for name, axis in AXES.items() for tuning in axis.tunings for size in axis.sizes
}  # fmt: skip


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the line through the last points, logarithms on both axes."""
    return float(np.polyfit(np.log(sizes[-FITTED:]), np.log(values[-FITTED:]), 1)[0])


def lines(cases: Mapping[str, Any]) -> Iterator[tuple[str, str, list[int], dict[str, list[list[float]]]]]:
    """Axis, tuning, sizes, and of each number the values of both contestants."""
    for axis, tuning in dict.fromkeys(tuple(name.split("/")[:2]) for name in cases):
        found = {int(n.split("/")[2]): c["contestants"] for n, c in cases.items() if n.startswith(f"{axis}/{tuning}/")}
        values = {
            number: [[each[who][number][key] for each in found.values()] for who in CONTESTANTS]
            for number, key in NUMBERS.items()
        }
        yield axis, tuning, list(found), values


def table(cases: Mapping[str, Any]) -> str:
    """A line for each axis and tuning: exponents, and the ratio to the plain step at the smallest and largest size."""
    rows = []
    for axis, tuning, sizes, values in lines(cases):
        ends = " - ".join(f"{size:.2g}" if sizes[-1] > 1e4 else str(size) for size in (sizes[0], sizes[-1]))
        row = [AXES[axis].title, tuning, ends]
        for before, private in values.values():
            ratios = f"{private[0] / before[0]:.2f} - {private[-1] / before[-1]:.2f}"
            row += [*(f"{exponent(sizes, each):.2f}" for each in (before, private)), ratios]
        rows.append(row)
    heads = (
        "what grows", "trained", "from - to", "time: plain", "private", "ratio, first - last", "memory: plain",
        "private", "ratio, first - last",
    )  # fmt: skip
    return markdown(heads, rows)


def picture(cases: Mapping[str, Any], path: Path) -> None:
    """Time of the private step over that of the plain one, as each size grows to its largest."""
    with pictures.figure(path, "Private over plain time of a step", 4.2) as axes:
        for axis, tuning, sizes, values in lines(cases):
            plain, private = values["time"]
            ratios = [after / before for before, after in zip(plain, private, strict=True)]
            style, shares = "o--" if TUNINGS[tuning] else "o-", [size / sizes[-1] for size in sizes]
            label, color = f"{AXES[axis].title.split()[0]}, {tuning.split()[0]}", f"C{list(AXES).index(axis)}"
            axes.plot(shares, ratios, style, color=color, label=label, markersize=4)
        axes.axhline(1.0, color=pictures.PLAIN, linewidth=1)
        axes.set(xscale="log", xlabel="size, as a share of the largest")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=2, frameon=False)


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--axes", default=",".join(AXES), help="Names with commas.")
@click.option("--points", default=0, type=click.IntRange(0), help="Only so many of the smallest sizes; 0 is all.")
@click.option("--page", default=PAGE, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--plot", default=PICTURE, type=click.Path(dir_okay=False, path_type=Path))
@measures(RESULT, rounds=3)
def main(axes: str, points: int, page: Path, plot: Path, settings: Settings, out: Path) -> None:
    """Measure, and write the result file after each point; then the picture and the table."""
    names = [
        f"{name}/{tuning}/{size}"
        for name in axes.split(",") for tuning in AXES[name].tunings
        for size in list(AXES[name].sizes)[: points or None]
    ]  # fmt: skip
    found = measure_cases(names, CONTESTANTS, settings, out, cases="benchmarks.growth")["cases"]
    picture(found, plot)
    fill(page, {"growth": table(found)})


if __name__ == "__main__":
    main()
