"""What the database of a budget holds, as values: public facts, and events in a chain of digests. No SQL here.

May import: its folder, checkpoint and below. Privacy depends on it: yes.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from dpfunc._utils.validation import checked, expect, fail, line, one_of, open_unit, positive, refuse
from dpfunc.accounting import Ledger
from dpfunc.accounting.ledger import to_values
from dpfunc.errors import CheckpointError, DPFuncError, InvalidArgument
from dpfunc.types import ADJACENCIES, Adjacency

SCHEMA = "dpfunc.budget/1"
RESERVE, SETTLE, REST = "reserved", "settled", "rest"
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, DPFuncError)


@dataclass(frozen=True)
@checked({"epsilon": positive, "delta": open_unit, "adjacency": partial(one_of, allowed=ADJACENCIES)})
class Facts:
    """Public facts of a budget, see `Budget.create`; fixed when it is made."""

    epsilon: float
    delta: float
    unit: str
    adjacency: Adjacency
    spenders: tuple[str, ...]
    earlier: Ledger

    def __post_init__(self) -> None:
        for name in (self.unit, *self.spenders):
            line("unit and spenders", name)
        expect(self.spenders, "the names of who may spend", "spenders", self.spenders)
        Ledger(adjacency=self.adjacency).compose(self.earlier)  # of one adjacency

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "earlier": self.earlier.to_json()})


@dataclass(frozen=True)
class BudgetEntry:
    """A run in a budget.

    Args:
        run: its name. spender: who reserved it. token: public name of its key.
        state: `reserved`, `settled`, or `rest`: a search, which has reserved all that was left.
        planned: ledger that was reserved. charged: ledger that counts: `planned`, or what was really spent.
        before: what its plan counted as spent. date: of the last change, UTC.

    >>> BudgetEntry("first model", "ana", "key", "reserved", Ledger(), Ledger(), Ledger(), "").state
    'reserved'
    """

    run: str
    spender: str
    token: str
    state: str
    planned: Ledger
    charged: Ledger
    before: Ledger
    date: str


class Event(NamedTuple):
    """An immutable row: the charge of a run from then on. `kind` is its state; ledgers are JSON."""

    number: int
    kind: str
    run: str
    spender: str
    token: str
    ledger: str
    before: str
    date: str

    def digest(self, previous: str) -> str:
        return digest([previous, *self])

    def entry(self, known: BudgetEntry | None) -> BudgetEntry:
        ledger, before = Ledger.from_json(self.ledger), Ledger.from_json(self.before)
        planned = known.planned if known is not None and self.kind == SETTLE else ledger
        return BudgetEntry(self.run, self.spender, self.token, self.kind, planned, ledger, before, self.date)


class Account(NamedTuple):
    """All that a database holds: facts, runs in the order of their reservations, and the end of the chain."""

    facts: Facts
    entries: Mapping[str, BudgetEntry]
    number: int
    head: str

    @property
    def closed(self) -> bool:
        return any(entry.state == REST for entry in self.entries.values())

    def place(self, run: str) -> dict[str, Any]:
        facts, others = self.facts, self.ledger(without=run)
        return {
            **{name: getattr(facts, name) for name in ("epsilon", "delta", "unit", "adjacency")},
            "run": run,
            "number": [*self.entries].index(run) + 1,
            "others": [to_values(event) for event in others.events],
        }

    def ledger(self, without: str = "") -> Ledger:
        """Ledger of all runs, or of all but one, with what came before the budget."""
        return self.facts.earlier.compose(*[entry.charged for entry in self.entries.values() if entry.run != without])


def digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def damaged(what: str) -> CheckpointError:
    return CheckpointError(
        f"Expected a budget as dpfunc wrote it, got {what}: it was changed or damaged. Restore the database from a "
        "copy, and reserve again what was reserved after it. Nothing was reserved or settled."
    )


def read_account(about: tuple[Any, ...], rows: Iterable[tuple[Any, ...]]) -> Account:
    """Read the row about a budget, and its events; what is missing, changed or in another order is found."""
    number, schema, text, head, found = about
    refuse(
        (schema != SCHEMA,
         fail(f"a budget of schema {SCHEMA!r}", "schema", schema, "Use the version of dpfunc that made it.")),
        (digest([number, schema, text, head]) != found, damaged("facts with another digest")),
    )  # fmt: skip
    previous, entries, count = "", dict[str, BudgetEntry](), 0
    try:
        values = json.loads(text)
        earlier, spenders = Ledger.from_json(values["earlier"]), tuple(values["spenders"])
        facts = Facts(**{**values, "earlier": earlier, "spenders": spenders})
        for count, (*fields, found) in enumerate(rows, 1):
            event = Event(*fields)
            previous = event.digest(previous)
            if event.number != count or previous != found:
                raise InvalidArgument(f"row {count} has another digest")
            entries[event.run] = event.entry(entries.get(event.run))
    except _UNREADABLE as error:
        raise damaged(f"one that cannot be read ({error})") from error
    if (count, previous) != (number, head):
        raise damaged(f"{count} rows instead of {number}")
    return Account(facts, entries, number, head)
