"""Models of the cases in plain jax.numpy, as functions of parameters under the names of torch.

Layouts are those of JAX: matrices (in, out), images (B, H, W, C), kernels (H, W, in, out). Sizes are read off the
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax import lax
from jax import numpy as jnp

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
    y = lax.conv_general_dilated(
        x_BHWC,
        p[f"{name}.weight"],
        (stride, stride),
        [(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def _pooled(x_BHWC: jax.Array) -> jax.Array:
    """The largest of 2 x 2, at each position."""
    return lax.reduce_window(x_BHWC, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")


def _mnist(p: Params, images_BHWC: jax.Array) -> jax.Array:
    x = _pooled(jax.nn.relu(_convolution(p, "0", images_BHWC, 2, 2)))
    x = _pooled(jax.nn.relu(_convolution(p, "3", x, 2, 0)))
    x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)  # torch flattens channels first
    return _linear(p, "9", jax.nn.relu(_linear(p, "7", x)))


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


def _perceptron(p: Params, x_Bd: jax.Array) -> jax.Array:
    return _linear(p, "4", jax.nn.relu(_linear(p, "2", jax.nn.relu(_linear(p, "0", x_Bd)))))


def _bag_of_words(p: Params, ids_BT: jax.Array) -> jax.Array:
    return _linear(p, "3", jax.nn.relu(_linear(p, "1", p["0.table.weight"][ids_BT].mean(1))))


class Model(NamedTuple):
    """A model, `(params, inputs) -> logits`, and the names of matrices that are tables of rows, not linear layers."""

    forward: Callable[[Params, jax.Array], jax.Array]
    tables: frozenset[str] = frozenset()


MODELS = {
    "decoder": Model(_decoder, frozenset({"0.weight"})),
    "vit": Model(_vit),
    "mnist": Model(_mnist),
    "convnet": Model(_convnet),
    "perceptron": Model(_perceptron),
    "bag of words": Model(_bag_of_words, frozenset({"0.table.weight"})),
}


def loss_of(model: Model) -> Callable[[Params, Params, jax.Array, jax.Array], jax.Array]:
    """The mean cross entropy of a batch: a function of trained parameters, frozen ones, inputs and targets."""

    def loss(trained: Params, frozen: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        logits = model.forward({**frozen, **trained}, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return loss


def to_jax(model: Model, name: str, value: np.ndarray) -> np.ndarray:
    """A parameter of torch in the layout of JAX."""
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0)
    return value.T if value.ndim == 2 and name not in model.tables else value


def to_torch(model: Model, name: str, value: np.ndarray) -> np.ndarray:
    """The other way."""
    if value.ndim == 4:
        return value.transpose(3, 2, 0, 1)
    return value.T if value.ndim == 2 and name not in model.tables else value
