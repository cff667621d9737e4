"""How well the engine `auto` keeps rows apart, on a CPU or on a GPU: `python -m benchmarks.rows`.

The losses of tests/_support/isolation, which mix rows or seem to, over several steps; random losses of
tests/_support/row_programs.py, whose rows must not depend on those beside them; and how far one record moves their
clipped sums, removed or replaced, of the sensitivity.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from torch.utils import _pytree as pytree

from benchmarks.measure import ROOT
from benchmarks.results import FOLDER, printed, write
from dpfunc.clipped import clipped_grad
from dpfunc.clipping import Flat
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.rng import insecure_key

PROCESSES, TOGETHER = 16, 10
Found = list[tuple[str, float]]  # outcome, perhaps with what failed after a colon; and how far off


def losses(names: Sequence[str], device: str) -> Found:
    """The worst outcome of losses that mix rows, or seem to; a failure with its name."""
    from isolation.truth import outcomes, tolerance_of
    from isolation.zoo import ZOO

    found = []
    for name in names:
        loss = ZOO[name]
        said = [outcome.told(tolerance_of(loss)) for outcome in outcomes(loss, "auto", device)]
        words = ("WRONG", "RAISED", "refused", "equal")
        start, text = next((word, text) for word in words for text in said if text.startswith(word))
        failed = f": {name}: {text}" if start in words[:2] else ""
        found.append((f"{'honest' if loss.honest else 'mixing'}, {start}{failed}", 0.0))
    return found


def programs(seeds: Sequence[int], device: str) -> Found:
    """Random losses: the largest difference of a row from itself beside others and alone."""
    from test_row_programs import judged

    found = [judged(seed, device) for seed in seeds]
    return [(word if off < 1e-8 else "WRONG", off) for word, off in found]


def records(seeds: Sequence[int], device: str) -> Found:
    """How far a record moves the clipped sum of random losses, of the sensitivity, and in which way it changes."""
    from devices import default_of
    from row_programs import batch_of, made

    found: Found = []
    on_device = partial(pytree.tree_map, lambda leaf: leaf.to(device))
    for seed in seeds:
        program, (params, batch) = made(seed), on_device(batch_of(seed))
        (_, others), row = on_device(batch_of(seed + 10**6)), seed % len(batch)
        left = torch.arange(len(batch), device=device) != row
        options = {"clip": Flat(10.0 ** (seed % 5 - 3)), "key": insecure_key(seed)}
        # a removed record leaves the place of the others as it is: their random numbers are those of their places
        ways = {"removed": (batch, left, 1), "replaced": (torch.where(left[:, None], batch, others), left | True, 2)}
        try:
            with default_of(device):
                whole, _ = clipped_grad(program, params, batch, **options)
                for way, (rows, mask, times) in ways.items():
                    other, _ = clipped_grad(program, params, rows, **options, mask_B=mask)
                    off = sum(float((whole.sums[n] - other.sums[n]).double().square().sum()) for n in params) ** 0.5
                    share = off / (times * whole.sensitivity)
                    found.append((f"{way}, {'within' if share <= 1 else 'BEYOND'}", share))
        except (UnsupportedModel, InvalidArgument):
            found.append(("refused", 0.0))
    return found


def counted(judge: Any, items: Sequence[Any], console: Console, device: str) -> dict[str, Any]:
    """Of each outcome the count and the largest difference; what failed.

    On a GPU in processes that end after a few items, since one error there ends all that follows.
    """
    size = 1 if judge is losses else TOGETHER
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    counts, largest, failed = Counter[str](), dict[str, float](), []
    with ExitStack() as stack:
        apply: Any = map
        if device != "cpu":
            apply = stack.enter_context(get_context("fork").Pool(PROCESSES, maxtasksperchild=1)).imap
        for part in track(apply(partial(judge, device=device), parts), judge.__name__, len(parts), console=console):
            for outcome, off in part:
                word, _, told = outcome.partition(": ")
                counts[word] += 1
                largest[f"largest, {word}"] = max(largest.get(f"largest, {word}", 0.0), off)
                failed += [told] if told else []
    found = {**dict(sorted(counts.items())), **{name: off for name, off in largest.items() if off}}
    return {**found, "failed": failed} if failed else found


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--programs", "count", default=5000, type=click.IntRange(1), help="Random losses.")
@click.option("--first", default=10_000, type=click.IntRange(0), help="Their first seed.")
@click.option("--every", default=1, type=click.IntRange(1), help="Only every so many of the losses of the tests.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]), help="The truth is always of the CPU.")
@click.option("--out", default=FOLDER / "rows.json", type=click.Path(path_type=Path, dir_okay=False))
def main(count: int, first: int, every: int, device: str, out: Path) -> None:
    sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "tests/_support", "tests/engines")]
    from isolation.zoo import ZOO

    warnings.simplefilter("ignore")  # of torch, about the losses
    logging.disable(logging.WARNING)  # how the engine computes them
    torch.set_num_threads(1)
    seeds, console, found = range(first, first + count), Console(), {}
    for judge, items in (losses, list(ZOO)[::every]), (programs, seeds), (records, seeds[: max(1, count // 10)]):
        found[judge.__name__] = counted(judge, items, console, device)
        printed((judge.__name__, "count"), found[judge.__name__].items())
        write(out, found)


if __name__ == "__main__":
    main()
