"""Standard normal noise from stateless keys.

A leaf is seen as a matrix (shape[0], everything else) and cut into tiles of at most 2**16 numbers, 256 columns wide
where it has as many. Tile i comes from the key folded with the leaf's name and i, so it depends on nothing else: not on
the other leaves, the microbatches, the number of threads or processes, and an owner of some rows or columns draws only
the tiles that they touch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpfunc._utils.dtensor import Window, local, window
from dpfunc._utils.validation import one_of
from dpfunc.errors import InvalidArgument
from dpfunc.noise.ziggurat import Scratch, normals, scratch, words_for
from dpfunc.rng import Key, fold_in, stream

TILE = 2**16
TILE_COLS = 2**8
MAX_THREADS = 16
NUMPY_DTYPES: dict[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}
Source = Literal["secure", "device"]
SOURCES: tuple[Source, ...] = ("secure", "device")


def tile(key: Key, name: str, number: int, size: int = TILE, room: Scratch | None = None) -> npt.NDArray[np.float64]:
    """The first `size` numbers of one tile of a leaf: float64 standard normals, tails as far as float64 goes.

    Args:
        key: of one release. name: of the leaf. number: of the tile, from 0. size: 0 <= size <= 2**16. room: memory to
            work in, where the numbers stay until it is used again; default: new memory.

    Guarantees:
        tests/noise/test_streams.py: the distribution (test_is_standard_normal, test_tails), independence of
        tiles, leaves and keys (test_no_correlation), the same numbers in every version (test_known_numbers).

    >>> from dpfunc.rng import insecure_key
    >>> bool((tile(insecure_key(0), "w", 3, 10) == tile(insecure_key(0), "w", 3)[:10]).all())
    True
    """
    words = stream(fold_in(key, "normal", name, number)).bit_generator.random_raw
    return normals(words, size, room)


class Tile(NamedTuple):
    """A tile and the part of it that is wanted, as rows and columns of the matrix.

    Its numbers fill `height` rows of `width`.

    >>> [cut.number for cut in tiles(Window(512, 512, (0, 512), (0, 256)))]
    [0, 2]
    """

    number: int
    first_row: int
    first_col: int
    height: int
    width: int
    rows: tuple[int, int]
    cols: tuple[int, int]

    @property
    def inside(self) -> tuple[slice, slice]:
        """Slices of the wanted rows and columns, counted from the corner of the tile."""
        first, col = self.first_row, self.first_col
        return slice(self.rows[0] - first, self.rows[1] - first), slice(self.cols[0] - col, self.cols[1] - col)


def tiles(part: Window) -> Iterator[Tile]:
    """The tiles that a part of a matrix touches; they are numbered row by row."""
    wide = max(min(TILE_COLS, part.num_cols), 1)
    high = TILE // wide
    in_a_row = math.ceil(part.num_cols / wide)
    if part.rows[0] >= part.rows[1] or part.cols[0] >= part.cols[1]:
        return
    for i in range(part.rows[0] // high, math.ceil(part.rows[1] / high)):
        for j in range(part.cols[0] // wide, math.ceil(part.cols[1] / wide)):
            row, col = i * high, j * wide
            width = min(wide, part.num_cols - col)
            rows = max(row, part.rows[0]), min(row + high, part.rows[1])
            cols = max(col, part.cols[0]), min(col + width, part.cols[1])
            yield Tile(i * in_a_row + j, row, col, min(high, part.num_rows - row), width, rows, cols)


def secure_normal(key: Key, like: Mapping[str, Tensor], threads: int | None = None) -> dict[str, Tensor]:
    """Standard normals of the shape and dtype (float32 or float64) of each leaf, on the CPU; the own part of a DTensor.

    Args:
        key: used for this purpose only. like: name -> tensor. threads: default one a core; no influence on the result.

    Raises:
        InvalidArgument: a narrower dtype.

    >>> from dpfunc.rng import insecure_key
    >>> secure_normal(insecure_key(0), {"w": torch.zeros(2, 3)})["w"].shape
    torch.Size([2, 3])
    """
    noise: dict[str, npt.NDArray[np.floating[Any]]] = {}
    jobs: list[tuple[str, Window, Tile]] = []
    for name, leaf in like.items():
        if leaf.dtype not in NUMPY_DTYPES:
            raise InvalidArgument(f"Expected noise in float32 or float64, got {leaf.dtype} for {name}.")
        part = window(leaf, name)
        noise[name] = np.empty([stop - start for start, stop in (part.rows, part.cols)], NUMPY_DTYPES[leaf.dtype])
        jobs += [(name, part, cut) for cut in tiles(part)]

    def draw(some: list[tuple[str, Window, Tile]]) -> None:
        sizes = [(cut.rows[1] - cut.first_row) * cut.width for _, _, cut in some]
        room = scratch(words_for(max(sizes, default=0)))
        for (name, part, cut), size in zip(some, sizes, strict=True):
            values = tile(key, name, cut.number, size, room)
            rows, cols = (slice(a - o, b - o) for (a, b), (o, _) in ((cut.rows, part.rows), (cut.cols, part.cols)))
            noise[name][rows, cols] = values.reshape(-1, cut.width)[cut.inside]

    workers = min(threads or _cores(), max(len(jobs), 1))
    if workers == 1:
        draw(jobs)
    else:  # numpy computes without the interpreter lock
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(draw, (jobs[first::workers] for first in range(workers))))
    return {name: torch.from_numpy(noise[name]).reshape(local(leaf).shape) for name, leaf in like.items()}


def _cores() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MAX_THREADS)


def philox_normal(key: Key, name: str, leaf: Tensor) -> Tensor:
    """Standard normals from torch's generator on the leaf's device, seeded with 64 bits of the key for each tile.

    Drawn in float64: float32 normals are cut off, at 5.77 sigma on the CPU and below 7 on CUDA.

    >>> from dpfunc.rng import insecure_key
    >>> philox_normal(insecure_key(0), "w", torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """
    part, held = window(leaf, name), local(leaf)
    noise = torch.empty(part.rows[1] - part.rows[0], part.cols[1] - part.cols[0], dtype=held.dtype, device=held.device)
    generator = torch.Generator(held.device)
    for cut in tiles(part):
        secret = fold_in(key, "normal", name, cut.number).secret
        generator.manual_seed(int.from_bytes(secret[:8], "little", signed=True))
        size = (cut.height, cut.width)  # whole tiles: torch's numbers depend on how many are asked for
        values = torch.randn(size, generator=generator, dtype=torch.float64, device=held.device)
        rows, cols = (slice(a - o, b - o) for (a, b), (o, _) in ((cut.rows, part.rows), (cut.cols, part.cols)))
        noise[rows, cols] = values[cut.inside].to(held.dtype)
    return noise.reshape(held.shape)


def standard_normal(key: Key, like: Mapping[str, Tensor], source: Source = "secure") -> dict[str, Tensor]:
    """Standard normals of the shape, dtype and device of each leaf; of a DTensor the own part, as a plain tensor.

    Args:
        key: of one release. like: name -> tensor. source: `secure` or `device`.

    Raises:
        InvalidArgument: unknown source, or `device` off CUDA.

    Guarantees:
        the same key gives the same numbers, for any number of threads and whatever the other leaves are
        (tests/noise/test_streams.py::test_stateless), and however a leaf is cut
        (test_a_part_is_a_part_of_the_whole).
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
