"""A module as a pure function of its trainable parameters, without touching the module."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpfunc.batchnorm import training_batchnorms
from dpfunc.checks import shorten
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.types import Params

BIASES = r"(^|\.)bias$"
HEADS = r"(^|\.)(head|heads|classifier|score|lm_head|fc|pre_classifier|qa_outputs|head_dist)\."
ATTENTION = r"(^|\.)(attn|attention|self_attn|crossattention|cross_attn|SelfAttention|EncDecAttention)\."
PROJECTOR = r"(^|\.)(multi_modal_projector|mm_projector|projector|visual_projection|connector)\."
"""Names of usual subsets in Hugging Face and timm models, for `functionalize(module, trainable=BIASES)`."""


@dataclass(frozen=True)
class Forward:
    """The module as `forward(params, *args)`; see `functionalize`."""

    module: nn.Module = field(repr=False)
    shapes: Mapping[str, torch.Size]
    # Every place a tensor is stored at, once: a tied parameter has several, a module with two names only one.
    places: Mapping[str, tuple[str, ...]]
    buffers: Mapping[str, Tensor]  # copies, so that the module's own are safe

    def __call__(self, params: Params, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (the module's own)
        """The module's output with these parameters in place of its own."""
        self._check(params)
        if not torch.compiler.is_compiling():
            refuse_unsupported(self.module)
        state = {place: params[name] for name, places in self.places.items() for place in places}
        before = self._buffer_versions()
        output = functional_call(self.module, {**self.buffers, **state}, args, kwargs, tie_weights=False)
        written = [name for name, version in self._buffer_versions().items() if version != before[name]]
        if written:
            raise UnsupportedModel(
                f"The forward pass writes into the buffers {shorten(written)}: samples would influence each other. Use "
                "model.eval(), or replace the layer."
            )
        return output

    def _check(self, params: Params) -> None:
        if params.keys() != self.shapes.keys():
            missing = sorted(self.shapes.keys() - params.keys())
            unknown = sorted(params.keys() - self.shapes.keys())
            raise InvalidArgument(
                f"Expected the parameters that functionalize returned: missing [{shorten(missing)}], "
                f"unknown [{shorten(unknown)}]."
            )
        for name, shape in self.shapes.items():
            if params[name].shape != shape:
                raise InvalidArgument(
                    f"Expected params[{name!r}] of shape {tuple(shape)}, got {tuple(params[name].shape)}."
                )

    def _buffer_versions(self) -> dict[str, int]:
        if torch.compiler.is_compiling():  # dynamo does not trace version counters
            return {}
        return {name: buffer._version for name, buffer in self.buffers.items()}


class Functional(NamedTuple):
    """A module as a function, and the parameters to call it with."""

    forward: Callable[..., Any]
    params: dict[str, Tensor]


def functionalize(module: nn.Module, trainable: str | Sequence[str] | None = None) -> Functional:
    """A module as `(forward, params)`: `forward(params, *args)` is what `module(*args)` is with those parameters.

    Args:
        module: any module; its training mode at the time of the call decides about dropout. It is not changed, now or
            later, and must not be changed while `forward` is used.
        trainable: which parameters are arguments: a regular expression that is searched in their names (`BIASES`,
            `HEADS`, `ATTENTION` and `PROJECTOR` are ready), or a list of names. None takes those that require
            gradients. All others are constants.

    Returns:
        `forward`, and `params`: name -> detached copy. Parameters that are tied count once and are replaced everywhere.

    Raises:
        InvalidArgument: no parameter selected, unknown names, or an integer parameter.
        UnsupportedModel: BatchNorm in training mode, gradient checkpointing, or a forward that writes buffers.

    Guarantees:
        the module is bit-identical afterwards, tied and shared layers included
        (tests/test_functional.py::test_module_is_never_changed).

    >>> model = nn.Linear(3, 2)
    >>> forward, params = functionalize(model)
    >>> x = torch.ones(1, 3)
    >>> torch.equal(forward(params, x), model(x))
    True
    """
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"Expected a torch module, got {type(module).__name__}.")
    refuse_unsupported(module)
    named = dict(module.named_parameters())  # each tensor once, under its first name
    names = select(named, trainable)
    for name in names:
        if not named[name].is_floating_point():
            raise InvalidArgument(f"Expected floating parameters, got {named[name].dtype} for {name!r}. Leave it out.")
    places = storage_places(module)
    params = {name: named[name].detach().clone() for name in names}
    forward = Forward(
        module,
        {name: param.shape for name, param in params.items()},
        {name: places[id(named[name])] for name in names},
        {name: buffer.clone() for name, buffer in module.named_buffers()},
    )
    return Functional(forward, params)


def select(named: Mapping[str, Tensor], trainable: str | Sequence[str] | None) -> list[str]:
    """The names of the trainable parameters, in the order of the module.

    Raises:
        InvalidArgument: nothing selected, or names that do not exist.
    """
    if trainable is None:
        chosen = [name for name, param in named.items() if param.requires_grad]
        hint = "All parameters are frozen: name the trainable ones."
    elif isinstance(trainable, str):
        chosen = [name for name in named if re.search(trainable, name)]
        hint = f"No name matches the regular expression {trainable!r}."
    else:
        unknown = [name for name in trainable if name not in named]
        if unknown:
            close = [match for name in unknown for match in difflib.get_close_matches(name, named, n=2)]
            raise InvalidArgument(
                f"Expected names of parameters, got unknown {shorten(unknown)}."
                + (f" Did you mean {shorten(close)}?" if close else "")
            )
        chosen = [name for name in named if name in set(trainable)]
        hint = "The list of names is empty."
    if not chosen:
        raise InvalidArgument(
            f"Expected at least one trainable parameter, got none. {hint} The names begin {shorten(list(named))}."
        )
    return chosen


def storage_places(module: nn.Module) -> dict[int, tuple[str, ...]]:
    """For each parameter (by id) one name for each module attribute that holds it.

    A module that is registered under two names holds its parameters in one place. `functional_call` with both names
    swaps that place twice and restores it wrongly, so only the first name is given.
    """
    places: dict[int, list[str]] = {}
    for prefix, owner in module.named_modules():  # each module once
        for attribute, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(param), []).append(f"{prefix}.{attribute}" if prefix else attribute)
    return {key: tuple(names) for key, names in places.items()}


def refuse_unsupported(module: nn.Module) -> None:
    """What would mix samples or give wrong gradients is an error.

    Raises:
        UnsupportedModel: BatchNorm in training mode, or gradient checkpointing that is switched on.
    """
    norms = training_batchnorms(module)
    if norms:
        raise UnsupportedModel(
            f"{len(norms)} BatchNorm layers in training mode mix the samples of a batch: {shorten(norms)}. Use "
            "dpfunc.replace_batchnorm(model), or model.eval() if their statistics come from public data."
        )
    checkpointed = [
        name or type(part).__name__
        for name, part in module.named_modules()
        if part.training and getattr(part, "gradient_checkpointing", False) is True
    ]
    if checkpointed:
        raise UnsupportedModel(
            f"Gradient checkpointing is on in {shorten(checkpointed)}: its second forward pass would run with the "
            "module's own parameters and give wrong gradients. Call model.gradient_checkpointing_disable(); to save "
            "memory use microbatch_size."
        )


def with_params(module: nn.Module, params: Params) -> nn.Module:
    """A deep copy of a module with these parameters in place, e.g. to save a trained model in its own format.

    Args:
        module: the module that was functionalized. params: name -> tensor, some or all of its parameters.

    Raises:
        InvalidArgument: an unknown name or a wrong shape.

    >>> model = nn.Linear(2, 1)
    >>> with_params(model, {"bias": torch.ones(1)}).bias.item()
    1.0
    """
    import copy

    result = copy.deepcopy(module)
    named = dict(result.named_parameters())
    select(named, list(params))
    with torch.no_grad():
        for name, value in params.items():
            if named[name].shape != value.shape:
                raise InvalidArgument(
                    f"Expected params[{name!r}] of shape {tuple(named[name].shape)}, got {tuple(value.shape)}."
                )
            named[name].copy_(value)
    return result
