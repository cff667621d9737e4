"""Errors for modules that would mix samples, be written into, or give wrong gradients; and for other parameters."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from dpfunc._utils.validation import apart, shorten
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.types import Params

_CHECKPOINTED = (
    "its second forward pass would run with the module's own parameters and give wrong gradients. Call "
    "model.gradient_checkpointing_disable(); to save memory use microbatch_size, or checkpoint a function that calls "
    "forward(params, ...) as a whole."
)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of DistributedDataParallel, which averages gradients, and torch.compile, which hides code."""
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"Expected a torch module, got {type(module).__name__}.")
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return unwrapped(module.module)
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    if compiled is not None and isinstance(module, compiled):
        return unwrapped(module.get_submodule("_orig_mod"))
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    inside = [(name or "the module", part) for name, part in module.named_modules() if isinstance(part, wrappers)]
    if inside:
        where = shorten([f"{name} ({type(part).__name__})" for name, part in inside])
        raise UnsupportedModel(
            f"The module is wrapped for several devices in {where}: parameters are copied in each forward "
            "pass, or gradients averaged before they are clipped. Take its .module, and use one process a device."
        )
    return module


def refuse_unsupported(
    module: nn.Module, parts: Sequence[nn.Module] | None = None, *, checkpointing: bool = False
) -> None:
    """Refuse modules that cannot work (`_REFUSED`); with `checkpointing`, gradient checkpointing is allowed."""
    for part in all_parts(module) if parts is None else parts:
        kind: Any = type(part)
        for is_refused, message in _of_kind(kind):
            if is_refused(part) and not (checkpointing and is_refused is _checkpoints):
                names = [name or type(own).__name__ for name, own in module.named_modules() if is_refused(own)]
                raise UnsupportedModel(message.format(names=shorten(names), count=len(names)))


def all_parts(module: nn.Module) -> list[nn.Module]:
    """A module and all in it, each once, in any order: each step asks, and `modules()` takes ten times as long."""
    parts, known = [module], {id(module)}
    for part in parts:
        for inner in part._modules.values():
            if inner is not None and id(inner) not in known:
                known.add(id(inner))
                parts.append(inner)
    return parts


def _checkpoints(part: Any) -> bool:
    own = part.__dict__.get("gradient_checkpointing")  # quick: nearly no part has it
    named = own is not None or hasattr(type(part), "gradient_checkpointing")
    return named and part.training and part.gradient_checkpointing is True


# Kinds of modules that cannot work: by their class; then what each part is asked, and the message.
_REFUSED: tuple[tuple[Callable[[type], bool], Callable[[Any], bool], str], ...] = (
    (
        lambda kind: issubclass(kind, _BatchNorm),
        lambda part: isinstance(part, _BatchNorm) and (part.training or part.running_mean is None),
        "{count} BatchNorm layers in training mode mix the samples of a batch: {names}. Use "
        "dpfunc.replace_batchnorm(model), or model.eval() if their statistics come from public data.",
    ),
    (
        lambda kind: kind.__name__ == "Linear8bitLt",
        lambda part: type(part).__name__ == "Linear8bitLt",  # their rounding depends on other rows
        "The LLM.int8 layers {names} choose outlier columns over the whole batch, so samples influence each other. "
        "Load the model with 4 bits (NF4) or in bfloat16.",
    ),
    (lambda kind: True, _checkpoints, f"Gradient checkpointing is on in {{names}}: {_CHECKPOINTED}"),
    (
        lambda kind: issubclass(kind, (nn.Embedding, nn.EmbeddingBag)),
        lambda part: isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None,
        "The embeddings {names} have max_norm, which overwrites their weights in each forward pass. "
        "Build them with max_norm=None.",
    ),
    (
        lambda kind: issubclass(kind, torch.jit.ScriptModule),
        lambda part: isinstance(part, torch.jit.ScriptModule),
        "The parts {names} are compiled by torch.jit, whose parameters cannot be replaced. "
        "Functionalize the module from which they were made, before torch.jit.script or torch.jit.trace.",
    ),
)


@functools.lru_cache(4096)
def _of_kind(kind: type) -> tuple[tuple[Callable[[Any], bool], str], ...]:
    return tuple((is_refused, message) for concerns, is_refused, message in _REFUSED if concerns(kind))


@contextmanager
def checkpoint_is_an_error() -> Iterator[None]:
    """Inside, `torch.utils.checkpoint` of a part of the module is an error and not a wrong gradient.

    It saves tensors through hooks, which torch lets us forbid. Hooks that are there already belong to somebody around
    us, who may checkpoint all of `forward(params, ...)`: that is right, and is let pass. The reentrant kind uses no
    hooks: see `refuse_reentrant`.
    """
    message = f"The forward pass uses gradient checkpointing or other saved tensor hooks: {_CHECKPOINTED}"
    with ExitStack() as stack:
        try:
            stack.enter_context(disable_saved_tensors_hooks(message))
        except RuntimeError as error:
            if message not in str(error):
                raise
        try:
            yield
        except RuntimeError as error:
            if message in str(error):
                raise UnsupportedModel(message) from error
            raise


def check_params(params: Params, shapes: Mapping[str, torch.Size]) -> None:
    """Check that parameters have exactly the expected names and shapes."""
    if not isinstance(params, Mapping):
        raise InvalidArgument(
            f"Expected params as a mapping from names to tensors, got {type(params).__name__}. "
            "It is the first argument: forward(params, *args)."
        )
    if params.keys() != shapes.keys():
        named = apart(shapes.keys() - params.keys(), params.keys() - shapes.keys())
        raise InvalidArgument(f"Expected the parameters that functionalize returned, got params {named}.")
    for name, shape in shapes.items():
        if params[name].shape != shape:
            raise InvalidArgument(
                f"Expected params[{name!r}] of shape {tuple(shape)}, got {tuple(params[name].shape)}."
            )
