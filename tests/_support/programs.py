"""Random programs over a batch: a pool of operations, some of which mix rows, and what runs them again on other rows.

A program is made step by step, because each step needs the shapes of those before it. It is then a list of functions
with all choices made, which runs again on any batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pools
import torch
from torch import Tensor

from dpfunc.engines.guards.modes import unseen
from dpfunc.engines.tracing.rows import ONE_SAMPLE, Mixed, Rows
from dpfunc.engines.tracing.trace import Trace, following
from dpfunc.errors import UnsupportedModel

LARGEST, DEEPEST = 600, 5


@dataclass(frozen=True)
class Step:
    """One operation with its choices: earlier values -> new values."""

    name: str
    run: Callable[..., Any]
    inputs: tuple[int, ...]


@dataclass
class Program:
    """Steps over a batch of leaves, with constants; `loss` is the value whose gradient is taken, or None."""

    constants: list[Tensor]
    steps: list[Step] = field(default_factory=list)
    loss: int | None = None

    def __str__(self) -> str:
        return "\n".join(f"{step.name}{step.inputs}" for step in self.steps) + f"\nloss of {self.loss}"


@dataclass
class Ran:
    """What a program gave: values, the type of each, and gradients behind them. `doubts`: of the trace."""

    values: list[Tensor]
    kinds: list[Any]
    doubts: list[str]
    names: list[str]


def tensors_in(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [value for value in result if isinstance(value, Tensor)] if isinstance(result, (list, tuple)) else []


def started(program: Program, batch: tuple[Tensor, ...]) -> list[Tensor]:
    return [*batch, *program.constants]


def leaves(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(leaf.detach().clone().requires_grad_(leaf.is_floating_point()) for leaf in batch)


def run(program: Program, batch: tuple[Tensor, ...]) -> Ran:
    """The program on a batch, followed by a trace of its own."""
    batch = leaves(batch)
    trace = Trace(len(batch[0]))
    pools.CURRENT[0] = trace
    with following(trace, batch):
        values = started(program, batch)
        names = ["leaf"] * len(values)
        for step in program.steps:
            found = tensors_in(step.run(*(values[place] for place in step.inputs)))
            values += found
            names += [step.name] * len(found)
        if program.loss is not None:
            grads, named = backward(values, names, program.loss)
            values, names = values + grads, names + named
        with unseen():
            kinds = [trace.type_of(value) for value in values]
    return Ran([value.detach() for value in values], kinds, trace.doubts, names)


def backward(values: list[Tensor], names: list[str], place: int) -> tuple[list[Tensor], list[str]]:
    """Gradients of a sum of squares with respect to all values before it."""
    reached = [(value, name) for value, name in zip(values[:place], names, strict=False) if value.requires_grad]
    loss = values[place].abs().square().sum()
    found = torch.autograd.grad(loss, [value for value, _ in reached], allow_unused=True)
    pairs = [(grad, f"gradient of {name}") for grad, (_, name) in zip(found, reached, strict=True) if grad is not None]
    return [grad for grad, _ in pairs], [name for _, name in pairs]


class Skip(Exception):
    """No value fits."""


@dataclass
class Maker:
    """What chooses: the random numbers, and the values so far."""

    rng: random.Random
    trace: Trace
    values: list[Tensor]
    honest: bool = False

    def kind(self, tensor: Tensor) -> Any:
        with unseen():
            return self.trace.type_of(tensor)

    def pick(self, fits: Callable[[Tensor], bool]) -> int:
        """A value: mostly one with clean rows, and one of the latest."""
        places = [place for place, value in enumerate(self.values) if fits(value)]
        if not places:
            raise Skip
        few = [self.rng.choice(places) for _ in range(4)]
        few[0] = self.rng.choice(places[-4:])
        for place in few:
            kind = self.kind(self.values[place])
            if isinstance(kind, Rows) and not kind.doubt:
                return place
        return few[0]

    def axis(self, x: Tensor) -> int:
        """An axis: mostly one that holds no samples; in honest programs none that does."""
        if not x.ndim:
            raise Skip
        kind = self.kind(x)
        others = [axis for axis in range(x.ndim) if not isinstance(kind, Rows) or axis != kind.axis]
        if self.honest and not others:
            raise Skip
        if others and (self.honest or self.rng.random() < 0.75):
            return self.rng.choice(others)
        return self.rng.randrange(x.ndim)

    def any_axis(self, x: Tensor) -> int:
        return self.rng.randrange(x.ndim)

    def const(self, *shape: int) -> Tensor:
        """A constant from outside of the program; sometimes the same at all places."""
        with unseen():
            generator = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
            if self.honest or self.rng.random() < 0.3:
                return torch.full(shape, self.rng.choice([0.5, 1.0, -2.0]), dtype=torch.float64)
            return torch.randn(shape, generator=generator, dtype=torch.float64)

    def ints(self, high: int, *shape: int) -> Tensor:
        with unseen():
            generator = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
            return torch.randint(high, shape, generator=generator)

    def size(self, low: int, high: int) -> int:
        return self.rng.randint(low, max(low, high))

    def number(self) -> float:
        return self.rng.choice([0.5, 2.0, -1.0, 1.5])


def floats(x: Tensor) -> bool:
    return x.dtype == torch.float64 and 1 <= x.ndim <= DEEPEST and x.numel() > 0


def anything(x: Tensor) -> bool:
    return x.ndim <= DEEPEST and x.numel() > 0


def broadcasts(x: Tensor) -> Callable[[Tensor], bool]:
    def fits(y: Tensor) -> bool:
        if y.dtype != torch.float64:
            return False
        pairs = zip(reversed(x.shape), reversed(y.shape), strict=False)
        return all(a == b or a == 1 or b == 1 for a, b in pairs)

    return fits


def made(seed: int, length: int, honest: bool = False) -> tuple[Program, tuple[Tensor, ...]]:
    """A random program of up to `length` steps, and the batch that it was made with."""
    rng = random.Random(seed)
    batch = drawn_batch(rng, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    constants = [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
                 for size in ((batch[0].shape[-1], batch[0].shape[-1]), (batch[0].shape[-1],))]  # fmt: skip
    program = Program(constants)
    live = leaves(batch)
    trace = Trace(len(batch[0]))
    pools.CURRENT[0] = trace
    with following(trace, live):
        maker = Maker(rng, trace, started(program, live), honest)
        for _ in range(length):
            attempt(program, maker)
        clean = [place for place, value in enumerate(maker.values)
                 if place >= len(batch) + 2 and value.requires_grad and value.dtype == torch.float64
                 and isinstance(maker.kind(value), Rows) and not maker.kind(value).doubt]  # fmt: skip
        if clean:
            program.loss = rng.choice(clean[-3:])
            try:
                backward(maker.values, ["leaf"] * len(maker.values), program.loss)
            except (RuntimeError, UnsupportedModel, NotImplementedError):  # a value was written into after it was used
                program.loss = None
    return program, batch


def drawn_batch(rng: random.Random, seed: int) -> tuple[Tensor, ...]:
    count = rng.choice([2, 3, 4])
    time = rng.choice([count, 2, 3, 4, 2 * count])
    width = rng.choice([count, count, 2, 4, 6])
    generator = torch.Generator().manual_seed(seed)
    shapes = [(count, time, width), *([(count, width)] if rng.random() < 0.6 else [])]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def attempt(program: Program, maker: Maker) -> None:
    """One more step, if one can be found that works and leaves no doubt of its own."""
    table = pools.HONEST if maker.honest else pools.POOL
    name = maker.rng.choice(table)
    before = len(maker.trace.doubts)
    try:
        step = chosen(name, maker)
        result = tensors_in(step.run(*(maker.values[place] for place in step.inputs)))
    except (Skip, RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, UnsupportedModel):
        del maker.trace.doubts[before:]
        return
    if len(maker.trace.doubts) > before:  # it gave a number to Python: the trace has seen it
        del maker.trace.doubts[before:]
        return
    if not result or any(value.numel() > LARGEST or value.ndim > DEEPEST or value.is_sparse for value in result):
        return
    program.steps.append(step)
    maker.values += result


def chosen(name: str, maker: Maker) -> Step:
    fits = anything if name in pools.ANY_DTYPE else floats
    first = maker.pick(fits)
    x = maker.values[first]
    if name in pools.UNARY:
        return Step(name, pools.UNARY[name](maker, x), (first,))
    if name in pools.BINARY:
        second = maker.pick(broadcasts(x))
        return Step(name, pools.BINARY[name](maker, x, maker.values[second]), (first, second))
    same = [maker.pick(lambda y: y.shape == x.shape and y.dtype == x.dtype) for _ in range(2)]
    return Step(name, pools.TERNARY[name](maker, x), (first, *same))


__all__ = ["ONE_SAMPLE", "Mixed", "Program", "Ran", "made", "run"]
