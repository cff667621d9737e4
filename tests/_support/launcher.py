"""torchrun for tests: real processes, of which nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

TESTS = Path(__file__).parents[1]
PATHS = os.pathsep.join(map(str, (TESTS / "_support", TESTS, TESTS.parent)))


def torchrun(*words, cwd=TESTS.parent, limit=1800):
    """What two processes under torchrun said. Nothing is left of them, whatever happens."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    agent = subprocess.Popen(command, cwd=cwd, env=environment, stdout=-1, stderr=-1, text=True)
    try:
        output, errors = agent.communicate(timeout=limit)
    finally:
        if agent.poll() is None:
            workers = psutil.Process(agent.pid).children(recursive=True)  # they are in sessions of their own
            for process in (agent, *workers):
                process.kill()
            agent.communicate()
    return agent.returncode, output, errors


def works(*words, **options):
    """The same of a command that succeeds."""
    code, output, errors = torchrun(*words, **options)
    assert code == 0, errors[-4000:]
    return output, errors
