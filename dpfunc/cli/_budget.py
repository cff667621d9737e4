"""The commands `dpfunc budget create`, `show`, `reserve`, `settle` and `history`.

May import: its folder, train and below. Privacy depends on it: no.
"""

import secrets
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from dpfunc._utils.locks import only_process
from dpfunc.accounting import Event, Ledger
from dpfunc.budget import Budget, BudgetEntry
from dpfunc.checkpoint.costs import read_spent
from dpfunc.cli._output import json_option, print_json, print_rows, print_values, shown
from dpfunc.types import ADJACENCIES, Adjacency

_file = click.Path(exists=True, path_type=Path)
_spender = click.option("--spender", help="Who reserves. [default: the user]")


@click.group()
def budget() -> None:
    """Budget of a data set: all runs on the same records share it, in a database.

    URL is the path of a SQLite file on a local disk, or postgresql://user@host/database. Nothing in it is private.
    """


@budget.command()
@click.argument("url")
@click.option("--epsilon", "-e", type=float, required=True, help="Of all runs together.")
@click.option("--delta", "-d", type=float, required=True, help="Of all runs together, below 1 / number of records.")
@click.option("--unit", required=True, help="What is protected, in the words of the runs, e.g. 'one patient'.")
@click.option("--adjacency", type=click.Choice(ADJACENCIES), required=True, help="Which data sets are neighbours.")
@click.option("--spender", "spenders", multiple=True, required=True, help="Who may reserve; repeat it for more names.")
@click.option("--spent", multiple=True, type=_file, help="Journal, ledger or record of an earlier run; repeat it.")
@json_option
def create(
    url: str, epsilon: float, delta: float, unit: str, adjacency: Adjacency, spenders: tuple[str, ...],
    spent: tuple[Path, ...], as_json: bool,
) -> None:  # fmt: skip
    """Make a budget. Its facts are fixed from then on.

    Example: dpfunc budget create mails.db -e 8 -d 1e-6 --unit "one person" --adjacency add_remove --spender ana
    """
    earlier = read_spent(spent)
    Budget(url).create(epsilon=epsilon, delta=delta, unit=unit, adjacency=adjacency, spenders=spenders, earlier=earlier)
    print_values("The budget was made", {"created": url}, as_json)


@budget.command()
@click.argument("url")
@json_option
def show(url: str, as_json: bool) -> None:
    """Show what the data set may cost, and what is charged.

    Example: dpfunc budget show mails.db
    """
    account = Budget(url).account()
    facts, ledger = account.facts, account.ledger()
    print_values("Budget of the data set", {
        "epsilon": facts.epsilon, "delta": facts.delta, "unit": facts.unit, "adjacency": facts.adjacency,
        "spenders": ", ".join(facts.spenders), "runs": len(account.entries), "steps_charged": ledger.num_steps,
        "epsilon_charged": facts.epsilon if account.closed else ledger.epsilon(facts.delta).epsilon,
    }, as_json)  # fmt: skip


@budget.command()
@click.argument("url")
@json_option
def history(url: str, as_json: bool) -> None:
    """List all runs, with what each would cost alone: epsilons do not add up.

    Example: dpfunc budget history mails.db
    """
    account = Budget(url).account()
    rows = [_described(entry, account.facts.delta) for entry in account.entries.values()]
    if as_json:
        print_json(rows)
    else:
        header = [name.replace("_", " ") for name in (rows[0] if rows else {"run": ""})]
        print_rows("Runs", header, [[shown(*item) for item in row.items()] for row in rows])


@budget.command()
@click.argument("url")
@click.argument("run")
@click.option("--unit", required=True, help="What the run protects: that of the budget.")
@click.option("--sampling-prob", "-q", type=float, required=True, help="Probability of a record to be in a batch.")
@click.option("--sigma", "-s", type=float, required=True, help="Noise multiplier.")
@click.option("--steps", "-t", type=int, required=True, help="Number of steps.")
@_spender
@json_option
def reserve(
    url: str, run: str, unit: str, sampling_prob: float, sigma: float, steps: int, spender: str | None, as_json: bool
) -> None:
    """Reserve for a run of another program, which is named once and for all; runs of dpfunc do it themselves.

    Example: dpfunc budget reserve mails.db scan -q 0.01 -s 1.1 -t 1000 --unit "one person"
    """
    there = Budget(url, run, spender)
    facts = there.account().facts
    planned = Ledger((Event(sampling_prob, sigma, steps),), facts.adjacency)
    # a text of this call alone: inside of the transaction it tells two people who take one name at once
    entry = there.reserve(planned, f"by hand: {run}, {secrets.token_hex(8)}", unit=unit)
    print_values("The run in the budget", _described(entry, facts.delta), as_json)


@budget.command()
@click.argument("url")
@click.argument("run")
@click.argument("spent", type=_file, required=False)
@click.option("--unused", is_flag=True, help="Instead of SPENT: nothing was released.")
@_spender
@json_option
def settle(url: str, run: str, spent: Path | None, unused: bool, spender: str | None, as_json: bool) -> None:
    """Charge what a run that has ended, or was killed, has really spent, by its journal.

    SPENT is its folder or journal (.jsonl). Runs of dpfunc that end by themselves settle without this.

    Example: dpfunc budget settle mails.db scan runs/scan/privacy_journal.jsonl
    """
    if (spent is None) != unused:
        raise click.UsageError("Expected either SPENT, the folder or the journal of the run, or --unused.")
    there = Budget(url, run, spender)
    facts = there.account().facts
    place = nullcontext() if spent is None else only_process(spent if spent.is_dir() else spent.parent)
    with place:  # it has ended
        entry = there.settle(Ledger(adjacency=facts.adjacency) if spent is None else spent)
    print_values("The run in the budget", _described(entry, facts.delta), as_json)


def _described(entry: BudgetEntry, delta: float) -> dict[str, Any]:
    return {
        "run": entry.run, "spender": entry.spender, "state": entry.state, "steps": entry.charged.num_steps,
        "reserved_steps": entry.planned.num_steps, "epsilon_alone": entry.charged.epsilon(delta).epsilon,
        "date": entry.date,
    }  # fmt: skip
