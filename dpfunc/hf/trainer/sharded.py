"""A model of the Trainer that `fully_shard` manages: its parts, put together to be written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpfunc import distributed
from dpfunc._utils.digests import checksum, in_hex
from dpfunc._utils.dtensor import is_dtensor
from dpfunc._utils.validation import shorten
from dpfunc._utils.versions import check_sharding
from dpfunc.distributed.object_collectives import all_or_none
from dpfunc.distributed.ranks import Ranks
from dpfunc.errors import CheckpointError, InvalidArgument, UnsupportedModel
from dpfunc.functional.fsdp import fsdp_parts
from dpfunc.hf.trainer.fsdp import Sharding

_AXIS = "dp"
_NOT_SHARDED = "The model was not sharded"
_FROZEN = "frozen parameters"


@dataclass(frozen=True)
class Division:
    """A model that is divided: the processes that hold its parts, and a digest of what is not trained."""

    ranks: Ranks
    frozen: str


def shard_model(model: nn.Module, sharding: Sharding, ranks: Ranks | None, device: torch.device) -> Division:
    """Shard a model in place with `fully_shard`, after all processes got the values of the first one.

    Raises:
        InvalidArgument: layers that the model has not. UnsupportedModel: quantised parameters, or parameters
            without values; one tensor in several parts; an older torch. RankMismatch: processes were told otherwise.

    Guarantees:
        tests/hf/trainer/test_fsdp.py: what is released is what one process releases
        (test_a_sharded_trainer_gives_what_one_process_gives).
    """
    check_sharding()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if ranks is None:
        raise InvalidArgument("Expected several processes to hold the parts of a model, got one.")
    all_or_none(partial(_refuse_parameters, model), ranks, _NOT_SHARDED)
    names = all_or_none(partial(part_names, model, sharding), ranks, _NOT_SHARDED)
    distributed.check_same("settings of FSDP", f"{sharding} {names}", ranks, "Start all with the same ones.")
    mesh = init_device_mesh(device.type, (ranks.size,), mesh_dim_names=(_AXIS,))
    distributed.replicate((*model.parameters(), *model.buffers()), ranks)
    frozen = checksum((name, param) for name, param in model.named_parameters() if not param.requires_grad)
    for name in names:
        fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=sharding.reshard)
    fully_shard(model, mesh=mesh)
    return Division(distributed.sharded(mesh, data=(_AXIS,)), in_hex(frozen))


def part_names(model: nn.Module, sharding: Sharding) -> list[str]:
    """The names of the modules that are put together at a time, inner ones first; the rest goes with the model.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(3, 3)))
    >>> part_names(model, Sharding("SIZE_BASED_WRAP", min_num_params=7))
    ['2.0', '2']
    >>> part_names(model, Sharding("TRANSFORMER_BASED_WRAP", layers=("Linear",)))
    ['2.0', '0']
    """
    inner = [*model.named_modules()][:0:-1]  # without the model itself, which comes first
    tied = _tied(model)
    if sharding.policy == "NO_WRAP":
        return []
    if sharding.policy == "SIZE_BASED_WRAP":
        return [
            name for name, module in inner if _is_large(module, sharding.min_num_params) and not _split(tied, name)
        ]  # fmt: skip
    classes = _layer_classes(model, sharding)
    layers = [name for name, module in inner if type(module).__name__ in classes]
    for layer in layers:
        _refuse_split(tied, layer)
    return layers


def _refuse_split(tied: list[list[str]], layer: str) -> None:
    if names := _split(tied, layer):
        raise UnsupportedModel(
            f"The parameters {shorten(names)} are one tensor, of which one name is in {layer} and another is not: each "
            "part would train its own. Name other layers in transformer_layer_cls_to_wrap."
        )


def _is_large(module: nn.Module, min_num_params: int) -> bool:
    """True for a module that is called as a whole, with more parameters."""
    called = type(module).forward is not nn.Module.forward
    return called and sum(param.numel() for param in module.parameters()) > min_num_params


def _layer_classes(model: nn.Module, sharding: Sharding) -> set[str]:
    there = {type(module).__name__ for module in model.modules()}
    if sharding.layers is None:
        what, asked = "_no_split_modules", sorted(there & set(getattr(model, "_no_split_modules", None) or ()))
    else:
        what, asked = "transformer_layer_cls_to_wrap", [*sharding.layers]
    missing = [name for name in asked if name not in there]
    if missing or not asked:
        raise InvalidArgument(
            f"Expected {what} to name classes of layers of {type(model).__name__}, got {missing or 'none that it has'}."
            " Name them: fsdp_config={'transformer_layer_cls_to_wrap': [...]}; or put it together as a whole: "
            "{'auto_wrap_policy': 'NO_WRAP'}."
        )
    return set(asked)


def _tied(model: nn.Module) -> list[list[str]]:
    """The names of each tensor that has several."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _split(tied: list[list[str]], part: str) -> list[str]:
    """The names of a tensor of which one is inside of a part and another outside."""
    return next((names for names in tied if len({name.startswith(f"{part}.") for name in names}) > 1), [])


def _refuse_parameters(model: nn.Module) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    for why, found in {
        "without values, on the meta device": [name for name, tensor in named if tensor.is_meta],
        "quantised": [name for name, param in model.named_parameters() if not param.is_floating_point()],
    }.items():
        if found:
            raise UnsupportedModel(
                f"Expected floating-point parameters with values on each process, got {shorten(found)} {why}. Load the "
                "model in float32 or bfloat16, on all processes."
            )


def settle(model: nn.Module) -> None:
    """Release what is still put together: `model.parameters()` are parts then, and hold what the optimizer has written.

    >>> settle(nn.Linear(1, 1))
    """
    for part in fsdp_parts(model).values():
        part.reshard()


@contextmanager
def settled(model: nn.Module) -> Iterator[None]:
    """Inside, the model runs; before and after, its parameters are parts."""
    settle(model)
    try:
        yield
    finally:
        settle(model)


def whole_state(model: nn.Module, keep: bool) -> dict[str, Tensor] | None:
    """The state dict of a sharded model with whole tensors on the CPU, one put together at a time. All must call it.

    Args:
        model: sharded. keep: False on the processes that write nothing, which get None.
    """
    settle(model)
    found: dict[int, Tensor] = {}
    result: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if is_dtensor(value) and id(value) not in found:
            part: Any = value.detach()
            whole: Tensor = part.full_tensor()
            found[id(value)] = whole.cpu() if keep else whole.new_empty(0)
        result[name] = found[id(value)] if is_dtensor(value) else value.detach().cpu()
    return result if keep else None


def _optimizer_state(optimizer: Any, params: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state of an optimizer, with the names of the parameters that it numbers: a file of parts needs them."""
    names = {id(param): name for name, param in params.items()}
    state: dict[str, Any] = optimizer.state_dict()
    groups = [
        {**group, "param_names": [names[id(param)] for param in own["params"]]}
        for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**state, "param_groups": groups}


def parts_of_run(division: Division, optimizer: Any, params: Mapping[str, Tensor]) -> dict[str, Any]:
    """Further parts of a checkpoint of a sharded run: the state of the optimizer, and a digest of what is frozen."""
    return {"optimizer_state": _optimizer_state(optimizer, params), "extra": {_FROZEN: division.frozen}}


def load_optimizer_state(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Give an optimizer the state that `parts_of_run` has described."""
    known = [name for group in optimizer.state_dict()["param_groups"] for name in group]
    groups = [{n: v for n, v in group.items() if n != "param_names" or n in known} for group in saved["param_groups"]]
    optimizer.load_state_dict({**saved, "param_groups": groups})


def check_frozen(division: Division, saved: object) -> None:
    """Check that a run that is resumed has the frozen parameters with which it was saved."""
    if not isinstance(saved, Mapping) or _FROZEN not in saved:
        raise CheckpointError(
            "Expected a checkpoint of a run with fsdp, got one of a run without: its optimizer is not in parts. Go on "
            "without fsdp."
        )
    if saved[_FROZEN] != division.frozen:
        raise CheckpointError(
            f"Expected the frozen parameters with which this run was saved ({saved[_FROZEN]}), got others "
            f"({division.frozen}). Load the same pretrained model."
        )
