"""Modules as functions of their parameters, without wrappers, several as one; and modules with other parameters.

May import: its folder, accounting, clipping, engines, noise, sampling, updates and below. Privacy depends on it: yes.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpfunc._utils.parts import local
from dpfunc._utils.validation import shorten, warn
from dpfunc.errors import InvalidArgument, RunWarning, UnsupportedModel
from dpfunc.functional import fsdp
from dpfunc.functional.copies import copied, uncopied
from dpfunc.functional.forward import Forward, check_params, owners, parts_of
from dpfunc.functional.names import select, storage_places
from dpfunc.functional.refused import refuse_unsupported
from dpfunc.types import Params


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
    if where := shorten([f"{name} ({type(part).__name__})" for name, part in inside]):
        raise UnsupportedModel(
            f"The module is wrapped for several devices in {where}: parameters are copied in each forward "
            "pass, or gradients averaged before they are clipped. Take its .module, and use one process a device."
        )
    return module


class Several(nn.ModuleDict):
    """Modules as one: `forward(name, *args)` calls one of them. Names of parameters begin with its name and a dot."""

    def forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The output of the module of this name."""
        if not isinstance(name, str) or name not in self:
            raise InvalidArgument(f"Expected a name of {list(self)} first: forward(params, name, *args), got {name!r}.")
        return self[name](*args, **kwargs)


def joined(module: nn.Module | Mapping[str, nn.Module]) -> nn.Module:
    """The module, or several modules joined under their names."""
    several = isinstance(module, Mapping) and all(isinstance(part, nn.Module) for part in module.values())
    if not several and type(module) is not nn.ModuleDict:  # a class made of it has a forward of its own
        return unwrapped(module)  # type: ignore[arg-type]  # or refused there
    parts = {name: unwrapped(part) for name, part in module.items()}  # type: ignore[operator]  # several
    try:
        return Several(parts)
    except (KeyError, TypeError) as error:
        raise InvalidArgument(
            f"Expected names of modules, texts without a dot that nn.Module does not use, got {list(parts)}: {error}."
        ) from error


class Functional(NamedTuple):
    """A module as a function, and the parameters to call it with."""

    forward: Forward
    params: dict[str, Tensor]


def functionalize(
    module: nn.Module | Mapping[str, nn.Module], trainable: str | Sequence[str] | None = None
) -> Functional:
    """A module as `(forward, params)`: `forward(params, *args)` is what `module(*args)` is with those parameters.

    Args:
        module: any module. It is not changed, now or later; it must not be changed while `forward` is used, but for
            `module.train()` and `module.eval()`, which `forward` follows. DistributedDataParallel and the wrapper of
            `torch.compile` are taken off: names have no prefix, nothing is communicated, and nothing is compiled.
            Parameters that `fully_shard` manages are constants. Several modules are a mapping {"enc": enc, "dec": dec}:
            parameters are then named "enc.weight", and `forward(params, "enc", x)` calls one. (`{**a, **b}` of two
            mappings of parameters loses those of a whose names b has too: it is refused inside of a step.)
        trainable: which parameters are arguments: a regular expression that is searched in their names
            (`dpfunc.functional` has `BIASES`, `HEADS`, `ATTENTION` and `PROJECTOR`), or a list of names. None takes
            those that require gradients. All others are constants.

    Returns:
        `forward`, and `params`: name -> detached contiguous copy that shares no memory with the module. Parameters that
        are tied count once, under their first name, and are replaced everywhere.

    Raises:
        InvalidArgument: no parameter selected, unknown names, or parameters that are not floating; from `forward` also
            params with other names or shapes, or of two modules in one call of a loss.
        UnsupportedModel: BatchNorm in training mode, gradient checkpointing, a forward that writes buffers, or trained
            parameters that have hooks or that `fully_shard` or ZeRO-3 manage. Where torch.compile traces `forward`,
            checkpointing and writes are not seen: writes into buffers are thrown away.

    Guarantees:
        the module is bit-identical afterwards, tied and shared layers included
        (tests/functional/test_forward.py::test_module_is_never_changed).

    >>> model = nn.Linear(3, 2)
    >>> forward, params = functionalize(model)
    >>> x = torch.ones(1, 3)
    >>> torch.equal(forward(params, x), model(x))
    True
    """
    module = joined(module)
    problem = "" if fsdp.fsdp_parts(module) else uncopied(module)  # a sharded one gives its parameters to another
    if problem:
        warn(f"dpfunc.with_params(module, params) will fail after the run. {problem}", RunWarning)
    return function_of(module, trainable)


def function_of(module: nn.Module, trainable: str | Sequence[str] | None = None) -> Functional:
    """As `functionalize`, for a module without wrappers that is not copied at the end."""
    refuse_unsupported(module)
    chosen = select(module, trainable)
    fsdp.refuse_managed(module, chosen)
    if hooked := [name for name, p in chosen.items() if p._backward_hooks or p._post_accumulate_grad_hooks]:
        raise UnsupportedModel(
            f"Expected trained parameters without hooks, got some on {shorten(hooked)}: gradients are those of copies, "
            "for which no hook runs, so that a mask or a projection in it would be left out. Take the hooks off, and "
            "apply what they do to the released gradients, which costs nothing."
        )
    stay = fsdp.constant(module) | chosen.keys()
    others = {name: p for name, p in module.named_parameters() if p.requires_grad and name not in stay}
    buffers = dict(module.named_buffers())
    places = storage_places(module)
    params = {name: p.detach().clone(memory_format=torch.contiguous_format) for name, p in chosen.items()}
    own = {name: places[id(tensor)] for name, tensor in {**buffers, **others, **chosen}.items()}
    return Functional(Forward(
        module,
        {name: param.shape for name, param in params.items()},
        own,
        {name: param.detach() for name, param in others.items()},
        {name: buffer.detach().clone() for name, buffer in buffers.items()},
        parts_of(module),
        owners(module, own),
        tuple(0.0 if p.is_meta or not local(p).numel() else float(local(p).flatten()[0]) for p in params.values()),
    ), params)  # fmt: skip


def with_params(module: nn.Module | Mapping[str, nn.Module], params: Params) -> nn.Module:
    """A deep copy of a module with these parameters in place, e.g. to save a trained model in its own format.

    Args:
        module: the module that was functionalized, or the mapping of several, of which a `nn.ModuleDict` is made;
            wrappers are taken off as there. params: name -> tensor, some or all of its parameters.

    Raises:
        InvalidArgument: an unknown name or a wrong shape. UnsupportedModel: attributes that cannot be copied.

    >>> model = nn.Linear(2, 1)
    >>> with_params(model, {"bias": torch.ones(1)}).bias.item()
    1.0
    """
    result: nn.Module = copied(joined(module))
    named = select(result, list(params))
    check_params(params, {name: param.shape for name, param in named.items()})
    with torch.no_grad():
        for name, value in params.items():
            named[name].copy_(value)
    return result
