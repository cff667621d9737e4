"""Results on stdout: tables, lines in terminals that are too narrow for a table, or JSON.

May import: its folder, train and below. Privacy depends on it: no.
"""

import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, field
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from dpfunc.accounting import Guarantee
from dpfunc.accounting.accountant import upper

_WIDE = 10_000  # of no terminal
json_option: Callable[[Any], Any] = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON value instead."
)


def describe(guarantee: Guarantee) -> dict[str, Any]:
    """A guarantee as JSON values; infinity as null, since JSON has none."""
    return {**asdict(guarantee), "epsilon": None if math.isinf(guarantee.epsilon) else guarantee.epsilon}


@dataclass(frozen=True)
class Report:
    """Lines that a command prints while it works, kept with what else it prints as JSON."""

    values: dict[str, Any] = field(default_factory=lambda: {"report": [], "record": None})

    def say(self, *lines: str) -> None:
        """Print lines, and keep them."""
        self.values["report"] += lines
        for line in lines:
            click.echo(line)


@contextmanager
def reporting(as_json: bool, writes: bool = True) -> Iterator[Report]:
    """A report. As JSON stdout has its values alone, from the process that writes; all else is on stderr."""
    report = Report()
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # also what the Trainer of Transformers prints
        yield report
    if as_json and writes:
        print_json(report.values)


def print_json(values: object) -> None:
    """Print one JSON value."""
    click.echo(json.dumps(values, indent=2, allow_nan=False))


def print_line(line: str, values: object, as_json: bool) -> None:
    """Print a line; or as JSON values."""
    if as_json:
        print_json(values)
    else:
        click.echo(line)


def print_values(title: str, values: Mapping[str, Any], as_json: bool = False) -> None:
    """Print values beside their names; None is an infinite epsilon, see `describe`."""
    if as_json:
        print_json(values)
        return
    print_rows(title, ("", ""), [(name.replace("_", " "), shown(name, value)) for name, value in values.items()])


def shown(name: str, value: Any) -> str:
    """A value as text; an epsilon is rounded up, and None is an infinite one."""
    if isinstance(value, float):
        return upper(value) if name.startswith("epsilon") else f"{value:.6g}"
    return "infinite" if value is None else str(value)


def print_rows(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their header; in a terminal that is too narrow for a table, lines with the same content."""
    columns = (Column(name, style="" if name else "bold") for name in header)
    table, console = Table(*columns, title=title, title_justify="left", show_header=any(header)), Console()
    for row in rows:
        table.add_row(*map(Text, row))
    if console.measure(table, options=console.options.update(max_width=_WIDE)).minimum <= console.width:
        console.print(table)  # no word is broken
        return
    click.echo(title)
    between = ", " if any(header) else ": "
    for row in rows:
        named = (f"{name}: {value}".removeprefix(": ") for name, value in zip(header, row, strict=True))
        click.echo(f"- {between.join(named)}")


def print_list(title: str, lines: Iterable[str]) -> None:
    """Print a title, and sentences under it that are broken between words."""
    click.echo(f"\n{title}")
    for line in lines:
        click.echo(textwrap.fill(
            line, max(20, Console().width), initial_indent="- ", subsequent_indent="  ", break_long_words=False,
            break_on_hyphens=False,
        ))  # fmt: skip


def print_checks(
    checks: Sequence[tuple[str, bool | None, str]], values: Mapping[str, Any], as_json: bool, bad: str,
    good: str = "All agrees.",
) -> None:  # fmt: skip
    """Print checks, (name, True if it agrees, what was found); the exit code is 0 if all agree, else 1.

    None: there is nothing to compare, which is told from a check that fails.
    """
    agrees = all(fine for _, fine, _ in checks)
    if as_json:
        print_json({"agrees": agrees, **values})
    else:
        words = {True: "ok", False: "WRONG", None: "not shown"}
        print_rows("Checks", ("", "", "found"), [(name, words[fine], text) for name, fine, text in checks])
        worst = "WRONG" if any(fine is False for _, fine, _ in checks) else "not shown"
        click.echo(good if agrees else f"{bad}: see {worst}.")
    if not agrees:
        sys.exit(1)
