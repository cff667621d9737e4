"""Workers: each is a process that is told names of cases and answers with a line of JSON for each."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.survey.case import Case

ROOT = Path(__file__).parents[2]
MARK = "case: "
GRACE = 20
Row = dict[str, Any]


class Worker:
    """A process that measures. One that does not answer in time, or dies, is replaced by a new one."""

    def __init__(self, limit: int, engine: str) -> None:
        self.limit, self.engine, self.process = limit, engine, None

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.survey", "--worker", "--limit", str(self.limit)]
        command += ["--engine", self.engine]
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def measure(self, case: Case) -> Row:
        if self.process is None or self.process.poll() is not None:
            self.process = self.start()
        process = self.process
        timer = threading.Timer(self.limit + GRACE, process.kill)
        timer.start()
        try:
            process.stdin.write(case.name + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith(MARK):
                    return json.loads(line[len(MARK) :])
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        process.wait()
        about = {name: getattr(case, name) for name in ("field", "family", "trained", "mode", "padding")}
        return {"case": case.name, **about, "left_out": f"the process ended with {process.returncode}"}

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()


def run(cases: Sequence[Case], workers: int, limit: int, found: Callable[[Row], object], engine: str = "auto") -> None:
    """Measure all; `found` is called with each row, from one thread at a time."""
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    one_at_a_time = threading.Lock()

    def work() -> None:
        worker = Worker(limit, engine)
        try:
            while not waiting.empty():
                row = worker.measure(waiting.get())
                with one_at_a_time:
                    found(row)
        finally:
            worker.close()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def answer(cases: Mapping[str, Case], limit: int, engine: str) -> None:
    """The worker's side: names come in, rows go out."""
    import torch

    from benchmarks.survey.measure import measure

    torch.set_num_threads(1)
    for line in sys.stdin:
        print(MARK + json.dumps(measure(cases[line.strip()], limit, engine)), flush=True)
