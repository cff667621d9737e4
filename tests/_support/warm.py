"""A process with the imports of most scripts: each fork of it runs one script, which need not import torch anew.

`warm.py SCRIPT ARGUMENTS...` runs a script so, and ends as it ends: with its exit code, or killed by the same signal.
`warm.py --serve SOCKET` is the process that forks. All forks have the hashes of one process: where these may differ, as
those of new processes do, a test asks for new ones.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

SOCKET = "DPFUNC_TESTS_WARM"  # in the environment of those who ask
IMPORTED = ("torch.distributed.run", "torch.distributed.fsdp", "launch_jobs")
_LENGTH = 8


def _read(asked: socket.socket, size: int) -> bytes:
    text = b""
    while len(text) < size and (more := asked.recv(size - len(text))):
        text += more
    return text


def ask(words: list[str]) -> int:
    """Have a script run by a fork, which has the output, folder and environment of this process; its exit code."""
    told = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, told)  # until there is somebody to tell
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SOCKET])
        text = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(server, [len(text).to_bytes(_LENGTH)], [1, 2])
        server.sendall(text)
        fork = int.from_bytes(_read(server, _LENGTH))
        for each in told:
            signal.signal(each, lambda number, frame: os.kill(fork, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, told)
        code = int.from_bytes(_read(server, _LENGTH), signed=True)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def serve(path: str) -> list[str]:
    """Fork for each that asks, for as long as the parent lives; only a fork returns, with the words of its script."""
    parent = os.getppid()
    for name in IMPORTED:
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        listening.settimeout(10)
        while True:
            try:
                asked, _ = listening.accept()
            except TimeoutError:
                if os.getppid() != parent:
                    sys.exit()
                continue
            if os.fork() == 0:
                break
            asked.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, outputs, _, _ = socket.recv_fds(asked, _LENGTH, 2)
    words, folder, environment = json.loads(_read(asked, int.from_bytes(size)))
    if fork := os.fork():  # this one waits for the end
        with suppress(OSError):  # who asked was killed
            asked.sendall(fork.to_bytes(_LENGTH))
            asked.sendall(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]).to_bytes(_LENGTH, signed=True))
        os._exit(0)
    asked.close()
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return words


def run(words: list[str]) -> None:
    """Run a script as Python would."""
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        run(serve(sys.argv[2]))
    else:
        sys.exit(ask(sys.argv[1:]))
