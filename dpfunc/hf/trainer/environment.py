"""Settings of launchers and of sharding: refused by name, unless a private run follows them rightly.

`accelerate launch` asks through variables of the environment, scripts through `TrainingArguments`. Both are checked
first, for the message; the `Accelerator` that came of them is checked last, so that nothing gets past by another way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn

from dpfunc._utils.dtensor import is_dtensor
from dpfunc._utils.validation import shorten
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.hf.trainer.fsdp import OFF, SWITCH

_PRECISIONS = ("", "no", "bf16")
_PLACES = ("NO", "MULTI_CPU", "MULTI_GPU")  # values of accelerate's DistributedType: replicas, or one process
_PLUGINS = ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "parallelism_config")
_SIZES = ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size", "ep_size")  # of a model sharded when it was loaded
_DEALING = ("split_batches", "dispatch_batches")
_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")

_SHARDED = (
    "Leave it out and start the same script with `torchrun --nproc-per-node N` (of the command: `torchrun "
    "--nproc-per-node N -m dpfunc.cli.main train job.yaml`); for a model that one device cannot hold set "
    "TrainingArguments(fsdp=True), or write a loop over make_dp_step(..., "
    "ranks=dpfunc.distributed.sharded(mesh)) with fully_shard or parallelize_module."
)
_ENGINE = f"Its engine owns the backward pass, and sums gradients before they are clipped. {_SHARDED}"
_SCRIPT = (
    "Only scripts with DPTrainer follow it: see docs/guides/trainer.md. Leave it out and start the command with "
    "`torchrun --nproc-per-node N -m dpfunc.cli.main train job.yaml`: each process has the whole model."
)
_FP16 = (
    "fp16 scales the loss, and skips steps, by what the data are; fp8 scales by their largest values. Use bf16: "
    "TrainingArguments(bf16=True), or `accelerate launch --mixed_precision bf16`."
)
_COMPILED = "It compiles the model for the gradient of a batch. Leave it out: private steps are not compiled."
_DEALT = "The plan deals out each draw to the processes. Leave it at its default."


Refusal = tuple[bool, str, str]
"""True if a setting is refused; its name, with dots; and what to do instead."""


def refuse_first(refusals: Iterable[Refusal], settings: object, expected: str) -> None:
    """Refuse the first setting that is refused.

    Args:
        refusals: to go through. settings: object whose attributes they name. expected: "a ... that ...".

    Raises:
        InvalidArgument: naming the setting and its value.

    >>> refuse_first([(True, "imag", "Use a real number.")], 1j, "a real number")
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected a real number, got imag=1.0. Use a real number.
    """
    for refused, name, advice in refusals:
        if refused:
            raise InvalidArgument(f"Expected {expected}, got {name}={attrgetter(name)(settings)!r}. {advice}")


class _Variable(NamedTuple):
    """A variable of the environment: values with which it changes nothing, or what a private run does, and advice."""

    harmless: tuple[str, ...]
    advice: str


_VARIABLES = {
    SWITCH: _Variable(OFF, _SCRIPT),
    "ACCELERATE_USE_DEEPSPEED": _Variable(OFF, _ENGINE),
    "ACCELERATE_USE_MEGATRON_LM": _Variable(OFF, _ENGINE),
    "ACCELERATE_USE_PARALLELISM_CONFIG": _Variable(OFF, _SHARDED),
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": _Variable(OFF, _SHARDED),
    "ACCELERATE_MIXED_PRECISION": _Variable(_PRECISIONS, _FP16),
    "ACCELERATE_DYNAMO_BACKEND": _Variable(OFF, _COMPILED),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": _Variable(
        (*OFF, "1", "auto"),
        "Only DeepSpeed reads it. Unset it, and set TrainingArguments(gradient_accumulation_steps=...) instead.",
    ),
    "ACCELERATE_GRADIENT_CLIPPING": _Variable(
        (*OFF, "auto"),
        "Only DeepSpeed reads it. Unset it, and set PrivacyArguments(dp_max_grad_norm=...) instead.",
    ),
}


_NO = ("", "FALSE", "0", "NO", "OFF")
_UPLOADS = (
    ("wandb", "WANDB_LOG_MODEL", "FALSE", (*_NO, "END")),
    ("mlflow", "HF_MLFLOW_LOG_ARTIFACTS", "FALSE", _NO),
    ("dagshub", "HF_MLFLOW_LOG_ARTIFACTS", "FALSE", _NO),
    ("dagshub", "HF_DAGSHUB_LOG_ARTIFACTS", "FALSE", _NO),
    ("comet_ml", "COMET_LOG_ASSETS", "FALSE", _NO),
    ("clearml", "CLEARML_LOG_MODEL", "TRUE", _NO),
    ("dvclive", "HF_DVCLIVE_LOG_MODEL", "FALSE", (*_NO, "TRUE")),
)
"""Loggers that send whole checkpoints: the variable that asks for it, its default, and values that do not ask."""
_ALWAYS = ("flyte",)
"""Loggers that send them, whatever a variable says."""


def refuse_uploads(args: Any, environment: Mapping[str, str]) -> None:
    """Refuse loggers that send checkpoints to a server: the key of the run is in them, and undoes the noise.

    Args:
        args: `TrainingArguments`. environment: `os.environ`.

    Raises:
        InvalidArgument: naming the variable, and what to do.
    """
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if args.save_only_model or strategy == "no":
        return
    loggers = args.report_to or ()
    for name in _ALWAYS:
        if name in loggers:
            raise InvalidArgument(
                f"Expected loggers that send no checkpoints, got report_to={name!r}, which sends all of them. A "
                "checkpoint holds the key of the run, which undoes the noise. Take another logger, or "
                "save_only_model=True."
            )
    for name, variable, default, harmless in _UPLOADS:
        value = environment.get(variable, default)
        if name in loggers and value.upper() not in harmless:
            raise InvalidArgument(
                f"Expected {variable} to send no checkpoints, got {variable}={value!r} with report_to={name!r}. A "
                f"checkpoint holds the key of the run, which undoes the noise. Set {variable}=false in the "
                "environment, or save_only_model=True."
            )


def refuse_environment(environment: Mapping[str, str], *, fsdp: bool = False) -> None:
    """Check the variables that `accelerate launch` sets.

    Args:
        environment: `os.environ`. fsdp: those about FSDP are followed, see `fsdp.sharding_of`.

    Raises:
        InvalidArgument: naming the first that a private run would not, or not rightly, follow.

    >>> refuse_environment({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_FSDP": "False"})
    >>> refuse_environment({"ACCELERATE_USE_DEEPSPEED": "true"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected a launcher that keeps differential privacy, got \
ACCELERATE_USE_DEEPSPEED='true' in the environment. ...
    """
    for name, variable in _VARIABLES.items():
        value = "" if fsdp and name == SWITCH else environment.get(name, "")
        if value.strip().lower() not in variable.harmless:
            raise InvalidArgument(
                f"Expected a launcher that keeps differential privacy, got {name}={value!r} in the environment. "
                f"{variable.advice}"
            )


def launch_refusals(args: Any) -> tuple[Refusal, ...]:
    """Settings of `TrainingArguments` about devices, precision, sharding, compilation and Accelerate."""
    accelerate = args.accelerator_config
    accumulation = dict(accelerate.gradient_accumulation_kwargs or {})
    return (
        (bool(getattr(args, "deepspeed", None)), "deepspeed", _ENGINE),
        (bool(getattr(args, "parallelism_config", None)), "parallelism_config", _SHARDED),
        (args.fp16, "fp16", _FP16),
        (getattr(args, "mixed_precision", "no") not in _PRECISIONS, "mixed_precision", _FP16),
        (args.torch_compile, "torch_compile", _COMPILED),
        (
            args.n_gpu > 1, "n_gpu",
            "nn.DataParallel mixes the gradients of samples. Start a process for each device, `torchrun "
            "--nproc-per-node N`, or set CUDA_VISIBLE_DEVICES to one.",
        ),
        (
            _name_of(args.distributed_state.distributed_type) not in _PLACES, "distributed_state.distributed_type",
            f"Known are one process, and replicas on CPUs or CUDA devices. {_SHARDED}",
        ),
        (
            accumulation not in ({}, {"num_steps": 1}), "accelerator_config.gradient_accumulation_kwargs",
            "Give the accumulation as gradient_accumulation_steps: it decides the logical batch.",
        ),
        *((bool(getattr(accelerate, name)), f"accelerator_config.{name}", _DEALT) for name in _DEALING),
    )  # fmt: skip


def without_effect(args: Any) -> list[str]:
    """Arguments that were set and change nothing in a private run, which wraps no model in DistributedDataParallel."""
    return [f"{name}={getattr(args, name)}" for name in _DDP if getattr(args, name, None) is not None]


def refuse_sharded_model(model: nn.Module) -> None:
    """Refuse a model that `from_pretrained(..., tp_size=...)`, `fully_shard` or DeepSpeed has sharded.

    Raises:
        UnsupportedModel: naming what is sharded.
    """
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    sizes = {name: getattr(part, name, None) or 1 for part in (config, model) for name in _SIZES}
    found = [f"{name}={size}" for name, size in sizes.items() if size != 1]
    found += [name for name, param in model.named_parameters() if is_dtensor(param) or hasattr(param, "ds_id")]
    if found:
        raise UnsupportedModel(f"Expected a model that is not sharded, got one with {shorten(found)}. {_SHARDED}")


def refuse_accelerator(accelerator: Any) -> None:
    """Check the `Accelerator` that the Trainer has made, however it was configured.

    Raises:
        InvalidArgument: it shards, compiles, or scales losses.
    """
    state = accelerator.state
    refuse_first(
        (
            *((getattr(state, name, None) is not None, f"state.{name}", _SHARDED) for name in _PLUGINS),
            (_name_of(accelerator.distributed_type) not in _PLACES, "distributed_type", _SHARDED),
            (_name_of(state.dynamo_plugin.backend).lower() not in OFF, "state.dynamo_plugin.backend", _COMPILED),
            (accelerator.mixed_precision not in _PRECISIONS, "mixed_precision", _FP16),
        ),
        accelerator,
        "an Accelerator that leaves the model as it is",
    )


def _name_of(choice: object) -> str:
    return str(getattr(choice, "value", choice))
