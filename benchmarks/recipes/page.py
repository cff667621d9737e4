"""The tables of docs/recipes.md from the committed results: `python -m benchmarks.recipes.page`."""

from __future__ import annotations

import click

from benchmarks.recipes import __main__ as first
from benchmarks.recipes import projector, rules, trainer
from benchmarks.results import DOCS, fill, row, rows_of

PAGE = DOCS / "recipes.md"
MULTIPLES = ("a quarter", "half", "recipe", "twice", "four times")
REACHED = ("data", "strategy", "n", "parameters", "r", "majority", "non-private", "tuned", "plain", "recipe")
HEADS = {
    "rules": ("data", "strategy", "epsilon", "r", "rate", *MULTIPLES),
    "batches": ("data", "n", "q = 0.1", "0.25", "0.5", "recipe"),
    "projector": ("data", "layers", "epsilon", "parameters", "r", "rate", "non-private", *MULTIPLES),
    "projector apart": ("data", "layers", "n", "parameters", "r", "majority", "non-private", "tuned", "recipe"),
    "way": (
        "data", "strategy", "way", "tokens", "n", "parameters", "rate of head", "majority", "recipe", "runs"
    ),
    "dev": REACHED,
    "apart": REACHED,
}  # fmt: skip


def tables() -> dict[str, str]:
    """The tables of the page, by their places."""
    reached = rows_of(first.RESULT)
    lines = {
        "rules": [rules.line(each) for each in rows_of(rules.RESULT)],
        "batches": [rules.line_of_batches(each) for each in rows_of(rules.BATCHES)],
        "projector": [projector.line(each) for each in rows_of(projector.RESULT)],
        "projector apart": [projector.line_apart(each) for each in rows_of(projector.APART)],
        "way": [trainer.line(each) for each in rows_of(trainer.RESULT)],
        "dev": [first.line(each) for each in reached if each["chosen_on"]],
        "apart": [first.line(each) for each in reached if not each["chosen_on"]],
    }
    return {
        name: "\n".join([row(HEADS[name]), "|---" * len(HEADS[name]) + "|", *found]) for name, found in lines.items()
    }


@click.command(help=__doc__)
def main() -> None:
    """Write the tables into the page."""
    fill(PAGE, tables())


if __name__ == "__main__":
    main()
