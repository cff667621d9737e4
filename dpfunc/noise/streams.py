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
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpfunc.checks import one_of
from dpfunc.errors import InvalidArgument
from dpfunc.rng import Key, fold_in, stream

TILE = 2**16
Source = Literal["secure", "device"]
SOURCES: tuple[Source, ...] = ("secure", "device")


def tile(key: Key, name: str, number: int, size: int = TILE) -> npt.NDArray[np.float64]:
    """The first `size` numbers of one tile of a leaf: float64 standard normals, tails as far as float64 goes.

    >>> from dpfunc.rng import insecure_key
    >>> bool((tile(insecure_key(0), "w", 3, 10) == tile(insecure_key(0), "w", 3)[:10]).all())
    True
    """
    return stream(fold_in(key, "normal", name, number)).standard_normal(size)


def secure_normal(key: Key, like: Mapping[str, Tensor], threads: int | None = None) -> dict[str, Tensor]:
    """Standard normals of the shape and dtype (float32 or float64) of each leaf, on the CPU.

    Args:
        key: used for this purpose only. like: name -> tensor. threads: default one a core; no influence on the result.

    >>> from dpfunc.rng import insecure_key
    >>> secure_normal(insecure_key(0), {"w": torch.zeros(2, 3)})["w"].shape
    torch.Size([2, 3])
    """
    noise = {name: torch.empty(leaf.numel(), dtype=leaf.dtype) for name, leaf in like.items()}
    jobs = [(name, number) for name, leaf in like.items() for number in range(math.ceil(leaf.numel() / TILE))]

    def draw(job: tuple[str, int]) -> None:
        name, number = job
        part = noise[name][number * TILE : (number + 1) * TILE]
        part.copy_(torch.from_numpy(tile(key, name, number, len(part))))

    workers = min(threads or os.cpu_count() or 1, max(len(jobs), 1))
    if workers == 1:
        for job in jobs:
            draw(job)
    else:  # numpy draws without the interpreter lock
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(draw, jobs, chunksize=max(1, len(jobs) // (8 * workers))))
    return {name: noise[name].reshape(leaf.shape) for name, leaf in like.items()}


def device_normal(key: Key, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Standard normals from the CUDA generator (Philox, seeded with 64 bits of the key), drawn where they are used.

    Raises:
        InvalidArgument: a leaf is not on a CUDA device.
    """
    noise = {}
    for name, leaf in like.items():
        if leaf.device.type != "cuda":
            raise InvalidArgument(
                f'Expected noise_source="secure" for parameters on {leaf.device.type}, got "device" for {name}. '
                "torch's CPU generator uses 32 bits of its seed and cuts float32 normals at 5.77 sigma."
            )
        generator = torch.Generator(leaf.device)
        generator.manual_seed(int.from_bytes(fold_in(key, "normal", name).secret[:8], "little", signed=True))
        noise[name] = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype, device=leaf.device)
    return noise


def standard_normal(key: Key, like: Mapping[str, Tensor], source: Source = "secure") -> dict[str, Tensor]:
    """Standard normals of the shape, dtype and device of each leaf.

    Raises:
        InvalidArgument: unknown source, or `device` off CUDA.
    """
    if one_of("noise_source", source, SOURCES) == "device":
        return device_normal(key, like)
    return {name: value.to(like[name].device) for name, value in secure_normal(key, like).items()}
