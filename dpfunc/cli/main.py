"""The `dpfunc` command: accounting without writing Python, and without torch, which takes seconds to import."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import click
from rich.console import Console
from rich.table import Table

from dpfunc import accounting
from dpfunc._utils.validation import fail, sampling_prob_of, unique_json, whole
from dpfunc.accounting import Guarantee, Ledger
from dpfunc.checkpoint.journal import journal_ledger
from dpfunc.cli.train import generate, train
from dpfunc.errors import DPFuncError, InvalidArgument
from dpfunc.types import ADJACENCIES, Adjacency, Event

adjacency_option = click.option(
    "--adjacency", type=click.Choice(ADJACENCIES), default="add_remove", show_default=True, help="Neighbours."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
method_option = click.option(
    "--method",
    type=click.Choice(["auto", "tilted", "prv", "rdp"]),
    default="auto",
    show_default=True,
    help="Accountant.",
)


class Group(click.Group):
    """Command group that prints errors of dpfunc on stderr without a traceback; for exit codes see `main`."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401  (click's own)
        """Run the command; turn an error of dpfunc into a click error."""
        try:
            return super().invoke(ctx)
        except DPFuncError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dpfunc")
def main() -> None:
    """Differential privacy accounting, and fine-tuning with differential privacy.

    Results are on stdout, errors and warnings on stderr. Exit codes: 0, done; 1, refused or interrupted, and the
    message says why and whether anything was spent; 2, an option, argument or file name that does not exist.
    """


def sampling(
    sampling_prob: float | None, dataset_size: int | None, batch_size: float | None, steps: int | None,
    epochs: float | None,
) -> tuple[float, int]:  # fmt: skip
    """q and the number of steps, from either way of giving them.

    Raises:
        InvalidArgument: both ways, or neither.
    """
    if (sampling_prob is None) == (dataset_size is None or batch_size is None):
        raise InvalidArgument("Expected either --sampling-prob, or --dataset-size together with --batch-size.")
    q = sampling_prob
    if q is None:
        q = sampling_prob_of(dataset_size, batch_size)
    if (steps is None) == (epochs is None):
        raise InvalidArgument("Expected either --steps or --epochs.")
    if steps is None:
        exact = cast(float, epochs) / q
        if not (math.isfinite(exact) and exact > 0):
            raise fail("0 < epochs < inf", "epochs", epochs)
        steps = math.ceil(round(exact, 6))  # a part of a step is a step
    return q, whole("steps", steps, minimum=1)


def sampling_options(command: Any) -> Any:  # noqa: ANN401  (a decorator)
    """Decorate a command with the options that `sampling` takes."""
    for option in reversed(
        [
            click.option("--sampling-prob", "-q", type=float, help="Probability of a record to be in a batch."),
            click.option("--dataset-size", "-n", type=int, help="Records; with --batch-size, instead of -q."),
            click.option("--batch-size", "-b", type=float, help="Expected batch size."),
            click.option("--steps", "-t", type=int, help="Number of steps."),
            click.option("--epochs", type=float, help="Passes over the data, instead of --steps; rounded up to steps."),
        ]
    ):
        command = option(command)
    return command


def show(values: dict[str, Any], as_json: bool, title: str) -> None:
    """Print a few values as a table or as JSON; None is an infinite epsilon, see `describe`."""
    if as_json:
        click.echo(json.dumps(values, indent=2, allow_nan=False))
        return
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    shown = {
        name.replace("_", " "): (
            "infinite" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        )
        for name, value in values.items()
    }
    for pair in shown.items():
        table.add_row(*pair)
    print_table(table, title, [f"{name}: {value}" for name, value in shown.items()])


def print_table(table: Table, title: str, lines: Sequence[str]) -> None:
    """Print a table; in a terminal that is too narrow for its numbers, print lines of text with the same content."""
    console = Console()
    cells = [str(cell) for column in table.columns for cell in (column.header, *column.cells)]
    with console.capture() as captured:
        console.print(table)
    if all(word in captured.get() for cell in cells for word in cell.split()):
        console.print(table)
        return
    for line in (title, *lines):
        click.echo(line)


def describe(guarantee: Guarantee) -> dict[str, Any]:
    """A guarantee as JSON values; infinity as null, since JSON has none."""
    values = dataclasses.asdict(guarantee)
    return {**values, "epsilon": None if math.isinf(guarantee.epsilon) else guarantee.epsilon}


@main.command()
@sampling_options
@click.option("--sigma", "-s", "noise_multiplier", type=float, required=True, help="Noise multiplier.")
@click.option("--delta", "-d", type=float, required=True, help="Below 1 / number of records.")
@adjacency_option
@method_option
@json_option
def epsilon(
    sampling_prob: float | None, dataset_size: int | None, batch_size: float | None, steps: int | None,
    epochs: float | None, noise_multiplier: float, delta: float, adjacency: Adjacency, method: str, as_json: bool,
) -> None:  # fmt: skip
    """Compute the privacy cost (epsilon) of a run.

    Example: dpfunc epsilon -n 60000 -b 256 --epochs 60 --sigma 1.1 --delta 1e-5
    """
    q, count = sampling(sampling_prob, dataset_size, batch_size, steps, epochs)
    ledger = Ledger((Event(q, noise_multiplier, count),), adjacency)
    guarantee = accounting.epsilon(ledger, delta, method)
    run = {"sampling_prob": q, "noise_multiplier": noise_multiplier, "steps": count}
    show({**describe(guarantee), **run}, as_json, "What the run costs")
    warn_about_delta(delta, dataset_size)


@main.command()
@sampling_options
@click.option("--epsilon", "-e", "target", type=float, required=True, help="Budget.")
@click.option("--delta", "-d", type=float, required=True, help="Below 1 / number of records.")
@adjacency_option
@method_option
@json_option
def sigma(
    sampling_prob: float | None, dataset_size: int | None, batch_size: float | None, steps: int | None,
    epochs: float | None, target: float, delta: float, adjacency: Adjacency, method: str, as_json: bool,
) -> None:  # fmt: skip
    """The noise multiplier that a budget needs.

    Example: dpfunc sigma -n 60000 -b 256 --epochs 60 --epsilon 3 --delta 1e-5
    """
    q, count = sampling(sampling_prob, dataset_size, batch_size, steps, epochs)
    needed = accounting.calibrate_noise(
        epsilon=target, delta=delta, sampling_prob=q, num_steps=count, adjacency=adjacency, method=method
    )
    guarantee = accounting.epsilon(Ledger((Event(q, needed, count),), adjacency), delta, method)
    run = {"noise_multiplier": needed, "sampling_prob": q, "steps": count}
    show({**run, **describe(guarantee)}, as_json, "Noise for the budget")
    warn_about_delta(delta, dataset_size)


def warn_about_delta(delta: float, dataset_size: int | None) -> None:
    """Say on stderr when delta is too large to mean anything."""
    if dataset_size is not None and delta * dataset_size >= 1:
        click.echo(
            f"Warning: delta={delta:g} is not below 1 / dataset_size = {1 / dataset_size:.3g}: publishing one random "
            f"record whole would satisfy it. Choose e.g. {accounting.suggest_delta(dataset_size):.1g}.",
            err=True,
        )


@main.command()
@click.option("--dataset-size", "-n", type=int, required=True, help="Records.")
@click.option("--batch-size", "-b", type=int, required=True, help="Expected batch size.")
@click.option("--epochs", type=float, required=True, help="Passes over the data.")
@click.option("--epsilon", "-e", "target_epsilon", type=float, required=True, help="Budget.")
@click.option("--delta", "-d", type=float, help="By default min(1e-5, 1 / n^1.1).")
@json_option
def requirements(
    dataset_size: int, batch_size: int, epochs: float, target_epsilon: float, delta: float | None, as_json: bool
) -> None:
    """Translate a budget into a training plan: steps, noise, batch size, and how to read epsilon and delta."""
    need = accounting.privacy_requirements(
        dataset_size=dataset_size, batch_size=batch_size, epochs=epochs, target_epsilon=target_epsilon, delta=delta
    )
    if as_json:
        values = {**dataclasses.asdict(need), "guarantee": describe(need.guarantee)}
        click.echo(json.dumps(values, indent=2, allow_nan=False))
        return
    plain = {
        field.name: getattr(need, field.name)
        for field in dataclasses.fields(need)
        if field.name not in ("choices", "guidance", "guarantee")
    }
    show({**plain, "spent": str(need.guarantee)}, False, "The plan")
    print_rows(
        "Batch sizes at this budget and number of epochs",
        ("batch", "sampling prob", "steps", "noise multiplier", "noise / signal a step", "... over the run"),
        [tuple(str(v) if isinstance(v, int) else f"{v:.4g}" for v in dataclasses.astuple(c)) for c in need.choices],
    )
    reading, ratio = accounting.read_epsilon(target_epsilon), accounting.read_delta(need.delta, dataset_size)
    print_rows("How to read it", ("", "what it allows"), [
        (f"epsilon {target_epsilon:g}", f"{reading.reading}: a belief of 1/2 becomes at most {reading.posterior:.3f}"),
        (f"delta {need.delta:g}", ratio.reading),
    ])  # fmt: skip
    for line in need.guidance:
        click.echo(f"- {line}")


def print_rows(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows as a table with its title on the left."""
    table = Table(*header, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    lines = [
        f"- {', '.join(f'{name}: {value}' if name else value for name, value in zip(header, row, strict=True))}"
        for row in rows
    ]
    print_table(table, title, lines)


@main.group()
def ledger() -> None:
    """Inspect the ledgers and journals of runs."""


def read_ledger(path: Path) -> Ledger:
    """Read a ledger from its JSON file.

    Raises:
        InvalidArgument: there is something else in it, or a ledger that cannot be read.
    """
    try:
        text = path.read_text("utf-8")
        content = unique_json(text)
    except ValueError as error:  # of the encoding, or of JSON
        if "occurs twice" in str(error):
            raise InvalidArgument(f"The ledger {str(path)!r} cannot be read: {error}.") from error
        text, content = "", None
    # The state of a checkpoint has a schema too, and a ledger which lacks the steps that were taken after it.
    if not isinstance(content, dict) or not str(content.get("schema")).startswith("dpfunc.ledger/"):
        raise InvalidArgument(
            f"Expected a ledger, as Ledger.to_json writes it, or a journal (.jsonl), got {str(path)!r}, which is "
            "neither. The journal of a run of dpfunc train is privacy_journal.jsonl."
        )
    return Ledger.from_json(text)


@ledger.command("show")
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--delta", "-d", type=float, required=True, help="Below 1 / number of records.")
@method_option
@json_option
def show_ledger(path: Path, delta: float, method: str, as_json: bool) -> None:
    """Compute the privacy cost (epsilon) of a ledger (.json) or a journal (.jsonl)."""
    spent = journal_ledger(path) if path.suffix == ".jsonl" else read_ledger(path)
    guarantee = accounting.epsilon(spent, delta, method)
    if as_json:
        events = [dataclasses.asdict(event) for event in spent.events]
        values = {**describe(guarantee), "num_steps": spent.num_steps, "events": events}
        click.echo(json.dumps(values, indent=2, allow_nan=False))
        return
    rows = [(f"{e.sampling_prob:g}", f"{e.noise_multiplier:g}", str(e.num_steps)) for e in spent.events]
    print_rows(f"{spent.num_steps} steps, {spent.adjacency}", ("sampling prob", "noise multiplier", "steps"), rows)
    click.echo(str(guarantee))


main.add_command(train)
main.add_command(generate)

if __name__ == "__main__":
    main()
