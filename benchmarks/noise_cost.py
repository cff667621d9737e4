"""What noise from a keyed stream costs, against torch's generator: `python -m benchmarks.noise_cost`.

Each round times every source once, in turn; the table shows medians, and the best round, which is what a machine with
nothing else to do would take; in seconds, and in CPU seconds of all threads, which leave out what other processes took.
One element is one number of noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import timed_in_turn
from benchmarks.results import FOLDER, question
from dpfunc.noise import add_gaussian
from dpfunc.noise._streams import TILE, secure_normal
from dpfunc.rng import Key, Streams, fold_in, insecure_key
from dpfunc.types import ClippedSum

RESULT = FOLDER / "noise_cost.json"
BASE = "torch.randn float32"
LAYOUTS = {
    "flat, 1e7": {"w": torch.zeros(10**7)},
    "LoRA, 200 x 32768": {f"layer.{i}.lora": torch.zeros(32768) for i in range(200)},
    "LoRA factors": {
        f"{i}.{n}": torch.zeros(shape) for i in range(112) for n, shape in (("A", (8, 2048)), ("B", (2048, 8)))
    },
}


def torch_normal(like: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """One generator for all leaves, which is what training loops do."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(leaf.shape, generator=generator, dtype=dtype) for name, leaf in like.items()}


def words_alone(key: Key, like: Mapping[str, Tensor]) -> None:
    """The AES words that the secure numbers are made of, and nothing else: no way of making numbers is faster."""
    streams = Streams()
    for name, leaf in like.items():
        for first in range(0, leaf.numel(), TILE):
            generator = streams.opened(fold_in(key, "normal", name, first))
            generator.bit_generator.random_raw(min(TILE, leaf.numel() - first))


def sources(like: Mapping[str, Tensor]) -> dict[str, Callable[[], object]]:
    """What is compared; each call has a key of its own, so that no draw is repeated."""
    double = {name: leaf.double() for name, leaf in like.items()}
    clipped = ClippedSum(like, dict.fromkeys(like, "all"), {"all": 1.0})
    keys = (fold_in(insecure_key(0), number) for number in count())
    return {
        BASE: lambda: torch_normal(like, torch.float32),
        "torch.randn float64": lambda: torch_normal(like, torch.float64),
        "AES words alone, 1 thread": lambda: words_alone(next(keys), like),
        "secure float32, 1 thread": lambda: secure_normal(next(keys), like, threads=1),
        "secure float32, 2 threads": lambda: secure_normal(next(keys), like, threads=2),
        "secure float64, 1 thread": lambda: secure_normal(next(keys), double, threads=1),
        "secure float64, 2 threads": lambda: secure_normal(next(keys), double, threads=2),
        "add_gaussian float32": lambda: add_gaussian(clipped, 1.0, next(keys)),
    }


def measure(layout: str, rounds: int, quick: bool) -> dict[str, Any]:
    """A layout: seconds of each source, and the nanoseconds of a number in the best round's CPU time."""
    like = {name: leaf[: 1000 if quick else None] for name, leaf in LAYOUTS[layout].items()}
    elements, found = sum(leaf.numel() for leaf in like.values()), timed_in_turn(sources(like), rounds, BASE)
    for record in found.values():
        record |= {"status": "ok", "best_cpu_ns_per_element": 1e9 * record["cpu"]["best_seconds"] / elements}
    return {"elements": elements, "contestants": found}


main = question(__doc__, RESULT, LAYOUTS, measure, rounds=11, threads=torch.get_num_threads())

if __name__ == "__main__":
    main()
