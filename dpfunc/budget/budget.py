"""The budget of a data set: a run reserves what it may cost before its first step, and settles what it has cost.

May import: its folder, checkpoint and below. Privacy depends on it: yes.
"""

from __future__ import annotations

import getpass
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dpfunc._utils.files import replace_file
from dpfunc._utils.validation import checked, fail, line, named, one_of, optional, signed, unique_json
from dpfunc.accounting import Guarantee, Ledger, affordable_steps
from dpfunc.accounting.accountant import upper
from dpfunc.budget._events import RESERVE, REST, SETTLE, Account, BudgetEntry, Event, Facts
from dpfunc.errors import BudgetExhausted, InvalidArgument, LedgerConflict
from dpfunc.types import Adjacency

if TYPE_CHECKING:  # a budget is shown without torch
    from dpfunc.plan import Plan
    from dpfunc.rng import Key

KEPT = Path("checkpoint-key", "key.json")  # of a run that has reserved, until it saves a step
_PLACE_FILE = "privacy_budget.json"
_NOTHING = "Nothing was reserved."


@dataclass(frozen=True)
@checked({
    "url": lambda name, value: str(value), "run": optional(line), "spender": optional(line)
})  # fmt: skip
class Budget:
    """The budget of a data set, in a database that all its runs share, for one of them or to look at.

    What all runs cost together is `accounting.epsilon` of the sum of their ledgers, never a sum of epsilons. A run is
    charged all that it has reserved until it settles; one that was killed, until it is settled with its journal.
    A run whose settings follow from results of earlier ones is counted as if they had been fixed before.

    Args:
        url: path of a SQLite file, on a local disk; or `postgresql://user@host/database`, for several machines.
        run: name of the run, e.g. `"first model"`, of which a budget has one; needed to reserve and to settle.
        spender: who reserves; None: the name of the user that this process has.

    Raises:
        InvalidArgument: there is no budget, or one of another version. CheckpointError: it was changed by other means.
        NotWritten: the database cannot be reached or written.

    Guarantees:
        tests/budget/test_store.py: no charge is lost or counted twice, whichever process is killed
        (test_no_charge_is_lost_or_counted_twice) or connection cut (test_cut_connections_count_once), and a changed
        byte is found (test_a_changed_byte_is_found); a charge is never below what was spent
        (tests/budget/test_budget.py::TestTruth).

    >>> import tempfile
    >>> from dpfunc.types import Event
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     budget = Budget(f"{folder}/patients.db", run="first model", spender="ana").create(
    ...         epsilon=3.0, delta=1e-6, unit="one patient", adjacency="add_remove", spenders=["ana"])
    ...     entry = budget.reserve(Ledger((Event(0.01, 1.0, 500),)), "a text of this run", unit="one patient")
    ...     print(budget.settle(Ledger((Event(0.01, 1.0, 400),))).charged)
    Ledger(400 steps, add_remove: (q=0.01, sigma=1) x 400)
    """

    url: str | Path
    run: str | None = None
    spender: str | None = None

    def __repr__(self) -> str:
        """The fields, without a password."""
        return f"Budget({_store().shown(self.url)!r}, run={self.run!r}, spender={self.spender!r})"

    @named
    def create(
        self, *, epsilon: float, delta: float, unit: str, adjacency: Adjacency, spenders: Sequence[str],
        earlier: Ledger | None = None,
    ) -> Budget:  # fmt: skip
        """Make the budget, where there is none. What it says is public, and cannot be changed.

        Args:
            epsilon, delta: what all runs together may cost. adjacency: which data sets are neighbours.
            unit: what is protected, in the words of the runs, e.g. `"one patient"`; DPTrainer's default is
                `dpfunc.accounting.record.ONE_RECORD`. earlier: what was spent on the same records before.
            spenders: names of who may reserve: against mistakes; the database decides who can write.

        Raises:
            InvalidArgument: a value outside its domain, or there is a budget. NotWritten: it could not be written.
        """
        names = (spenders,) if isinstance(spenders, str) else tuple(spenders)
        before = Ledger(adjacency=adjacency) if earlier is None else earlier
        _store().make(self.url, Facts(epsilon, delta, unit, adjacency, names, before))
        return self

    def account(self) -> Account:
        """Read the database: `facts` (epsilon, delta, unit, ...), `entries` by run, `ledger()`."""
        return cast(Account, _store().read(self.url))

    def spent(self) -> Ledger:
        """Ledger that a plan of this run counts as spent: all charges; of a run that has reserved, those of that time.

        So a resumed run makes the plan that it was begun with. `dp_step.init` refuses to begin with this ledger, or
        with a plan whose `spent` it is, where nothing is reserved for the run.
        """
        account = self.account()
        entry = account.entries.get(self.run or "")
        return replace(account.ledger() if entry is None else entry.before, _budget=self)

    @named
    def reserve(
        self, planned: Plan | Ledger | Guarantee, key: Key | str, *, unit: str, before: Ledger | None = None
    ) -> BudgetEntry:
        """Reserve what a run may cost, before its first step. The same again, by a resumed run, changes nothing.

        Args:
            planned: the plan of the run; or the ledger of all its steps; or, of a private search, the cost of all
                charges and the search together: it takes all that is left, since its own cost is no ledger.
            key: of the run, which tells it from another one of the same name; or a text that no other run has: two
                processes of one spender with the same text and plan are taken for one run that goes on.
            unit: what the run protects; must be that of the budget.
            before: what the run counts as spent, for `spent()`; None: what the plan does, or all charges.

        Returns:
            The entry of the run, which is charged all of `planned`. It has public facts only.

        Raises:
            BudgetExhausted: it does not fit; the message says how many steps would. InvalidArgument: no name of a run,
                another delta or unit, or an unknown spender. LedgerConflict: another adjacency, another run of
                this name, or a search that lacks charges. Nothing was reserved.
        """
        run, spender = self._names()
        if isinstance(key, str):
            token = f"text {line('key', key)}"
        else:
            from dpfunc.rng import fingerprint

            token = fingerprint(key)  # which its journal has as well
        ledger, kind = _ledger_of(planned), REST if isinstance(planned, Guarantee) else RESERVE
        if before is None and not isinstance(planned, Ledger | Guarantee):
            before = planned.spent

        def decide(account: Account) -> tuple[Event | None, BudgetEntry | tuple[Account, float]]:
            self._check(account, unit, ledger, getattr(planned, "delta", account.facts.delta))
            entry, others = account.entries.get(run), account.ledger(without=run)
            if entry is not None and _is_there(entry, spender, token, ledger):
                return None, entry
            known = entry.before if entry is not None else others if before is None else before
            if isinstance(planned, Guarantee) and (entry is not None or known != account.ledger()):
                raise LedgerConflict(f"Expected a search that counts all charges, got others since. {_NOTHING}")
            cost = _cost(account, others, planned, ledger)
            if cost > account.facts.epsilon or account.closed:
                return None, (account, cost)
            return _event(account, kind, run, spender, token, ledger, known)

        found = _store().change(self.url, decide)
        if isinstance(found, BudgetEntry):
            return found
        raise self._no_room(planned, ledger, *found)

    def check(self, planned: Plan | Ledger | Guarantee, *, unit: str) -> None:
        """Check that `reserve` has room for a run or a search, as far as it follows from its plan. Nothing is written.

        Args:
            planned, unit: see `reserve`.

        Raises:
            BudgetExhausted, InvalidArgument, LedgerConflict: as `reserve`, which also compares keys.
        """
        account, (run, _) = self.account(), self._names()
        ledger = _ledger_of(planned)
        self._check(account, unit, ledger, getattr(planned, "delta", account.facts.delta))
        if run in account.entries:  # it goes on, or `reserve` says that it is another one
            return
        cost = _cost(account, account.ledger(), planned, ledger)
        if cost > account.facts.epsilon or account.closed:
            raise self._no_room(planned, ledger, account, cost)

    def _no_room(
        self, planned: Plan | Ledger | Guarantee, ledger: Ledger, account: Account, cost: float
    ) -> BudgetExhausted:
        """The error of a run or search that is beyond the budget: all of them cost `cost`, or nothing is left."""
        run, _ = self._names()
        if account.closed or isinstance(planned, Guarantee):
            why = "A search has reserved all that was left" if account.closed else "Lower the epsilon of the search"
            return BudgetExhausted(f"The budget of the data set has no room for run={run!r}. {why}. {_NOTHING}")
        others, facts = account.ledger(without=run), account.facts
        limit = getattr(planned, "num_steps", ledger.num_steps)  # of a plan: one event may be that of many steps
        steps = affordable_steps(
            lambda count: others.compose(_first(planned, count)),
            epsilon=facts.epsilon, delta=facts.delta, limit=limit,
        )  # fmt: skip
        return BudgetExhausted(
            f"Expected a run within the budget of the data set, epsilon={facts.epsilon:g} at delta={facts.delta:g}, "
            f"got run={run!r}, with which all runs cost {upper(cost, 4)}. {steps} of its {limit} steps would fit "
            f"beside the {others.num_steps} that are charged; Plan.for_budget(budget=...) finds the noise for all. "
            f"{_NOTHING}"
        )

    def settle(self, spent: Ledger | Path | str) -> BudgetEntry:
        """Charge what the run has really spent; the rest of its reservation returns. The same again changes nothing.

        Args:
            spent: the journal of the run, or the folder with it, which then gets `privacy_budget.json`, for the
                certificate; or a ledger of the run's own steps alone.

        Returns:
            The entry of the run; `charged` is what was spent.

        Raises:
            InvalidArgument: no reservation, or no journal with a step of the run. LedgerConflict: fewer steps than were
                settled before; or more than were reserved, which are charged from here on: settle again if that is
                right. CheckpointError: a journal that lost lines.
        """
        run, spender = self._names()
        entries = self.account().entries
        known = entries.get(run)
        if known is None or known.state == REST:
            raise fail("a run that has reserved, and no search", "run", run, "Nothing was settled.")
        tokens = {entry.token for entry in entries.values()}
        own = spent if isinstance(spent, Ledger) else _of_files(Path(spent), known, tokens)

        def decide(account: Account) -> tuple[Event | None, BudgetEntry]:
            self._check(account, account.facts.unit, own, account.facts.delta)
            entry = account.entries[run]
            if own.beyond(entry.planned).events:
                whole = entry.planned.compose(own.beyond(entry.planned))
                return _event(account, RESERVE, run, spender, entry.token, whole, entry.before)
            if entry.state == SETTLE and own.lacks(entry.charged):
                raise LedgerConflict(
                    f"Expected at least the {entry.charged.num_steps} steps that were settled, got {own.num_steps}: "
                    "what was spent does not return. Nothing was changed."
                )
            if entry.state == SETTLE and own == entry.charged:
                return None, entry
            return _event(account, SETTLE, run, spender, entry.token, own, entry.before)

        after = cast(BudgetEntry, _store().change(self.url, decide))
        if after.state != SETTLE:
            raise LedgerConflict(
                f"Expected at most the {known.planned.num_steps} steps that were reserved, got {own}, with others. The "
                "run is charged both from now on. If the run took these steps, settle again with the same. If they are "
                "of other runs (state.ledger has plan.spent in it), settle with its own: name its journal."
            )
        if not isinstance(spent, Ledger):
            folder, place = Path(spent), self.account().place(run)
            replace_file((folder if folder.is_dir() else folder.parent) / _PLACE_FILE, json.dumps(signed(place)) + "\n")
        return after

    def _names(self) -> tuple[str, str]:
        if self.run is None:
            raise fail("the name of a run", "run", None, 'Budget(url, run="first model").')
        return self.run, getpass.getuser() if self.spender is None else self.spender

    def _check(self, account: Account, unit: str, ledger: Ledger, delta: float) -> None:
        """Check that epsilon means for a run what it does for the budget, and that the spender may spend."""
        facts, (_, spender) = account.facts, self._names()
        one_of("spender", spender, facts.spenders, f"These may spend. {_NOTHING}")
        one_of("unit", unit, (facts.unit,), f"This is what the budget protects. {_NOTHING}")
        one_of("delta", repr(delta), (repr(facts.delta),), f"This is the delta of the budget. {_NOTHING}")
        if ledger.adjacency != facts.adjacency:
            raise LedgerConflict(
                f"Expected adjacency {facts.adjacency!r}, as the budget has, got {ledger.adjacency!r}. {_NOTHING}"
            )


def _store() -> Any:
    """The module with the database, which needs the extra."""
    try:
        from dpfunc.budget import _store
    except ImportError as error:
        raise InvalidArgument(f'A budget needs SQLAlchemy: pip install "dpfunc[budget]" ({error}).') from error
    return _store


def _ledger_of(planned: Plan | Ledger | Guarantee) -> Ledger:
    """The steps of what is planned; of a search, whose cost is no ledger, none."""
    if isinstance(planned, Guarantee):
        return Ledger(adjacency=planned.adjacency)
    return planned if isinstance(planned, Ledger) else planned.ledger()


def _cost(account: Account, others: Ledger, planned: object, ledger: Ledger) -> float:
    """Epsilon of these steps with the others; that of a search has them in it."""
    if isinstance(planned, Guarantee):
        return planned.epsilon
    return others.compose(ledger).epsilon(account.facts.delta).epsilon


def _is_there(entry: BudgetEntry, spender: str, token: str, planned: Ledger) -> bool:
    """True if a run has its reservation; False if it was settled, and goes on. Another run of that name is an error."""
    settled = entry.state == SETTLE
    other = token.startswith("text ") if settled else entry.spender != spender  # another spender may settle
    if other or entry.token != token or entry.planned != planned:
        raise LedgerConflict(
            f"Expected a run that is not in the budget, got run={entry.run!r}, which is there with another key, plan "
            f"or spender ({entry.spender!r}), or is settled. Two runs of one name would be counted once: choose "
            "another name, or resume that run as its spender. One that was killed before its first step, and has lost "
            f"its key, is settled by dpfunc budget settle --unused. {_NOTHING}"
        )
    return not settled


def _event(
    account: Account, kind: str, run: str, spender: str, token: str, ledger: Ledger, before: Ledger
) -> tuple[Event, BudgetEntry]:
    date = datetime.now(UTC).isoformat(timespec="seconds")  # for people: nothing is decided by it
    event = Event(account.number + 1, kind, run, spender, token, ledger.to_json(), before.to_json(), date)
    return event, event.entry(account.entries.get(run))


def _of_files(path: Path, entry: BudgetEntry, tokens: Collection[str]) -> Ledger:
    """The steps of one run in a journal, or in the journals of a folder, without what it counted before.

    Later runs there that have no reservation are its own: it was resumed with a new key, or nobody else counts them.
    """
    from dpfunc.checkpoint.journal import read_steps, steps_ledger

    journals, token = sorted(path.glob("*journal.jsonl")) if path.is_dir() else [path], entry.token
    runs = read_steps(*journals, missing="empty")
    if token in runs:
        began = [*runs].index(token)
        return steps_ledger(runs[name] for name in [*runs][began:] if name == token or name not in tokens)
    if token.startswith("text ") and len(runs) == 1:
        return steps_ledger(runs.values())
    lost = not journals and any(path.glob("checkpoint-[0-9]*"))  # the first one is made after the journal
    if not lost and (path / KEPT).is_file() and unique_json((path / KEPT).read_bytes()).get("run") == token:
        return Ledger(adjacency=entry.planned.adjacency)
    raise InvalidArgument(
        f"Expected a journal with steps of the run whose key is {token!r}, got {str(path)!r}, which has none. If "
        "it took no step, settle with Ledger(adjacency=...), or --unused. Nothing was settled."
    )


def _first(planned: Plan | Ledger, count: int) -> Ledger:
    """The first steps of a plan; of a ledger those that come first in it."""
    if not isinstance(planned, Ledger):
        return planned.ledger(count)
    events = []
    for event in planned.events:
        if count:
            events.append(replace(event, num_steps=min(count, event.num_steps)))
            count -= events[-1].num_steps
    return Ledger(tuple(events), planned.adjacency)
