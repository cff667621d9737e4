"""Standard normal noise from stateless keys, drawn tile by tile: on CPU threads (`secure`) or on a device (`device`).

May import: its folder, batches, rng and below. Privacy depends on it: yes.

`secure` takes words of AES from the CPU, and numpy makes them normal (Marsaglia & Tsang 2000, the ziggurat method, in
float64, whose tail ends at 12.2 sigma); `device` takes words of ChaCha20, as hard to guess, where the parameter lies,
and other numbers (`_chacha.py`). A parameter is treated as a matrix (shape[0], everything else) and divided into tiles:
of at most 2**16 numbers in `secure`, 256 columns wide where it has as many. Tile i comes from the key folded with the
parameter's name and i, so it depends on nothing else: not on the other parameters, the microbatches, the number of
threads or processes, and a process that holds some rows or columns draws only the tiles that they touch.
"""

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.parts import Window, local, window
from dpfunc._utils.validation import one_of
from dpfunc.errors import InvalidArgument
from dpfunc.noise import _chacha as chacha
from dpfunc.rng import Key, Streams, fold_in

TILE = 2**16
TILE_COLS = 2**8
_MAX_THREADS = 2  # more were not measured
_FOR_A_THREAD = 2**15  # numbers for which it is worth to begin one
# Tiles of a device, and numbers that are made there together: so many that a launch is worth it, in a cache of a GPU.
_DEVICE_TILE, _DEVICE_TILE_COLS = 2**22, 2**11
_NUMPY_DTYPES: dict[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}
Source = Literal["secure", "device"]
SOURCES: tuple[Source, ...] = ("secure", "device")


class Part(NamedTuple):
    """A window of a parameter, with its dtype and device, of which the noise is drawn."""

    window: Window
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns that are held."""
        return self.window.shape


class Tile(NamedTuple):
    """A tile, and the wanted numbers of it: their place in the tile (`inside`), and in the result (`there`)."""

    number: int  # of all tiles, counted row by row
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


Leaves = Mapping[str, Tensor | Part]  # what noise is for: name -> tensor, DTensor, or a part that is described only


def secure_normal(key: Key, like: Leaves, threads: int | None = None) -> dict[str, Tensor]:
    """Standard normals of the shape and dtype (float32 or float64) of each leaf, on the CPU; the own part of a DTensor.

    The number of threads, by default one a core and at most two, has no influence on the result.

    Guarantees:
        tests/noise/test_streams.py: the distribution (test_is_standard_normal, test_tails), independence of tiles,
        parameters and keys (test_no_correlation), the same numbers in every version (test_known_numbers).
    """
    noise: dict[str, npt.NDArray[np.floating[Any]]] = {}
    jobs: deque[tuple[str, Tile]] = deque()
    for name, leaf in like.items():
        part = _window(leaf, name)
        noise[name] = np.empty(part.shape, _NUMPY_DTYPES[leaf.dtype])
        jobs.extend((name, each) for each in tiles(part))
    worth = sum(each.needed for _, each in jobs) // _FOR_A_THREAD
    helpers = min(worth, (threads or _cores()) - 1, len(jobs) - 1)

    def draw() -> None:
        room, streams = np.empty(TILE), Streams()  # of this thread
        while True:
            try:
                name, each = jobs.popleft()
            except IndexError:
                return
            opened = streams.opened(fold_in(key, "normal", name, each.number))
            numbers = opened.standard_normal(out=room[: each.needed])
            noise[name][each.there] = numbers.reshape(-1, each.width)[each.inside]

    pool = ThreadPoolExecutor(max(helpers, 1), thread_name_prefix="noise")  # starts no thread before it gets work
    try:
        begun = [pool.submit(draw) for _ in range(helpers)]
        draw()
        for thread in begun:
            thread.result()  # raises what it raised: no number is given out that was not drawn
    finally:
        jobs.clear()
        pool.shutdown()
    return {name: torch.from_numpy(noise[name]).reshape(_held(leaf).shape) for name, leaf in like.items()}


def _groups(found: Iterable[tuple[str, Tile]], most: int) -> Iterator[list[tuple[str, Tile]]]:
    """Groups of tiles that are drawn together: of `most` numbers at most, or of one tile."""
    group: list[tuple[str, Tile]] = []
    total = 0
    for name, each in found:
        if group and total + each.needed > most:
            yield group
            group, total = [], 0
        group.append((name, each))
        total += each.needed
    if group:
        yield group


def _window(leaf: Tensor | Part, name: str) -> Window:
    return leaf.window if isinstance(leaf, Part) else window(leaf, name)


def _held(leaf: Tensor | Part) -> Tensor | Part:
    return leaf if isinstance(leaf, Part) else local(leaf)


def _cores() -> int:
    """Number of threads of this process: its share of the cores, if other processes of the run use this machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get("LOCAL_WORLD_SIZE", "")  # of torchrun; otherwise all processes of the run could be here
    here = int(given) if given.isdecimal() else 0
    everywhere = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return max(1, min(usable // (here or everywhere), _MAX_THREADS))


def device_normal(key: Key, like: Leaves) -> dict[str, Tensor]:
    """Standard normals of the shape and dtype of each leaf, drawn in float64 where it lies; a DTensor's own part."""
    noise: dict[str, Tensor] = {}
    found: dict[torch.device, list[tuple[str, Tile]]] = {}
    for name, leaf in like.items():
        part, held = _window(leaf, name), _held(leaf)
        noise[name] = torch.empty(part.shape, dtype=held.dtype, device=held.device)
        found.setdefault(held.device, []).extend((name, each) for each in tiles(part, _DEVICE_TILE, _DEVICE_TILE_COLS))
    for device, own in found.items():
        for group in _groups(own, _DEVICE_TILE):
            secrets = [fold_in(key, "chacha", name, each.number).secret for name, each in group]
            drawn = chacha.normals(secrets, [each.needed for _, each in group], device)
            for (name, each), values in zip(group, drawn, strict=True):
                noise[name][each.there] = values.view(-1, each.width)[each.inside].to(noise[name].dtype)
    return {name: values.reshape(_held(like[name]).shape) for name, values in noise.items()}


def standard_normal(key: Key, like: Leaves, source: Source = "secure") -> dict[str, Tensor]:
    """Standard normals of the shape, dtype and device of each leaf; of a DTensor the own part, as a plain tensor.

    Guarantees:
        the same key gives the same numbers, for any number of threads and whatever the other leaves are
        (tests/noise/test_streams.py::test_stateless), and however a leaf is divided
        (test_a_part_is_a_part_of_the_whole).
    """
    for name, leaf in like.items():
        if leaf.dtype not in _NUMPY_DTYPES:
            raise InvalidArgument(f"Expected noise in float32 or float64, got {leaf.dtype} for {name}.")
    return (
        device_normal(key, like)
        if one_of("source", source, SOURCES) == "device"
        else {name: value.to(like[name].device) for name, value in secure_normal(key, like).items()}
    )
