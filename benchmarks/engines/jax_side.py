"""Steps of JAX, in an interpreter that has JAX and JAX Privacy; for `benchmarks.measure`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.measure import MIB, Contestant, Spec, resident

PACKAGES = ("jax", "jaxlib", "jax-privacy")


def keep_to_cores(number: int) -> None:
    """Stay on this many cores: XLA takes as many threads as there are cores in the mask."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:number])


class Stepper:
    """A compiled function, and what it is called with."""

    def __init__(self, spec: Spec) -> None:
        import jax
        import numpy as np

        from benchmarks.engines.jax_models import MODELS, loss_of, to_jax

        jax.config.update("jax_enable_x64", bool(spec.get("double")))
        self.model, self.spec = MODELS[spec["model"]], spec
        with np.load(spec["arrays"]) as arrays:
            found = {name: arrays[name] for name in arrays.files}
        if spec.get("double"):
            found = {name: x.astype(np.float64) if x.dtype.kind == "f" else x for name, x in found.items()}
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
        function, self.given = self._released() if spec["mode"] == "whole" else (self.gradient, self.arguments)
        self.lowered = jax.jit(function).lower(*self.given)
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

    def step(self) -> Any:
        """A step; the first one compiles."""
        import jax

        if self.compiled is None:
            self.compiled = self.lowered.compile()
        result = jax.block_until_ready(self.compiled(*self.given))
        if self.spec["mode"] == "whole":
            self.given = (*result, *self.given[2:])
        return result

    def sums(self, result: Any) -> Mapping[str, Any]:
        """The sums of gradients, in the layout of torch."""
        import jax
        import numpy as np

        from benchmarks.engines.jax_models import to_torch

        if self.spec["mode"] == "whole":
            result = jax.jit(self.gradient)(*self.arguments)
        scale = self.batch_size if self.spec["mode"] == "plain" else 1
        return {name: scale * to_torch(self.model, name, np.asarray(value)) for name, value in result.items()}

    def memory(self) -> dict[str, Any]:
        """Peak of the resident memory during one step over what was there before it, after a step that warmed up.

        `planned_mib` is what XLA says it reserves: scratch space and results.
        """
        self.step()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins from here
        before = resident("VmRSS")
        self.step()
        peak, plan = resident(), self.compiled.memory_analysis()
        numbers = {
            "peak_mib": peak - before, "planned_mib": plan.temp_size_in_bytes + plan.output_size_in_bytes,
            "total_mib": plan.argument_size_in_bytes + peak - before, "resident_mib": peak,
        }  # fmt: skip
        return {name: value / MIB for name, value in numbers.items()}


def contestant(spec: Spec) -> Contestant:
    """For `measure`."""
    keep_to_cores(spec["threads"])
    stepper = Stepper(spec)
    facts = {"versions": {package: version(package) for package in PACKAGES}}
    return Contestant(stepper.step, stepper.sums, memory=stepper.memory, facts=facts)
