"""Standard normal noise from stateless keys, drawn tile by tile (`noise.tiles`): by threads, or on a GPU."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.dtensor import Window, local, window
from dpfunc._utils.validation import one_of
from dpfunc.errors import InvalidArgument
from dpfunc.noise._tiles import Part, Room, Tile, tile, tiles
from dpfunc.rng import Key, fold_in

_MAX_THREADS = 16
# Tiles of a GPU: each is a generator, a launch and a copy, whatever its size.
_DEVICE_TILE, _DEVICE_TILE_COLS = 2**22, 2**11
_NUMPY_DTYPES: dict[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}
_Leaves = Mapping[str, Tensor | Part]
"""What noise is for: name -> tensor, DTensor, or a part that is described only."""
Source = Literal["secure", "device"]
SOURCES: tuple[Source, ...] = ("secure", "device")


def secure_normal(key: Key, like: _Leaves, threads: int | None = None) -> dict[str, Tensor]:
    """Standard normals of the shape and dtype (float32 or float64) of each leaf, on the CPU; the own part of a DTensor.

    Args:
        key: used for this purpose only. like: name -> tensor. threads: default one a core of this process; no
            influence on the result.

    Raises:
        InvalidArgument: a narrower dtype. Whatever a thread raises.

    >>> from dpfunc.rng import insecure_key
    >>> secure_normal(insecure_key(0), {"w": torch.zeros(2, 3)})["w"].shape
    torch.Size([2, 3])
    """
    noise: dict[str, npt.NDArray[np.floating[Any]]] = {}
    jobs: deque[tuple[str, Tile]] = deque()
    for name, leaf in like.items():
        if leaf.dtype not in _NUMPY_DTYPES:
            raise InvalidArgument(f"Expected noise in float32 or float64, got {leaf.dtype} for {name}.")
        part = _window(leaf, name)
        noise[name] = np.empty(part.shape, _NUMPY_DTYPES[leaf.dtype])
        jobs.extend((name, each) for each in tiles(part))
    largest = max((each.needed for _, each in jobs), default=0)
    others = min(threads or _cores(), len(jobs)) - 1

    def draw() -> None:
        """Draw tiles until none is left."""
        room = Room.of(largest)
        while True:
            try:
                name, each = jobs.popleft()
            except IndexError:
                return
            values = tile(key, name, each.number, each.needed, room)
            noise[name][each.there] = values.reshape(-1, each.width)[each.inside]

    if others < 1:
        draw()
    else:
        pool = ThreadPoolExecutor(others, thread_name_prefix="noise")
        try:
            begun = [pool.submit(draw) for _ in range(others)]
            draw()
            for thread in begun:
                thread.result()  # raises what it raised: no number is given out that was not drawn
        finally:
            jobs.clear()
            pool.shutdown()
    return {name: torch.from_numpy(noise[name]).reshape(_held(leaf).shape) for name, leaf in like.items()}


def _window(leaf: Tensor | Part, name: str) -> Window:
    return leaf.window if isinstance(leaf, Part) else window(leaf, name)


def _held(leaf: Tensor | Part) -> Tensor | Part:
    return leaf if isinstance(leaf, Part) else local(leaf)


def _cores() -> int:
    """Cores of this process: an equal share of those that it may use, if others of the run are on this machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, _MAX_THREADS) // _processes_here())


def _processes_here() -> int:
    """Processes of the run on this machine, as torchrun says; otherwise all could be."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    if given.isdecimal() and int(given):
        return int(given)
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def philox_normal(key: Key, name: str, leaf: Tensor | Part) -> Tensor:
    """Standard normals from torch's generator on the leaf's device, seeded with 64 bits of the key for each tile.

    Drawn in float64: float32 normals are truncated, at 5.77 sigma on the CPU and below 7 on CUDA. Tiles are large here,
    2**22 numbers, so that most leaves are one launch.

    >>> from dpfunc.rng import insecure_key
    >>> philox_normal(insecure_key(0), "w", torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """
    part, held = _window(leaf, name), _held(leaf)
    noise = torch.empty(part.shape, dtype=held.dtype, device=held.device)
    generator = torch.Generator(held.device)
    for each in tiles(part, _DEVICE_TILE, _DEVICE_TILE_COLS):
        secret = fold_in(key, "normal", name, each.number).secret
        generator.manual_seed(int.from_bytes(secret[:8], "little", signed=True))
        size = (each.height, each.width)  # whole tiles: torch's numbers depend on how many are asked for
        values = torch.randn(size, generator=generator, dtype=torch.float64, device=held.device)
        noise[each.there] = values[each.inside].to(held.dtype)
    return noise.reshape(held.shape)


def standard_normal(key: Key, like: _Leaves, source: Source = "secure") -> dict[str, Tensor]:
    """Standard normals of the shape, dtype and device of each leaf; of a DTensor the own part, as a plain tensor.

    Args:
        key: of one release. like: name -> tensor, or `Part` of one. source: `secure` or `device`.

    Raises:
        InvalidArgument: unknown source, or `device` off CUDA.

    Guarantees:
        the same key gives the same numbers, for any number of threads and whatever the other leaves are
        (tests/noise/test_streams.py::test_stateless), and however a leaf is divided
        (test_a_part_is_a_part_of_the_whole).
    """
    if one_of("source", source, SOURCES) == "secure":
        return {name: value.to(like[name].device) for name, value in secure_normal(key, like).items()}
    for name, leaf in like.items():
        if leaf.device.type != "cuda":
            raise InvalidArgument(
                f'Expected source="secure" for sums on {leaf.device.type}, got source="device" for {name}. '
                "torch's CPU generator uses 32 bits of its seed and truncates float32 normals at 5.77 sigma."
            )
    return {name: philox_normal(key, name, leaf) for name, leaf in like.items()}
