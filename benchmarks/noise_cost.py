"""What noise from a keyed stream costs, against torch's generator: `python benchmarks/noise_cost.py`.

Each round times every source once, in turn, so that a slow moment of the machine hits all of them; the table shows
medians, and the best round, which is what a machine with nothing else to do would take; in seconds, and in CPU seconds
of all threads, which leave out what other processes took. One element is one number of noise. The machine's load at the
start is in the result file: threads gain nothing where no core is free.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import randomgen
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dpfunc.noise import add_gaussian
from dpfunc.noise.streams import secure_normal
from dpfunc.noise.tiles import TILE
from dpfunc.noise.ziggurat import words_for
from dpfunc.rng import Key, fold_in, insecure_key, stream
from dpfunc.types import ClippedSum

ROUNDS = 11
KEY = insecure_key(0)
LAYOUTS = {
    "flat, 1e7": {"w": torch.zeros(10**7)},
    "LoRA, 200 x 32768": {f"layer.{i}.lora": torch.zeros(32768) for i in range(200)},
}
RESULT = Path(__file__).parent / "results" / "noise_cost.json"


def torch_normal(like: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """One generator for all leaves, which is what training loops do."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(leaf.shape, generator=generator, dtype=dtype) for name, leaf in like.items()}


def tile_streams(key: Key, like: Mapping[str, Tensor]) -> Iterator[tuple[numpy.random.Generator, int]]:
    """A stream for each tile of the flattened leaves, and how many numbers the tile has."""
    for name, leaf in like.items():
        for first in range(0, leaf.numel(), TILE):
            yield stream(fold_in(key, "normal", name, first)), min(TILE, leaf.numel() - first)


def words_alone(key: Key, like: Mapping[str, Tensor]) -> None:
    """The AES words that the secure numbers are made of, and nothing else: no way of making numbers is faster."""
    for generator, size in tile_streams(key, like):
        generator.bit_generator.random_raw(words_for(size))


def by_numpy(key: Key, like: Mapping[str, Tensor]) -> None:
    """The same numbers by numpy's ziggurat, which goes from word to word."""
    for generator, size in tile_streams(key, like):
        generator.standard_normal(size).astype(numpy.float32)


def sources(like: Mapping[str, Tensor]) -> dict[str, Callable[[int], object]]:
    """What is compared; each takes the number of the round, so that no draw is repeated."""
    double = {name: leaf.double() for name, leaf in like.items()}
    clipped = ClippedSum(like, dict.fromkeys(like, "all"), {"all": 1.0})
    return {
        "torch.randn float32": lambda i: torch_normal(like, torch.float32),
        "torch.randn float64": lambda i: torch_normal(like, torch.float64),
        "AES words alone, 1 thread": lambda i: words_alone(fold_in(KEY, i), like),
        "AES and numpy's ziggurat, 1 thread": lambda i: by_numpy(fold_in(KEY, i), like),
        "secure float32, 1 thread": lambda i: secure_normal(fold_in(KEY, i), like, threads=1),
        "secure float32, 2 threads": lambda i: secure_normal(fold_in(KEY, i), like, threads=2),
        "secure float64, 1 thread": lambda i: secure_normal(fold_in(KEY, i), double, threads=1),
        "secure float64, 2 threads": lambda i: secure_normal(fold_in(KEY, i), double, threads=2),
        "add_gaussian float32": lambda i: add_gaussian(clipped, 1.0, fold_in(KEY, i)),
    }


def measure(like: Mapping[str, Tensor]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The seconds of each source in each round, and the CPU seconds."""
    contestants = sources(like)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    cpu: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(ROUNDS + 1):
        for name, draw in contestants.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            draw(number)
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - start_cpu)
    return seconds, cpu


def _three(seconds: list[float], cpu: list[float]) -> tuple[float, float, float]:
    """Median, best, and best of the CPU seconds."""
    return statistics.median(seconds), min(seconds), min(cpu)


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    info = Path("/proc/cpuinfo")
    models = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "randomgen": randomgen.__version__,
    }


def main() -> None:
    """Measure, write the result file, print the table."""
    report: dict[str, Any] = {"machine": machine(), "rounds": ROUNDS, "layouts": {}}
    console = Console()
    for layout, like in LAYOUTS.items():
        elements = sum(leaf.numel() for leaf in like.values())
        seconds, cpu = measure(like)
        columns = ("median ns", "best ns", "best CPU ns", "x torch float32, median", "best", "best CPU")
        table = Table("source", *columns, title=f"{layout}: {elements} elements")
        rows = {}
        bases = _three(seconds["torch.randn float32"], cpu["torch.randn float32"])
        for name in seconds:
            found = _three(seconds[name], cpu[name])
            each = [1e9 * value / elements for value in found]
            ratios = [value / base for value, base in zip(found, bases, strict=True)]
            rows[name] = {
                "median_seconds": round(found[0], 6),
                "best_seconds": round(found[1], 6),
                "best_cpu_seconds": round(found[2], 6),
                "median_ns_per_element": round(each[0], 3),
                "best_ns_per_element": round(each[1], 3),
                "best_cpu_ns_per_element": round(each[2], 3),
                "times_torch_float32": round(ratios[0], 3),
                "best_times_torch_float32": round(ratios[1], 3),
                "best_cpu_times_torch_float32": round(ratios[2], 3),
            }
            table.add_row(name, *(f"{cell:.2f}" for cell in (*each, *ratios)))
        report["layouts"][layout] = {"elements": elements, "sources": rows}
        console.print(table)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
