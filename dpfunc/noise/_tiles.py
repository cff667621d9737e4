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
from dpfunc.noise._ziggurat import Scratch, normals, scratch, words_for
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
        """Numbers of rows and columns that are held."""
        return self.window.shape


class Room(NamedTuple):
    """Memory in which tiles of up to a size are drawn, and a stream that is opened again for each; for one thread."""

    scratch: Scratch
    words: Words

    @classmethod
    def of(cls, size: int) -> Room:
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
    room = room or Room.of(size)
    return normals(room.words.opened(fold_in(key, "normal", name, number)), size, room.scratch)


class Tile(NamedTuple):
    """A tile and the part of it that is wanted.

    Args:
        number: its place among the tiles of the matrix, row by row. height, width: its own.
        inside: the wanted rows and columns, counted from the corner of the tile. there: from that of the wanted part.

    >>> [each.number for each in tiles(Window(512, 512, (0, 512), (0, 256)))]
    [0, 2]
    """

    number: int
    height: int
    width: int
    inside: tuple[slice, slice]
    there: tuple[slice, slice]

    @property
    def needed(self) -> int:
        """Count of numbers up to the last wanted row."""
        return int(self.inside[0].stop) * self.width


def rows_of_a_tile(num_cols: int) -> int:
    """The number of rows of a matrix with so many columns that tiles have.

    >>> rows_of_a_tile(512), rows_of_a_tile(1)
    (256, 65536)
    """
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
            rows = slice(max(row, top), min(row + height, bottom))
            cols = slice(max(col, left), min(col + width, right))
            inside, there = (_from(rows, row), _from(cols, col)), (_from(rows, top), _from(cols, left))
            yield Tile(i * in_a_row + j, height, width, inside, there)


def _from(span: slice, start: int) -> slice:
    return slice(span.start - start, span.stop - start)
