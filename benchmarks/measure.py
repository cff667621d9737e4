"""Measure steps: contestants in processes of their own, compared with the truth, then timed in interleaved rounds.

A question is a file with a function `contestant(spec)`, which sets one contestant up from an object of JSON. `compete`
starts a process for each (`python -m benchmarks.measure SPEC`), which takes steps when it is told to. Nothing but the
standard library is imported at the top: interpreters without torch take part as well.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import math
import os
import resource
import select
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

ROOT = Path(__file__).parents[1]
MIB = 2**20
TOLERANCE = 1e-4
LIMIT_SECONDS = 600.0
# glibc keeps what is freed, and gives no block pages of its own
KEEPS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1000000000000"}
AGAINST = "@against"
Spec = Mapping[str, Any]
Error = Callable[[str, Mapping[str, Any], bool], float]
T = TypeVar("T")


class Numbers(dict[str, float]):
    """What a step measured itself; it wins over what is measured around it."""


class TakesNoPart(RuntimeError):
    """A contestant is not installed, or left out; the message says which."""


class Failed(RuntimeError):
    """What a process answered in place of a result."""


class Contestant(NamedTuple):
    """A step that is set up.

    Args:
        step: one step. sums: numpy arrays by name, of what a step returned, that are compared with the truth.
        clear: what is dropped after a step, outside of its time. memory: measures a step that torch does not see.
        facts: for the result file. answer: to a question, where there is no step to take.
    """

    step: Callable[[], Any]
    sums: Callable[[Any], Mapping[str, Any]] | None = None
    clear: Callable[[], object] = lambda: None
    memory: Callable[[], dict[str, float]] | None = None
    facts: Mapping[str, Any] = {}
    answer: Callable[[str], dict[str, Any]] | None = None


class Allocated(NamedTuple):
    """Bytes over what was allocated at the start: the largest value while a function ran, and what it left."""

    peak: int
    left: int


def allocated(function: Callable[[], T], device: str = "cpu") -> tuple[T, Allocated]:
    """Run a function; its result, and what it allocated through torch (`resident` sees what others take, too)."""
    import torch
    from torch.autograd.profiler import profile

    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        torch.cuda.synchronize()
        return result, Allocated(torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before)
    # The profiler reports each allocation and each release with its size; releases of what was there before are not
    # reported, so the running sum starts at 0 and never goes below.
    with profile(use_cpu=True, profile_memory=True) as profiler:
        result = function()
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    peak = running = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        running += event.nbytes()
        peak = max(peak, running)
    return result, Allocated(peak, running)


def resident(field: str = "VmHWM") -> int:
    """Resident memory of this process in bytes: the most so far, or `VmRSS` now; 0 where the system does not tell.

    Not `getrusage`: that starts from the size of the process that started this one.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), 0)


def timed(step: Callable[[], Any], device: str = "cpu") -> dict[str, float]:
    """Seconds, CPU seconds of all threads, page faults and resident memory of a call; and `Numbers` that it returns."""
    synchronize: Callable[[], object] = lambda: None
    if device.startswith("cuda"):
        import torch

        synchronize = torch.cuda.synchronize
    gc.collect()  # outside of the time: hooks leave cycles behind that hold tensors
    synchronize()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start, cpu = time.perf_counter(), time.process_time()
    result = step()
    synchronize()
    found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    found["page_faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    found["resident_mib"] = resident() / MIB
    return {**found, **result} if isinstance(result, Numbers) else found


def in_turn(steps: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each step returned in each round, after one round that warms up.

    All are called once a round, in rotating order, so that a slow moment of the machine hits all of them.
    """
    found: dict[str, list[T]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds + 1):
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            numbers = steps[name]()
            if number:
                found[name].append(numbers)
    return found


def timed_in_turn(
    steps: Mapping[str, Callable[[], Any]], rounds: int, base: str | None = None, device: str = "cpu"
) -> dict[str, dict[str, Any]]:
    return statistics_of(in_turn({name: partial(timed, step, device) for name, step in steps.items()}, rounds), base)


def quartiles(values: Sequence[float]) -> list[float]:
    return [values[0]] * 2 if len(values) < 2 else statistics.quantiles(values, n=4, method="inclusive")[::2]


def summary(seconds: Sequence[float], base: Sequence[float] | None = None) -> dict[str, Any]:
    """Median, least and quartiles; the same of the ratios to another step in the same round."""
    found = {
        "median_seconds": statistics.median(seconds), "best_seconds": min(seconds),
        "seconds_quartiles": quartiles(seconds),
    }  # fmt: skip
    if base is None:
        return found
    ratios = [mine / max(its, 1e-12) for mine, its in zip(seconds, base, strict=True)]
    return {**found, "ratio": statistics.median(ratios), "ratio_quartiles": quartiles(ratios)}


def statistics_of(found: Mapping[str, list[dict[str, float]]], base: str | None = None) -> dict[str, dict[str, Any]]:
    """`time` and `cpu` of each contestant, page faults, and its own numbers; ratios are to `base`.

    A contestant that has a twin with `AGAINST` after its name has the ratio to it in `against`.
    """
    names = {"seconds": "time", "cpu_seconds": "cpu"}
    records: dict[str, dict[str, Any]] = {}
    for who, rows in found.items():
        record = records[who] = {
            "page_faults": statistics.median(row["page_faults"] for row in rows),
            "resident_mib": rows[-1]["resident_mib"],
        }
        for number in rows[0].keys() - record.keys():
            theirs = None if base is None else [row.get(number, math.nan) for row in found[base]]
            record[names.get(number, number)] = summary([row[number] for row in rows], theirs)
        if who + AGAINST in found:
            record["against"] = summary(*([row["seconds"] for row in found[each]] for each in (who, who + AGAINST)))
    return records


class Process:
    """A contestant in a process of its own; see `serve`.

    Args:
        spec: what `contestant` of its `module` is told. These keys are read here, too: `freed`, "kept" or "given back"
            (as this process has it, if it is not there); `dpfunc`, a checkout whose dpfunc is used; `python`, another
            interpreter; `variables` of the process, in the place of those of this one; `limit_seconds` of an answer.

    Raises:
        Failed: it could not be set up.
    """

    def __init__(self, spec: Spec) -> None:
        self.limit = spec.get("limit_seconds", LIMIT_SECONDS)
        self.folder = tempfile.TemporaryDirectory(prefix="dpfunc-benchmark-")
        self.errors = (Path(self.folder.name) / "errors").open("w+")
        variables = dict(spec.get("variables", os.environ))
        if "freed" in spec:
            variables = {name: value for name, value in variables.items() if not name.startswith("MALLOC_")}
            variables |= KEEPS if spec["freed"] == "kept" else {}
        self.process = subprocess.Popen(
            [spec.get("python", sys.executable), "-m", "benchmarks.measure", json.dumps({**spec, "variables": {}})],
            cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
        )  # fmt: skip
        try:
            self.facts = self._answer()
        except BaseException:
            self.close()
            raise

    def _answer(self) -> dict[str, Any]:
        ready, _, _ = select.select([self.process.stdout], [], [], self.limit)
        if not ready:
            raise Failed(f"TimeoutError: no step within {self.limit:.0f} s, compiling included")
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            said = self.errors.read().strip().splitlines() or ["nothing was said; perhaps there was no memory left"]
            raise Failed(f"RuntimeError: the process ended with code {self.process.returncode}: {said[-1][:150]}")
        found = json.loads(line)
        if "failed" in found:
            raise Failed(found["failed"])
        return found

    def ask(self, command: str) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # it has ended, which is its answer
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        return self._answer()

    def sums(self) -> tuple[dict[str, Any], float]:
        """Arrays of a step, and its seconds."""
        import numpy as np

        file = Path(self.folder.name) / "sums.npz"
        seconds = self.ask(f"sums {file}")["seconds"]
        with np.load(file) as found:
            return {name: found[name] for name in found.files}, seconds

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            pipe.close()
        self.folder.cleanup()


def reason(error: BaseException) -> str:
    """Why a contestant does not run, in one line."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if isinstance(error, (TakesNoPart, Failed)) else f"{type(error).__name__}: {lines[0].strip()}"
    return text if len(text) <= 180 else text[:177] + "..."


def admit(name: str, spec: Spec, error: Error, patience: float, stack: ExitStack) -> tuple[Process, dict[str, Any]]:
    """Set a contestant up and compare its sums with the truth: its process, and its record with a `status`.

    Where float32 is off by more than is allowed, float64 decides: in networks with kinks (ReLU, max pooling) the last
    digit of an activation can switch a unit, for everybody in the same way.
    """
    process = Process(spec)
    stack.callback(process.close)
    record = {"status": "ok", **process.facts}
    if not record.pop("compared"):
        return process, record
    sums, first = process.sums()
    found = record["relative_error"] = error(name, sums, False)
    if not found <= TOLERANCE:
        wide = Process({**spec, "double": True})
        stack.callback(wide.close)
        found = record["relative_error_float64"] = error(name, wide.sums()[0], True)
    record["first_step_seconds"] = first  # engines look at a new loss and at new shapes
    if not found <= TOLERANCE:
        record["status"] = f"wrong: {found:.2g}"
    elif first > patience and (seconds := process.ask("step")["seconds"]) > patience:
        record["status"] = f"x: one step takes {seconds:.0f} s"
    return process, record


def compete(
    specs: Mapping[str, Spec | TakesNoPart], rounds: int, *, base: str, error: Error = lambda *_: 0.0,
    memory: bool = False, patience: float = math.inf, device: str = "cpu",
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Parity, then time in interleaved rounds, then memory in a new process each.

    Args:
        specs: name -> what its process is told; or why it takes no part.
        rounds: timed rounds; 0 measures no time. base: to which ratios are taken, within a round.
        error: the error of sums of a contestant, in float64 or not. memory: whether to measure it.
        patience: seconds; a contestant whose step takes longer is not timed. device: "cpu", or "cuda": all are set up
            at the same time, and memory is that of the processes that were timed, since torch counts it there.

    Returns:
        A record of each: `status` is "ok", "wrong: <relative error>" or "x: <reason>"; `time`, `cpu` and `memory`.
    """
    records: dict[str, dict[str, Any]] = {}
    admitted: dict[str, Process] = {}
    with ExitStack() as stack:
        on_gpu = device.startswith("cuda")

        def set_up(name: str) -> tuple[Process | None, dict[str, Any]]:
            try:
                if isinstance(spec := specs[name], TakesNoPart):
                    raise spec
                told = {**spec, "memory": True} if on_gpu else spec
                return admit(name, told, error, patience, stack)
            except (Failed, TakesNoPart) as why:
                return None, {"status": f"x: {reason(why)}"}

        with ThreadPoolExecutor(len(specs) if on_gpu else 1) as pool:
            for name, (process, record) in zip(specs, pool.map(set_up, specs), strict=True):
                records[name] = record
                if process is not None and record["status"] == "ok":
                    admitted[name] = process
        if rounds and base in admitted:
            steps = {name: partial(each.ask, "step") for name, each in admitted.items()}
            for name, numbers in statistics_of(in_turn(steps, rounds), base).items():
                records[name].update(numbers)
        if memory and on_gpu:
            for name, numbers in weighed({name: each.ask for name, each in admitted.items()}, base).items():
                records[name]["memory"] = numbers
    if memory and not on_gpu:
        for name, numbers in weigh({name: specs[name] for name in admitted}, base).items():
            records[name]["memory"] = numbers
    return records


def weigh(specs: Mapping[str, Any], base: str) -> dict[str, dict[str, Any]]:
    """Memory of a step of each contestant, and the ratio of peaks to that of `base`.

    In a new process each: resident memory tells what a step takes only where freed memory goes back.
    """

    def alone(spec: Spec, command: str) -> dict[str, Any]:
        with ExitStack() as stack:
            process = Process({"freed": "given back", **spec, "memory": True})
            stack.callback(process.close)
            return process.ask(command)

    return weighed({name: partial(alone, spec) for name, spec in specs.items()}, base)


def weighed(asks: Mapping[str, Callable[[str], dict[str, Any]]], base: str) -> dict[str, dict[str, Any]]:
    """What processes answer about their memory, with ratios; and what failed."""
    found: dict[str, dict[str, Any]] = {}
    for name, ask in asks.items():
        try:
            found[name] = {"status": "ok", **ask("memory")}
        except Failed as caught:
            found[name] = {"status": f"x: {reason(caught)}"}
    peak = found.get(base, {}).get("peak_mib")
    for numbers in found.values():
        if peak and "peak_mib" in numbers:
            numbers["ratio"] = numbers["peak_mib"] / peak
    return found


class Server:
    """Commands to a contestant: `step`, `sums FILE`, `memory`, and `answer QUESTION`."""

    def __init__(self, spec: Spec) -> None:
        self.device = spec.get("device", "cpu")
        make = partial(importlib.import_module(spec["module"]).contestant, spec)
        weighed = spec.get("memory") and "python" not in spec  # torch is in this interpreter
        self.contestant, (_, self.built) = allocated(make, self.device) if weighed else (make(), Allocated(0, 0))
        gc.collect()
        gc.freeze()  # what is there now is not looked at again by the collections before each step

    def facts(self) -> dict[str, Any]:
        return {**self.contestant.facts, "compared": self.contestant.sums is not None}

    def step(self) -> dict[str, float]:
        """A step that follows another one, as in training: after those of other processes a step takes up to a fifth
        longer, not all of them alike."""
        self.contestant.step()
        self.contestant.clear()
        found = timed(self.contestant.step, self.device)
        self.contestant.clear()
        return found

    def answer(self, question: str) -> dict[str, Any]:
        return self.contestant.answer(question)

    def sums(self, file: str) -> dict[str, float]:
        """Write the sums of a step; its seconds."""
        import numpy as np

        start = time.perf_counter()
        result = self.contestant.step()
        seconds = time.perf_counter() - start
        np.savez(file, **(self.contestant.sums or (lambda result: {}))(result))
        self.contestant.clear()
        return {"seconds": seconds}

    def memory(self) -> dict[str, float]:
        """Peak of a step over what is built, after one that warms up, in MiB; that of all, and of the process."""
        if self.contestant.memory is not None:
            return self.contestant.memory()
        self.step()
        _, (peak, _) = allocated(self.contestant.step, self.device)
        numbers = {"peak_mib": peak, "total_mib": self.built + peak, "resident_mib": resident()}
        return {name: value / MIB for name, value in numbers.items()}


def serve(spec: Spec) -> None:
    """Answer with a line of JSON to each line of the input, until that ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a contestant prints is no answer
    warnings.simplefilter("ignore")  # of contestants: only their results are read
    if spec.get("dpfunc"):
        sys.path.insert(0, spec["dpfunc"])
    if "python" not in spec:
        import torch

        torch.set_num_threads(spec.get("threads", 1))
        torch.backends.cudnn.allow_tf32 = False  # float32 for everybody, so that parity can be checked
    server = None
    for line in itertools.chain(["facts"], sys.stdin):
        command, _, argument = line.strip().partition(" ")
        try:
            server = server or Server(spec)
            found = getattr(server, command)(*([argument] if argument else []))
        except Exception as error:  # noqa: BLE001  (a contestant may fail in any way; that is its result)
            found = {"failed": reason(error)}
        print(json.dumps(found), file=answers, flush=True)
        if server is None:
            return


if __name__ == "__main__":
    from benchmarks.measure import serve as serve_once  # not the copy that has the name __main__

    serve_once(json.loads(sys.argv[1]))
