"""Standard normal noise from stateless keys, drawn tile by tile: by threads, or on a GPU.

A leaf is treated as a matrix (shape[0], everything else) and divided into tiles of at most 2**16 numbers, 256 columns
wide where it has as many. Tile i comes from the key folded with the leaf's name and i, so it depends on nothing else:
not on the other leaves, the microbatches, the number of threads or processes, and an owner of some rows or columns
draws only the tiles that they touch.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.processes import Window, local, window
from dpfunc._utils.validation import one_of
from dpfunc.errors import InvalidArgument
from dpfunc.noise._ziggurat import Scratch, normals, scratch, words_for
from dpfunc.rng import Key, Words, fold_in

TILE = 2**16
TILE_COLS = 2**8
_MAX_THREADS = 16
# Tiles of a GPU: each is a generator, a launch and a copy, whatever its size.
_DEVICE_TILE, _DEVICE_TILE_COLS = 2**22, 2**11
_NUMPY_DTYPES: dict[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}
Source = Literal["secure", "device"]
SOURCES: tuple[Source, ...] = ("secure", "device")


class Part(NamedTuple):
    """Some rows of a leaf, in the place of a tensor of which only they are held."""

    window: Window
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns that are held."""
        return self.window.shape


Room = tuple[Scratch, Words]
"""Memory in which tiles of up to a size are drawn, and a stream that is opened again for each; for one thread."""


def room_for(size: int) -> Room:
    """New memory."""
    return scratch(words_for(size)), Words()


def tile(key: Key, name: str, number: int, size: int = TILE, room: Room | None = None) -> npt.NDArray[np.float64]:
    """The first `size` numbers of one tile of a leaf: float64 standard normals, tails as far as float64 goes.

    They stay in the memory of the room until it is used again.

    Guarantees:
        tests/noise/test_streams.py: the distribution (test_is_standard_normal, test_tails), independence of
        tiles, leaves and keys (test_no_correlation), the same numbers in every version (test_known_numbers).
    """
    memory, words = room or room_for(size)
    return normals(words.opened(fold_in(key, "normal", name, number)), size, memory)


class Tile(NamedTuple):
    """A tile, and the wanted rows and columns from its corner (`inside`) and from that of the wanted part (`there`)."""

    number: int  # row by row
    height: int
    width: int
    inside: tuple[slice, slice]
    there: tuple[slice, slice]

    @property
    def needed(self) -> int:
        """Count of numbers up to the last wanted row."""
        return int(self.inside[0].stop) * self.width


def rows_of_a_tile(num_cols: int) -> int:
    """The number of rows of a matrix with so many columns that tiles have."""
    return TILE // max(min(TILE_COLS, num_cols), 1)


def tiles(part: Window, size: int = TILE, columns: int = TILE_COLS) -> Iterator[Tile]:
    """The tiles that a part of a matrix touches."""
    wide = max(min(columns, part.num_cols), 1)
    high = size // wide
    in_a_row = math.ceil(part.num_cols / wide)
    (top, bottom), (left, right) = part.rows, part.cols
    if top >= bottom or left >= right:
        return
    for i in range(top // high, math.ceil(bottom / high)):
        for j in range(left // wide, math.ceil(right / wide)):
            row, col = i * high, j * wide
            height, width = min(high, part.num_rows - row), min(wide, part.num_cols - col)
            rows = max(row, top), min(row + height, bottom)
            cols = max(col, left), min(col + width, right)
            inside, there = (
                (slice(rows[0] - y, rows[1] - y), slice(cols[0] - x, cols[1] - x)) for y, x in ((row, col), (top, left))
            )
            yield Tile(i * in_a_row + j, height, width, inside, there)


_Leaves = Mapping[str, Tensor | Part]
"""What noise is for: name -> tensor, DTensor, or a part that is described only."""


def secure_normal(key: Key, like: _Leaves, threads: int | None = None) -> dict[str, Tensor]:
    """Standard normals of the shape and dtype (float32 or float64) of each leaf, on the CPU; the own part of a DTensor.

    The number of threads, one a core of this process unless given, has no influence on the result.
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
        room = room_for(largest)
        while True:
            try:
                name, each = jobs.popleft()
            except IndexError:
                return
            values = tile(key, name, each.number, each.needed, room)
            noise[name][each.there] = values.reshape(-1, each.width)[each.inside]

    pool = ThreadPoolExecutor(max(others, 1), thread_name_prefix="noise")  # which begins a thread when it gets work
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
    given = os.environ.get("LOCAL_WORLD_SIZE", "")  # of torchrun; otherwise all processes of the run could be here
    here = int(given) if given.isdecimal() else 0
    everywhere = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return max(1, min(usable, _MAX_THREADS) // (here or everywhere))


def philox_normal(key: Key, name: str, leaf: Tensor | Part) -> Tensor:
    """Standard normals from torch's generator on the leaf's device, seeded with 64 bits of the key for each tile.

    Drawn in float64: float32 normals are truncated, at 5.77 sigma on the CPU and below 7 on CUDA.
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
