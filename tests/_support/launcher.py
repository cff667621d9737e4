"""torchrun for tests: real processes, of which nothing is left. They are forks of one that has imported torch (`warm.py`)."""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import warm

TESTS = Path(__file__).parents[1]
PATHS = os.pathsep.join(map(str, (TESTS / "_support", TESTS, TESTS.parent)))


def _environment():
    return {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}


def _end(process):
    """Kill all that a process has started, of which some may be in sessions of their own, and the process itself."""
    if process.poll() is None:
        for each in (*psutil.Process(process.pid).children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


@functools.cache
def _server():
    """A process that forks, and its socket; it ends with this one."""
    folder = tempfile.TemporaryDirectory()
    path = f"{folder.name}/{warm.SOCKET}"
    process = subprocess.Popen([sys.executable, warm.__file__, "--serve", path], env=_environment())
    atexit.register(folder.cleanup)
    atexit.register(_end, process)
    while not os.path.exists(path):
        assert process.poll() is None, "the process that forks has ended"
        time.sleep(0.05)
    return process, path


def torchrun(*words, cwd=TESTS.parent, limit=1800, new=False):
    """What two processes under torchrun said: new ones, or forks of one. Nothing is left of them, whatever happens."""
    agent, environment = find_spec("torch.distributed.run").origin, _environment()
    command = [sys.executable, agent, "--standalone", "--nproc-per-node", "2", *map(str, words)]
    if not new:
        environment[warm.SOCKET] = _server()[1]
        command[1 : -len(words)] = [warm.__file__, *command[1 : -len(words)], warm.__file__]
    launched = subprocess.Popen(command, cwd=cwd, env=environment, stdout=-1, stderr=-1, text=True)
    try:
        output, errors = launched.communicate(timeout=limit)
    except BaseException:
        _end(launched)
        if not new:
            _end(_server()[0])
            _server.cache_clear()
        raise
    return launched.returncode, output, errors


def works(*words, **options):
    """The same of a command that succeeds."""
    code, output, errors = torchrun(*words, **options)
    assert code == 0, errors[-4000:]
    return output, errors
