"""A real server, started here: kills, connections that are cut in the middle, and misuse."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from budget_jobs import FACTS, check, killed, steps

from dpfunc.budget import Budget, _store
from dpfunc.errors import InvalidArgument, NotWritten

BIN = max(Path("/usr/lib/postgresql").glob("*/bin/initdb"), default=None) or shutil.which("initdb")
# .ci/run installs a server where it can
pytestmark = pytest.mark.skipif(BIN is None, reason="no PostgreSQL server is here: apt-get install postgresql")


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
    """URL of a new database."""
    from sqlalchemy import create_engine

    name = f"t{abs(hash(request.node.name))}"
    address = server.format("postgres").replace("postgresql:", "postgresql+psycopg:")
    engine = create_engine(address, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"create database {name}")
    engine.dispose()
    return server.format(name)


@pytest.mark.slow  # 200 processes
def test_no_charge_is_lost_or_counted_twice(url, tmp_path):
    found = killed(url, tmp_path / "told", kills=200)
    assert check(found)["planned"] >= 20


@pytest.mark.slow  # many connections
def test_cut_connections_count_once(url, tmp_path):
    """While connections are ended by the server, wherever they are; clients do the same again, some are killed."""
    check(killed(url, tmp_path / "told", kills=60, cuts=True))


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
    assert budget.account().charged() == steps(4)


def test_misuse(url, monkeypatch):
    with pytest.raises(InvalidArgument, match="one without"):
        Budget(url).account()
    Budget(url).create(**FACTS)
    with pytest.raises(InvalidArgument, match="There is one"):
        Budget(url).create(**FACTS)
    monkeypatch.setattr(_store, "_PAUSE", 0.0)
    secret = url.replace("dpfunc@", "dpfunc:secret@").replace("host=", "host=/nowhere")
    assert "secret" not in repr(Budget(secret))
    with pytest.raises(NotWritten, match="could not be reached") as caught:
        Budget(secret).account()
    assert "secret" not in str(caught.value)
