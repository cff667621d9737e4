"""How well the engine `auto` keeps rows apart, and what it takes in one pass: `python -m benchmarks.rows`.

Tables: the losses of tests/_support/isolation, which mix rows or seem to, over several steps; the museum of faults of
other libraries; random losses of tests/_support/row_programs.py, whose rows must not depend on those beside them; how
far one record moves their clipped sums, beside the sensitivity; and, with --survey, a file of
`python -m benchmarks.survey --out FILE`.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from rich.console import Console
from rich.progress import track
from torch.utils import _pytree as pytree

from benchmarks.measure import ROOT
from benchmarks.results import FOLDER, printed, write
from dpfunc import clipped_grad
from dpfunc.clipping import Flat
from dpfunc.engines import auto
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.rng import insecure_key

sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "tests/_support", "tests/engines")]
RESULT = FOLDER / "rows.json"
MUSEUM = "tests/**/test_museum*.py"
PROCESSES = 16
T, R = TypeVar("T"), TypeVar("R")


class Told(logging.Handler):
    """What the engine says of how it computes a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def mapped(function: Callable[[T], R], items: Sequence[T], what: str, console: Console, device: str) -> Iterable[R]:
    """Apply a function to each; on a GPU in a process of its own each, since one error there ends all that follows."""
    with ExitStack() as stack:
        apply: Callable[..., Iterable[R]] = map
        if device != "cpu":
            apply = stack.enter_context(get_context("fork").Pool(PROCESSES, maxtasksperchild=1)).imap
        yield from track(apply(function, items), what, total=len(items), console=console)


def judged_loss(name: str, device: str) -> tuple[str, bool, list[str]]:
    """The worst outcome of a loss that mixes rows, or seems to; whether it went by the loop; what failed."""
    from isolation.truth import outcomes, tolerance_of
    from isolation.zoo import ZOO

    loss, told = ZOO[name], Told()
    logging.getLogger("dpfunc").addHandler(told)
    said = [outcome.told(tolerance_of(loss)) for outcome in outcomes(loss, "auto", device)]
    logging.getLogger("dpfunc").removeHandler(told)
    worst = next(word for word in ("WRONG", "RAISED", "refused", "equal") if any(word in text for text in said))
    looped = loss.honest and any("engine loop" in message for message in told.messages)
    failed = [f"{name}: {text}" for text in said if text.startswith(("WRONG", "RAISED"))]
    return f"{'honest' if loss.honest else 'mixing'}, {worst}", looped, failed


def isolation(every: int, console: Console, device: str) -> dict[str, Any]:
    """Outcomes of losses that mix rows, or seem to; and which honest ones are computed by the loop."""
    from isolation.zoo import ZOO

    names = list(ZOO)[::every]
    words, by_loop, failed = zip(
        *mapped(partial(judged_loss, device=device), names, "losses", console, device), strict=True
    )
    looped = [name for name, by in zip(names, by_loop, strict=True) if by]
    counts = dict(sorted(Counter(words).items()))
    return {
        **counts,
        "honest, by the loop": len(looped),
        "names": looped,
        "failed": [text for each in failed for text in each],
    }


def judged_programs(seeds: Sequence[int], device: str) -> list[tuple[str, float]]:
    from test_row_programs import judged

    return [judged(seed, device) for seed in seeds]


def parts(count: int, first: int) -> list[range]:
    """Seeds in tens."""
    return [range(start, min(start + 10, first + count)) for start in range(first, first + count, 10)]


def programs(count: int, first: int, console: Console, device: str) -> dict[str, Any]:
    """Outcomes of random losses, and the largest difference of a row from itself beside others and alone."""
    counts: Counter[str] = Counter()
    worst = 0.0
    for found in mapped(partial(judged_programs, device=device), parts(count, first), "programs", console, device):
        for word, off in found:
            counts[word if off < 1e-8 else "WRONG"] += 1
            worst = max(worst, off)
    return {**counts, "largest difference": worst}


def museum() -> dict[str, Any]:
    """Outcomes of the tests of faults that other libraries have."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *map(str, sorted(ROOT.rglob(MUSEUM)))]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?)", text)}


def moved_by(seeds: Sequence[int], device: str) -> list[tuple[str, float]]:
    """How far a record moves the clipped sum of random losses, of the sensitivity, and in which way it changes."""
    from row_programs import batch_of, made

    found: list[tuple[str, float]] = []
    on_device = partial(pytree.tree_map, lambda leaf: leaf.to(device))
    for seed in seeds:
        program, (params, batch) = made(seed), on_device(batch_of(seed))
        (_, others), row = on_device(batch_of(seed + 10**6)), seed % len(batch)
        left = torch.arange(len(batch), device=device) != row
        replaced = torch.where(left[:, None], batch.flatten(1), others.flatten(1)).reshape(batch.shape)
        options = {"clip": Flat(10.0 ** (seed % 5 - 3)), "engine": auto(), "key": insecure_key(seed)}
        # a removed record leaves the place of the others as it is: their random numbers are those of their places
        ways = {"removed": (batch, left, 1), "replaced": (replaced, left | True, 2)}
        try:
            with nullcontext() if device == "cpu" else torch.device(device):
                whole, _ = clipped_grad(program, params, batch, **options)
                for way, (rows, mask, times) in ways.items():
                    other, _ = clipped_grad(program, params, rows, **options, mask_B=mask)
                    off = sum(float((whole.sums[n] - other.sums[n]).double().square().sum()) for n in params) ** 0.5
                    found.append((way, off / (times * whole.sensitivity)))
        except (UnsupportedModel, InvalidArgument):
            found.append(("refused", 0.0))
    return found


def moved(count: int, first: int, console: Console, device: str) -> dict[str, Any]:
    """How far one record moves the clipped sum of a random loss: removed, and replaced; of the sensitivity."""
    counts: Counter[str] = Counter()
    worst = {"removed": 0.0, "replaced": 0.0}
    for found in mapped(partial(moved_by, device=device), parts(count, first), "records", console, device):
        for way, share in found:
            counts[way if way == "refused" else f"{way}, {'within' if share <= 1 else 'BEYOND'}"] += 1
            if way in worst:
                worst[way] = max(worst[way], share)
    return {**counts, **{f"largest, {way}": value for way, value in worst.items()}}


def survey(path: Path) -> dict[str, Any]:
    """Engines of the models of a survey, the largest difference, and why some are not in one pass or groups."""
    rows = [row for row in json.loads(path.read_text())["cases"] if "engine" in row]
    slow = {row["case"]: row["reason"][:160] for row in rows if row["engine"] in ("loop", "refused")}
    largest = max(row.get("parity") or 0.0 for row in rows)
    return {**Counter(row["engine"] for row in rows), "largest difference": largest, "reasons": slow}


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--programs", "count", default=5000, type=click.IntRange(1), help="Random losses.")
@click.option("--first", default=10_000, type=click.IntRange(0), help="Their first seed.")
@click.option("--every", default=1, type=click.IntRange(1), help="Only every so many of the losses of the tests.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]), help="The truth is always of the CPU.")
@click.option("--survey", "path", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="A survey's file.")
@click.option("--out", default=RESULT, type=click.Path(path_type=Path, dir_okay=False), help="The result file.")
def main(count: int, first: int, every: int, device: str, path: Path | None, out: Path) -> None:
    warnings.simplefilter("ignore")  # of torch, about the losses
    logging.getLogger("dpfunc").propagate = False
    torch.set_num_threads(1)
    console = Console()
    found = {
        "losses": isolation(every, console, device), **({"museum": museum()} if device == "cpu" else {}),
        "programs": programs(count, first, console, device),
        "records": moved(max(1, count // 10), first, console, device), **({"survey": survey(path)} if path else {}),
    }  # fmt: skip
    for title, values in found.items():
        cells = {n: json.dumps(v, indent=1) if isinstance(v, (list, dict)) else v for n, v in values.items()}
        printed((title, "count"), cells.items())
    write(out, found)


if __name__ == "__main__":
    main()
