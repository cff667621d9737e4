"""Steps of JAX for another process: reads one command a line, answers one line of JSON.

`python -m benchmarks.engines.jax_side '{"model": ..., "arrays": FILE, "mode": ..., ...}'`, in an interpreter that has
JAX and JAX Privacy. Commands: `step`, `sums FILE`, `memory`. It ends with its input.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

MIB = 2**20
PACKAGES = ("jax", "jaxlib", "jax-privacy")


def keep_to_cores(number: int) -> None:
    """Stay on this many cores: XLA takes as many threads as there are cores in the mask."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:number])


def resident(field: str) -> int:
    """Resident memory in bytes: `VmRSS` now, `VmHWM` at the most; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), 0)


def forget_peak() -> None:
    """Give freed memory back, and let `VmHWM` begin from here."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


class Stepper:
    """One contestant: a compiled function, and what it is called with."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        import jax
        import numpy as np

        from benchmarks.engines.jax_side.models import MODELS, loss_of, to_jax

        self.model, self.spec = MODELS[spec["model"]], spec
        with np.load(spec["arrays"]) as arrays:
            found = {name: arrays[name] for name in arrays.files}
        inputs, targets = found.pop("inputs"), found.pop("targets")
        params: dict[str, dict[str, jax.Array]] = {"trained": {}, "frozen": {}}
        for key, value in found.items():
            kind, _, name = key.partition("/")
            params[kind][name] = jax.numpy.array(to_jax(self.model, name, value))
        if inputs.ndim == 4:
            inputs = inputs.transpose(0, 2, 3, 1)
        self.batch_size = len(inputs)
        self.arguments = (params["trained"], params["frozen"], jax.numpy.array(inputs), jax.numpy.array(targets))
        self.gradient = self._gradient(loss_of(self.model))
        self.compiled: Any = None

    def _released(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A whole step, with noise and SGD, and its arguments; the rate is zero, which XLA is not told."""
        import jax
        from jax_privacy.noise_addition import gaussian_privatizer

        noise = gaussian_privatizer(stddev=self.gradient.sensitivity(), prng_key=jax.random.key(0))

        def step(trained: Any, noise_state: Any, rate: Any, *others: Any) -> Any:
            noisy, noise_state = noise.update(self.gradient(trained, *others), noise_state)
            return jax.tree.map(lambda p, g: p - rate * g, trained, noisy), noise_state

        trained, *others = self.arguments
        return step, (trained, noise.init(trained), jax.numpy.zeros(()), *others)

    def _gradient(self, loss: Callable[..., Any]) -> Any:
        """The mean gradient, or the sum of clipped gradients."""
        import jax
        import jax_privacy

        if self.spec["mode"] == "plain":
            return jax.grad(loss)
        return jax_privacy.clipped_grad(
            loss, l2_clip_norm=self.spec["clip_norm"], batch_argnums=(2, 3), microbatch_size=self.spec["microbatch"]
        )

    def ready(self) -> None:
        """Compile."""
        import jax

        if self.compiled is None:
            function, self.given = self._released() if self.spec["mode"] == "whole" else (self.gradient, self.arguments)
            self.compiled = jax.jit(function).lower(*self.given).compile()

    def step(self) -> dict[str, Any]:
        """Seconds of one step."""
        import jax

        self.ready()
        start = time.perf_counter()
        result = jax.block_until_ready(self.compiled(*self.given))
        seconds = time.perf_counter() - start
        if self.spec["mode"] == "whole":
            self.given = (*result, *self.given[2:])
        return {"seconds": seconds}

    def sums(self, path: str) -> dict[str, Any]:
        """Write the sums of gradients, in the layout of torch."""
        import jax
        import numpy as np

        from benchmarks.engines.jax_side.models import to_torch

        self.ready()
        gradient = jax.jit(self.gradient) if self.spec["mode"] == "whole" else self.compiled
        scale = self.batch_size if self.spec["mode"] == "plain" else 1
        found = {name: to_torch(self.model, name, np.asarray(v)) for name, v in gradient(*self.arguments).items()}
        np.savez(path, **{name: value * scale for name, value in found.items()})
        return {}

    def memory(self) -> dict[str, Any]:
        """Peak of the resident memory during one step over what was there before it, after a step that warmed up.

        `planned_mib` is what XLA says it reserves: scratch space and results.
        """
        self.step()
        forget_peak()
        before = resident("VmRSS")
        self.step()
        peak, plan = resident("VmHWM"), self.compiled.memory_analysis()
        numbers = {
            "peak_mib": peak - before,
            "planned_mib": plan.temp_size_in_bytes + plan.output_size_in_bytes,
            "total_mib": plan.argument_size_in_bytes + peak - before,
            "resident_mib": peak,
        }
        return {name: value / MIB for name, value in numbers.items()}


def answer(stepper: Stepper, line: str) -> dict[str, Any]:
    """What a command gives, or why not."""
    command, _, argument = line.strip().partition(" ")
    try:
        return getattr(stepper, command)(*([argument] if argument else []))
    except Exception as error:  # noqa: BLE001  (a contestant may fail in any way; that is its result)
        return {"error": f"{type(error).__name__}: {error}"}


def main(spec: Mapping[str, Any]) -> None:
    """Answer until the input ends."""
    keep_to_cores(spec["threads"])

    def say(what: Mapping[str, Any]) -> None:
        print(json.dumps(what), flush=True)

    try:
        stepper = Stepper(spec)
    except Exception as error:  # noqa: BLE001  (the same)
        return say({"error": f"{type(error).__name__}: {error}"})
    say({"versions": {package: version(package) for package in PACKAGES}})
    for line in sys.stdin:
        say(answer(stepper, line))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
