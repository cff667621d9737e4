"""Standard normal noise from stateless keys.

The noise of a leaf is cut into flat tiles of 2**16 numbers. Tile i comes from the key folded with the leaf's name and
i, so it depends on nothing else: not on the other leaves, the microbatches, the number of threads or processes, and an
owner of some tiles draws only those.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpfunc.checks import one_of
from dpfunc.errors import InvalidArgument
from dpfunc.rng import Key, fold_in, stream

TILE = 2**16
MAX_THREADS = 16
NUMPY_DTYPES: dict[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}
Source = Literal["secure", "device"]
SOURCES: tuple[Source, ...] = ("secure", "device")


def tile(key: Key, name: str, number: int, size: int = TILE) -> npt.NDArray[np.float64]:
    """The first `size` numbers of one tile of a leaf: float64 standard normals, tails as far as float64 goes.

    Args:
        key: of one release. name: of the leaf. number: of the tile, from 0. size: 0 <= size <= 2**16.

    Guarantees:
        tests/noise/test_noise_streams.py: the distribution (test_is_standard_normal, test_tails), independence of
        tiles, leaves and keys (test_no_correlation), the same numbers in every version (test_known_numbers).

    >>> from dpfunc.rng import insecure_key
    >>> bool((tile(insecure_key(0), "w", 3, 10) == tile(insecure_key(0), "w", 3)[:10]).all())
    True
    """
    return stream(fold_in(key, "normal", name, number)).standard_normal(size)


def secure_normal(key: Key, like: Mapping[str, Tensor], threads: int | None = None) -> dict[str, Tensor]:
    """Standard normals of the shape and dtype (float32 or float64) of each leaf, on the CPU.

    Args:
        key: used for this purpose only. like: name -> tensor. threads: default one a core; no influence on the result.

    Raises:
        InvalidArgument: a narrower dtype.

    >>> from dpfunc.rng import insecure_key
    >>> secure_normal(insecure_key(0), {"w": torch.zeros(2, 3)})["w"].shape
    torch.Size([2, 3])
    """
    noise: dict[str, npt.NDArray[np.floating[Any]]] = {}
    for name, leaf in like.items():
        if leaf.dtype not in NUMPY_DTYPES:
            raise InvalidArgument(f"Expected noise in float32 or float64, got {leaf.dtype} for {name}.")
        noise[name] = np.empty(leaf.numel(), NUMPY_DTYPES[leaf.dtype])
    jobs = [(name, number) for name, part in noise.items() for number in range(math.ceil(part.size / TILE))]

    def draw(job: tuple[str, int]) -> None:
        name, number = job
        part = noise[name][number * TILE : (number + 1) * TILE]
        part[:] = tile(key, name, number, part.size)

    workers = min(threads or _cores(), max(len(jobs), 1))
    if workers == 1:
        for job in jobs:
            draw(job)
    else:  # numpy draws without the interpreter lock
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(draw, jobs))
    return {name: torch.from_numpy(noise[name]).reshape(leaf.shape) for name, leaf in like.items()}


def _cores() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MAX_THREADS)


def philox_normal(key: Key, name: str, leaf: Tensor) -> Tensor:
    """Standard normals from torch's generator on the leaf's device, seeded with 64 bits of the key.

    Drawn in float64: float32 normals are cut off, at 5.77 sigma on the CPU and below 7 on CUDA.

    >>> from dpfunc.rng import insecure_key
    >>> philox_normal(insecure_key(0), "w", torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """
    generator = torch.Generator(leaf.device)
    generator.manual_seed(int.from_bytes(fold_in(key, "normal", name).secret[:8], "little", signed=True))
    return torch.randn(leaf.shape, generator=generator, dtype=torch.float64, device=leaf.device).to(leaf.dtype)


def standard_normal(key: Key, like: Mapping[str, Tensor], source: Source = "secure") -> dict[str, Tensor]:
    """Standard normals of the shape, dtype and device of each leaf.

    Args:
        key: of one release. like: name -> tensor. source: `secure` or `device`.

    Raises:
        InvalidArgument: unknown source, or `device` off CUDA.

    Guarantees:
        the same key gives the same numbers, for any number of threads and whatever the other leaves are
        (tests/noise/test_noise_streams.py::test_stateless).
    """
    if one_of("source", source, SOURCES) == "secure":
        return {name: value.to(like[name].device) for name, value in secure_normal(key, like).items()}
    for name, leaf in like.items():
        if leaf.device.type != "cuda":
            raise InvalidArgument(
                f'Expected source="secure" for sums on {leaf.device.type}, got source="device" for {name}. '
                "torch's CPU generator uses 32 bits of its seed and cuts float32 normals at 5.77 sigma."
            )
    return {name: philox_normal(key, name, leaf) for name, leaf in like.items()}
