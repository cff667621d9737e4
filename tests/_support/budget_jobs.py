"""Processes that reserve and settle, are killed, and tell what they did in files of their own. No torch is imported.

`python budget_jobs.py URL FOLDER KILLS CUTS` prints what the database and these files say, as JSON; `killed` runs it.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from dpfunc.accounting import Ledger
from dpfunc.budget import Budget
from dpfunc.errors import BudgetExhausted, NotWritten
from dpfunc.types import Event

WORKERS = 4
FACTS = {"epsilon": 5.0, "delta": 1e-6, "unit": "one patient", "adjacency": "add_remove", "spenders": ["ana"]}


def steps(count):
    return Ledger((Event(1.0, 50.0, count),) if count else ())


class Worker:
    """Reserves and settles, run after run. Each line of its file is written before, or after, what it tells of."""

    def __init__(self, url, path, seed):
        self.url, self.path, self.random = url, path, random.Random(seed)
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(self, what, run, count):
        os.write(self.file, (json.dumps([what, run, count]) + "\n").encode())

    def budget(self, run):
        return Budget(self.url, run=run, spender="ana")

    def reserve(self, run, count):
        try:
            self.budget(run).reserve(steps(count), run, unit="one patient")
        except BudgetExhausted:
            self.tell("refused", run, count)
            return False
        self.tell("reserved", run, count)
        return True

    def settle(self, run, count):
        self.budget(run).settle(steps(count))
        self.tell("settled", run, count)

    def go_on(self):
        """After a kill: do the last thing again, as a retry or a resumed run does, or leave it."""
        lines = told(self.path)
        if not lines or self.random.random() < 0.3:
            return
        what, run, count = lines[-1]
        if what == "planned":
            self.reserve(run, count)
        elif what == "settling":
            self.settle(run, count)

    def one_run(self, run):
        count = self.random.randint(1, 40)
        self.tell("planned", run, count)
        if not self.reserve(run, count):
            return
        spent = self.random.randint(0, count)
        self.tell("spent", run, spent)  # released
        if self.random.random() < 0.9:
            self.tell("settling", run, spent)
            self.settle(run, spent)

    def work(self, name, runs):
        self.go_on()
        for number in range(runs):
            self.one_run(f"{name}-{number}")


def told(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def start(url, path, name, seed, seconds):
    """A worker that dies within its first two runs, at any instruction, also inside of a commit."""
    pid = os.fork()
    if pid:
        return pid
    try:
        worker = Worker(url, path, seed)
        signal.setitimer(signal.ITIMER_REAL, random.Random(seed + 1).uniform(0.001, 2 * seconds))  # it ends a process
        worker.work(name, 1000)
    except NotWritten as error:  # its connection was cut too often: as a crash
        os.write(2, f"{error}\n".encode())
        os._exit(3)
    except BaseException as error:  # noqa: BLE001  (a fork must not go on)
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os._exit(0)


def cut(url):
    """A process that ends connections of the others to the server, wherever they are."""
    from sqlalchemy import create_engine

    pid = os.fork()
    if pid:
        return pid
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    own = "pid <> pg_backend_pid() and backend_type = 'client backend'"
    query = f"select pg_terminate_backend(pid) from pg_stat_activity where {own} and random() < .3"
    with engine.connect() as connection:
        while True:
            connection.exec_driver_sql(query)
            time.sleep(random.uniform(0, 0.03))


def main(url, folder, kills, cuts):
    Budget(url).create(**FACTS)
    first = Worker(url, folder / "first", 0)
    began = time.monotonic()
    first.work("first", 2)
    seconds = (time.monotonic() - began) / 2
    cutter = cut(url) if cuts else None
    running, ended, failures, seed = {}, 0, 0, 1
    while ended < kills:
        for number in set(range(WORKERS)) - set(running.values()):
            seed += 1
            path = folder / str(number)
            running[start(url, path, f"{number}-{seed}", seed, seconds)] = number
        pid, status = os.waitpid(-1, 0)
        running.pop(pid)
        killed = os.WIFSIGNALED(status)
        ended += killed
        failures += not killed and not (cuts and os.WEXITSTATUS(status) == 3)
    if cutter is not None:
        os.kill(cutter, signal.SIGKILL)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    for pid in (*running, *([cutter] if cutter else [])):
        os.waitpid(pid, 0)
    account = Budget(url).account()
    print(json.dumps({
        "kills": ended, "failures": failures, "events": account.number,
        "epsilon": account.ledger().epsilon(FACTS["delta"]).epsilon, "total": account.ledger().num_steps,
        "entries": {run: [e.state, e.planned.num_steps, e.charged.num_steps] for run, e in account.entries.items()},
        "told": [told(path) for path in sorted(folder.iterdir()) if path.name.isdigit() or path.name == "first"],
    }))  # fmt: skip


def raced(url, way, folder, processes=8):
    """(exit code, output) of so many processes that reserve one name at once, in one of `WAYS`."""
    folder.mkdir()
    command = [sys.executable, __file__, "race", url, way, str(folder), str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [(code, (folder / str(number)).read_text()) for number, code in enumerate(json.loads(done.stdout))]


def race(url, way, folder, processes):
    """Forks of a process that has imported all; they begin when the last one is there."""
    Budget(url).account()
    waiting, begin = os.pipe()
    pids = [fork_racer(url, way, folder / str(number), number, (waiting, begin)) for number in range(processes)]
    os.close(waiting)
    os.close(begin)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))


def fork_racer(url, way, output, number, pipe):
    pid = os.fork()
    if pid:
        return pid
    os.close(pipe[1])
    os.read(pipe[0], 1)  # until nobody holds the other end
    for file in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), file)
    try:
        WAYS[way](url, number)
    except BaseException as error:  # noqa: BLE001  (a fork must not go on)
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os._exit(0)


def by_command(url, number):
    from dpfunc.cli.main import main

    facts = ["--unit", "one patient", "-q", "1", "-s", "50", "-t", "10", "--spender", "ana"]
    main(["budget", "reserve", url, "one name", *facts], standalone_mode=False)


WAYS = {
    "commands": by_command,
    "keys": lambda url, number: Budget(url, "one name", "ana").reserve(steps(10), f"run {number}", unit="one patient"),
    "persons with one script": lambda url, number: Budget(url, "one name", f"person {number}").reserve(
        steps(10), "a text", unit="one patient"
    ),
}


def killed(url, folder, kills, cuts=False):
    folder.mkdir()
    command = [sys.executable, __file__, url, str(folder), str(kills), str(cuts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["failures"], done.stderr
    return found


def check(found):
    """No charge is lost, and none is counted twice. Returns where the processes were when they were killed."""
    entries, runs = found["entries"], {}
    for lines in found["told"]:
        for what, run, count in lines:
            runs.setdefault(run, {})[what] = count
    assert set(entries) <= set(runs)
    where = Counter()
    for run, said in runs.items():
        last = list(said)[-1]
        where[last] += 1
        if run not in entries:
            assert "reserved" not in said, (run, said)
            continue
        state, planned, charged = entries[run]
        assert planned == said["planned"]
        assert said.get("spent", 0) <= charged <= planned, (run, said, charged)
        if "settled" in said:
            assert (state, charged) == ("settled", said["settled"])
        elif "settling" in said:
            assert charged in (planned, said["settling"])
        else:
            assert (state, charged) == ("reserved", planned)
        if "refused" in said:
            assert "reserved" in said  # it was tried again
    assert found["total"] == sum(charged for _, _, charged in entries.values())
    assert found["events"] == len(entries) + sum(state == "settled" for state, _, _ in entries.values())
    assert found["epsilon"] <= 5.0
    return where


if __name__ == "__main__" and sys.argv[1] == "race":
    race(sys.argv[2], sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
elif __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True")
