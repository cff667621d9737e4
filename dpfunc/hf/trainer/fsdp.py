"""FSDP of the Trainer: its settings, each followed, named as useless or refused; and a model in parts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

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
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.settings import OFF, SWITCH, Table, among, attrgetter_of, off, refuse_first, said, word

_ON = ("1", "true", "yes", "y", "t", "on")
_PREFIX = "FSDP_"
_RENAMED = {"transformer_cls_to_wrap": "transformer_layer_cls_to_wrap", "offload_params": "cpu_offload"}

_AXIS = "dp"
_NOT_SHARDED = "The model was not sharded"
_FROZEN = "frozen parameters"

_Policy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")

_FOLLOWED = (
    "version", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "reshard_after_forward",
    "activation_checkpointing", "cpu_ram_efficient_loading",
)  # fmt: skip

# What is not said: in Transformers, and in `accelerate launch`.
_DEFAULTS = {"version": 2, "auto_wrap_policy": _POLICIES[0]}
_LAUNCHED = {"version": 1, "auto_wrap_policy": _POLICIES[2]}

# Settings that FSDP2 has not, and those of files that a private run does not write: values with which nobody asks.
_WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "backward_prefetch": (*OFF, "no_prefetch"),
    "forward_prefetch": OFF,
    "limit_all_gathers": OFF,
    "sync_module_states": OFF,
    "use_orig_params": OFF,
    "state_dict_type": ("", "full_state_dict"),
}


_XLA = (said(*OFF, "{}"), "XLA devices were not tried. Leave it out.")
_REFUSED: Table = {
    "cpu_offload": (
        said(*OFF),
        "Parts that are kept on the CPU were not tried. Leave it out; more processes make smaller parts.",
    ),
    "ignored_modules": (
        said(*OFF),
        "What fully_shard does not manage cannot be trained with the rest. Freeze it, and leave this out.",
    ),
    "mixed_precision_policy": (
        said(*OFF),
        "Sums of gradients stay in float32. Leave it out, and compute in bfloat16: TrainingArguments(bf16=True).",
    ),
    "activation_checkpointing_offload": (
        said(*OFF),
        "Leave it out: activation_checkpointing=True saves most memory.",
    ),
    "sharding_strategy": (
        said(*OFF, "full_shard", "1"),
        "FSDP2 divides everything over all processes. Leave it out; to keep layers whole until their backward pass set "
        "reshard_after_forward=False. For replicas of parts (HSDP) write a loop, see docs/guides/sharded.md.",
    ),
    **dict.fromkeys(("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"), _XLA),
}

_CAST = (off, "The model would be cast, with its parts. Leave it out: bf16=True evaluates in bfloat16.")
# Settings besides those of FSDP.
_BESIDE: Table = {
    "world_size": (
        lambda count: int(count) >= 2,
        "FSDP divides a model over several processes. Start `torchrun --nproc-per-node N`, or leave fsdp out.",
    ),
    "dp_engine": (
        among("auto", "ghost"),
        "A sharded model has one engine, in which one layer is whole at a time. Leave it at 'auto'.",
    ),
    "load_best_model_at_end": (
        off,
        "Leave it out, and open the best checkpoint afterwards: from_pretrained(trainer.state."
        "best_model_checkpoint). Each checkpoint has the whole model.",
    ),
    "bf16_full_eval": _CAST,
    "fp16_full_eval": _CAST,
    "accelerator_config.even_batches": (
        lambda value: value is not False,
        "A process with fewer batches would leave the others waiting inside of the model. Leave it at True.",
    ),
}


@dataclass(frozen=True)
class Sharding:
    """Division of a model over the processes, and the parts that are put together at a time.

    Args:
        policy: layers by their class, every module of some size, or the model as a whole.
        layers: names of classes; None takes the model's own `_no_split_modules`.
        min_num_params: of modules that are a part, for SIZE_BASED_WRAP.
        reshard: layers are divided again after their forward pass; False keeps them until the backward pass.
        checkpointing: activations of layers are computed again in the backward pass.
        without_effect: settings that were made and change nothing.
    """

    policy: _Policy
    layers: tuple[str, ...] | None = None
    min_num_params: int = 0
    reshard: bool = True
    checkpointing: bool = False
    without_effect: tuple[str, ...] = ()


def sharding_of(args: Any, environment: Mapping[str, str]) -> Sharding | None:
    """The sharding that `TrainingArguments(fsdp=...)` or `accelerate launch --use_fsdp` asks for; None without.

    Guarantees:
        tests/hf/trainer/test_fsdp.py: each setting is followed, named or refused
        (test_no_setting_is_ignored_in_silence).

    >>> from types import SimpleNamespace
    >>> sharding_of(SimpleNamespace(fsdp=True, fsdp_config={"version": 2}), {})
    Sharding(policy='TRANSFORMER_BASED_WRAP', layers=None, min_num_params=0, reshard=True, checkpointing=False, \
without_effect=())
    >>> sharding_of(SimpleNamespace(fsdp=True, fsdp_config={"cpu_offload": True}), {})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected a setting of FSDP that a private run follows, got cpu_offload=True. ...
    """
    config = getattr(args, "fsdp_config", None)
    if not args.fsdp and config:
        raise InvalidArgument(f"Expected fsdp=True beside fsdp_config, got fsdp_config={config!r}. Use both, or none.")
    if not args.fsdp and not _switch(SWITCH, environment.get(SWITCH, "")):
        return None
    settings = _from_environment(environment) | _from_config(config or {})
    refuse_first(_REFUSED, settings.get, "a setting of FSDP that a private run follows")
    for name, value in settings.items():
        if name not in (*_FOLLOWED, *_WITHOUT_EFFECT, *_REFUSED):
            known = ", ".join(_FOLLOWED)
            raise InvalidArgument(
                f"Expected a setting of FSDP that is known, got {name}={value!r}. Leave it out; followed are {known}."
            )
    defaults = _DEFAULTS if args.fsdp else _LAUNCHED
    policy = _policy(defaults | settings)
    return Sharding(
        policy=policy,
        layers=_layers(settings, policy),
        min_num_params=_size(settings, policy),
        reshard=_switch("reshard_after_forward", settings.get("reshard_after_forward", True)),
        checkpointing=_switch("activation_checkpointing", settings.get("activation_checkpointing", False)),
        without_effect=tuple(
            f"{name}={settings[name]}"
            for name, harmless in _WITHOUT_EFFECT.items()
            if word(settings.get(name)) not in harmless
        ),
    )


def _policy(settings: Mapping[str, Any]) -> _Policy:
    if str(settings["version"]) != "2":
        raise InvalidArgument(
            f"Expected FSDP2, got version={settings['version']!r}: FSDP1 flattens parameters, which have no "
            'per-sample gradients then. Set fsdp_config={"version": 2}, or `accelerate launch --fsdp_version 2`.'
        )
    policy = str(settings["auto_wrap_policy"]).upper()
    if policy not in _POLICIES:
        raise InvalidArgument(f"Expected auto_wrap_policy to be one of {_POLICIES}, got {policy!r}.")
    return cast("_Policy", policy)


def refuse_with_sharding(args: Any, privacy: PrivacyArguments, optimizers: Sequence[object]) -> None:
    """Refuse what a sharded model cannot do, or what would end in processes that wait for each other."""
    expected = "settings that a model sharded by FSDP can follow"
    given = attrgetter_of(args)
    refuse_first(_BESIDE, lambda name: privacy.dp_engine if name == "dp_engine" else given(name), expected)
    if any(each is not None for each in optimizers):
        raise InvalidArgument(
            f"Expected {expected}, got optimizers=. They hold parameters that are replaced by parts. Use "
            "optimizer_cls_and_kwargs=, or override create_optimizer."
        )


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found = {name.removeprefix(_PREFIX).lower(): v for name, v in environment.items() if name.startswith(_PREFIX)}
    settings = {_RENAMED.get(name, name): value for name, value in found.items()}
    if str(settings.get("auto_wrap_policy", "")).upper() != _POLICIES[1]:
        settings.pop("min_num_params", None)  # accelerate sets it always
    return settings


def _from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `fsdp_config`, without the default of Transformers that says nothing."""
    return {name: value for name, value in config.items() if (name, value) != ("min_num_params", 0)}


def _layers(settings: Mapping[str, Any], policy: str) -> tuple[str, ...] | None:
    given = settings.get("transformer_layer_cls_to_wrap")
    if not given:
        return None
    if policy != _POLICIES[0]:
        raise InvalidArgument(
            f"Expected transformer_layer_cls_to_wrap with auto_wrap_policy={_POLICIES[0]!r} only, got {given!r} and "
            f"{policy!r}. Leave one of them out."
        )
    names = given.split(",") if isinstance(given, str) else given
    return tuple(str(name).strip() for name in names)


def _size(settings: Mapping[str, Any], policy: str) -> int:
    given = settings.get("min_num_params", 0)
    if (policy == _POLICIES[1]) != bool(given) or not str(given).isdecimal():
        raise InvalidArgument(
            f"Expected a whole number min_num_params >= 1 with auto_wrap_policy={_POLICIES[1]!r}, and none without, "
            f"got min_num_params={given!r} and {policy!r}. Set both, or name the layers: transformer_layer_cls_to_wrap."
        )
    return int(given)


def _switch(name: str, value: object) -> bool:
    if word(value) not in (*OFF, *_ON):
        raise InvalidArgument(f"Expected {name} to be true or false, got {value!r}. Say one of them.")
    return word(value) in _ON


@contextmanager
def without_fsdp() -> Iterator[None]:
    """Inside, Accelerate does not see that FSDP was asked for: it would wrap the model, or shard it once more."""
    value = os.environ.pop(SWITCH, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[SWITCH] = value


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
