"""Selection of the layers to adapt, and the names of their parameters in the adapted module."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from torch import nn

from dpfunc._utils.validation import fail, shorten
from dpfunc.functional.names import pattern
from dpfunc.lora.layer import adaptable

KINDS = "Linear, Embedding, Conv2d or Conv1D"


def select_layers(module: nn.Module, targets: str | Sequence[str]) -> dict[str, nn.Module]:
    """The layers that a regular expression or a list of names selects; each object once, in the module's order.

    Raises:
        InvalidArgument: none, unknown names, or layers that cannot be adapted.
    """
    candidates = {name: layer for name, layer in module.named_modules() if name and adaptable(layer)}
    if isinstance(targets, str):
        searched = pattern("targets", targets)
        chosen = {name: layer for name, layer in candidates.items() if searched.search(name)}
    else:
        _check_names(module, targets, candidates)
        chosen = {name: layer for name, layer in candidates.items() if name in set(targets)}
    if not chosen:
        raise fail("targets to select a layer", "targets", targets, f"Layers: {shorten(list(candidates))}.")
    return chosen


def _check_names(module: nn.Module, targets: Sequence[str], candidates: dict[str, nn.Module]) -> None:
    named = dict(module.named_modules())
    for name in targets:
        if name not in candidates:
            raise fail(f"targets to be names of {KINDS} layers", "targets", name, _hint(name, named, candidates))


def _hint(name: str, named: dict[str, nn.Module], candidates: dict[str, nn.Module]) -> str:
    if name and name in named:
        kind = type(named[name]).__name__
        inside = [other for other in candidates if other.startswith(name + ".")]
        return f"It is a {kind}. " + (f"Inside of it: {shorten(inside)}." if inside else "It cannot be adapted.")
    if any(other.endswith("." + name) for other in candidates):
        return f"Names are whole paths; for all that end so, pass the regular expression r'(^|\\.){name}$'."
    close = difflib.get_close_matches(name, candidates, n=3)
    return f"Did you mean {shorten(close)}?" if close else f"Layers: {shorten(list(candidates))}."


def adapted_name(name: str, targets: Sequence[str]) -> str:
    """The name of an ordinary parameter in the adapted module: one of a target layer is inside of its wrapper."""
    layer, _, attribute = name.rpartition(".")
    return f"{layer}.base.{attribute}" if layer in targets else name
