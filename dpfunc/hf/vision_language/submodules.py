"""The parts of a vision-language model: vision tower, projector, language model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpfunc._utils.validation import shorten
from dpfunc.errors import UnsupportedModel

_VISION = ("vision_tower", "vision_model", "visual")
PROJECTOR = ("multi_modal_projector", "mm_projector", "connector", "merger")
_LANGUAGE = ("language_model", "text_model")


@dataclass(frozen=True)
class Parts:
    """Names of the modules that are the parts of a model.

    Args:
        vision: image to patches. projector: patches to the width of the language model. language: the language model.
    """

    vision: tuple[str, ...]
    projector: tuple[str, ...]
    language: tuple[str, ...]


def parts(model: nn.Module) -> Parts:
    """The vision tower, the projector and the language model, by their usual names.

    Args:
        model: `LlavaForConditionalGeneration`, or another model with these three parts.

    Raises:
        UnsupportedModel: a part is missing.

    >>> from dpfunc.hf.vision_language.tiny_llava import tiny_llava
    >>> parts(tiny_llava()).projector
    ('model.multi_modal_projector',)
    """
    found = {"vision": _topmost(model, _VISION), "projector": _topmost(model, PROJECTOR)}
    found["language"] = _topmost(model, _LANGUAGE)
    missing = [name for name, modules in found.items() if not modules]
    if missing:
        raise UnsupportedModel(
            f"Expected a vision-language model, got {type(model).__name__} without {shorten(missing)}. Looked for "
            f"{', '.join(_VISION)}; {', '.join(PROJECTOR)}; {', '.join(_LANGUAGE)}. Name the trained parameters "
            "yourself: dpfunc.functionalize(model, trainable=...)."
        )
    return Parts(**found)


def _topmost(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    found: list[str] = []
    for name, _ in model.named_modules():  # parents come first
        if name.rpartition(".")[2] in names and not name.startswith(tuple(other + "." for other in found)):
            found.append(name)
    return tuple(found)


def language_layers(model: nn.Module) -> tuple[str, ...]:
    """The names of the linear layers of the language model, the output layer left out: what LoRA adapts.

    Args:
        model: see `parts`.

    >>> from dpfunc.hf.vision_language.tiny_llava import tiny_llava
    >>> language_layers(tiny_llava())[0]
    'model.language_model.layers.0.self_attn.q_proj'
    """
    prefixes = tuple(part + "." for part in parts(model).language)
    return tuple(
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.startswith(prefixes) and not name.endswith("lm_head")
    )


def quantised_layers(model: nn.Module) -> tuple[str, ...]:
    """The names of the linear layers whose weight is not an ordinary tensor of floats.

    Args:
        model: any module.

    >>> quantised_layers(nn.Sequential(nn.Linear(2, 2)))
    ()
    """
    return tuple(
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and isinstance(layer.weight, Tensor) and not _is_plain(layer.weight)
    )


def _is_plain(weight: Tensor) -> bool:
    kinds = (Tensor, nn.Parameter)  # packed formats are subclasses of tensor, or hold bytes
    return weight.is_floating_point() and type(weight) in kinds and type(weight.data) in kinds


def without_values(model: nn.Module) -> nn.Module:
    """A copy of the structure of a model on the meta device: shapes and dtypes without memory.

    Args:
        model: any module with weights in float; it is not changed.

    >>> without_values(nn.Linear(2, 3)).weight
    Parameter containing:
    tensor(..., device='meta', size=(3, 2), requires_grad=True)
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    structure: nn.Module = copy.deepcopy(model, memo)  # deepcopy takes what its memo holds in place of the original
    return structure


def takes_pixels_alone(model: nn.Module) -> bool:
    """True if `get_image_features(pixel_values)` takes images of one size, and needs to know nothing else of them."""
    inner = getattr(model, "model", model)
    function: Any = getattr(inner, "get_image_features", getattr(model, "get_image_features", None))
    config: Any = getattr(model, "config", None)
    if function is None or not hasattr(getattr(config, "vision_config", None), "image_size"):
        return False
    arguments = inspect.signature(function).parameters.values()
    needed = [a.name for a in arguments if a.default is a.empty and a.kind not in (a.VAR_KEYWORD, a.VAR_POSITIONAL)]
    described = any(a.name in ("image_grid_thw", "pixel_attention_mask") for a in arguments)
    return needed == ["pixel_values"] and not described


def image_features(model: nn.Module, pixels: Tensor) -> Tensor:
    """Image features that the language model receives, as one vector."""
    function: Any = model.get_image_features
    output = function(pixel_values=pixels)
    leaves = pytree.tree_leaves(getattr(output, "pooler_output", output))
    return torch.cat([leaf.flatten() for leaf in leaves if isinstance(leaf, Tensor)])


def image_size(model: nn.Module) -> tuple[int, int]:
    """Height and width of the images that the vision tower takes."""
    config: Any = model.config
    size = config.vision_config.image_size
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
