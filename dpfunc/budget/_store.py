"""The database of a budget: SQLAlchemy Core on one SQLite file, or on a PostgreSQL server. It needs no torch.

May import: its folder, checkpoint and below. Privacy depends on it: yes.

A change is one transaction under one lock: `BEGIN IMMEDIATE` of SQLite, the lock of the one row of facts of PostgreSQL.
Every change finds what it has already done, so it is simply done again after a connection was cut in the middle.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine, insert, inspect, make_url, select, update
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.pool import NullPool

from dpfunc._utils.validation import expect, fail, refuse
from dpfunc.budget._events import SCHEMA, Account, Event, Facts, damaged, digest, read_account
from dpfunc.errors import InvalidArgument, NotWritten

_TABLES = MetaData()


def _table(name: str, *texts: str) -> Table:
    columns = [Column(text, Text, nullable=False) for text in (*texts, "digest")]
    return Table(name, _TABLES, Column("number", Integer, primary_key=True, autoincrement=False), *columns)


BUDGET = _table("dpfunc_budget", "schema", "facts", "head")
EVENTS = _table("dpfunc_budget_events", *Event._fields[1:])
_ATTEMPTS, _PAUSE = 8, 0.05  # seconds, doubled each time
_WAIT = 60  # seconds for the lock of a SQLite file
Answer = TypeVar("Answer")


def make(url: str, facts: Facts) -> None:
    def write(connection: Connection) -> None:
        expect(
            not inspect(connection).has_table(BUDGET.name), "a place without a budget", "url", shown(url),
            "There is one: its facts are fixed. Show it.",
        )  # fmt: skip
        _TABLES.create_all(connection)
        connection.execute(insert(BUDGET).values(_about(facts.to_json(), 0, "")))

    _in_transaction(url, write, mode="rwc")


def read(url: str) -> Account:
    return _in_transaction(url, _read, mode="ro")


def change(url: str, decide: Callable[[Account], tuple[Event | None, Answer]]) -> Answer:
    """Read a budget, decide, and add an event or none, under an exclusive lock; repeated after a lost connection."""

    def write(connection: Connection) -> Answer:
        account = _read(connection, lock=True)
        event, answer = decide(account)
        if event is not None:
            head = event.digest(account.head)
            connection.execute(insert(EVENTS).values(**event._asdict(), digest=head))
            connection.execute(update(BUDGET).values(_about(account.facts.to_json(), event.number, head)))
        return answer

    return _in_transaction(url, write, mode="rw")


# A password before the host, or as an argument; what cannot be parsed may hold one as well.
_SECRET = re.compile(r"(?i)(?<=:)(?!//)[^:\s]*(?=@)|(?<=pass=)[^&\s]+|(?<=password=)[^&\s]+|(?<=passwd=)[^&\s]+")


def shown(text: str) -> str:
    """An address, or a message with one, without its passwords."""
    return _SECRET.sub("***", text)


def _about(facts: str, number: int, head: str) -> dict[str, Any]:
    values = [number, SCHEMA, facts, head]
    return dict(zip(BUDGET.c.keys(), [*values, digest(values)], strict=True))


def _read(connection: Connection, lock: bool = False) -> Account:
    if not inspect(connection).has_table(BUDGET.name):
        raise InvalidArgument("Expected a database with a budget, got one without. Make it: dpfunc budget create.")
    rows = connection.execute(select(BUDGET).with_for_update() if lock else select(BUDGET)).all()
    if len(rows) != 1:
        raise damaged(f"{len(rows)} rows about the budget")
    return read_account(tuple(rows[0]), map(tuple, connection.execute(select(EVENTS).order_by(EVENTS.c.number))))


def _in_transaction(url: str, action: Callable[[Connection], Answer], *, mode: str) -> Answer:
    """Run an action in one transaction, again after a lost connection; `mode` as of SQLite: rwc, rw or ro."""
    address, attempt = _address(url, mode), 0
    while True:
        try:
            return _once(address, action, mode)
        except DBAPIError as error:
            attempt += 1
            if not _was_cut(error) or attempt == _ATTEMPTS:
                raise _refusal(url, error) from error
        except ImportError as error:
            raise InvalidArgument(f'A server needs psycopg: pip install "dpfunc[postgresql]" ({error}).') from error
        except UnicodeDecodeError as error:  # of a text column
            raise damaged("text that is none") from error
        time.sleep(_PAUSE * 2 ** (attempt - 1))


def _once(address: URL, action: Callable[[Connection], Answer], mode: str) -> Answer:
    """One transaction, with explicit BEGIN and COMMIT: the drivers begin one at other times, and without its lock."""
    sqlite = address.get_backend_name() == "sqlite"
    options = {"timeout": _WAIT} if sqlite else {}
    engine = create_engine(address, poolclass=NullPool, isolation_level="AUTOCOMMIT", connect_args=options)
    with engine.connect() as connection:
        if sqlite:
            connection.exec_driver_sql("PRAGMA synchronous = EXTRA")  # a commit survives a power cut
            connection.exec_driver_sql("BEGIN" if mode == "ro" else "BEGIN IMMEDIATE")
        elif mode == "ro":
            connection.exec_driver_sql("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")  # all of one moment
        else:
            connection.exec_driver_sql("BEGIN ISOLATION LEVEL READ COMMITTED")  # and the lock of a row
            connection.exec_driver_sql("SET LOCAL synchronous_commit = on")
        answer = action(connection)
        connection.exec_driver_sql("COMMIT")
    return answer  # whatever is raised above closes the connection, which undoes all


def _address(url: str, mode: str) -> URL:
    """The address for SQLAlchemy: a path is a SQLite file, which only the mode `rwc` makes."""
    try:
        made = make_url(url if "://" in url else URL.create("sqlite", database=url))
    except ArgumentError as error:
        raise InvalidArgument("Expected the path of a file or a URL of a database, got one that is none.") from error
    backend = made.get_backend_name()
    if backend == "postgresql":
        return made if "+" in made.drivername else made.set(drivername="postgresql+psycopg")
    path = Path(str(made.database)).absolute()
    refuse(
        (backend != "sqlite" or made.database in (None, "", ":memory:") or made.query,
         fail("the path of a file, or postgresql://...", "url", shown(url), "These two were tried.")),
        (mode != "rwc" and not path.is_file(),
         fail("a file with a budget", "url", shown(url), "There is no such file. Make it: dpfunc budget create.")),
    )  # fmt: skip
    query = {"mode": mode.replace("ro", "rw"), "uri": "true"}  # who reads undoes what a killed process has half-written
    return URL.create("sqlite", database=f"file:{quote(str(path))}", query=query)


def _was_cut(error: DBAPIError) -> bool:
    """True after an error of a connection to a server, or of two that make the same table."""
    cut = error.connection_invalidated or isinstance(error, OperationalError | InterfaceError | IntegrityError)
    return cut and not type(error.orig).__module__.startswith("sqlite3")


def _refusal(url: str, error: DBAPIError) -> Exception:
    if isinstance(error, DatabaseError) and not isinstance(error, OperationalError):
        return damaged(str(error.orig).strip())
    return NotWritten(
        shown(
            f"The budget {url} could not be reached or changed: {str(error.orig).strip()}. What was reserved before "
            "stays so; do the same again, which counts once."
        )
    )
