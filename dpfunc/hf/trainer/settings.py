"""Settings of scripts, launchers and loggers: refused by name, unless a private run follows them rightly.

`accelerate launch` asks through variables of the environment, scripts through `TrainingArguments`. Both are checked
first, for the message; the `Accelerator` that came of them is checked last, so that nothing gets past by another way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from torch import nn

from dpfunc._utils.dtensor import is_dtensor
from dpfunc._utils.validation import integer, positive, shorten
from dpfunc.errors import InvalidArgument, UnsupportedModel

SWITCH = "ACCELERATE_USE_FSDP"
OFF = ("", "0", "false", "no", "none", "n", "f", "off")
_PRECISIONS = ("", "no", "bf16")
_SIZES = ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size", "ep_size")  # of a model sharded when it was loaded
_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
_OWN_BACKWARD = ("lomo", "layerwise")  # in the names of optimizers
_KEY_SHARING = ("checkpoint", "all_checkpoints")

Table = Mapping[str, tuple[Callable[[Any], bool], str]]
"""Name of a setting, with dots -> True for its values that a private run follows, or with which nobody asks for
anything; and what to do instead of others. A setting that is not there is None."""


def refuse_first(table: Table, given: Callable[[str], Any], expected: str, place: str = "") -> None:
    """Refuse the first setting of a table whose value a private run does not follow.

    Args:
        table: to go through. given: name -> value. expected: "a ... that ...". place: of the value, for the message.

    >>> refuse_first({"imag": (off, "Use a real number.")}, attrgetter_of(1j), "a real number")
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected a real number, got imag=1.0. Use a real number.
    """
    for name, (is_harmless, advice) in table.items():
        value = given(name)
        if not is_harmless(value):
            raise InvalidArgument(f"Expected {expected}, got {name}={value!r}{place}. {advice}")


def attrgetter_of(settings: object) -> Callable[[str], Any]:
    """Attributes by their names with dots; None for those that this version of a library does not have."""

    def get(name: str) -> Any:
        try:
            return attrgetter(name)(settings)
        except AttributeError:
            return None

    return get


def off(value: object) -> bool:
    """True for what counts as false."""
    return not value


def among(*values: object) -> Callable[[Any], bool]:
    """True for these values, and for members of enumerations that have them."""
    return lambda value: getattr(value, "value", value) in values


def said(*words: str) -> Callable[[Any], bool]:
    """True for values that are these words, in any case."""
    return lambda value: word(value) in words


def word(value: object) -> str:
    """A value as a word in lower case; None is the empty one."""
    return "" if value is None else str(getattr(value, "value", value)).strip().lower()


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
_PACKED = "Packed records share rows, and a row is what is clipped and protected. Give each record a row."
_PLACES = among("NO", "MULTI_CPU", "MULTI_GPU")  # values of accelerate's DistributedType: replicas, or one process

_ARGUMENTS: Table = {
    # what is drawn
    "group_by_length": (
        off, "Who is in a batch would depend on the lengths of all records, which no accounting covers.",
    ),
    "train_sampling_strategy": (
        among(None, "random"),
        "The plan draws the batches: by length or in order, who is in a batch would depend on the other records. "
        "Leave it at 'random'; dp_poisson_sampling=False shuffles.",
    ),
    "dataloader_drop_last": (
        off, "Poisson batches have no fixed size; a draw that was dropped would not be what epsilon counts.",
    ),
    "auto_find_batch_size": (
        off,
        "The sampling probability, and with it epsilon, would change. Only memory matters here: set "
        "dp_physical_batch_size.",
    ),
    # what is computed
    "label_smoothing_factor": (
        among(0),
        "The Trainer smooths the mean over a batch, which has no per-sample gradient. Give DPTrainer a loss= that "
        "smooths each sample.",
    ),
    "neftune_noise_alpha": (
        among(None), "It hooks noise into the embeddings. Leave it out: private gradients are noisy enough.",
    ),
    "packing": (off, _PACKED),
    "padding_free": (off, _PACKED),
    "use_liger_kernel": (off, "Its fused kernels have no per-sample gradients."),
    "max_grad_norm": (
        among(None, 0, 1.0),  # the last is the default of Transformers
        "The Trainer would clip the mean gradient, which bounds no sample. Set "
        "PrivacyArguments(dp_max_grad_norm=...) and leave this at its default.",
    ),
    "optim": (
        lambda value: not any(name in word(value) for name in _OWN_BACKWARD),
        "It updates inside the backward pass. Use an optimizer that reads .grad, e.g. adamw_torch.",
    ),
    # devices, precision, sharding, compilation, Accelerate
    "deepspeed": (off, _ENGINE),
    "parallelism_config": (off, _SHARDED),
    "fp16": (off, _FP16),
    "mixed_precision": (said(*_PRECISIONS), _FP16),
    "torch_compile": (off, _COMPILED),
    "n_gpu": (
        lambda count: count <= 1,
        "nn.DataParallel mixes the gradients of samples. Start a process for each device, `torchrun "
        "--nproc-per-node N`, or set CUDA_VISIBLE_DEVICES to one.",
    ),
    "distributed_state.distributed_type": (
        _PLACES, f"Known are one process, and replicas on CPUs or CUDA devices. {_SHARDED}",
    ),
    "accelerator_config.gradient_accumulation_kwargs": (
        among(None, {}, {"num_steps": 1}),
        "Give the accumulation as gradient_accumulation_steps: it decides the logical batch.",
    ),
    "accelerator_config.split_batches": (off, _DEALT),
    "accelerator_config.dispatch_batches": (off, _DEALT),
    # what is told
    "include_num_input_tokens_seen": (
        among("no", False),
        "How many tokens were drawn is private: the number of drawn records is not released.",
    ),
}  # fmt: skip
_REENTRANT: Table = dict.fromkeys(
    ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
    (
        lambda options: not (isinstance(options, Mapping) and options.get("use_reentrant")),
        "Reentrant checkpoints hide the forward pass from per-sample gradients. Use {'use_reentrant': False}.",
    ),
)
_VARIABLES: Table = {
    SWITCH: (said(*OFF), _SCRIPT),
    "ACCELERATE_USE_DEEPSPEED": (said(*OFF), _ENGINE),
    "ACCELERATE_USE_MEGATRON_LM": (said(*OFF), _ENGINE),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (said(*OFF), _SHARDED),
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": (said(*OFF), _SHARDED),
    "ACCELERATE_MIXED_PRECISION": (said(*_PRECISIONS), _FP16),
    "ACCELERATE_DYNAMO_BACKEND": (said(*OFF), _COMPILED),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        said(*OFF, "1", "auto"),
        "Only DeepSpeed reads it. Unset it, and set TrainingArguments(gradient_accumulation_steps=...) instead.",
    ),
    "ACCELERATE_GRADIENT_CLIPPING": (
        said(*OFF, "auto"),
        "Only DeepSpeed reads it. Unset it, and set PrivacyArguments(dp_max_grad_norm=...) instead.",
    ),
}
_ACCELERATOR: Table = {
    **dict.fromkeys(
        ("state.fsdp_plugin", "state.deepspeed_plugin", "state.megatron_lm_plugin", "state.parallelism_config"),
        (among(None), _SHARDED),
    ),
    "distributed_type": (_PLACES, _SHARDED),
    "state.dynamo_plugin.backend": (said(*OFF), _COMPILED),
    "mixed_precision": (among(*_PRECISIONS), _FP16),
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


def refuse_arguments(args: Any) -> None:
    """Check the `TrainingArguments` of a private run, and the environment that they were made in."""
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        integer(name, getattr(args, name), minimum=1)
    if args.max_steps <= 0:
        positive("num_train_epochs", args.num_train_epochs)
    refuse_environment(os.environ, fsdp=True)
    refuse_uploads(args, os.environ)
    for table in (_ARGUMENTS, _REENTRANT):
        refuse_first(table, attrgetter_of(args), "a TrainingArguments that keeps differential privacy")


def refuse_environment(environment: Mapping[str, str], *, fsdp: bool = False) -> None:
    """Check the variables that `accelerate launch` sets.

    Args:
        environment: `os.environ`. fsdp: those about FSDP are followed, see `fsdp.sharding_of`.

    >>> refuse_environment({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_FSDP": "False"})
    >>> refuse_environment({"ACCELERATE_USE_DEEPSPEED": "true"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected a launcher that keeps differential privacy, got \
ACCELERATE_USE_DEEPSPEED='true' in the environment. ...
    """
    table = {name: row for name, row in _VARIABLES.items() if not (fsdp and name == SWITCH)}
    expected = "a launcher that keeps differential privacy"
    refuse_first(table, lambda name: environment.get(name, ""), expected, " in the environment")


def refuse_uploads(args: Any, environment: Mapping[str, str]) -> None:
    """Refuse what sends checkpoints to a server: the key of the run is in them, and undoes the noise."""
    if args.save_only_model:
        return
    if args.push_to_hub and word(args.hub_strategy) in _KEY_SHARING:
        raise InvalidArgument(
            "Expected a TrainingArguments that keeps differential privacy, got hub_strategy="
            f"{args.hub_strategy!r}. A checkpoint holds the key of the run, which undoes the noise. Use 'end' or "
            "'every_save', or save_only_model=True."
        )
    if word(args.save_strategy) == "no":
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


def without_effect(args: Any) -> list[str]:
    """Arguments that were set and change nothing in a private run, which wraps no model in DistributedDataParallel."""
    return [f"{name}={getattr(args, name)}" for name in _DDP if getattr(args, name, None) is not None]


def refuse_sharded_model(model: nn.Module) -> None:
    """Refuse a model that `from_pretrained(..., tp_size=...)`, `fully_shard` or DeepSpeed has sharded."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    sizes = {name: getattr(part, name, None) or 1 for part in (config, model) for name in _SIZES}
    found = [f"{name}={size}" for name, size in sizes.items() if size != 1]
    found += [name for name, param in model.named_parameters() if is_dtensor(param) or hasattr(param, "ds_id")]
    if found:
        raise UnsupportedModel(f"Expected a model that is not sharded, got one with {shorten(found)}. {_SHARDED}")


def refuse_accelerator(accelerator: Any) -> None:
    """Check the `Accelerator` that the Trainer has made, however it was configured: it must not shard or compile."""
    refuse_first(_ACCELERATOR, attrgetter_of(accelerator), "an Accelerator that leaves the model as it is")
