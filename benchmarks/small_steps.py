"""Steps of a few milliseconds, where Python counts: `python -m benchmarks.small_steps`.

A step without privacy and clipped sums of small models, in CPU seconds of one thread; the best of the rounds. What one
more use of a parameter takes is a step of a chain of tiny linear layers, less the plain step, by the number of layers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from benchmarks.engines.cases import CASES, Case
from benchmarks.engines.problem import Problem, classification
from benchmarks.engines.runner import Settings, measure_cases, measures
from benchmarks.results import FOLDER, markdown, write

RESULT = FOLDER / "small_steps.json"
CHAIN = 50
ENGINES = ("plain", "auto", "captured")
HEADS = ("case", "plain step, ms", "default engine, ms", "ratio", "captured, ms", "ratio")


class Recurrent(nn.Module):
    """An LSTM over sequences (B, T, 32) and a head; packed, it reads until the first position of zeros."""

    def __init__(self, *, bidirectional: bool, packed: bool) -> None:
        super().__init__()
        self.layer = nn.LSTM(32, 64, batch_first=True, bidirectional=bidirectional)
        self.head, self.packed = nn.Linear(64 * (1 + bidirectional), 10), packed

    def forward(self, x_BTd: Tensor) -> Tensor:
        """The head on the mean output, or on the last state of each sample."""
        if not self.packed:
            return self.head(self.layer(x_BTd)[0].mean(1))
        lengths_B = x_BTd.ne(0).any(-1).sum(1)
        packed = pack_padded_sequence(x_BTd, lengths_B, batch_first=True, enforce_sorted=False)
        return self.head(torch.cat(tuple(self.layer(packed)[1][0]), 1))


def recurrent(batch_size: int, *, bidirectional: bool = False, packed: bool = False) -> Problem:
    """Random sequences of 24 positions, or of 4 to 24."""
    module, inputs = Recurrent(bidirectional=bidirectional, packed=packed), torch.randn(batch_size, 24, 32)
    if packed:
        inputs = inputs * (torch.arange(24) < torch.randint(4, 25, (batch_size, 1)))[..., None]
    targets = torch.randint(10, (batch_size,))
    return Problem(module, inputs, targets, classification, no_jax_model="an LSTM, which no case for JAX has")


def chain(batch_size: int) -> Problem:
    """Tiny linear layers, which keep the size of what goes through them."""
    layers = [nn.Linear(4, 4, bias=False) for _ in range(CHAIN)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    module, targets = nn.Sequential(*layers, nn.Linear(4, 10, bias=False)), torch.randint(10, (batch_size,))
    return Problem(module, torch.randn(batch_size, 4), targets, classification, no_jax_model="a chain of layers")


def lstm(title: str, **sizes: Any) -> Case:
    return Case(title, recurrent, 32, sizes, sizes)


ALL_CASES = {
    "perceptron, 3 layers": CASES["perceptron"],
    "transformer, 2 layers, LoRA": CASES["small"],
    "LSTM": lstm("LSTM and a linear layer"),
    "LSTM in both directions": lstm("the same in both directions", bidirectional=True),
    "LSTM in both directions, packed": lstm("the same, packed", bidirectional=True, packed=True),
    "chain": Case(f"{CHAIN + 1} tiny linear layers", chain, 8, {}, {}),
}


def best(case: Mapping[str, Any], who: str) -> float:
    """CPU seconds of a step of an engine, or without privacy."""
    return case["contestants"][who]["cpu"]["best_seconds"]


def section(found: Mapping[str, Any]) -> str:
    """The table of docs/performance.md, and what a use of a parameter takes."""
    cells = []
    for name, case in found.items():
        if name != "chain":
            plain, *private = (best(case, who) for who in ENGINES)
            times = [[f"{1e3 * seconds:.1f}", f"{seconds / plain:.1f}"] for seconds in private]
            cells.append([name, f"{1e3 * plain:.1f}", *times[0], *times[1]])
    use = 1e6 * found["chain"]["seconds_a_use"]
    line = f"One more use of a parameter takes {use:.0f} microseconds there, norm and sum included."
    return markdown(HEADS, cells) + "\n\n" + textwrap.fill(line, 130)


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@measures(RESULT, rounds=30)
def main(settings: Settings, out: Path) -> None:
    found = measure_cases(list(ALL_CASES), list(ENGINES), settings, out, cases="benchmarks.small_steps")
    long = found["cases"]["chain"]
    long["seconds_a_use"] = (best(long, "auto") - best(long, "plain")) / (CHAIN + 1)
    write(out, found)


if __name__ == "__main__":
    main()
