"""Modules that cannot be a function: they mix samples, or compute with other parameters than those they are given.

May import: its folder, accounting, clipping, engines, noise, sampling, updates and below. Privacy depends on it: yes.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from dpfunc._utils.validation import shorten
from dpfunc.errors import UnsupportedModel

_CHECKPOINTED = (
    "its second forward pass would run with the module's own parameters and give wrong gradients. Call "
    "model.gradient_checkpointing_disable(); to save memory use microbatch_size, or checkpoint a function that calls "
    "forward(params, ...) as a whole."
)


def _checkpoints(part: Any) -> bool:
    own = part.__dict__.get("gradient_checkpointing")  # quick: nearly no part has it
    named = own is not None or hasattr(type(part), "gradient_checkpointing")
    return named and part.training and part.gradient_checkpointing is True


# Kinds of modules that cannot work: by their class; then what each part is asked, and the message.
_REFUSED: tuple[tuple[Callable[[type], bool], Callable[[Any], bool], str], ...] = (
    (
        lambda kind: issubclass(kind, _BatchNorm),
        lambda part: isinstance(part, _BatchNorm) and (part.training or part.running_mean is None),
        "{count} BatchNorm layers in training mode mix the samples of a batch, or keep statistics of a record's own "
        "rows from step to step: {names}. Use dpfunc.functional.replace_batchnorm(model); or, in a loop of your "
        "own, model.eval() if their statistics come from public data; F.batch_norm without running statistics may "
        "normalise the rows of one record.",
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
def refusals(kind: type, checkpointing: bool = False) -> tuple[tuple[Callable[[Any], bool], str], ...]:
    """Tests of a part of this class, each with the message of its refusal; most classes need none."""
    return tuple(
        (is_refused, message)
        for concerns, is_refused, message in _REFUSED
        if concerns(kind) and not (checkpointing and is_refused is _checkpoints)
    )


def refuse_unsupported(module: nn.Module, *, checkpointing: bool = False) -> None:
    """Refuse modules that cannot work (`_REFUSED`); with `checkpointing`, gradient checkpointing is allowed."""
    for part in module.modules():
        kind: Any = type(part)
        for is_refused, message in refusals(kind, checkpointing):
            if is_refused(part):
                names = [name or type(own).__name__ for name, own in module.named_modules() if is_refused(own)]
                raise UnsupportedModel(message.format(names=shorten(names), count=len(names)))


@contextmanager
def checkpoint_is_an_error() -> Iterator[None]:
    """Context in which `torch.utils.checkpoint` of a part of the module is an error, not a wrong gradient.

    It saves tensors through hooks, which torch lets us forbid. Hooks that are there already belong to code around
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
