"""Models of the cases in plain jax.numpy, and steps of JAX, in an interpreter that has JAX and JAX Privacy.

Models are functions of parameters under the names of torch. Layouts are those of JAX: matrices (in, out), images
(B, H, W, C), kernels (H, W, in, out). Sizes are read off the parameters.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax_privacy
import numpy as np
import optax
from jax import lax
from jax import numpy as jnp
from jax_privacy.noise_addition import gaussian_privatizer

from benchmarks.measure import MIB, Contestant, Spec, resident

PACKAGES = ("jax", "jaxlib", "jax-privacy")
Params = Mapping[str, jax.Array]


def _linear(p: Params, name: str, x: jax.Array) -> jax.Array:
    if f"{name}.base.weight" in p:  # LoRA
        return _linear(p, f"{name}.base", x) + 2.0 * _linear(p, f"{name}.up", _linear(p, f"{name}.down", x))
    y = x @ p[f"{name}.weight"]
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def _norm(p: Params, name: str, x: jax.Array) -> jax.Array:
    """LayerNorm, or RMSNorm where there is no bias."""
    if f"{name}.bias" not in p:
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p[f"{name}.weight"]
    centred = x - x.mean(-1, keepdims=True)
    scale = lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-5)
    return centred * scale * p[f"{name}.weight"] + p[f"{name}.bias"]


def _rotated(x_BTHd: jax.Array) -> jax.Array:
    length, half = x_BTHd.shape[1], x_BTHd.shape[-1] // 2
    angle_T1d = jnp.arange(length)[:, None, None] * 10000.0 ** -(jnp.arange(half) / half)
    cos, sin = jnp.cos(angle_T1d), jnp.sin(angle_T1d)
    first, second = jnp.split(x_BTHd, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTHd.dtype)


def _attention(p: Params, name: str, x_BTd: jax.Array, *, causal: bool) -> jax.Array:
    heads = max(1, x_BTd.shape[-1] // 64)
    q, k, v = (_linear(p, f"{name}.{part}", x_BTd).reshape(*x_BTd.shape[:2], heads, -1) for part in "qkv")
    if causal:
        q, k = _rotated(q), _rotated(k)
    return _linear(p, f"{name}.o", jax.nn.dot_product_attention(q, k, v, is_causal=causal).reshape(x_BTd.shape))


def _decoder(p: Params, ids_BT: jax.Array) -> jax.Array:
    x, layer = p["0.weight"][ids_BT], 1
    while f"{layer}.norm1.weight" in p:
        x = x + _attention(p, f"{layer}.attention", _norm(p, f"{layer}.norm1", x), causal=True)
        y, mlp = _norm(p, f"{layer}.norm2", x), f"{layer}.mlp"
        x = x + _linear(p, f"{mlp}.down", jax.nn.silu(_linear(p, f"{mlp}.gate", y)) * _linear(p, f"{mlp}.up", y))
        layer += 1
    return _linear(p, f"{layer + 1}", _norm(p, f"{layer}", x))


def _vit(p: Params, images_BHWC: jax.Array) -> jax.Array:
    patch = p["patches.weight"].shape[0]
    patches = _convolution(p, "patches", images_BHWC, patch, 0)
    x = patches.reshape(len(patches), -1, patches.shape[-1])
    x = jnp.concatenate([jnp.broadcast_to(p["token"], (len(x), *p["token"].shape[1:])), x], axis=1) + p["positions"]
    layer = 0
    while (block := f"blocks.{layer}") and f"{block}.norm1.weight" in p:
        x = x + _attention(p, f"{block}.attention", _norm(p, f"{block}.norm1", x), causal=False)
        y = jax.nn.gelu(_linear(p, f"{block}.mlp.up", _norm(p, f"{block}.norm2", x)), approximate=False)
        x = x + _linear(p, f"{block}.mlp.down", y)
        layer += 1
    return _linear(p, "head", _norm(p, "norm", x)[:, 0])


def _convolution(p: Params, name: str, x_BHWC: jax.Array, stride: int, padding: int) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    pads = [(padding, padding)] * 2
    y = lax.conv_general_dilated(x_BHWC, p[f"{name}.weight"], (stride, stride), pads, dimension_numbers=layout)
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def _pooled(x_BHWC: jax.Array) -> jax.Array:
    """The largest of 2 x 2, at each position."""
    return lax.reduce_window(x_BHWC, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")


def _mnist(p: Params, images_BHWC: jax.Array) -> jax.Array:
    x = _pooled(jax.nn.relu(_convolution(p, "0", images_BHWC, 2, 2)))
    x = _pooled(jax.nn.relu(_convolution(p, "3", x, 2, 0)))
    x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)  # torch flattens channels first
    return _layers(p, x, "7", "9")


def _group_norm(p: Params, name: str, x_BHWC: jax.Array) -> jax.Array:
    width = x_BHWC.shape[-1]
    grouped = x_BHWC.reshape(*x_BHWC.shape[:3], min(16, width // 4), -1)
    centred = grouped - grouped.mean((1, 2, 4), keepdims=True)
    scale = lax.rsqrt(jnp.mean(centred * centred, (1, 2, 4), keepdims=True) + 1e-5)
    return (centred * scale).reshape(x_BHWC.shape) * p[f"{name}.weight"] + p[f"{name}.bias"]


def _convnet(p: Params, images_BHWC: jax.Array) -> jax.Array:
    x, layer = images_BHWC, 0
    while f"{layer}.weight" in p and p[f"{layer}.weight"].ndim == 4:
        x = _convolution(p, f"{layer}", x, 1 + layer // 3 % 2, 1)
        x = jax.nn.relu(_group_norm(p, f"{layer + 1}", x))
        layer += 3
    return _linear(p, f"{layer + 2}", x.mean((1, 2)))


def _layers(p: Params, x: jax.Array, *names: str) -> jax.Array:
    for name in names[:-1]:
        x = jax.nn.relu(_linear(p, name, x))
    return _linear(p, names[-1], x)


class Model(NamedTuple):
    """A model, `(params, inputs) -> logits`, and the names of matrices that are tables of rows, not linear layers."""

    forward: Callable[[Params, jax.Array], jax.Array]
    tables: Collection[str] = ()

    def turned(self, name: str, value: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        """A parameter in the layout of the other library: kernels by these axes, matrices of layers transposed."""
        if value.ndim == 4:
            return value.transpose(axes)
        return value.T if value.ndim == 2 and name not in self.tables else value


MODELS = {
    "decoder": Model(_decoder, {"0.weight"}),
    "vit": Model(_vit),
    "mnist": Model(_mnist),
    "convnet": Model(_convnet),
    "perceptron": Model(lambda p, x: _layers(p, x, "0", "2", "4")),
    "bag of words": Model(lambda p, ids: _layers(p, p["0.table.weight"][ids].mean(1), "1", "3"), {"0.table.weight"}),
}


class Stepper:
    """A compiled function, and what it is called with."""

    def __init__(self, spec: Spec) -> None:
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
            params[kind][name] = jnp.array(self.model.turned(name, value, (2, 3, 1, 0)))
        if inputs.ndim == 4:
            inputs = inputs.transpose(0, 2, 3, 1)
        self.batch_size = len(inputs)
        self.arguments = (params["trained"], params["frozen"], jnp.array(inputs), jnp.array(targets))
        self.gradient = self._gradient()
        function, self.given = self._released() if spec["mode"] == "whole" else (self.gradient, self.arguments)
        self.lowered = jax.jit(function).lower(*self.given)
        self.compiled: Any = None

    def _loss(self, trained: Params, frozen: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        logits = self.model.forward({**frozen, **trained}, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def _gradient(self) -> Any:
        """The mean gradient, or the sum of clipped gradients."""
        if self.spec["mode"] == "plain":
            return jax.grad(self._loss)
        size, clip_norm = self.spec["microbatch"], self.spec["clip_norm"]
        return jax_privacy.clipped_grad(self._loss, l2_clip_norm=clip_norm, batch_argnums=(2, 3), microbatch_size=size)

    def _released(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A whole step, with noise and SGD, and its arguments; the rate is zero, which XLA is not told."""
        noise = gaussian_privatizer(stddev=self.gradient.sensitivity(), prng_key=jax.random.key(0))

        def step(trained: Any, noise_state: Any, rate: Any, *others: Any) -> Any:
            noisy, noise_state = noise.update(self.gradient(trained, *others), noise_state)
            return jax.tree.map(lambda p, g: p - rate * g, trained, noisy), noise_state

        trained, *others = self.arguments
        return step, (trained, noise.init(trained), jnp.zeros(()), *others)

    def step(self) -> Any:
        """A step; the first one compiles."""
        if self.compiled is None:
            self.compiled = self.lowered.compile()
        result = jax.block_until_ready(self.compiled(*self.given))
        if self.spec["mode"] == "whole":
            self.given = (*result, *self.given[2:])
        return result

    def sums(self, result: Any) -> Mapping[str, Any]:
        """The sums of gradients, in the layout of torch."""
        if self.spec["mode"] == "whole":
            result = jax.jit(self.gradient)(*self.arguments)
        scale = self.batch_size if self.spec["mode"] == "plain" else 1
        return {n: scale * self.model.turned(n, np.asarray(value), (3, 2, 0, 1)) for n, value in result.items()}

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
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: spec["threads"]])
    stepper = Stepper(spec)
    facts = {"versions": {package: version(package) for package in PACKAGES}}
    return Contestant(stepper.step, stepper.sums, memory=stepper.memory, facts=facts)
