"""Standard normal noise from stateless keys, drawn tile by tile (`noise.tiles`): by threads, or on a GPU.

Noise is a function of its key and of the shapes, so it may be drawn before the sum that it is for is known: by cores
that are free while gradients are computed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.dtensor import Window, local, window
from dpfunc._utils.validation import one_of
from dpfunc.errors import InvalidArgument
from dpfunc.noise.tiles import Part, Room, Tile, tile, tiles
from dpfunc.rng import Key, fold_in

_MAX_THREADS = 16
# Noise of fewer numbers, some milliseconds, is not worth a thread.
_WORTH_A_THREAD = 2**18
# Tiles of a GPU: each is a generator, a launch and a copy, whatever its size.
_DEVICE_TILE, _DEVICE_TILE_COLS = 2**22, 2**11
_NUMPY_DTYPES: dict[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}
_Leaves = Mapping[str, Tensor | Part]
"""What noise is for: name -> tensor, DTensor, or a part that is described only."""
Source = Literal["secure", "device"]
SOURCES: tuple[Source, ...] = ("secure", "device")


class Drawing:
    """Noise of one release while it is drawn, by as many threads as were started; no number depends on them.

    Args:
        key: used for this purpose only. like: name -> tensor of float32 or float64; only shapes and dtypes count.

    Raises:
        InvalidArgument: a narrower dtype.

    >>> from dpfunc.rng import insecure_key
    >>> Drawing(insecure_key(0), {"w": torch.zeros(2, 3)}).finish(threads=2)["w"].shape
    (2, 3)
    """

    def __init__(self, key: Key, like: _Leaves) -> None:
        self.key = key
        self.layout = _layout(like)
        self._noise: dict[str, npt.NDArray[np.floating[Any]]] = {}
        self._jobs: deque[tuple[str, Window, Tile]] = deque()
        self._largest = 0
        self._pool: ThreadPoolExecutor | None = None
        self._started: list[Future[int]] = []
        for name, (part, dtype) in self.layout.items():
            shape = [stop - start for start, stop in (part.rows, part.cols)]
            self._noise[name] = np.empty(shape, _NUMPY_DTYPES[dtype])
            for each in tiles(part):
                self._jobs.append((name, part, each))
                self._largest = max(self._largest, _needed(each))
        self._tiles = len(self._jobs)

    def start(self, threads: int) -> None:
        """Begin to draw in so many threads more, and return at once."""
        threads = min(threads, len(self._jobs))
        if threads > 0:
            self._pool = self._pool or ThreadPoolExecutor(2 * _MAX_THREADS, thread_name_prefix="noise")
            self._started += [self._pool.submit(self._draw) for _ in range(threads)]

    def finish(self, threads: int) -> dict[str, npt.NDArray[np.floating[Any]]]:
        """The noise: name -> matrix. Draws what is left, in so many threads, this one and those begun before included.

        Raises:
            RuntimeError: not all tiles were drawn, so that there is memory without noise. Whatever a thread raises.
        """
        try:
            self.start(min(threads, len(self._jobs)) - 1 - len(self._started))
            drawn = self._draw() + sum(thread.result() for thread in self._started)
        finally:
            self.stop()
        if drawn != self._tiles:
            raise RuntimeError(f"Expected {self._tiles} tiles of noise, got {drawn}: the drawing was stopped.")
        return self._noise

    def stop(self) -> None:
        """Draw no further tile, and wait for the threads."""
        self._jobs.clear()
        if self._pool is not None:
            self._pool.shutdown()

    def _draw(self) -> int:
        """Draw tiles until none is left; the number of those that this thread drew."""
        room, drawn = Room.of(self._largest) if self._jobs else None, 0
        while True:
            try:
                name, part, each = self._jobs.popleft()
            except IndexError:
                return drawn
            values = tile(self.key, name, each.number, _needed(each), room)
            self._noise[name][each.of(part)] = values.reshape(-1, each.width)[each.inside]
            drawn += 1


def _needed(each: Tile) -> int:
    """Numbers of a tile up to the last wanted row."""
    return (each.rows[1] - each.first_row) * each.width


def _layout(like: _Leaves) -> dict[str, tuple[Window, torch.dtype]]:
    for name, leaf in like.items():
        if leaf.dtype not in _NUMPY_DTYPES:
            raise InvalidArgument(f"Expected noise in float32 or float64, got {leaf.dtype} for {name}.")
    return {name: (_window(leaf, name), leaf.dtype) for name, leaf in like.items()}


def _window(leaf: Tensor | Part, name: str) -> Window:
    return leaf.window if isinstance(leaf, Part) else window(leaf, name)


def _held(leaf: Tensor | Part) -> Tensor | Part:
    return leaf if isinstance(leaf, Part) else local(leaf)


_ahead: ContextVar[list[Drawing]] = ContextVar("dpfunc_noise_ahead")


@contextmanager
def drawn_ahead(key: Key, like: _Leaves, threads: int) -> Iterator[None]:
    """Draw, in threads, the noise that `secure_normal` is asked for inside with the same key and shapes.

    The numbers are those that it would draw itself. They are given out once; what was not asked for when the block is
    left, by an error or otherwise, is gone with it.

    Args:
        key, like: as for `secure_normal`. threads: cores that are free meanwhile; 0 draws nothing ahead.

    Guarantees:
        tests/noise/test_ahead.py: the same bits (test_the_same_numbers), no number is left for a later release
        (test_an_error_leaves_nothing).

    >>> from dpfunc.rng import insecure_key
    >>> like = {"w": torch.zeros(2, 3)}
    >>> with drawn_ahead(insecure_key(0), like, threads=1):
    ...     noise = secure_normal(insecure_key(0), like)
    >>> torch.equal(noise["w"], secure_normal(insecure_key(0), like)["w"])
    True
    """
    if threads < 1:
        yield
        return
    drawing = Drawing(key, like)
    token = _ahead.set([drawing])
    try:
        drawing.start(threads)
        yield
    finally:
        _ahead.reset(token)
        drawing.stop()


def free_cores(on_cpu: bool) -> int:
    """Cores that are left while gradients are computed: by torch's threads, or by a GPU that one thread drives.

    Args:
        on_cpu: gradients are computed there.
    """
    return max(0, _cores() - (torch.get_num_threads() if on_cpu else 1))


def threads_ahead(numbers: int, on_cpu: bool) -> int:
    """Threads that should draw so many numbers ahead: one a free core, none if it is not worth a thread.

    Args:
        numbers: of noise. on_cpu: as for `free_cores`.
    """
    return free_cores(on_cpu) if numbers >= _WORTH_A_THREAD else 0


def _drawing(key: Key, like: _Leaves) -> Drawing:
    """The noise that was begun ahead, if it is this, else one that is begun now."""
    waiting = _ahead.get([])
    if waiting and waiting[0].key == key and waiting[0].layout == _layout(like):
        return waiting.pop()
    return Drawing(key, like)


def secure_normal(key: Key, like: _Leaves, threads: int | None = None) -> dict[str, Tensor]:
    """Standard normals of the shape and dtype (float32 or float64) of each leaf, on the CPU; the own part of a DTensor.

    Args:
        key: used for this purpose only. like: name -> tensor. threads: default one a core of this process; no
            influence on the result.

    Raises:
        InvalidArgument: a narrower dtype.

    >>> from dpfunc.rng import insecure_key
    >>> secure_normal(insecure_key(0), {"w": torch.zeros(2, 3)})["w"].shape
    torch.Size([2, 3])
    """
    noise = _drawing(key, like).finish(threads or _cores())
    return {name: torch.from_numpy(noise[name]).reshape(_held(leaf).shape) for name, leaf in like.items()}


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
    noise = torch.empty(part.rows[1] - part.rows[0], part.cols[1] - part.cols[0], dtype=held.dtype, device=held.device)
    generator = torch.Generator(held.device)
    for each in tiles(part, _DEVICE_TILE, _DEVICE_TILE_COLS):
        secret = fold_in(key, "normal", name, each.number).secret
        generator.manual_seed(int.from_bytes(secret[:8], "little", signed=True))
        size = (each.height, each.width)  # whole tiles: torch's numbers depend on how many are asked for
        values = torch.randn(size, generator=generator, dtype=torch.float64, device=held.device)
        noise[each.of(part)] = values[each.inside].to(held.dtype)
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
