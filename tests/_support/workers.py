"""Real process groups for tests: a few worker processes that are kept, used again, and killed when the tests end.

`run(2, "jobs:name", ...)` calls `jobs.name(...)` in two processes that form a gloo group, and gives what each returned.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

# Imported once, by the server that the workers are forked from: in each worker they would take most of the time.
IMPORTED = [
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo", "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama", "peft", "pytest", "dpfunc.distributed.fsdp",
    "dpfunc.checkpoint",
]  # fmt: skip
HERE = Path(__file__).parent
PATHS = (str(HERE), str(HERE.parent), str(HERE.parents[1]))


@dataclass(frozen=True)
class Outcome:
    """What one process gave: a value, or the type, message and traceback of its error; `died` when it is gone."""

    value: Any = None
    error: str | None = None
    message: str = ""
    trace: str = ""
    died: bool = False


def _serve(pipe: Any) -> None:
    sys.path[:0] = [path for path in PATHS if path not in sys.path]
    import torch
    import torch.distributed as dist

    from dpfunc import state

    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        name, args, options, rank, size, file, seconds = job
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
            )
            dist.barrier()  # nobody leaves the group while another still connects
            module, _, function = name.partition(":")
            state._runs.clear()  # each job stands for processes of its own
            outcome = Outcome(getattr(importlib.import_module(module), function)(*args, **options))
        except Exception as error:  # noqa: BLE001  (told to whoever asked)
            outcome = Outcome(None, type(error).__name__, str(error), traceback.format_exc())
        if not outcome.error:
            with contextlib.suppress(Exception):  # a group that another process has left, or that the job has ended
                dist.barrier()  # nobody leaves while another still connects a group that the job made
        try:
            dist.destroy_process_group()
        except Exception as error:  # noqa: BLE001  (the group is broken: it is not used again)
            outcome = Outcome(outcome.value, outcome.error or type(error).__name__, outcome.message or str(error))
        pipe.send(outcome)


class _Pool:
    def __init__(self) -> None:
        self.workers: list[tuple[Any, Any]] = []

    def grow(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        while len(self.workers) < size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def stop(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        self.workers.clear()


_pool = _Pool()
atexit.register(_pool.stop)


def caught(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The type and the message of the error of a call, for the test to compare."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  (told to the test)
        return type(error).__name__, str(error)
    return "ok", ""


def outcomes(size: int, name: str, *args: Any, seconds: float = 120.0, **options: Any) -> list[Outcome]:
    """What each of `size` processes gave. `seconds` is the timeout of their group; of the whole job it is ten minutes."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _pool.grow(size)
    chosen = _pool.workers[:size]
    with tempfile.TemporaryDirectory() as folder:
        for rank, (_, pipe) in enumerate(chosen):
            pipe.send((name, args, options, rank, size, f"{folder}/store", seconds))
        end, found = time.monotonic() + 600, []
        for process, pipe in chosen:
            while not pipe.poll(0.05):
                if not process.is_alive() or time.monotonic() > end:
                    break
            try:
                found.append(pipe.recv() if pipe.poll() else Outcome(error="Died", died=True))
            except EOFError:
                found.append(Outcome(error="Died", died=True))
    if any(outcome.error for outcome in found):  # their group may be broken
        _pool.stop()
    return found


def run(size: int, name: str, *args: Any, **options: Any) -> list[Any]:
    """What each process returned; an error of one fails the test with its traceback."""
    found = outcomes(size, name, *args, **options)
    for rank, outcome in enumerate(found):
        assert outcome.error is None, f"process {rank}: {outcome.error} {outcome.message}\n{outcome.trace}"
    return [outcome.value for outcome in found]
