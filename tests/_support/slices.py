"""Random programs that write a batch into slices of constants, and read slices of the result at other places."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

DOUBLE = torch.float64
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy_": lambda place, x: place.copy_(x),
    "add_": lambda place, x: place.add_(x),
    "mul_": lambda place, x: place.mul_(x),
    "assign": lambda place, x: place.__setitem__(slice(None), x),
    "out": lambda place, x: torch.add(x, 1, out=place),
    "foreach": lambda place, x: torch._foreach_add_([place], [x]),
    "zero_": lambda place, x: place.zero_(),
}
MEMORY: dict[str, Callable[..., Tensor]] = {"zeros": torch.zeros, "ones": torch.ones}
STRIDES = ((2, 1), (1, 4), (3, 1), (4, 1), (1, 2), (1, 5), (2, 2), (1, 1), (8, 1), (2, 4), (5, 1))


@dataclass(frozen=True)
class Write:
    """A write of all rows at a row and a column, with a step between rows.

    Writes of some rows treat them in another way because of their number, which is audited, not proven.
    """

    name: str
    row: int
    column: int
    step: int

    def into(self, plane: Tensor, x: Tensor) -> None:
        height, width = x.shape
        rows = slice(self.row, self.row + self.step * (height - 1) + 1, self.step)
        WRITES[self.name](plane[rows, self.column : self.column + width], x)


@dataclass(frozen=True)
class Slices:
    """A program.

    Args:
        margin: rows and columns of the memory that are left. plane: the axis, and place on it, of the plane in a
            memory of three axes; None of two. samples_second: the samples are the columns. read: the way of reading.
    """

    memory: str
    margin: tuple[int, int]
    plane: tuple[int, int] | None
    samples_second: bool
    writes: list[Write] = field(default_factory=list)
    read: str = "slice"
    start: tuple[int, int] = (0, 0)
    strides: tuple[int, int] = (2, 1)
    offset: int = 0

    def __call__(self, batch: Tensor) -> Tensor:
        x = batch.t() if self.samples_second else batch
        height, width = x.shape
        shape = [2 * height - 1 + self.margin[0], width + self.margin[1]]
        if self.plane is not None:
            shape.insert(self.plane[0], 2)
        memory = MEMORY[self.memory](shape, dtype=DOUBLE)
        plane = memory if self.plane is None else memory.select(*self.plane)
        for write in self.writes:
            write.into(plane, x)
        found = self.reading(memory, plane, height, width)
        return found.t() if self.samples_second else found

    def reading(self, memory: Tensor, plane: Tensor, height: int, width: int) -> Tensor:
        row, column = self.start
        match self.read:
            case "slice":
                return plane[row : row + height, column : column + width] * 2
            case "every second":
                return plane[row : row + 2 * height - 1 : 2, column : column + width]
            case "flat":
                return memory.reshape(-1)[self.offset : self.offset + height * width].view(height, width)
        return memory.as_strided((height, width), self.strides, self.offset)


def drawn(seed: int) -> Slices:
    rng = random.Random(seed)
    margin = (rng.randint(0, 3), rng.randint(0, 3))

    def place() -> tuple[int, int]:
        return rng.randint(0, margin[0]), rng.randint(0, margin[1])

    def write() -> Write:
        names = list(WRITES)
        return Write(rng.choice(names), *place(), rng.choice([1, 1, 2]))

    return Slices(
        memory=rng.choice(list(MEMORY)),
        margin=margin,
        plane=rng.choice([None, (0, 0), (0, 1), (1, 1), (2, 0), (2, 1)]),
        samples_second=rng.random() < 0.4,
        writes=[write() for _ in range(rng.randint(1, 3))],
        read=rng.choice(["slice", "slice", "every second", "flat", "strided"]),
        start=place(),
        strides=rng.choice(STRIDES),
        offset=rng.randint(0, 8),
    )
