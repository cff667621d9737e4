"""Adapters on named layers of a module, as a pure function."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpfunc.checks import fail, shorten
from dpfunc.functional import functionalize, select
from dpfunc.lora.layer import LoRAConfig, LoRALayer, adaptable, delta_weight, initial_a, shapes
from dpfunc.rng import Key, fold_in
from dpfunc.types import Params


@dataclass(frozen=True)
class LoRA:
    """An adapter: `forward(params, *args)` and the parameters it starts with. See `attach`.

    Args:
        params: initial trainable parameters, name -> tensor.
        constants: A of each target when only B is trained. config: what the adapter is. module: the original.
    """

    params: dict[str, Tensor]
    constants: dict[str, Tensor]
    config: LoRAConfig
    module: nn.Module = field(repr=False)
    _adapted: Callable[..., Any] = field(repr=False)

    def forward(self, params: Params, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (the module's own)
        """The adapted module's output with these parameters."""
        return self._adapted({**self.constants, **params}, *args, **kwargs)

    def merge(self, params: Params) -> nn.Module:
        """A copy of the original module with `W + scale B A`, and with the other trained parameters.

        A target whose weight is tied to another layer gets a weight of its own.
        """
        result = copy.deepcopy(self.module)
        every = {**self.constants, **params}
        with torch.no_grad():
            for name in self.config.targets:
                layer = result.get_submodule(name)
                weight = layer.get_parameter("weight")
                delta = delta_weight(layer, every[f"{name}.lora_A"], every[f"{name}.lora_B"])
                merged = (weight.to(delta.dtype) + self.config.scale * delta).to(weight.dtype)
                layer.register_parameter("weight", nn.Parameter(merged, requires_grad=weight.requires_grad))
            for name in self.config.also_train:
                result.get_parameter(name).copy_(every[adapted_name(name, self.config.targets)])
        return result


def adapted_name(name: str, targets: Sequence[str]) -> str:
    """The name of an ordinary parameter in the adapted module: one of a target layer is inside of its wrapper."""
    layer, _, attribute = name.rpartition(".")
    return f"{layer}.base.{attribute}" if layer in targets else name


def attach(
    module: nn.Module,
    key: Key,
    *,
    targets: str | Sequence[str],
    rank: int,
    alpha: float,
    rslora: bool = False,
    dropout: float = 0.0,
    train: Literal["AB", "B"] = "AB",
    init: Literal["kaiming", "orthonormal"] = "kaiming",
    also_train: str | Sequence[str] = (),
) -> LoRA:
    """Low-rank adapters on named layers of a module, as a function of the adapter's parameters.

    The module is not changed, now or later: the function runs a copy of its structure that shares its tensors.

    Args:
        module: any module with Linear, Embedding, Conv2d or Hugging Face Conv1D layers. Its training mode at the time
            of the call decides about dropout.
        key: from which A is drawn; the same key gives the same A.
        targets: the layers: a regular expression that is searched in their names, or a list of names.
        rank, alpha, rslora, dropout, train, init: see `LoRAConfig`.
        also_train: ordinary parameters to train as well, e.g. of a new head: regular expression or list of names.

    Returns:
        A `LoRA`. All other parameters are constants. With B = 0 the function starts as the module's own.

    Raises:
        InvalidArgument: no such layer, a layer of another kind, a rank that is too large.

    Guarantees:
        tests/test_lora.py: equals the merged module (test_merge), leaves the module alone (test_module_is_unchanged).

    >>> from dpfunc.rng import insecure_key
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> adapter = attach(model, insecure_key(0), targets=["0"], rank=2, alpha=4, also_train="^2")
    >>> {name: tuple(p.shape) for name, p in adapter.params.items()}
    {'0.lora_A': (2, 4), '0.lora_B': (8, 2), '2.weight': (2, 8), '2.bias': (2,)}
    """
    layers = select_layers(module, targets)
    trained = select(dict(module.named_parameters()), also_train) if also_train else []
    config = LoRAConfig(
        tuple(layers), rank, float(alpha) if not isinstance(alpha, bool) else alpha, rslora, dropout, train, init,
        tuple(trained),
    )  # fmt: skip
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    for name, layer in layers.items():
        shape_a, shape_b = shapes(layer, rank)
        weight = layer.get_parameter("weight")
        a = initial_a(fold_in(key, "lora", name), shape_a, init).to(weight)
        memo[id(layer)] = LoRALayer(layer, config, a, torch.zeros(shape_b).to(weight))
    adapted = memo[id(module)] if id(module) in memo else copy.deepcopy(module, memo)
    names = [f"{name}.{suffix}" for name in layers for suffix in ("lora_A", "lora_B")]
    forward, params = functionalize(adapted, names + [adapted_name(name, config.targets) for name in trained])
    frozen = [name for name in params if train == "B" and name.endswith(".lora_A")]
    return LoRA(params, {name: params.pop(name) for name in frozen}, config, module, forward)


def select_layers(module: nn.Module, targets: str | Sequence[str]) -> dict[str, nn.Module]:
    """The layers that a regular expression or a list of names selects; each object once.

    Raises:
        InvalidArgument: none, unknown names, or layers that cannot be adapted.
    """
    named = {name: layer for name, layer in module.named_modules() if name}
    candidates = {name: layer for name, layer in named.items() if adaptable(layer)}
    if isinstance(targets, str):
        chosen = {name: layer for name, layer in candidates.items() if re.search(targets, name)}
    else:
        for name in targets:
            if name not in named:
                close = difflib.get_close_matches(name, candidates, n=3)
                hint = f"Did you mean {shorten(close)}?" if close else f"Layers: {shorten(list(candidates))}."
                raise fail("names of layers in targets", "targets", name, hint)
            if name not in candidates:
                raise fail(
                    "targets of kind Linear, Embedding, Conv2d or Conv1D", "targets", name,
                    f"It is a {type(named[name]).__name__}.",
                )  # fmt: skip
        chosen = {name: candidates[name] for name in targets}
    if not chosen:
        raise fail("targets to select a layer", "targets", targets, f"Layers: {shorten(list(candidates))}.")
    return chosen
