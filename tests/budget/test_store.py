"""The database: a changed byte, a file that is none or cannot be written, processes that are killed, a server that is cut off."""

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from budget_jobs import FACTS, WAYS, check, killed, raced, steps

from dpfunc.budget import Budget, _store
from dpfunc.errors import CheckpointError, InvalidArgument, NotWritten


@pytest.fixture
def path(tmp_path):
    budget = Budget(tmp_path / "budget.db").create(**FACTS)
    for name in "abc":
        Budget(budget.url, run=name, spender="ana").reserve(steps(10), name, unit="one patient")
    Budget(budget.url, run="b", spender="ana").settle(steps(4))
    return tmp_path / "budget.db"


def sql(path, statement):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


def test_a_changed_byte_is_found(path):
    """Any byte of the file: an error, or, where nothing reads it, the same account."""
    whole, before, found = path.read_bytes(), Budget(path).account(), 0
    stored = [place for place in range(len(whole)) if whole[place]]
    for place in random.Random(0).sample(stored, 150):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            assert Budget(path).account() == before, place
        except (CheckpointError, InvalidArgument, NotWritten):
            found += 1
    assert found > 100


CHANGES = {
    "fewer steps": "update dpfunc_budget_events set ledger = replace(ledger, '10', '9') where number = 1",
    "a lost row": "delete from dpfunc_budget_events where number = 2",
    "the last row": "delete from dpfunc_budget_events where number = 4",
    "all rows": "delete from dpfunc_budget_events",
    "another order": "update dpfunc_budget_events set number = 5 where number = 1",
    "a larger budget": "update dpfunc_budget set facts = replace(facts, '5.0', '6.0')",
    "a spender more": "update dpfunc_budget set facts = replace(facts, 'ana', 'eve')",
    "no budget": "delete from dpfunc_budget",
    "two budgets": "insert into dpfunc_budget select 9, schema, facts, head, digest from dpfunc_budget",
    "no digest": "update dpfunc_budget_events set digest = ''",
    "bytes": "update dpfunc_budget_events set ledger = x'ff' where number = 1",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_row_is_found(path, name):
    sql(path, CHANGES[name])
    for action in (lambda: Budget(path).account(), lambda: Budget(path, run="a", spender="ana").settle(steps(0))):
        with pytest.raises(CheckpointError, match="changed or damaged"):
            action()


def test_another_version_is_refused(path):
    sql(path, "update dpfunc_budget set schema = 'dpfunc.budget/2'")
    with pytest.raises(InvalidArgument, match="Use the version of dpfunc that made it"):
        Budget(path).account()


def test_places_without_a_budget(tmp_path, path):
    missing = tmp_path / "missing.db"
    with pytest.raises(InvalidArgument, match="no such file"):
        Budget(missing).account()
    assert not missing.exists()
    (tmp_path / "empty.db").touch()  # as after a kill while it was made
    with pytest.raises(InvalidArgument, match="one without"):
        Budget(tmp_path / "empty.db").account()
    assert Budget(tmp_path / "empty.db").create(**FACTS).account().number == 0
    with pytest.raises(InvalidArgument, match="There is one"):
        Budget(path).create(**FACTS)
    (tmp_path / "text.db").write_text("no database" * 100)
    with pytest.raises(CheckpointError, match="not a database"):
        Budget(tmp_path / "text.db").account()
    for url in ("mysql://host/x", "sqlite://", "sqlite:///:memory:", "://", ""):
        with pytest.raises(InvalidArgument):
            Budget(url).create(**FACTS)


def test_a_file_that_cannot_be_written(path, tmp_path, monkeypatch):
    """Another process has it for too long, the disk is full, or the folder is not there. Nothing was reserved."""
    monkeypatch.setattr(_store, "_WAIT", 0.1)
    before = Budget(path).account()
    with closing(sqlite3.connect(path)) as other:
        other.execute("begin immediate")
        with pytest.raises(NotWritten, match="locked"):
            Budget(path, run="d", spender="ana").reserve(steps(1), "d", unit="one patient")
        assert Budget(path).account() == before

    def fill(connection):
        connection.exec_driver_sql("pragma max_page_count = 1")
        connection.exec_driver_sql("create table one_page_more (number integer)")

    with pytest.raises(NotWritten, match="full"):
        _store._in_transaction(str(path), fill, mode="rw")
    assert Budget(path).account() == before
    with pytest.raises(NotWritten, match="unable to open"):
        Budget(tmp_path / "nowhere" / "budget.db").create(**FACTS)


def test_what_a_killed_process_has_half_written_is_undone(path):
    """Killed with changed pages in the file and their old content in the journal of SQLite: whoever comes next reads."""
    before = Budget(path).account()
    code = (
        "import os, signal, sqlite3; c = sqlite3.connect({!r}, isolation_level=None); c.execute('pragma cache_size = 2'); "
        "c.execute('begin immediate'); [c.execute(\"insert into dpfunc_budget_events select number + 10 * \" + str(i) + "
        '", kind, run, spender, token, ledger, before, date, digest from dpfunc_budget_events where number < 5") '
        "for i in range(1, 200)]; os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code.format(str(path))], check=False, timeout=300)
    journal = path.with_name("budget.db-journal")
    assert journal.stat().st_size > 0
    assert Budget(path).account() == before
    assert not journal.exists()


BIN = max(Path("/usr/lib/postgresql").glob("*/bin/initdb"), default=None) or shutil.which("initdb")
# .ci/run installs a server where it can
on_a_server = pytest.mark.skipif(BIN is None, reason="no PostgreSQL server is here: apt-get install postgresql")


@pytest.fixture(scope="module")
def server():
    """URL of a server on a socket in a new folder; it refuses to run as root."""
    folder = Path(tempfile.mkdtemp(prefix="dpfunc-pg-"))
    bin_folder = Path(BIN).parent
    as_user = []
    if os.getuid() == 0:
        as_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        os.chown(folder, 65534, 65534)

    def call(*command):
        subprocess.run([*as_user, *map(str, command)], check=True, stdout=subprocess.DEVNULL, cwd=folder, timeout=120)

    data = folder / "data"
    try:
        call(bin_folder / "initdb", "-D", data, "-U", "dpfunc", "-A", "trust", "--no-sync")
        options = f"-c listen_addresses='' -k {folder} -c fsync=off -c max_connections=50"  # only clients are killed
        call(bin_folder / "pg_ctl", "-D", data, "-o", options, "-l", folder / "log", "-w", "start")
        yield f"postgresql://dpfunc@/{{}}?host={folder}"
        call(bin_folder / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def url(server, request):
    from sqlalchemy import create_engine

    name = f"t{abs(hash(request.node.name))}"
    address = server.format("postgres").replace("postgresql:", "postgresql+psycopg:")
    engine = create_engine(address, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"create database {name}")
    engine.dispose()
    return server.format(name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["SQLite", pytest.param("PostgreSQL", marks=on_a_server)])
def test_one_name_is_reserved_once(kind, way, tmp_path, request):
    """By eight processes at once: one succeeds, and the others are told that the name is taken."""
    url = str(tmp_path / "budget.db") if kind == "SQLite" else request.getfixturevalue("url")
    Budget(url).create(**{**FACTS, "spenders": ["ana", *(f"person {number}" for number in range(8))]})
    found = raced(url, way, tmp_path / "told")
    taken = "Expected a run that is not in the budget, got run='one name'"
    assert sorted((code, taken in output) for code, output in found) == [(0, False)] + [(1, True)] * 7, found
    account = Budget(url).account()
    assert (account.number, account.ledger()) == (1, steps(10))


@pytest.mark.slow  # 200 processes
@pytest.mark.parametrize("kind", ["SQLite", pytest.param("PostgreSQL", marks=on_a_server)])
def test_no_charge_is_lost_or_counted_twice(kind, tmp_path, request):
    url = str(tmp_path / "budget.db") if kind == "SQLite" else request.getfixturevalue("url")
    found = killed(url, tmp_path / "told", kills=200)
    where = check(found)
    assert found["kills"] == 200
    assert where["planned"] >= 20  # killed while they reserved
    assert where["settling"] >= 5


def test_a_few_kills(tmp_path):
    check(killed(str(tmp_path / "budget.db"), tmp_path / "told", kills=12))


@on_a_server
@pytest.mark.slow  # many connections
def test_cut_connections_count_once(url, tmp_path):
    """While connections are ended by the server, wherever they are; clients do the same again, some are killed."""
    check(killed(url, tmp_path / "told", kills=60, cuts=True))


@on_a_server
def test_a_cut_after_the_commit(url, monkeypatch):
    """The change was made, and the client does not know: it reserves again, and finds it."""
    Budget(url).create(**FACTS)
    once, cuts = _store._once, []

    def cut(address, action, mode):
        answer = once(address, action, mode)
        if mode == "rw" and len(cuts) < 3:
            cuts.append(answer)
            raise _store.OperationalError("COMMIT", {}, ConnectionError("cut"))
        return answer

    monkeypatch.setattr(_store, "_once", cut)
    budget = Budget(url, run="a", spender="ana")
    assert budget.reserve(steps(10), "a", unit="one patient").charged == steps(10)
    assert len(cuts) == 3
    assert budget.account().number == 1
    monkeypatch.undo()
    assert budget.settle(steps(4)).charged == steps(4)
    assert budget.account().ledger() == steps(4)


@on_a_server
def test_a_server_that_is_not_there(url, monkeypatch):
    monkeypatch.setattr(_store, "_PAUSE", 0.0)
    secret = url.replace("dpfunc@", "dpfunc:secret@").replace("host=", "host=/nowhere")
    assert "secret" not in repr(Budget(secret))
    with pytest.raises(NotWritten, match="could not be reached") as caught:
        Budget(secret).account()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://ana:hidden@localhost/x", "postgresql+psycopg://localhost/x?user=ana&password=hidden",
        "postgresql://ana:hid/hidden@host/x?sslmode=require", "postgresql:ana:hidden@host", "//ana:hidden@host/x",
        "postgresql://host/x?PASSWORD=hidden", "postgresql://ana@host/x?sslpassword=hidden&b=1",
    ],
)  # fmt: skip
def test_no_password_is_shown(url):
    """As an argument, and where the address is no good one, it stood in the repr and in errors."""
    assert "hidden" not in repr(Budget(url))
    assert "hidden" not in _store.shown(f"could not reach {url}: password=hidden")
    assert repr(Budget("postgresql://ana@host/x")).startswith("Budget('postgresql://ana@host/x'")
