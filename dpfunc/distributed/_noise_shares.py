"""The noise of a release, divided over processes: each draws some rows, about as many numbers as the others.

Rows are divided where tiles of noise begin, so that no tile is drawn twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dpfunc._utils.dtensor import Window
from dpfunc.noise._tiles import rows_of_a_tile


def noise_windows(shapes: Mapping[str, Sequence[int]], rank: int, size: int) -> dict[str, Window]:
    """The rows whose noise a process draws, of each leaf of which it draws some.

    The windows of all ranks together have each row of each leaf once.

    Args:
        shapes: name -> shape of a leaf, in the same order on all processes. rank: 0 <= rank < size. size: processes.

    Guarantees:
        tests/distributed/test_reduce.py::test_each_number_belongs_to_one_process.

    >>> {name: part.rows for name, part in noise_windows({"w": (512, 256), "b": (512,)}, 0, 2).items()}
    {'w': (0, 256)}
    >>> {name: part.rows for name, part in noise_windows({"w": (512, 256), "b": (512,)}, 1, 2).items()}
    {'w': (256, 512), 'b': (0, 512)}
    """
    total = sum(math.prod(shape) for shape in shapes.values())
    found: dict[str, Window] = {}
    done = 0
    for name, shape in shapes.items():
        num_rows, num_cols = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        height = rows_of_a_tile(num_cols)
        for first in range(0, num_rows if num_cols else 0, height):
            stop = min(first + height, num_rows)
            numbers = (stop - first) * num_cols
            if (2 * done + numbers) * size // (2 * total) == rank:  # the middle of these rows decides
                begin = found[name].rows[0] if name in found else first
                found[name] = Window(num_rows, num_cols, (begin, stop), (0, num_cols))
            done += numbers
    return found


def num_bands(windows: Mapping[str, Window]) -> int:
    """The number of bands of rows, as tall as tiles, that windows have.

    >>> num_bands(noise_windows({"w": (512, 256), "b": (512,), "empty": (3, 0)}, 0, 1))
    3
    """
    return sum(-(-(part.rows[1] - part.rows[0]) // rows_of_a_tile(part.num_cols)) for part in windows.values())
