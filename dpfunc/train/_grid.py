"""Grid of a search: which values of a job are tried. It is public, and must not come from the private records."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpfunc._utils.validation import fail, suggestion
from dpfunc.errors import InvalidArgument
from dpfunc.train._config_file import override
from dpfunc.train.config import Job, job_from_dict

KEYS = {
    "learning_rate": ("training", "learning_rate"), "batch_size": ("training", "batch_size"),
    "steps": ("training", "steps"), "rank": ("lora", "rank"),
}  # fmt: skip
"""Keys of a job that can be searched, with their sections."""

FACTORS = (0.3, 1.0, 3.0)
_MOST = 1000


@dataclass(frozen=True)
class Grid:
    """Values to try, all combinations of them.

    Args:
        values: key of `KEYS` -> texts, as a flag of the job has them.
        factors: of the learning rate that the job has, or its recipe gives; (1.0,) where `values` has learning rates.

    >>> parse_grid(["batch_size=64,128"], None)
    Grid(values={'batch_size': ('64', '128')}, factors=(0.3, 1.0, 3.0))
    """

    values: Mapping[str, tuple[str, ...]]
    factors: tuple[float, ...]


@dataclass(frozen=True)
class Trial:
    """One combination: a job, and the factor of its learning rate, which may still come from a recipe."""

    job: Job
    factor: float


def parse_grid(texts: Sequence[str], factors: str | None) -> Grid:
    """The grid that flags describe.

    Args:
        texts: `key=value,value`; keys as in `KEYS`, with or without their section.
        factors: `0.3,1,3`; None for `FACTORS`.

    >>> parse_grid(["ranks=4"], None)
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected key=value,value in --grid, got --grid='ranks=4'. Did you mean 'rank'?
    """
    values: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, found = _values(text)
        if key in values:
            raise fail("each key of --grid once", "--grid", text)
        values[key] = found
    if "learning_rate" in values and factors is not None:
        raise InvalidArgument("Expected --factors or learning rates in --grid, got both: factors multiply the job's.")
    chosen = (1.0,) if "learning_rate" in values else FACTORS if factors is None else _factors(factors)
    size = len(chosen) * math.prod(map(len, values.values()))
    if size > _MOST:
        raise fail(f"at most {_MOST} combinations in --grid", "combinations", size)
    return Grid(values, chosen)


def _values(text: str) -> tuple[str, tuple[str, ...]]:
    """A key of the grid, and its values."""
    name, _, listed = text.partition("=")
    key = name.strip().rpartition(".")[2].replace("-", "_")
    if key not in KEYS or name.strip() not in (key, ".".join(KEYS[key]), key.replace("_", "-")):
        raise fail("key=value,value in --grid", "--grid", text, suggestion(key, KEYS))
    found = tuple(part.strip() for part in listed.split(","))
    if not all(found) or len(set(found)) != len(found):
        raise fail("different values in --grid", "--grid", text)
    return key, found


def _factors(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < each < math.inf for each in found) or len(set(found)) != len(found):
        raise fail("different numbers > 0 in --factors, with commas", "--factors", text)
    return found


def trials(values: Mapping[str, Any], flags: Mapping[tuple[str, str], str], grid: Grid) -> tuple[Trial, ...]:
    """All combinations of a grid over a job.

    Args:
        values: of the file of the job. flags: over them, see `parse_flags`. grid: over both.
    """
    found = []
    for combination in itertools.product(*grid.values.values()):
        chosen = {KEYS[key]: text for key, text in zip(grid.values, combination, strict=True)}
        job = job_from_dict(override(values, {**flags, **chosen}))
        found += [Trial(job, factor) for factor in grid.factors]
    return tuple(found)
