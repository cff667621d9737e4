"""What parts of a step cost on this machine: noise, norms, an all-reduce, the checksum, the draw of a batch."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.scaling.allreduce import all_reduce_seconds
from benchmarks.scaling.memory import norm_operations
from dpfunc._utils.digests import checksum
from dpfunc.engines.per_sample import Outer
from dpfunc.noise.streams import secure_normal
from dpfunc.rng import fold_in, insecure_key
from dpfunc.sampling import Poisson

KEY = insecure_key(0)
ROUNDS = 11
DATA_SETS = (10**6, 10**7, 10**8, 10**9)
EXPECTED_BATCH = 4096
# positions, outputs, inputs of one sample's matrix; the first has its norm from the factors, the second formed
MATRICES = ((128, 2048, 2048), (1024, 1024, 1024))
SAMPLES = 4


def timed(step: Callable[[int], object], rounds: int = ROUNDS) -> list[float]:
    """Seconds of each round, after one that warms up; the step is told the number of the round."""
    seconds = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def rate(seconds: Sequence[float], amount: float) -> dict[str, float]:
    """Median and best seconds, and what is done in a second at the median."""
    median = statistics.median(seconds)
    return {"median_seconds": median, "best_seconds": min(seconds), "per_second": amount / median}


def noise(numbers: int, rounds: int, threads: Sequence[int] = (1, 2)) -> dict[str, dict[str, float]]:
    """Float32 numbers from the keyed stream, by threads; a second's numbers."""
    like = {"w": torch.zeros(numbers)}

    def drawn(count: int) -> dict[str, float]:
        return rate(timed(lambda number: secure_normal(fold_in(KEY, number), like, threads=count), rounds), numbers)

    return {str(count): drawn(count) for count in threads}


def products(rounds: int, matrices: Sequence[tuple[int, int, int]] = MATRICES) -> list[dict[str, Any]]:
    """Norms and weighted sums of a matrix's per-sample gradients, and a plain product of that size; operations."""
    return [_product(*matrix, rounds) for matrix in matrices]


def _product(positions: int, outputs: int, inputs: int, rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    a_BTp = torch.randn(SAMPLES, positions, outputs, generator=generator)
    b_BTd = torch.randn(SAMPLES, positions, inputs, generator=generator)
    flat_p, flat_d = a_BTp.flatten(0, 1).T.contiguous(), b_BTd.flatten(0, 1)
    factors_B = torch.rand(SAMPLES, generator=generator)
    grads = Outer(a_BTp, b_BTd, (outputs, inputs))
    product = 2 * SAMPLES * positions * outputs * inputs
    norms = SAMPLES * norm_operations(positions, outputs, inputs)
    return {
        "positions": positions,
        "outputs": outputs,
        "inputs": inputs,
        "norms": rate(timed(lambda number: grads.sq_norms(), rounds), norms),
        "weighted sum": rate(timed(lambda number: grads.weighted_sum(factors_B), rounds), product),
        "plain product": rate(timed(lambda number: flat_p @ flat_d, rounds), product),
    }


def draws(rounds: int, sizes: Sequence[int] = DATA_SETS, expected: float = EXPECTED_BATCH) -> list[dict[str, Any]]:
    """The draw of one step: seconds, and the most bytes that are allocated for it."""
    return [_draw(Poisson.of_batch_size(size, expected), rounds) for size in sizes]


def _draw(sampler: Poisson, rounds: int) -> dict[str, Any]:
    seconds = timed(lambda number: sampler.indices(KEY, number), rounds)
    tracemalloc.start()
    sampler.indices(KEY, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    expected = sampler.expected_batch_size(0)
    return {"records": sampler.dataset_size, "expected_batch": expected, "peak_bytes": peak, **rate(seconds, 1)}


def measure(say: Callable[[str], object] = lambda text: None, *, shrink: int = 1, rounds: int = ROUNDS) -> Any:
    """All pieces, as the result file holds them.

    Args:
        say: told what comes next. shrink: divides sizes, for tests. rounds: of each measurement.
    """
    say("noise")
    found: dict[str, Any] = {"noise": noise(10**7 // shrink, rounds)}
    say("norms and sums")
    found["products"] = products(rounds, [(t // shrink, p // shrink, d // shrink) for t, p, d in MATRICES])
    say("all-reduce")
    message = 2**24 // shrink
    found["all-reduce"] = {"bytes": 4 * message, **rate(all_reduce_seconds(message, rounds), 4 * message)}
    say("checksum")
    params = {"w": torch.ones(2**26 // shrink)}
    size = 4 * params["w"].numel()
    found["checksum"] = {"bytes": size, **rate(timed(lambda i: checksum(params.items()), rounds), size)}
    say("Poisson draws")
    found["draws"] = draws(rounds)
    return found
