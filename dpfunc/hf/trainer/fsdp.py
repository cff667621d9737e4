"""Settings of FSDP in `TrainingArguments` and the environment: followed, named as useless, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from dpfunc.errors import InvalidArgument
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.settings import OFF, SWITCH, Table, among, attrgetter_of, off, refuse_first, said, word

_ON = ("1", "true", "yes", "y", "t", "on")
_PREFIX = "FSDP_"
_RENAMED = {"transformer_cls_to_wrap": "transformer_layer_cls_to_wrap", "offload_params": "cpu_offload"}

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
