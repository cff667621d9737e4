"""Tests and benchmarks that need a GPU, in at most ten minutes: `make gpu`, or `python -m benchmarks.gpu`.

Without a GPU nothing is run, and the exit code is 2. With one: the tests that are marked `cuda`, whether rows are kept
apart (`benchmarks.rows`), what noise costs from both sources, and steps in three precisions and batch sizes
(`benchmarks.gpu_steps`). The results are JSON files, and a page made of them. A part that would take longer than the
time that is left is stopped; the file says so. The exit code is 1 if a part failed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks import gpu_steps
from benchmarks.measure import ROOT, timed_in_turn
from benchmarks.results import DOCS, FOLDER, machine, markdown, read, versions, write
from dpfunc.noise._streams import Source, standard_normal
from dpfunc.rng import fold_in, insecure_key

LIMIT_SECONDS = 600.0
NO_GPU = 2
STEPS_SECONDS = 450  # in which combinations of steps begin; the last ones are left out, and the page says so


def commands(results: Path, pages: Path) -> dict[str, list[str]]:
    python = sys.executable
    steps = ["--device", "cuda", "--seconds", str(STEPS_SECONDS), "--out", str(results / "gpu_steps.json")]
    # only files with such tests: to collect all takes as long as these tests
    files = [
        str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "from devices import" in file.read_text()
    ]
    rows = ["--device", "cuda", "--programs", "200", "--out", str(results / "rows_gpu.json")]
    return {
        "tests": [python, "-m", "pytest", "-m", "cuda", *files],
        "rows": [python, "-m", "benchmarks.rows", *rows],
        "steps": [python, "-m", "benchmarks.gpu_steps", *steps],
    }


def run(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run a program, for so many seconds at most: its status and the seconds that it took."""
    start = time.monotonic()
    try:
        code = subprocess.run(command, cwd=ROOT, timeout=max(seconds, 1.0), check=False).returncode
        status = "ok" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        status = "stopped: the time was over"
    return {"status": status, "seconds": time.monotonic() - start}


def noise(device: str, numbers: Sequence[int] = (10**5, 10**7), rounds: int = 11) -> list[dict[str, Any]]:
    """Seconds of noise on a device from each source: drawn by the host and copied, or drawn by the GPU."""
    sources: tuple[Source, ...] = ("secure", "device") if device.startswith("cuda") else ("secure",)
    keys, rows = (fold_in(insecure_key(0), number) for number in count()), []
    for size in numbers:
        like = {"w": torch.zeros(size, device=device)}
        draws = {
            each: partial(lambda like, each: standard_normal(next(keys), like, each), like, each) for each in sources
        }
        for source, found in timed_in_turn(draws, rounds, device=device).items():
            rows.append({"numbers": size, "source": source, "best_ns": 1e9 * found["time"]["best_seconds"] / size})
    return rows


def page(report: dict[str, Any], steps: dict[str, Any], rows: dict[str, Any]) -> str:
    parts = "; ".join(f"{name}: {part['status']}" for name, part in report["parts"].items())
    costs = [[f"{row['numbers']:,}", row["source"], f"{row['best_ns']:.2f}"] for row in report["noise"]]
    found = [
        (f"{what}, {name}", value)
        for what in ("losses", "programs", "records")
        for name, value in rows.get(what, {}).items()
    ]
    numbers = [(name, value) for name, value in found if isinstance(value, (int, float))]
    left_out = "; ".join(steps.get("left_out", [])) or "none"
    return f"""# On a GPU

{report["machine"]["gpu"]}; {", ".join(f"{name} {number}" for name, number in report["versions"].items())}. \
`make gpu` writes this page. Parts: {parts}.

A step in milliseconds, with its peak memory over the model in MiB and the operations that it launches: median of up \
to {gpu_steps.ROUNDS} rounds, one thread of torch. `float32` is without TF32, `bfloat16` is autocast. Sums of \
{min(gpu_steps.BATCHES)} rows are compared with single samples in float32 first. `plain`: without privacy; `whole`: \
with noise and an optimizer, noise drawn by the host (`secure`) or by the GPU (`noise_source="device"`). Left out, \
since the time was over: {left_out}.

{gpu_steps.table(steps)}

## Noise

{markdown(("numbers of noise", "source", "ns for each"), costs)}

## Rows kept apart

Outcomes of the losses and programs that a CPU is asked, too ([losses that mix samples](isolation.md)); a wrong one \
would be in the list. `RAISED` is an error of torch: what exists on a CPU only (numpy, `apply_`), and an index that a \
GPU finds too late to go on.

{markdown(("what", "count"), numbers)}
"""


def everything(results: Path, pages: Path, runner: Callable[[Sequence[str], float], dict[str, Any]] = run) -> int:
    """Run all parts, write the results; the exit code."""
    end, parts = time.monotonic() + LIMIT_SECONDS, {}
    about = {"machine": machine(torch.get_num_threads(), "cuda"), "versions": versions()}
    report: dict[str, Any] = {**about, "parts": parts, "noise": noise("cuda")}
    for name, command in commands(results, pages).items():
        parts[name] = runner(command, end - time.monotonic())
        write(results / "gpu.json", report)
    pages.mkdir(parents=True, exist_ok=True)
    files = ("gpu", "gpu_steps", "rows_gpu")
    (pages / "gpu.md").write_text(page(*(read(results / f"{name}.json") for name in files)))
    return 0 if all(part["status"] == "ok" for part in parts.values()) else 1


@click.command(help=__doc__.splitlines()[0])
@click.option("--results", default=FOLDER, type=click.Path(file_okay=False, path_type=Path), help="For JSON files.")
@click.option("--pages", default=DOCS / "results", type=click.Path(file_okay=False, path_type=Path))
def main(results: Path, pages: Path) -> None:
    if not torch.cuda.is_available():
        build = f"torch {torch.__version__}" + ("" if torch.version.cuda else ", which is built without CUDA")
        where = "Run this where torch.cuda.is_available() is true, with a torch that is built for CUDA."
        click.echo(f"No GPU was found by {build}, so nothing was run. {where}", err=True)
        sys.exit(NO_GPU)
    sys.exit(everything(results, pages))


if __name__ == "__main__":
    main()
