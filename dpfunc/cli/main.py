"""The `dpfunc` command: accounting without writing Python, and without torch, which takes seconds to import.

May import: its folder, train and below. Privacy depends on it: no.
"""

import dataclasses
import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import click

from dpfunc._utils.validation import integer, positive, probability, refuse, sampling_prob_of, total_steps
from dpfunc.accounting import (
    Event,
    Ledger,
    calibrate_noise,
    explain_delta,
    explain_epsilon,
    privacy_requirements,
    suggest_delta,
)
from dpfunc.cli._budget import budget
from dpfunc.cli._doctor import doctor
from dpfunc.cli._evidence import audit, certify, verify
from dpfunc.cli._ledger import ledger
from dpfunc.cli._output import describe, json_option, print_json, print_list, print_rows, print_values
from dpfunc.cli._train import generate, predict, train, tune
from dpfunc.errors import DPFuncError
from dpfunc.types import ADJACENCIES, Adjacency


class _Group(click.Group):
    """Command group that prints errors of dpfunc on stderr without a traceback; for exit codes see `main`."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DPFuncError as error:
            raise click.ClickException(str(error)) from error


@click.group(
    cls=_Group, context_settings={"help_option_names": ["-h", "--help"]},
    commands=[ledger, train, tune, generate, predict, certify, verify, audit, budget, doctor],
)  # fmt: skip
@click.version_option(package_name="dpfunc")
def main() -> None:
    """Differential privacy accounting, and fine-tuning with differential privacy.

    Results are on stdout, errors and warnings on stderr. Exit codes: 0, done; 1, refused or interrupted, and the
    message says why and whether anything was spent, or something wrong was found (`ledger check`, `certify --check`,
    `verify`, `audit`, `doctor`); 2, an option, argument or file name that does not exist, or one that is missing.
    """


def _of_a_run(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorate a function of q, steps, delta, adjacency, method and an option of its own, which gives a title and
    values: the command that prints them, with all ways to give q and steps."""
    options = [
        click.option("--sampling-prob", "-q", type=float, help="Probability of a record to be in a batch."),
        click.option("--dataset-size", "-n", type=int, help="Number of records; with --batch-size, instead of -q."),
        click.option("--batch-size", "-b", type=float, help="Expected batch size."),
        click.option("--steps", "-t", type=int, help="Number of steps."),
        click.option("--epochs", type=float, help="Passes over the data, instead of --steps; rounded up to steps."),
        own,
        click.option("--delta", "-d", type=float, required=True, help="Delta, below 1 / number of records."),
        click.option(
            "--adjacency", type=click.Choice(ADJACENCIES), default="add_remove", show_default=True,
            help="Which data sets are neighbours.",
        ),
        click.option(
            "--method", type=click.Choice(["auto", "tilted", "prv", "rdp"]), default="auto", show_default=True,
            help="How epsilon is computed.",
        ),
        json_option,
    ]  # fmt: skip

    def decorate(function: Callable[..., tuple[str, dict[str, Any]]]) -> Any:
        @functools.wraps(function)
        def _command(
            sampling_prob: float | None, dataset_size: int | None, batch_size: float | None, steps: int | None,
            epochs: float | None, delta: float, as_json: bool, **rest: Any,
        ) -> None:  # fmt: skip
            refuse(
                ((sampling_prob is None) == (batch_size is None) or (batch_size is not None and dataset_size is None),
                 "Expected either --sampling-prob, or --dataset-size together with --batch-size."),
                ((steps is None) == (epochs is None), "Expected either --steps or --epochs."),
            )  # fmt: skip
            q = sampling_prob_of(dataset_size, batch_size) if sampling_prob is None else sampling_prob
            if steps is None:
                # n / B of a q that is rounded to a float: 1 epoch at 0.333.. is 3 steps
                an_epoch = (1 / Fraction(probability("sampling_prob", q))).limit_denominator(10**6)
                steps = total_steps(an_epoch, 1, positive("epochs", epochs))
            print_values(*function(q, integer("steps", steps, minimum=1), delta, **rest), as_json)
            if dataset_size is not None and delta * dataset_size >= 1:
                click.echo(
                    f"Warning: delta={delta:g} is not below 1 / dataset_size = {1 / dataset_size:.3g}: publishing one "
                    f"random record in full would satisfy it. Choose e.g. "
                    f"{suggest_delta(dataset_size):.1g}.",
                    err=True,
                )

        return functools.reduce(lambda command, option: option(command), reversed(options), _command)

    return decorate


def _cost(
    q: float, sigma: float, steps: int, delta: float, adjacency: Adjacency, method: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The guarantee of a run, and the run, as values."""
    return (
        describe(Ledger((Event(q, sigma, steps),), adjacency).epsilon(delta, method)),
        {"sampling_prob": q, "noise_multiplier": sigma, "steps": steps},
    )


@main.command()
@_of_a_run(click.option("--sigma", "-s", type=float, required=True, help="Noise multiplier: noise / sensitivity."))
def epsilon(
    q: float, steps: int, delta: float, sigma: float, adjacency: Adjacency, method: str
) -> tuple[str, dict[str, Any]]:
    """Compute the privacy cost (epsilon) of a run.

    Example: dpfunc epsilon -n 60000 -b 256 --epochs 60 --sigma 1.1 --delta 1e-5
    """
    if sigma == 0:
        raise click.BadParameter("0 is no noise: epsilon is infinite. Expected sigma > 0.", param_hint="'--sigma'")
    cost, run = _cost(q, sigma, steps, delta, adjacency, method)
    return "What the run costs", {**cost, **run}


@main.command()
@_of_a_run(click.option("--epsilon", "-e", "target", type=float, required=True, help="Budget for epsilon."))
def sigma(
    q: float, steps: int, delta: float, target: float, adjacency: Adjacency, method: str
) -> tuple[str, dict[str, Any]]:
    """Compute the noise multiplier that a budget needs.

    Example: dpfunc sigma -n 60000 -b 256 --epochs 60 --epsilon 3 --delta 1e-5
    """
    needed = calibrate_noise(
        epsilon=target, delta=delta, sampling_prob=q, num_steps=steps, adjacency=adjacency, method=method
    )
    cost, run = _cost(q, needed, steps, delta, adjacency, method)
    return "Noise for the budget", {**run, **cost}


@main.command()
@click.option("--dataset-size", "-n", type=int, required=True, help="Number of records.")
@click.option("--batch-size", "-b", type=int, required=True, help="Expected batch size.")
@click.option("--epochs", type=float, required=True, help="Passes over the data.")
@click.option("--epsilon", "-e", "target_epsilon", type=float, required=True, help="Budget for epsilon.")
@click.option("--delta", "-d", type=float, help="Delta; by default min(1e-5, 1 / (20 n)).")
@json_option
def requirements(
    dataset_size: int, batch_size: int, epochs: float, target_epsilon: float, delta: float | None, as_json: bool
) -> None:
    """Turn a budget into a training plan: steps, noise, batch size, and what epsilon and delta mean.

    Example: dpfunc requirements -n 60000 -b 256 --epochs 60 --epsilon 3
    """
    need = privacy_requirements(
        dataset_size=dataset_size, batch_size=batch_size, epochs=epochs, target_epsilon=target_epsilon, delta=delta
    )
    values = dataclasses.asdict(need)
    if as_json:
        print_json({**values, "guarantee": describe(need.guarantee)})
        return
    plain = {name: value for name, value in values.items() if name not in ("choices", "guidance", "guarantee")}
    print_values("The plan", {**plain, "spent": str(need.guarantee)})
    print_rows(
        "Batch sizes at this budget and number of epochs",
        ("batch", "sampling prob", "steps", "noise multiplier", "noise / signal a step", "... over the run"),
        [tuple(str(v) if isinstance(v, int) else f"{v:.4g}" for v in dataclasses.astuple(c)) for c in need.choices],
    )
    meaning, ratio = explain_epsilon(target_epsilon), explain_delta(need.delta, dataset_size)
    print_rows("How to read it", ("", "what it allows"), [
        (f"epsilon {target_epsilon:g}", f"{meaning.words}: a belief of 1/2 becomes at most {meaning.posterior:.3f}"),
        (f"delta {need.delta:g}", ratio.words),
    ])  # fmt: skip
    print_list("To keep in mind:", need.guidance)


if __name__ == "__main__":
    main()
