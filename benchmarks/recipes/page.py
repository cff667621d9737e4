"""The tables of docs/recipes.md from the committed results: `python -m benchmarks.recipes.page`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from benchmarks.pages import filled, row
from benchmarks.recipes import __main__ as first
from benchmarks.recipes import adapters, projector, projector_apart, rules, trainer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
MULTIPLES = ("a quarter", "half", "recipe", "twice", "four times")
REACHED = ("data", "strategy", "n", "parameters", "r", "majority", "non-private", "tuned", "plain", "recipe")
HEADS = {
    "rules": ("data", "strategy", "epsilon", "r", "rate", *MULTIPLES),
    "batches": ("data", "n", "q = 0.1", "0.25", "0.5", "recipe"),
    "adapters": ("rank", "trained", "rate of adapters", "rate of head", "bound", "parameters", "accuracy"),
    "projector": ("data", "layers", "epsilon", "parameters", "r", "rate", "non-private", *MULTIPLES),
    "projector apart": ("data", "layers", "n", "parameters", "r", "majority", "non-private", "tuned", "recipe"),
    "way": (
        "data", "strategy", "way", "tokens", "n", "parameters", "rate of head", "majority", "recipe", "runs"
    ),
    "dev": REACHED,
    "apart": REACHED,
}  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    """The results of a file; none if it is not there."""
    found: list[dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.exists() else []
    return found


def tables() -> dict[str, str]:
    """The tables of the page, by their places."""
    reached = read(first.RESULT)
    lines = {
        "rules": [rules.line(each) for each in read(rules.RESULT)],
        "batches": [rules.line_of_batches(each) for each in read(rules.BATCHES)],
        "adapters": [adapters.line(each) for each in read(adapters.RESULT)],
        "projector": [projector.line(each) for each in read(projector.RESULT)],
        "projector apart": [projector_apart.line(each) for each in read(projector_apart.RESULT)],
        "way": [trainer.line(each) for each in read(trainer.RESULT)],
        "dev": [first.line(each) for each in reached if each["chosen_on"]],
        "apart": [first.line(each) for each in reached if not each["chosen_on"]],
    }
    return {
        name: "\n".join([row(HEADS[name]), "|---" * len(HEADS[name]) + "|", *found]) for name, found in lines.items()
    }


@click.command(help=__doc__)
def main() -> None:
    """Write the tables into the page."""
    PAGE.write_text(filled(PAGE.read_text("utf-8"), tables()), "utf-8")


if __name__ == "__main__":
    main()
