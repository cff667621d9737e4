"""Features of a row of a table, from it and public facts alone: nothing is fitted to the records.

May import: its folder, hf, metrics and below. Privacy depends on it: yes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfunc.errors import InvalidArgument

MISSING = ("", "?", "na", "n/a", "nan", "none", "null")  # of a number, in small letters


@dataclass(frozen=True)
class TableFeatures:
    """Features of a row: of each column a vector of norm 1, so rows have a norm that is known without the data.

    Number v, clipped to [low, high], with u = (2 v - low - high) / (high - low) in [-1, 1]:

        (sin(pi u / 2), cos(pi u / 2)), and 0; or (0, 0, 1) where it is missing and `missing` is `feature`

    Category: one-hot over its values and a last slot for all others, an empty text among them.

    Guarantees:
        tests/train/test_features.py: a row is encoded alone (test_one_row_more_changes_no_other_row), with norm
        sqrt(columns) (test_rows_have_a_public_norm).

    >>> front = TableFeatures({"age": (0, 100)}, {"sex": ("f", "m")})
    >>> front.encode({"age": "50", "sex": "x"})
    tensor([0., 1., 0., 0., 1.])
    """

    numbers: Mapping[str, Sequence[float]]
    categories: Mapping[str, Sequence[str]]
    missing: str = "refuse"

    @property
    def size(self) -> int:
        """Number of features of a row: of its numbers, marks of missing ones, and a place for each category."""
        each = 3 if self.missing == "feature" else 2
        return each * len(self.numbers) + sum(len(values) + 1 for values in self.categories.values())

    def encode(self, row: Mapping[str, str], where: str = "a row") -> Tensor:
        """Features (size,) of the texts of a row; messages say where it is and show nothing of it."""
        found: list[float] = []
        for column, ends in self.numbers.items():
            found += self._of_number(row[column], column, ends, where)
        for column, values in self.categories.items():
            text = row[column].strip()
            found += [float(text == value) for value in values] + [float(text not in values)]
        return torch.tensor(found)

    def _of_number(self, text: str, column: str, ends: Sequence[float], where: str) -> list[float]:
        slot = [0.0] * (self.missing == "feature")
        if text.strip().lower() in MISSING:
            if slot:
                return [0.0, 0.0, 1.0]
            raise InvalidArgument(
                f"Expected a number in the column {column!r} in {where}, which has none. Leave such rows out by a "
                "public rule; or data.missing: feature gives missing numbers a feature of their own."
            )
        value = number_of(text)
        if not math.isfinite(value):
            raise InvalidArgument(
                f"Expected a finite number in the column {column!r} in {where}, got another text. Write numbers as "
                "1234.5, or name the column in data.categories, with its values."
            )
        low, high = ends
        angle = math.pi * (max(low, min(high, value)) - (low + high) / 2) / (high - low)
        return [math.sin(angle), math.cos(angle), *slot]


def number_of(text: str) -> float:
    """The number in a text; nan where there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
