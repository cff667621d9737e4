"""Selection of parameters by name, and all places where a tensor is stored.

May import: its folder, accounting, clipping, engines, noise, sampling, updates and below. Privacy depends on it: no.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpfunc._utils.validation import shorten
from dpfunc.batches import COMPLEX
from dpfunc.errors import InvalidArgument

BIASES = r"(^|\.)bias$"
"""Biases only (BiTFiT), for `functionalize(module, trainable=BIASES)`."""

HEADS = r"(^|\.)(head|heads|classifier|score|lm_head|fc|pre_classifier|qa_outputs|head_dist)\."
"""The head that usual Hugging Face, timm and torchvision models end with."""

ATTENTION = r"(^|\.)(attn|attention|self_attn|encoder_attn|crossattention|cross_attn|SelfAttention|EncDecAttention)\."
"""Attention layers of usual transformers, with the layer norms that are inside of them."""

PROJECTOR = r"(^|\.)(multi_modal_projector|mm_projector|projector|visual_projection|connector)\."
"""The projector between image and language model of usual vision-language models."""

OF_TORCH = nn.Module().__dict__.keys()
"""Attributes of each module, which torch itself keeps."""


def pattern(name: str, expression: str) -> re.Pattern[str]:
    """Compile a regular expression; `name` is that of the argument, for the message."""
    try:
        return re.compile(expression)
    except re.error as error:
        raise InvalidArgument(f"Expected a regular expression, got {name}={expression!r}: {error}.") from error


def first_names(named: Iterable[tuple[str, object]]) -> dict[str, str]:
    """Each name, and the first one of the same parameter or module, from pairs with all names of each."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(each), name) for name, each in named}


def chosen_names(argument: str, wanted: str | Sequence[str], every: Mapping[str, str], kind: str) -> dict[str, None]:
    """The names that an expression finds among `first_names`, or those of a list; none alone that is not a first one.

    Args:
        argument: its name, for messages. kind: what has the names: "parameter" or "layer".
    """
    expression = pattern(argument, wanted) if isinstance(wanted, str) else None
    found = dict.fromkeys(wanted if expression is None else filter(expression.search, every))
    if others := [f"{name!r} is {every[name]!r}" for name in found if every.get(name, name) not in found]:
        raise InvalidArgument(
            f"Expected each {kind} under its first name, got another one: {shorten(others)}. Choose that one, or none."
        )
    return found


def select(module: nn.Module, trainable: str | Sequence[str] | None) -> dict[str, Tensor]:
    """The trainable parameters of a module, in its order, each tensor once and under its first name."""
    named = dict(module.named_parameters())
    if not named:
        raise InvalidArgument(f"Expected a module with parameters, got {type(module).__name__}, which has none.")
    chosen, hint = _chosen(module, named, trainable)
    if not chosen:
        raise InvalidArgument(
            f"Expected at least one trainable parameter, got none. {hint} The names begin {shorten(list(named))}."
        )
    for name in chosen:
        if is_lazy(named[name]):
            raise InvalidArgument(f"Expected parameters with a shape, got lazy {name!r}. Run the model once before.")
        if not named[name].is_floating_point():
            raise InvalidArgument(
                f"Expected floating parameters, got {named[name].dtype} for {name!r}. "
                f"{COMPLEX if named[name].is_complex() else 'Leave it out.'}"
            )
    return {name: named[name] for name in chosen}


def _chosen(
    module: nn.Module, named: Mapping[str, Tensor], trainable: str | Sequence[str] | None
) -> tuple[list[str], str]:
    """The names that are selected, and why there may be none."""
    if trainable is None:
        requiring = [name for name, param in named.items() if param.requires_grad]
        return requiring, "All parameters are frozen: name the trainable ones."
    every = first_names(module.named_parameters(remove_duplicate=False))
    wanted = chosen_names("trainable", trainable, every, "parameter")
    if unknown := [name for name in wanted if name not in every]:
        close = [match for name in unknown for match in difflib.get_close_matches(name, named, n=2)]
        hint = f"Did you mean {shorten(close)}?" if close else f"The names begin {shorten(list(named))}."
        raise InvalidArgument(f"Expected names of parameters, got unknown {shorten(unknown)}. {hint}")
    is_text = isinstance(trainable, str)
    hint = f"No name matches the regular expression {trainable!r}." if is_text else "The list of names is empty."
    return [name for name in named if name in wanted], hint


def storage_places(module: nn.Module) -> dict[int, tuple[str, ...]]:
    """For each parameter and buffer (by id) one name for each module attribute that holds it, to be swapped once."""
    places: dict[int, list[str]] = {}
    for prefix, owner in module.named_modules():  # each module once
        for attribute, tensor in {**owner._parameters, **owner._buffers}.items():
            places.setdefault(id(tensor), []).append(f"{prefix}.{attribute}" if prefix else attribute)
    return {key: tuple(names) for key, names in places.items()}


def outermost(names: Iterable[str]) -> list[str]:
    """Names of modules that are in none of the others; parents come before their children."""
    kept: list[str] = []
    for name in names:
        if not any(not other or name.startswith(f"{other}.") for other in kept):
            kept.append(name)
    return kept
