"""Tiles of normal numbers: the smallest pieces of noise, each drawn from a key of its own.

A leaf is treated as a matrix (shape[0], everything else) and divided into tiles of at most 2**16 numbers, 256 columns
wide where it has as many. Tile i comes from the key folded with the leaf's name and i, so it depends on nothing else:
not on the other leaves, the microbatches, the number of threads or processes, and an owner of some rows or columns
draws only the tiles that they touch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dpfunc._utils.dtensor import Window
from dpfunc.noise.ziggurat import Scratch, normals, scratch, words_for
from dpfunc.rng import Key, Words, fold_in

TILE = 2**16
TILE_COLS = 2**8


class Part(NamedTuple):
    """Some rows of a leaf, in the place of a tensor of which only they are held.

    >>> Part(Window(512, 4, (0, 256), (0, 4)), torch.float32, torch.device("cpu")).shape
    (256, 4)
    """

    window: Window
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns of the matrix."""
        (first, stop), (left, right) = self.window.rows, self.window.cols
        return stop - first, right - left


class Room(NamedTuple):
    """Memory in which tiles of up to a size are drawn, and a stream that is opened again for each; for one thread.

    >>> Room.of(100).scratch.numbers.shape
    (166,)
    """

    scratch: Scratch
    words: Words

    @classmethod
    def of(cls, size: int) -> Room:
        """Room for tiles of a size."""
        return cls(scratch(words_for(size)), Words())


def tile(key: Key, name: str, number: int, size: int = TILE, room: Room | None = None) -> npt.NDArray[np.float64]:
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
    room = Room.of(size) if room is None else room
    words = room.words.opened(fold_in(key, "normal", name, number))
    return normals(words, size, room.scratch)


class Tile(NamedTuple):
    """A tile and the part of it that is wanted, as rows and columns of the matrix.

    Its numbers fill `height` rows of `width`.

    >>> [part.number for part in tiles(Window(512, 512, (0, 512), (0, 256)))]
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

    def of(self, part: Window) -> tuple[slice, slice]:
        """The same rows and columns, counted from the corner of a part of the matrix."""
        return (
            slice(self.rows[0] - part.rows[0], self.rows[1] - part.rows[0]),
            slice(self.cols[0] - part.cols[0], self.cols[1] - part.cols[0]),
        )


def rows_of_a_tile(num_cols: int) -> int:
    """The number of rows of a matrix with so many columns that tiles have.

    >>> rows_of_a_tile(512), rows_of_a_tile(1)
    (256, 65536)
    """
    return TILE // max(min(TILE_COLS, num_cols), 1)


def tiles(part: Window, size: int = TILE, columns: int = TILE_COLS) -> Iterator[Tile]:
    """The tiles that a part of a matrix touches; they are numbered row by row.

    Args:
        part: of a matrix. size: largest number of numbers in a tile. columns: largest width of a tile.
    """
    wide = max(min(columns, part.num_cols), 1)
    high = size // wide
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
