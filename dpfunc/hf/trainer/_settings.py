"""What a private run of the Trainer does not follow: one table of (setting, domain, reason), refused by name.

May import: its folder, budget, evidence, rehearsal, release and below. Trusted: yes.

Variables of `accelerate launch` and `TrainingArguments` are checked first, for the message; the `Accelerator` that came
of them is checked last, so that nothing gets past by another way.
"""

import copy
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from functools import reduce
from operator import not_
from typing import Any

from torch import Tensor, nn
from transformers import TrainingArguments

from dpfunc._utils import validation as checks
from dpfunc._utils.processes import is_dtensor
from dpfunc._utils.validation import integer, positive, shorten, wrong_type
from dpfunc.batches import refuse_narrow_range
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional.forward import refuse_unsupported
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.rng import Key

_logger = logging.getLogger(__name__)

# Values that a private run follows, or with which nobody asks for anything: words in lower case, or a function.
Domain = tuple[str, ...] | Callable[[Any], bool]

# What is expected, as messages say it: the first level of the table.
_TRAINER = "arguments of DPTrainer that make one private run"
SCRIPT = "a TrainingArguments that keeps differential privacy"
LAUNCHER = "a launcher that keeps differential privacy"
ACCELERATOR = "an Accelerator that leaves the model as it is"
FSDP = "a setting of FSDP that a private run follows"
SHARDED = "settings that a model sharded by FSDP can follow"

SWITCH = "ACCELERATE_USE_FSDP"
OFF = ("", "0", "false", "no", "none", "n", "f", "off")
ON = ("1", "true", "yes", "y", "t", "on")
_PRECISIONS = ("", "no", "bf16")
_PLACES = ("no", "multi_cpu", "multi_gpu")  # of accelerate's DistributedType: one process, or replicas
_SIZES = ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size", "ep_size")  # of a model sharded when it was loaded

_PARTS = (
    "Leave it out and start the same script with `torchrun --nproc-per-node N` (of the command: `torchrun "
    "--nproc-per-node N -m dpfunc.cli.main train job.yaml`); for a model that one device cannot hold set "
    "TrainingArguments(fsdp=True), or write a loop over make_dp_step(..., "
    "ranks=dpfunc.distributed.sharded(mesh)) with fully_shard or parallelize_module."
)
_LOSS = "Pass loss=, a function (forward, params, batch) -> one loss a sample."
_ENGINE = f"Its engine owns the backward pass, and sums gradients before they are clipped. {_PARTS}"
_FP16 = (
    "fp16 scales the loss, and skips steps, by what the data are; fp8 scales by their largest values. Use bf16: "
    "TrainingArguments(bf16=True), or `accelerate launch --mixed_precision bf16`."
)
_COMPILED = "It compiles the model for the gradient of a batch. Leave it out: private steps are not compiled."
_DEEPSPEED_ALONE = "Only DeepSpeed reads it. Unset it, and set"
_NO_EFFECT = ""  # in place of a reason: other values change nothing, which is told and not refused


def word(value: object) -> str:
    """A value, also of an enumeration, as a word in lower case; None is the empty one."""
    return "" if value is None else str(getattr(value, "value", value)).strip().lower()


# What is expected -> name of a setting, with dots -> its domain, and what to do instead of a value outside of it.
SETTINGS: Mapping[str, Mapping[str, tuple[Domain, str]]] = {
    _TRAINER: {
        "model_init": (not_, "Each model is a run of its own. Pass model=, a module."),
        "compute_loss_func": (not_, f"It gives one loss for a batch. {_LOSS}"),
        "unit": (lambda text: isinstance(text, str) and bool(text.strip()) and text.isprintable(),
            "Say what one row of a batch is, in one line, for example unit='one person'."),
        "data_name": (lambda name: name is None or (isinstance(name, str) and name != ""),
            "Give a text as data_name, for example a version or a hash of the files; or leave it out."),
    },
    SCRIPT: {
        # what is drawn
        "group_by_length": (not_,
            "Who is in a batch would depend on the lengths of all records, which no accounting covers."),
        "train_sampling_strategy": (("", "random"),
            "The plan draws the batches: by length or in order, who is in a batch would depend on the other records. "
            "Leave it at 'random'; dp_poisson_sampling=False shuffles."),
        "dataloader_drop_last": (not_, "Poisson batches have no fixed size; epsilon counts each draw."),
        "auto_find_batch_size": (not_, "The sampling probability, and with it epsilon, would change. For memory set "
            "dp_physical_batch_size."),
        # what is computed
        "label_smoothing_factor": (not_, "The Trainer smooths the mean over a batch, which has no per-sample gradient. "
            "Give DPTrainer a loss= that smooths each sample."),
        "neftune_noise_alpha": (("",), "It hooks noise into the embeddings. Leave it out: there is noise enough."),
        **dict.fromkeys(("packing", "padding_free"), (not_,
            "Packed records share rows, and a row is what is clipped and protected. Give each record a row.")),
        "use_liger_kernel": (not_, "Its fused kernels have no per-sample gradients."),
        "max_grad_norm": (lambda norm: norm in (None, 0, 1.0),  # the last is the default of Transformers
            "The Trainer would clip the mean gradient, which bounds no sample. Set "
            "PrivacyArguments(dp_max_grad_norm=...) and leave this at its default."),
        "optim": (lambda name: not any(part in word(name) for part in ("lomo", "layerwise")),
            "It updates inside the backward pass. Use an optimizer that reads .grad, e.g. adamw_torch."),
        **dict.fromkeys(("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"), (
            lambda options: not (isinstance(options, Mapping) and options.get("use_reentrant")),
            "Reentrant checkpoints hide the forward pass from per-sample gradients. Use {'use_reentrant': False}.")),
        # devices, precision, sharding, compilation, Accelerate
        "deepspeed": (not_, _ENGINE),
        "parallelism_config": (not_, _PARTS),
        "fp16": (not_, _FP16),
        "mixed_precision": (_PRECISIONS, _FP16),
        "torch_compile": (not_, _COMPILED),
        "n_gpu": (lambda count: count <= 1,
            "nn.DataParallel mixes the gradients of samples. Start a process for each device, `torchrun "
            "--nproc-per-node N`, or set CUDA_VISIBLE_DEVICES to one."),
        "distributed_state.distributed_type": (_PLACES,
            f"Known are one process, and replicas on CPUs or CUDA devices. {_PARTS}"),
        "accelerator_config.gradient_accumulation_kwargs": (lambda options: options in (None, {}, {"num_steps": 1}),
            "Give the accumulation as gradient_accumulation_steps: it decides the logical batch."),
        **dict.fromkeys(("accelerator_config.split_batches", "accelerator_config.dispatch_batches"), (not_,
            "The plan deals out each draw to the processes. Leave it at its default.")),
        **dict.fromkeys(("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
            "ddp_static_graph", "data_seed", "torch_empty_cache_steps"), (("",), _NO_EFFECT)),
        # what is told
        "include_num_input_tokens_seen": (("no", "false"),
            "How many tokens were drawn is private: the number of drawn records is not released."),
        "skip_memory_metrics": (lambda skips: skips is not False,
            "The peak of memory grows with the number of drawn records and their lengths, which are private. "
            "Leave it out."),
    },
    LAUNCHER: {
        SWITCH: (OFF, "Only scripts with DPTrainer follow it: see docs/guides/trainer.md. Leave it out and start the "
            "command with `torchrun --nproc-per-node N -m dpfunc.cli.main train job.yaml`: each process has the whole "
            "model."),
        **dict.fromkeys(("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"), (OFF, _ENGINE)),
        **dict.fromkeys(("ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"), (OFF, _PARTS)),
        "ACCELERATE_MIXED_PRECISION": (_PRECISIONS, _FP16),
        "ACCELERATE_DYNAMO_BACKEND": (OFF, _COMPILED),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ((*OFF, "1", "auto"),
            f"{_DEEPSPEED_ALONE} TrainingArguments(gradient_accumulation_steps=...) instead."),
        "ACCELERATE_GRADIENT_CLIPPING": ((*OFF, "auto"),
            f"{_DEEPSPEED_ALONE} PrivacyArguments(dp_max_grad_norm=...) instead."),
    },
    ACCELERATOR: {
        **dict.fromkeys(("state.fsdp_plugin", "state.deepspeed_plugin", "state.megatron_lm_plugin",
            "state.parallelism_config"), (("",), _PARTS)),
        "distributed_type": (_PLACES, _PARTS),
        "state.dynamo_plugin.backend": (OFF, _COMPILED),
        "mixed_precision": (_PRECISIONS, _FP16),
    },
    FSDP: {
        "version": (("2",), "FSDP1 flattens parameters, which have no per-sample gradients then. Set "
            'fsdp_config={"version": 2}, or `accelerate launch --fsdp_version 2`.'),
        "auto_wrap_policy": (("transformer_based_wrap", "size_based_wrap", "no_wrap"),
            "Set TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP."),
        **dict.fromkeys(("transformer_layer_cls_to_wrap", "min_num_params"), (lambda value: True, "")),
        **dict.fromkeys(("reshard_after_forward", "activation_checkpointing", "cpu_ram_efficient_loading"),
            ((*ON, *OFF), "Set it to true or false.")),
        "cpu_offload": (OFF,
            "Parts that are kept on the CPU were not tried. Leave it out; more processes make smaller parts."),
        "ignored_modules": (OFF,
            "What fully_shard does not manage cannot be trained with the rest. Freeze it, and leave this out."),
        "mixed_precision_policy": (OFF,
            "Sums of gradients stay in float32. Leave it out, and compute in bfloat16: TrainingArguments(bf16=True)."),
        "activation_checkpointing_offload": (OFF, "Leave it out: activation_checkpointing=True saves most memory."),
        "sharding_strategy": ((*OFF, "full_shard", "1"),
            "FSDP2 divides everything over all processes. Leave it out; to keep layers whole until their backward "
            "pass set reshard_after_forward=False. For replicas of parts (HSDP) write a loop, see "
            "docs/guides/sharded.md."),
        **dict.fromkeys(("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"),
            ((*OFF, "{}"), "XLA devices were not tried. Leave it out.")),
        # FSDP2 has no such setting, or a private run writes no such file
        "backward_prefetch": ((*OFF, "no_prefetch"), _NO_EFFECT),
        **dict.fromkeys(("forward_prefetch", "limit_all_gathers", "sync_module_states", "use_orig_params"),
            (OFF, _NO_EFFECT)),
        "state_dict_type": (("", "full_state_dict"), _NO_EFFECT),
    },
    SHARDED: {
        "world_size": (lambda count: int(count) >= 2,
            "FSDP divides a model over several processes. Start `torchrun --nproc-per-node N`, or leave fsdp out."),
        "dp_engine": (("auto", "ghost"),
            "A sharded model has one engine, in which one layer is whole at a time. Leave it at 'auto'."),
        "optimizers": (lambda given: all(each is None for each in given),
            "They hold parameters that are replaced by parts. Use optimizer_cls_and_kwargs=, or override "
            "create_optimizer."),
        "load_best_model_at_end": (not_,
            "Leave it out, and open the best checkpoint afterwards: "
            "from_pretrained(trainer.state.best_model_checkpoint). Each checkpoint has the whole model."),
        **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), (not_,
            "The model would be cast, with its parts. Leave it out: bf16=True evaluates in bfloat16.")),
        "accelerator_config.even_batches": (lambda value: value is not False,
            "A process with fewer batches would leave the others waiting inside of the model. Leave it at True."),
    },
}  # fmt: skip

# Loggers that send whole checkpoints: the variable that asks for it, its default, and values that do not ask.
_UPLOADS = (
    ("wandb", "WANDB_LOG_MODEL", "false", (*OFF, "end")),
    ("mlflow", "HF_MLFLOW_LOG_ARTIFACTS", "false", OFF),
    ("dagshub", "HF_MLFLOW_LOG_ARTIFACTS", "false", OFF),
    ("dagshub", "HF_DAGSHUB_LOG_ARTIFACTS", "false", OFF),
    ("comet_ml", "COMET_LOG_ASSETS", "false", OFF),
    ("clearml", "CLEARML_LOG_MODEL", "true", OFF),
    ("dvclive", "HF_DVCLIVE_LOG_MODEL", "false", (*OFF, "true")),
    ("flyte", "", "always", ()),
)

# Methods of the Trainer on which privacy depends, and what to do instead of overriding them.
_OVERRIDES = {
    "compute_loss": _LOSS,
    "training_step": "Use callbacks, or write a loop over dpfunc.make_dp_step.",
    "get_train_dataloader": "The plan draws the batches; pass a data_collator to change what is in them.",
    **dict.fromkeys(("get_batch_samples", "_get_train_sampler", "_get_dataloader"),
        "Epsilon holds for the batches that the plan draws; dp_poisson_sampling=False shuffles."),
}  # fmt: skip


def _outside(expected: str, given: Callable[[str], Any]) -> list[tuple[str, Any, str]]:
    """Name, value and reason of each setting that is outside of its domain."""
    every = [(name, given(name), domain, reason) for name, (domain, reason) in SETTINGS[expected].items()]
    return [(n, v, why) for n, v, domain, why in every if not (domain(v) if callable(domain) else word(v) in domain)]


def refuse(expected: str, given: Callable[[str], Any], place: str = "") -> None:
    """Refuse the first setting whose value is outside of its domain; `expected` is the first level of the table."""
    for name, value, reason in _outside(expected, given):
        if reason != _NO_EFFECT:
            raise InvalidArgument(f"Expected {expected}, got {name}={value!r}{place}. {reason}")


def without_effect(expected: str, given: Callable[[str], Any]) -> list[str]:
    """Settings that were made and change nothing in a private run."""
    return [f"{name}={value}" for name, value, reason in _outside(expected, given) if reason == _NO_EFFECT]


def attributes(settings: object) -> Callable[[str], Any]:
    """Attributes by their names with dots; None for those that this version of a library does not have."""
    return lambda name: reduce(lambda inside, part: getattr(inside, part, None), name.split("."), settings)


def refuse_values(trainer: object, ours: type, values: Mapping[str, Any]) -> None:
    """Check the class and the constructor's arguments: some would be found out at the first checkpoint, after steps."""
    privacy, model, key = values["privacy"], values["model"], values["key"]
    refuse(_TRAINER, values.get)
    checks.refuse(
        (not isinstance(privacy, PrivacyArguments), wrong_type("privacy to be PrivacyArguments", "privacy", privacy)),
        (not isinstance(key, Key | None), wrong_type("key to be a dpfunc Key", "key", key, "Use dpfunc.secure_key().")),
        (not isinstance(model, nn.Module), wrong_type("model to be a module", "model", model)),
    )
    if not privacy.dp_enabled:
        return
    _refuse_sharded(model)
    for name, hint in _OVERRIDES.items():
        if getattr(type(trainer), name, None) is not getattr(ours, name, None):
            raise InvalidArgument(f"Expected {name} of DPTrainer, got an override in {type(trainer).__name__}. {hint}")


def refuse_unknown(args: Any) -> None:
    """Refuse settings of a subclass of `TrainingArguments` that were made, and that the Trainer does not read.

    One rule for `SFTConfig`, `Seq2SeqTrainingArguments` and all others: a field that `TrainingArguments` has not.
    """
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    for field in dataclasses.fields(args):
        if field.name in known or not field.init:
            continue
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        value = getattr(args, field.name)
        if value != default:
            raise InvalidArgument(
                f"Expected settings that DPTrainer follows, got {field.name}={value!r}, which {type(args).__name__} "
                "has and TrainingArguments has not: it would change nothing. Leave it out, and do in the data set, the "
                "collator or loss= what it asks for; settings of your own script belong into a dataclass of its own."
            )


def refuse_arguments(args: Any, privacy: PrivacyArguments) -> None:
    """Check the `TrainingArguments` of a run, and the environment that they were made in."""
    if not privacy.dp_enabled:
        refuse_unknown(args)
        if args.label_smoothing_factor != 0:
            raise InvalidArgument("Expected label_smoothing_factor=0: the loss is one number a sample. Pass loss=.")
        return
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        integer(name, getattr(args, name), minimum=1)
    if args.max_steps <= 0:
        positive("num_train_epochs", args.num_train_epochs)
    refuse_environment(os.environ, fsdp=True)
    refuse_uploads(args, os.environ)
    refuse(SCRIPT, attributes(args))
    refuse_unknown(args)
    for setting in without_effect(SCRIPT, attributes(args)):
        _logger.warning("%s changes nothing: the plan draws the batches, and no step of Trainer is taken.", setting)


def refuse_averages(args: Any, privacy: PrivacyArguments, *, sharded: bool) -> None:
    """Check that views and averages fit the other arguments of a run."""
    both = privacy.dp_views > 1 or privacy.dp_average is not None
    checks.refuse(
        (both and sharded, f"Expected one view and no average of a sharded model, got dp_views={privacy.dp_views} and "
         f"dp_average={privacy.dp_average!r}. Leave them out, or fsdp."),
        (privacy.dp_average is not None and args.load_best_model_at_end,
         f"Expected one model at the end, got dp_average={privacy.dp_average!r} and load_best_model_at_end=True. Leave "
         "one of them out."),
    )  # fmt: skip


def refuse_environment(environment: Mapping[str, str], *, fsdp: bool = False) -> None:
    """Check the variables that `accelerate launch` sets; with `fsdp` those about FSDP are followed, see `_fsdp.py`."""
    refuse(LAUNCHER, {**environment, **({SWITCH: ""} if fsdp else {})}.get, " in the environment")


def refuse_uploads(args: Any, environment: Mapping[str, str]) -> None:
    """Refuse what sends checkpoints to a server: the key of the run is in them, and undoes the noise."""
    saving, found = word(args.save_strategy) != "no", []
    for name, variable, default, harmless in _UPLOADS:
        value = environment.get(variable, default)
        if saving and name in (args.report_to or ()) and word(value) not in harmless:
            advice = {"": "Take another logger"}.get(variable, f"Set {variable}=false in the environment")
            found.append((f"report_to={name!r}" + f" and {variable}={value!r}" * bool(variable), advice))
    if args.push_to_hub and word(args.hub_strategy) in ("checkpoint", "all_checkpoints"):
        found.append((f"hub_strategy={args.hub_strategy!r}", "Use 'end' or 'every_save'"))
    if found and not args.save_only_model:
        asked, advice = found[0]
        raise InvalidArgument(
            f"Expected {SCRIPT}, got {asked}. A checkpoint holds the key of the run, which undoes the noise. {advice}, "
            "or save_only_model=True."
        )


def _refuse_sharded(model: nn.Module) -> None:
    """Refuse a model that `from_pretrained(..., tp_size=...)`, `fully_shard` or DeepSpeed has sharded."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    sizes = {name: getattr(part, name, None) or 1 for part in (config, model) for name in _SIZES}
    found = [
        *(f"{name}={size}" for name, size in sizes.items() if size != 1),
        *(name for name, param in model.named_parameters() if is_dtensor(param) or hasattr(param, "ds_id")),
    ]
    if found:
        raise UnsupportedModel(f"Expected a model that is not sharded, got one with {shorten(found)}. {_PARTS}")


def refuse_model(model: nn.Module) -> None:
    """Refuse a wrapped model, one that mixes samples in training mode, and trained parameters in float16."""
    if hasattr(model, "_orig_mod") or isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise UnsupportedModel(f"Expected the model itself, got it wrapped in {type(model).__name__}.")
    refuse_narrow_range({name: param for name, param in model.named_parameters() if param.requires_grad})
    refuse_unsupported(model, checkpointing=True)


def refuse_optimizer(optimizer: Any, params: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer that leaves trained parameters as they are: the budget would be spent on them for nothing."""
    if optimizer is None:
        return
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if missing := [name for name, param in params.items() if id(param) not in held]:
        raise InvalidArgument(
            f"Expected an optimizer of all {len(params)} trained parameters of the model, got one without "
            f"{len(missing)} of them, e.g. {missing[0]!r}: they would cost noise and never change. Build it from the "
            "parameters of the model that DPTrainer gets (of PEFT: after get_peft_model), or freeze the others: "
            "requires_grad_(False)."
        )


def recomputed(args: Any) -> dict[str, object]:
    """Arguments that compute activations again in the backward pass, under the names that `TrainingArguments` has."""
    name = "activation" if hasattr(args, "activation_checkpointing") else "gradient"
    return {f"{name}_checkpointing": True, f"{name}_checkpointing_kwargs": {"use_reentrant": False}}


def changed(args: Any, values: Mapping[str, object]) -> Any:
    """A copy of `TrainingArguments` with other values; the caller's own are not changed."""
    result = copy.copy(args)
    vars(result).update(values)
    return result
