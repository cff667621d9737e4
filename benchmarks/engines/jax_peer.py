"""JAX Privacy, and JAX without privacy, in a process with an interpreter of their own, for the same weights and batch.

`DPFUNC_JAX_PYTHON` names that interpreter; without it the one that `make jax` installs is used, if it is there.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.engines.problem import Problem

ROOT = Path(__file__).parents[2]
VARIABLE = "DPFUNC_JAX_PYTHON"
INSTALLED = ROOT / ".cache" / "jax" / "bin" / "python"
NOT_INSTALLED = "not installed"
LIMIT_SECONDS = 240.0
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


class Elsewhere(NamedTuple):
    """A step that another process took, and timed."""

    seconds: float


class TakesNoPart(RuntimeError):
    """JAX is not installed, or a case is left out."""


def interpreter() -> str:
    """The interpreter that has JAX and JAX Privacy.

    Raises:
        TakesNoPart: none was named, and `make jax` has made none.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return named
    if INSTALLED.exists():
        return str(INSTALLED)
    raise TakesNoPart(f"{NOT_INSTALLED}. Run `make jax`, or name an interpreter that has JAX Privacy in {VARIABLE}.")


def arrays(problem: Problem) -> dict[str, np.ndarray]:
    """Parameters, `trained/<name>` or `frozen/<name>`, and the batch; tied parameters once."""
    found = {
        f"{'trained' if param.requires_grad else 'frozen'}/{name}": param.detach().numpy()
        for name, param in problem.module.named_parameters()
    }
    return {**found, "inputs": problem.inputs.numpy(), "targets": problem.targets.numpy()}


def environment(threads: int, double: bool) -> dict[str, str]:
    """Variables of the process: float64 where the problem has it, and one thread of XLA where torch has one."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PYTHON"))}
    flags = {"XLA_FLAGS": ONE_THREAD} if threads == 1 else {}
    return {**keep, **flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": str(int(double)), "PYTHONPATH": str(ROOT)}


class Peer:
    """A process that takes steps when it is told to.

    Args:
        problem: its tensors are copied into the process. mode: "plain", "clipped", or "whole" with noise and SGD.
        microbatch: of JAX Privacy.

    Raises:
        TakesNoPart: there is no JAX, the model is not written in jax.numpy, or it is not on a CPU.
    """

    def __init__(self, problem: Problem, mode: str, microbatch: int | None) -> None:
        python = interpreter()
        if not problem.jax_model:
            raise TakesNoPart(f"left out: {problem.no_jax_model}")
        if problem.inputs.device.type != "cpu":
            raise TakesNoPart("left out: JAX is measured on CPUs only")
        threads = torch.get_num_threads()
        self.folder = tempfile.TemporaryDirectory(prefix="dpfunc-jax-")
        file = Path(self.folder.name) / "arrays.npz"
        np.savez(file, **arrays(problem))
        spec = {"model": problem.jax_model, "arrays": str(file), "mode": mode, "microbatch": microbatch}
        spec |= {"clip_norm": problem.clip_norm, "threads": threads}
        double = next(problem.module.parameters()).dtype == torch.float64
        self.errors = (Path(self.folder.name) / "errors").open("w+")
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.engines.jax_side", json.dumps(spec)],
            cwd=ROOT, env=environment(threads, double), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.errors, text=True,
        )  # fmt: skip
        try:
            self.versions: Mapping[str, str] = self._answer()["versions"]
        except BaseException:
            self.close()
            raise
        file.unlink()

    def _answer(self) -> dict[str, Any]:
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT_SECONDS)
        if not ready:
            self.close()
            raise TimeoutError(f"no step within {LIMIT_SECONDS:.0f} s, compiling included")
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            said = self.errors.read().strip().splitlines() or ["nothing was said"]
            raise RuntimeError(f"the process ended with code {self.process.returncode}: {said[-1][:150]}")
        found = json.loads(line)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command; its answer."""
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._answer()

    def step(self) -> Elsewhere:
        """Take a step."""
        return Elsewhere(self.ask("step")["seconds"])

    def sums(self) -> dict[str, Tensor]:
        """The clipped sums of a step, or without privacy the sums."""
        file = Path(self.folder.name) / "sums.npz"
        self.ask(f"sums {file}")
        with np.load(file) as found:
            return {name: torch.from_numpy(found[name]) for name in found.files}

    def memory(self) -> dict[str, float]:
        """Peak of the resident memory during a step over what was there before it, and the like, in MiB."""
        return self.ask("memory")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            pipe.close()
        self.folder.cleanup()
