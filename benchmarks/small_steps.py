"""Steps of a few milliseconds, where Python counts: `python -m benchmarks.small_steps`.

Each round takes, in turn, a step without privacy and a clipped sum, of small models. Seconds are processor seconds of
one thread, and the best of the rounds. Last come the seconds that one more use of a parameter takes (a step of a chain
of tiny linear layers, less the plain step, by the number of layers).
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import dpfunc
from benchmarks.engines import report
from benchmarks.engines.transformer_nets import decoder
from dpfunc.clipped import make_clipped_grad
from dpfunc.clipping import Flat

RESULT = Path(__file__).parent / "results" / "small_steps.json"
CHAIN = 50
STEPS = 10
FUNCTIONS = 1000


class Recurrent(nn.Module):
    """An LSTM over sequences (B, T, 32), packed if lengths are given, and a head."""

    def __init__(self, *, bidirectional: bool = False) -> None:
        super().__init__()
        self.layer = nn.LSTM(32, 64, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(64 * (1 + bidirectional), 10)

    def forward(self, x_BTd: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """The head on the mean output, or on the last state of each sample."""
        if lengths_B is None:
            return self.head(self.layer(x_BTd)[0].mean(1))
        packed = pack_padded_sequence(x_BTd, lengths_B, batch_first=True, enforce_sorted=False)
        return self.head(torch.cat(tuple(self.layer(packed)[1][0]), 1))


class Case(NamedTuple):
    """A module, the arguments that it is called with, and a target for each sample."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    targets: Tensor
    losses: Callable[[Tensor, Tensor], Tensor] = lambda output, targets: F.cross_entropy(
        output, targets, reduction="none"
    )


def _perceptron() -> Case:
    layers = (nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return Case(nn.Sequential(*layers), (torch.randn(64, 256),), torch.randint(10, (64,)))


def _recurrent(*, bidirectional: bool = False, packed: bool = False) -> Case:
    lengths = (torch.randint(4, 25, (32,)),) if packed else ()
    module = Recurrent(bidirectional=bidirectional)
    return Case(module, (torch.randn(32, 24, 32), *lengths), torch.randint(10, (32,)))


def _transformer() -> Case:
    sizes = {"layers": 2, "width": 64, "hidden": 128, "length": 32, "vocabulary": 128, "norm": "rms", "lora": True}
    problem = decoder(8, **sizes)
    return Case(problem.module, (problem.inputs,), problem.targets, problem.losses)


def _chain() -> Case:
    layers = (nn.Linear(4, 4, bias=False) for _ in range(CHAIN))
    return Case(nn.Sequential(*layers, nn.Linear(4, 10, bias=False)), (torch.randn(8, 4),), torch.randint(10, (8,)))


CASES: dict[str, Callable[[], Case]] = {
    "perceptron, 3 layers": _perceptron,
    "transformer, 2 layers, LoRA": _transformer,
    "LSTM": _recurrent,
    "LSTM in both directions": lambda: _recurrent(bidirectional=True),
    "LSTM in both directions, packed": lambda: _recurrent(bidirectional=True, packed=True),
}


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Seconds of a plain step and of a clipped sum, and their ratio."""
    forward, params = dpfunc.functionalize(case.module)
    trained = [param for param in case.module.parameters() if param.requires_grad]

    def plain() -> object:
        return torch.autograd.grad(case.losses(case.module(*case.inputs), case.targets).mean(), trained)

    def loss_fn(params: dpfunc.types.Params, batch: dpfunc.types.Batch) -> Tensor:
        return case.losses(forward(params, *batch[0]), batch[1])

    clipped_grad = make_clipped_grad(loss_fn, Flat(1.0), engine=dpfunc.engines.auto())
    steps: dict[str, Callable[[], object]] = {
        "plain": plain, "private": lambda: clipped_grad(params, (case.inputs, case.targets))
    }  # fmt: skip
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds + 1):  # the first round is never the best: it warms up
        for kind, step in steps.items():
            best[kind] = min(best[kind], seconds(step, STEPS))
    return {
        **{kind: round(value, 6) for kind, value in best.items()},
        "ratio": round(best["private"] / best["plain"], 2),
    }


def seconds(step: Callable[[], object], number: int) -> float:
    """Processor seconds of a step: the mean of some calls."""
    start = time.process_time()
    for _ in range(number):
        step()
    return (time.process_time() - start) / number


def of_a_function(rounds: int) -> float:
    """Seconds that a private step adds to a torch function that takes no parameter."""

    def losses(calls: int, params: dpfunc.types.Params, x: Tensor) -> Tensor:
        for _ in range(calls):
            x.detach()
        return (x * params["w"]).sum(1)

    params, x, engine = {"w": torch.ones(4)}, torch.ones(8, 4), dpfunc.engines.auto()
    few, many = (functools.partial(losses, calls) for calls in (0, FUNCTIONS))
    private = [min(seconds(lambda f=f: engine(f, params, x), STEPS) for _ in range(rounds)) for f in (few, many)]
    plain = [min(seconds(lambda f=f: f(params, x), STEPS) for _ in range(rounds)) for f in (few, many)]
    return (private[1] - private[0] - plain[1] + plain[0]) / FUNCTIONS


@click.command(help=__doc__.splitlines()[0])
@click.option("--rounds", default=9, type=click.IntRange(1), show_default=True)
@click.option("--out", default=RESULT, type=click.Path(dir_okay=False, path_type=Path), show_default=True)
def main(rounds: int, out: Path) -> None:
    """Measure, print and write."""
    torch.set_num_threads(1)
    console = Console()
    found: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(20)
        for name, build in CASES.items():
            found[name] = measure(build(), rounds)
            console.print(f"{name:34}", *(f"{kind} {value * 1e3:.2f} ms" for kind, value in found[name].items()
                                          if kind != "ratio"), f"ratio {found[name]['ratio']:.2f}")  # fmt: skip
        chain = measure(_chain(), rounds)
    use = (chain["private"] - chain["plain"]) / (CHAIN + 1)
    console.print(f"a use {use * 1e6:.0f} us")
    machine = report.machine(torch.get_num_threads(), "cpu")
    result = {"machine": machine, "rounds": rounds, "cases": found, "seconds_a_use": round(use, 8)}  # fmt: skip
    out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"Written to {out}")


if __name__ == "__main__":
    main()
