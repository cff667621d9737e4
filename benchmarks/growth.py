"""Growth of time and memory with the work: `python -m benchmarks.growth`.

Llama-style decoders in which one size grows and the others stay: positions, samples, parameters, rank. At each point
the clipped sum of `auto` and the step without privacy, with LoRA and with all parameters, in interleaved rounds
of one process; the best round counts. Memory is the peak of torch's allocator over the built model. An exponent p says
that cost grows as size^p: the slope of a line through the three largest points, logarithms on both axes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from benchmarks.engines import report
from benchmarks.engines.cases import SEED
from benchmarks.engines.contestants import Contestant, ours, plain
from benchmarks.engines.memory import MIB, allocated
from benchmarks.engines.problem import Problem
from benchmarks.engines.timing import interleaved
from benchmarks.engines.transformer_nets import decoder
from benchmarks.pages import filled, markdown

RESULT = Path(__file__).parent / "results" / "growth.json"
PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
PICTURE = Path(__file__).parent.parent / "docs" / "results" / "growth.png"
ROUNDS = 3
FITTED = 3
TUNINGS = {"LoRA": True, "all parameters": False}
CONTESTANTS = ("plain", "private")


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

    def problem(self, size: int, tuning: str) -> Problem:
        """The model and the batch of one point."""
        numbers = {"vocabulary": 500, **self.fixed, **self.sizes[size]}
        samples, width = numbers.pop("samples"), numbers["width"]
        hidden = 16 * round(width / 6)  # 8 / 3, as in Llama
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(SEED)
            return decoder(samples, hidden=hidden, norm="rms", lora=TUNINGS[tuning], **numbers)


AXES = {
    "T": Axis(
        "positions", {size: {"length": size} for size in (128, 256, 512, 1024, 2048, 4096)},
        {"samples": 2, "layers": 2, "width": 256},
    ),
    "B": Axis(
        "samples", {size: {"samples": size} for size in (1, 4, 16, 64, 256, 1024)},
        {"length": 32, "layers": 2, "width": 128},
    ),
    "P": Axis(
        "parameters of the layers",
        {
            12 * width * width * layers: {"width": width, "layers": layers}
            for width, layers in ((128, 5), (256, 4), (384, 6), (640, 6), (1024, 8), (1536, 11))
        },
        {"samples": 2, "length": 32},
    ),
    "r": Axis(
        "rank", {size: {"rank": size} for size in (1, 4, 16, 64)},
        {"samples": 8, "length": 128, "layers": 4, "width": 384}, ("LoRA",),
    ),
}  # fmt: skip


def measure(problem: Problem, rounds: int) -> dict[str, Any]:
    """Best seconds and peak MiB of both steps."""
    contestants: dict[str, Contestant] = {
        "plain": plain(problem.copy()),
        "private": ours(problem, "auto", "none"),
    }
    seconds = interleaved({name: each.step for name, each in contestants.items()}, rounds)
    found = {}
    for name, each in contestants.items():
        each.clear()
        _, used = allocated(each.step)
        each.clear()
        found[name] = {"best_seconds": min(seconds[name]), "peak_mib": used.peak / MIB}
    return found


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the line through the last points, logarithms on both axes.

    >>> round(exponent([1, 2, 4, 8], [5, 12, 48, 192]), 6)
    2.0
    """
    x, y = ([math.log(number) for number in some[-FITTED:]] for some in (sizes, values))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def curves(found: Mapping[str, Any]) -> dict[tuple[str, str, str, str], tuple[list[int], list[float]]]:
    """(axis, tuning, number, contestant) -> sizes and values."""
    return {
        (axis, tuning, number, who): ([int(size) for size in points], [p[who][number] for p in points.values()])
        for axis, tunings in found.items()
        for tuning, points in tunings.items()
        for number in ("best_seconds", "peak_mib")
        for who in CONTESTANTS
    }


def table(found: Mapping[str, Any]) -> str:
    """A line for each axis and tuning: exponents, and the ratio to the plain step at the smallest and largest size."""
    lines = []
    every = curves(found)
    for axis, tunings in found.items():
        for tuning in tunings:
            line = [AXES[axis].title, tuning]
            sizes = every[axis, tuning, "best_seconds", "plain"][0]
            line.append(f"{sizes[0]:.2g} - {sizes[-1]:.2g}" if sizes[-1] > 1e4 else f"{sizes[0]} - {sizes[-1]}")
            for number in ("best_seconds", "peak_mib"):
                before, private = (every[axis, tuning, number, who][1] for who in CONTESTANTS)
                line += [f"{exponent(sizes, values):.2f}" for values in (before, private)]
                line.append(f"{private[0] / before[0]:.2f} - {private[-1] / before[-1]:.2f}")
            lines.append(line)
    heads = (
        "what grows", "trained", "from - to", "time: plain", "private", "ratio, first - last", "memory: plain",
        "private", "ratio, first - last",
    )  # fmt: skip
    return markdown(heads, lines)


def picture(found: Mapping[str, Any], path: Path) -> None:
    """A row for time and one for memory, a column for each axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(found), 7), layout="constrained")
    grid = figure.subplots(2, len(found), squeeze=False)
    for (axis, tuning, number, who), (sizes, values) in curves(found).items():
        axes = grid[int(number == "peak_mib")][list(found).index(axis)]
        style = {"linestyle": "-" if who == "private" else "--", "marker": "o" if who == "private" else "x"}
        color = f"C{list(TUNINGS).index(tuning)}"
        axes.plot(sizes, values, label=f"{tuning}, {who}", color=color, **style)
        axes.set(xscale="log", yscale="log", xlabel=AXES[axis].title)
        axes.set_ylabel("peak, MiB" if number == "peak_mib" else "a step, s")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


@click.command(help=__doc__.splitlines()[0])
@click.option("--axes", default=",".join(AXES), help="Names with commas.", show_default=True)
@click.option("--points", default=0, type=click.IntRange(0), help="Only so many of the smallest sizes; 0 is all.")
@click.option("--rounds", default=ROUNDS, type=click.IntRange(1), show_default=True)
@click.option("--threads", default=1, type=click.IntRange(1), help="Threads of torch.", show_default=True)
@click.option("--out", default=RESULT, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--page", default=PAGE, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--plot", default=PICTURE, type=click.Path(dir_okay=False, path_type=Path))
def main(axes: str, points: int, rounds: int, threads: int, out: Path, page: Path, plot: Path) -> None:
    """Measure, and write the result file after each point; then the picture and the table."""
    torch.set_num_threads(threads)
    found: dict[str, Any] = {}
    result = {"machine": report.machine(threads, "cpu"), "versions": report.versions(), "rounds": rounds, "axes": found}
    for name in axes.split(","):
        for tuning in AXES[name].tunings:
            for size in list(AXES[name].sizes)[: points or None]:
                record = report.rounded(measure(AXES[name].problem(size, tuning), rounds))
                found.setdefault(name, {}).setdefault(tuning, {})[str(size)] = record
                report.write(result, out)
                Console().print(name, tuning, size, record)
    written = json.loads(out.read_text())["axes"]
    picture(written, plot)
    page.write_text(filled(page.read_text(), {"growth": table(written)}))


if __name__ == "__main__":
    main()
