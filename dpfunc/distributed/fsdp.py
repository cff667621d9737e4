"""A model whose frozen parameters are sharded over the processes by FSDP2, and whose trained ones are arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, overload

from torch import nn

from dpfunc._utils.validation import shorten
from dpfunc._utils.versions import check_sharding
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional.forward import functionalize
from dpfunc.functional.fsdp import communicates
from dpfunc.functional.names import pattern, select
from dpfunc.functional.refuse import unwrapped
from dpfunc.lora import LoRA

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy


@overload
def shard_frozen(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    layers: str | Sequence[str] | None = None,
    trainable: str | Sequence[str] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
) -> nn.Module: ...
@overload
def shard_frozen(
    model: LoRA,
    mesh: DeviceMesh,
    *,
    layers: str | Sequence[str] | None = None,
    trainable: None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
) -> LoRA: ...


def shard_frozen(
    model: nn.Module | LoRA,
    mesh: DeviceMesh,
    *,
    layers: str | Sequence[str] | None = None,
    trainable: str | Sequence[str] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
) -> nn.Module | LoRA:
    """FSDP2 for everything that is not trained: `fully_shard` on each layer and on the module, without the trained
    parameters.

    A process holds 1 / size of the frozen parameters and gathers one layer at a time. Trained parameters stay
    unsharded, for `dpfunc.functionalize(module, trainable)`; `distributed.shard` shards them as well.

    Args:
        model: a module, which is sharded in place (its frozen parameters no longer require gradients); or an adapter of
            `dpfunc.lora.attach`, whose copy of the structure is sharded. The adapter's own `module` keeps its unsharded
            parameters, on the device they are on: leave it on the CPU.
        mesh: as for `fully_shard`: one dimension, or two (replicas, parts) for HSDP. Parameters move to its device.
        layers: the parts that are gathered at once: a regular expression that is searched in their names (of nested
            matches the outermost is taken), or a list of names. None is each element of every outermost ModuleList.
        trainable: trained parameters of a module, as for `functionalize`; an adapter knows them.
        mp_policy: of the frozen layers, e.g. `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`. Trained layers then
            get inputs of that dtype; adapters convert them.
        reshard_after_forward: see `fully_shard`; False keeps layers gathered until their backward pass.

    Returns:
        The module, or a new adapter with the same parameters. Use `ranks=dpfunc.distributed.sharded(mesh, ...)`.

    Raises:
        InvalidArgument: no such layer, no trained parameter, or trained parameters for an adapter.
        UnsupportedModel: the module is sharded already, or an older torch: see `dpfunc._utils.versions.check_sharding`.

    Guarantees:
        the released gradients are those of one process without sharding
        (tests/distributed/test_sharded_models.py::test_a_sharded_base_gives_the_same).
    """
    check_sharding()
    if isinstance(model, LoRA):
        if trainable is not None:
            raise InvalidArgument("Expected trainable=None for an adapter, which knows what is trained.")
        module = model.adapted
        names = [*model.constants, *model.params]
        _own_parameters(module, set(names))
        _shard(module, mesh, layers, names, mp_policy, reshard_after_forward)
        params, constants = (
            {name: tensor.to(mesh.device_type) for name, tensor in tensors.items()}
            for tensors in (model.params, model.constants)
        )
        forward = functionalize(module, names).forward
        return dataclasses.replace(model, params=params, constants=constants, _adapted=forward)
    if not isinstance(model, nn.Module):
        raise InvalidArgument(
            f"Expected a torch module or an adapter of dpfunc.lora.attach, got {type(model).__name__}."
        )
    module = unwrapped(model)
    _shard(module, mesh, layers, list(select(module, trainable)), mp_policy, reshard_after_forward)
    return model


def _shard(
    module: nn.Module,
    mesh: DeviceMesh,
    layers: str | Sequence[str] | None,
    trained: Sequence[str],
    mp_policy: MixedPrecisionPolicy | None,
    reshard_after_forward: bool | None,
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    found = communicates(module)
    if found is not None:
        raise UnsupportedModel(
            f"Expected a module that is not sharded, got one with {found}. For tensor parallelism as well, call "
            "parallelize_module, then fully_shard(layer, mesh=mesh['dp'], ignored_params=trained)."
        )
    parts = [module.get_submodule(name) for name in _layer_names(module, layers)]
    _to_device(module, set(trained), mesh.device_type)
    ignored = {param for name, param in module.named_parameters() if name in set(trained)}
    for param in module.parameters():
        if param not in ignored:
            param.requires_grad_(False)
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    for part in (*parts, module):
        fully_shard(
            part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward, ignored_params=ignored
        )


def _layer_names(module: nn.Module, layers: str | Sequence[str] | None) -> list[str]:
    """The names of layers, see `shard_frozen`.

    Raises:
        InvalidArgument: none, or unknown ones.

    >>> model = nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]), nn.Linear(1, 1))
    >>> _layer_names(model, None), _layer_names(model, "^1$")
    (['0.0', '0.1'], ['1'])
    """
    names = [name for name, _ in module.named_modules() if name]
    if layers is None:
        lists = _outermost(name for name in names if isinstance(module.get_submodule(name), nn.ModuleList))
        return [f"{name}.{index}" for name in lists for index, _ in module.get_submodule(name).named_children()]
    if isinstance(layers, str):
        searched = pattern("layers", layers)
        found = _outermost(name for name in names if searched.search(name))
    elif unknown := [name for name in layers if name not in names]:
        raise InvalidArgument(f"Expected names of layers, got unknown {shorten(unknown)}.")
    else:
        found = [name for name in names if name in set(layers)]
    if not found:
        raise InvalidArgument(f"Expected at least one layer, got layers={layers!r}. The names begin {shorten(names)}.")
    nested = len(_outermost(found)) < len(found)
    return found[::-1] if nested else found


def _outermost(names: Iterable[str]) -> list[str]:
    kept: list[str] = []
    for name in names:  # parents come before their children
        if not any(name.startswith(f"{other}.") for other in kept):
            kept.append(name)
    return kept


def _own_parameters(module: nn.Module, trained: set[str]) -> None:
    """Frozen parameters of its own for a copy that shares them with the original: FSDP changes what they hold."""
    kept = {id(param) for name, param in module.named_parameters() if name in trained}
    _replace(module, lambda p: p if id(p) in kept else nn.Parameter(p.detach(), requires_grad=False))


def _to_device(module: nn.Module, trained: set[str], device: str) -> None:
    """Move the trained parameters, which FSDP ignores and does not move."""
    elsewhere = {id(p) for name, p in module.named_parameters() if name in trained and p.device.type != device}
    _replace(
        module,
        lambda p: nn.Parameter(p.detach().to(device), requires_grad=p.requires_grad) if id(p) in elsewhere else p,
    )


def _replace(module: nn.Module, new: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter by `new(parameter)`; tied parameters stay tied."""
    memo: dict[int, nn.Parameter] = {}
    for _, owner in module.named_modules():
        for attribute, param in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            chosen = memo[id(param)] if id(param) in memo else new(param)
            memo |= {id(param): chosen, id(chosen): chosen}
            if chosen is not param:
                owner.register_parameter(attribute, chosen)
