"""FSDP of the Trainer: its settings, each followed, named as useless or refused; and a model in parts.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: yes.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from dpfunc import distributed
from dpfunc._utils.digests import checksum, in_hex
from dpfunc._utils.parts import is_dtensor
from dpfunc._utils.validation import fail, refuse, shorten, suggestion
from dpfunc.distributed.ranks import Ranks
from dpfunc.errors import CheckpointError, InvalidArgument, UnsupportedModel
from dpfunc.functional.fsdp import settle
from dpfunc.hf.trainer import _settings as rules
from dpfunc.hf.trainer._run import ranks_of
from dpfunc.hf.trainer.arguments import PrivacyArguments

_logger = logging.getLogger(__name__)

_RENAMED = {"transformer_cls_to_wrap": "transformer_layer_cls_to_wrap", "offload_params": "cpu_offload"}
_NOT_SHARDED = "The model was not sharded"
_FROZEN = "frozen parameters"
_BY_LAYER, _BY_SIZE, _WHOLE = "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"
# What is not said: in Transformers, and in `accelerate launch`.
_DEFAULTS = {"version": 2, "auto_wrap_policy": _BY_LAYER, "reshard_after_forward": True}
_LAUNCHED = {"version": 1, "auto_wrap_policy": _WHOLE, "reshard_after_forward": True}


@dataclass(frozen=True)
class Sharding:
    """Division of a model over the processes, and the parts that are put together at a time."""

    policy: str  # layers by their class, every module of some size, or the model as a whole
    layers: tuple[str, ...] = ()  # names of classes; none takes the model's own `_no_split_modules`
    min_num_params: int = 0
    reshard: bool = True  # layers are divided again after their forward pass; False keeps them until the backward pass
    checkpointing: bool = False
    without_effect: tuple[str, ...] = ()


def sharding_of(args: Any, environment: Mapping[str, str]) -> Sharding | None:
    """The sharding that `TrainingArguments(fsdp=...)` or `accelerate launch --use_fsdp` asks for; None without.

    Each setting is followed, named or refused (tests/hf/trainer/test_fsdp.py::test_no_setting_is_ignored_in_silence).
    """
    settings = _asked(args, environment)
    if settings is None:
        return None
    known = rules.SETTINGS[rules.FSDP]
    for name in sorted(settings.keys() - known.keys()):
        raise fail("a setting of FSDP that is known", name, settings[name], f"Leave it out. {suggestion(name, known)}")
    rules.refuse_outside(rules.FSDP, settings.get)
    policy = str(settings["auto_wrap_policy"]).upper()
    layers, size = settings.get("transformer_layer_cls_to_wrap") or (), settings.get("min_num_params", 0)
    refuse(
        (layers and policy != _BY_LAYER,
         f"Expected transformer_layer_cls_to_wrap with auto_wrap_policy={_BY_LAYER!r} only, got {layers!r} and "
         f"{policy!r}. Leave one of them out."),
        ((policy == _BY_SIZE) != bool(size) or not str(size).isdecimal(),
         f"Expected a whole number min_num_params >= 1 with auto_wrap_policy={_BY_SIZE!r}, and none without, "
         f"got min_num_params={size!r} and {policy!r}. Set both, or name the layers: transformer_layer_cls_to_wrap."),
    )  # fmt: skip
    return Sharding(
        policy=policy,
        layers=tuple(map(str.strip, layers.split(",") if isinstance(layers, str) else layers)),
        min_num_params=int(size),
        reshard=rules.word(settings["reshard_after_forward"]) in rules.ON,
        checkpointing=rules.word(settings.get("activation_checkpointing")) in rules.ON,
        without_effect=tuple(rules.without_effect(rules.FSDP, settings.get)),
    )


def _asked(args: Any, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The settings that the script and the launcher make, over what is not said; None without FSDP."""
    config, switch = getattr(args, "fsdp_config", None) or {}, environment.get(rules.SWITCH, "")
    refuse(
        (not args.fsdp and config,
         f"Expected fsdp=True beside fsdp_config, got fsdp_config={config!r}. Use both, or none."),
        (rules.word(switch) not in (*rules.OFF, *rules.ON),
         fail(f"{rules.SWITCH} to be true or false", rules.SWITCH, switch)),
    )  # fmt: skip
    if not args.fsdp and rules.word(switch) in rules.OFF:
        return None
    launched = {name.removeprefix("FSDP_").lower(): v for name, v in environment.items() if name.startswith("FSDP_")}
    if launched.get("auto_wrap_policy", "").upper() != _BY_SIZE:
        launched.pop("min_num_params", None)  # accelerate sets it always
    renamed = {_RENAMED.get(name, name): value for name, value in launched.items()}
    asked = {**(_DEFAULTS if args.fsdp else _LAUNCHED), **renamed, **config}
    if asked.get("min_num_params") == 0:  # the default of Transformers, which says nothing
        del asked["min_num_params"]
    return asked


@contextmanager
def without_fsdp() -> Iterator[None]:
    """Context that hides the FSDP settings from Accelerate, which would wrap the model or shard it again."""
    value = os.environ.pop(rules.SWITCH, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[rules.SWITCH] = value


class Division(NamedTuple):
    """A model that is divided: the processes that hold its parts, and a digest of what is not trained."""

    ranks: Ranks
    frozen: str


def shard(
    model: nn.Module, args: Any, privacy: PrivacyArguments, optimizers: tuple[Any, Any]
) -> tuple[Division | None, Any]:
    """Shard the model in place, if the script asks for it; returns arguments that stop others from sharding it again.

    All processes get the values of the first one. What is released is what one process releases
    (tests/hf/trainer/test_fsdp.py::test_a_sharded_trainer_gives_what_one_process_gives).
    """
    sharding = sharding_of(args, os.environ)
    if sharding is None:
        return None, args
    given, beside = rules.attributes(args), {**vars(privacy), "optimizers": optimizers}
    rules.refuse_outside(rules.SHARDED, lambda name: beside[name] if name in beside else given(name))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks: Any = ranks_of(args)  # not None, by the table
    if distributed.is_writer(ranks) and (without_effect := list(sharding.without_effect)):
        _logger.warning("FSDP2 and a private run have no use for %s: it changes nothing.", without_effect)
    distributed.all_or_none(partial(_refuse_parameters, model), ranks, _NOT_SHARDED)
    names = distributed.all_or_none(partial(part_names, model, sharding), ranks, _NOT_SHARDED)
    distributed.check_same("settings of FSDP", f"{sharding} {names}", ranks, "Start all with the same ones.")
    mesh = init_device_mesh(args.device.type, (ranks.size,), mesh_dim_names=("dp",))
    distributed.replicate((*model.parameters(), *model.buffers()), ranks)
    frozen = checksum((name, param) for name, param in model.named_parameters() if not param.requires_grad)
    for name in names:
        fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=sharding.reshard)
    fully_shard(model, mesh=mesh)
    values = {"fsdp": None, "fsdp_plugin_args": None, **(rules.recomputed(args) if sharding.checkpointing else {})}
    return Division(distributed.sharded(mesh), in_hex(frozen)), rules.changed(args, values)


def part_names(model: nn.Module, sharding: Sharding) -> list[str]:
    """The names of the modules that are put together at a time, inner ones first; the rest goes with the model."""
    inner = [*model.named_modules()][:0:-1]  # without the model itself, which comes first
    tied = _tied(model)
    if sharding.policy == _WHOLE:
        return []
    if sharding.policy == _BY_SIZE:
        large = [name for name, module in inner if _num_params(module) > sharding.min_num_params]
        return [name for name in large if not _split(tied, name)]
    classes = _layer_classes(model, sharding.layers)
    layers = [name for name, module in inner if type(module).__name__ in classes]
    for layer in layers:
        if names := _split(tied, layer):
            raise UnsupportedModel(
                f"The parameters {shorten(names)} are one tensor, of which one name is in {layer} and another is not: "
                "each part would train its own. Name other layers in transformer_layer_cls_to_wrap."
            )
    return layers


def _num_params(module: nn.Module) -> int:
    """Numbers in the parameters of a module that is called as a whole; 0 for a list of modules."""
    return sum(p.numel() for p in module.parameters()) if type(module).forward is not nn.Module.forward else 0


def _layer_classes(model: nn.Module, named: Sequence[str]) -> Sequence[str]:
    there = {type(module).__name__ for module in model.modules()}
    asked = named or sorted(there & set(getattr(model, "_no_split_modules", None) or ()))
    missing = [name for name in asked if name not in there]
    if missing or not asked:
        raise InvalidArgument(
            f"Expected {'transformer_layer_cls_to_wrap' if named else '_no_split_modules'} to name classes of layers "
            f"of {type(model).__name__}, got {missing or 'none that it has'}. Name them: "
            "fsdp_config={'transformer_layer_cls_to_wrap': [...]}; or put it together as a whole: "
            "{'auto_wrap_policy': 'NO_WRAP'}."
        )
    return asked


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
    found = [
        *(f"{name} without values, on the meta device" for name, tensor in named if tensor.is_meta),
        *(f"{name}, quantised" for name, param in model.named_parameters() if not param.is_floating_point()),
    ]
    if found:
        raise UnsupportedModel(
            f"Expected floating-point parameters with values on each process, got {shorten(found)}. Load the model in "
            "float32 or bfloat16, on all processes."
        )


@contextmanager
def settled(model: nn.Module) -> Iterator[None]:
    """Context in which the model can run. Before and after it, parameters are shards with the optimizer's values."""
    settle(model)
    try:
        yield
    finally:
        settle(model)


def whole_state(model: nn.Module, keep: bool) -> dict[str, Tensor] | None:
    """The state dict of a sharded model on the CPU, put together one by one by all processes; None without `keep`."""
    settle(model)
    found: dict[int, Tensor] = {}  # tied ones once
    every = model.state_dict(keep_vars=True)
    for value in every.values():
        if id(value) not in found:
            part: Any = value.detach()
            whole: Tensor = part.full_tensor() if is_dtensor(value) else part
            found[id(value)] = whole.cpu() if keep else whole.new_empty(0)
    return {name: found[id(value)] for name, value in every.items()} if keep else None


def parts_of_run(division: Division, optimizer: Any, params: Mapping[str, Tensor]) -> dict[str, Any]:
    """Further parts of a checkpoint: the state of the optimizer by names, and a digest of what is frozen."""
    names = {id(param): name for name, param in params.items()}
    state: dict[str, Any] = optimizer.state_dict()
    groups = [
        {**group, "param_names": [names[id(param)] for param in own["params"]]}
        for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {"optimizer_state": {**state, "param_groups": groups}, "extra": {_FROZEN: division.frozen}}


def load_optimizer_state(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Give an optimizer the state that `parts_of_run` has described."""
    named = any("param_names" in group for group in optimizer.param_groups)
    groups = [{n: v for n, v in group.items() if named or n != "param_names"} for group in saved["param_groups"]]
    optimizer.load_state_dict({**saved, "param_groups": groups})


def check_frozen(division: Division, saved: object) -> None:
    """Check that a run that is resumed has the frozen parameters with which it was saved."""
    frozen = saved.get(_FROZEN) if isinstance(saved, Mapping) else None
    refuse(
        (frozen is None, CheckpointError(
            "Expected a checkpoint of a run with fsdp, got one of a run without: its optimizer is not in parts. Go on "
            "without fsdp.")),
        (frozen != division.frozen, CheckpointError(
            f"Expected the frozen parameters with which this run was saved ({frozen}), got others "
            f"({division.frozen}). Load the same pretrained model.")),
    )  # fmt: skip
