"""Settings of the Trainer: the fields that a private run follows, and tables of (setting, domain, reason) for others.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: yes.

Variables of `accelerate launch` and `TrainingArguments` are checked first, for the message; the `Accelerator` that came
of them is checked last, so that nothing gets past by another way.
"""

import copy
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import not_
from typing import Any

from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from dpfunc._utils.parts import is_dtensor
from dpfunc._utils.validation import expect, integer, positive, refuse, shorten, wrong_type
from dpfunc.batches import refuse_narrow_range
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional.refused import refuse_unsupported
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.rehearsal import FAILURES
from dpfunc.rng import Key

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
        "max_grad_norm": (lambda norm: norm in (None, 0, 1.0),  # the last is the default of Transformers
            "The Trainer would clip the mean gradient, which bounds no sample. Set "
            "PrivacyArguments(dp_max_grad_norm=...) and leave this at its default."),
        "optim": (lambda name: not any(part in word(name) for part in ("lomo", "layerwise")),
            "It updates inside the backward pass. Use an optimizer that reads .grad, e.g. adamw_torch."),
        **dict.fromkeys(("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"), (
            lambda options: not (isinstance(options, Mapping) and options.get("use_reentrant")),
            "Reentrant checkpoints hide the forward pass from per-sample gradients. Use {'use_reentrant': False}.")),
        "mixed_precision": (_PRECISIONS, _FP16),
        "n_gpu": (lambda count: count <= 1,
            "nn.DataParallel mixes the gradients of samples. Start a process for each device, `torchrun "
            "--nproc-per-node N`, or set CUDA_VISIBLE_DEVICES to one."),
        "distributed_state.distributed_type": (_PLACES,
            f"Known are one process, and replicas on CPUs or CUDA devices. {_PARTS}"),
        "accelerator_config.gradient_accumulation_kwargs": (lambda options: options in (None, {}, {"num_steps": 1}),
            "Give the accumulation as gradient_accumulation_steps: it decides the logical batch."),
        **dict.fromkeys(("accelerator_config.split_batches", "accelerator_config.dispatch_batches"), (not_,
            "The plan deals out each draw to the processes. Leave it at its default.")),
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
        "dp_views": (lambda views: views == 1, "A sharded model has one view of a record. Leave it out, or fsdp."),
        "dp_average": (("",), "Parts of a model are not averaged over steps. Leave it out, or fsdp."),
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

# Fields of `TrainingArguments` that a private run follows. Every other field of theirs, or of a subclass, must have its
# default; some values of these are refused by the table above, and what sends checkpoints away by that below.
FOLLOWED = frozenset((
    "output_dir", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "seed",
    "full_determinism", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim",
    "optim_args", "optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
    "average_tokens_across_devices", "bf16", "bf16_full_eval", "fp16_full_eval", "tf32", "use_cache", "use_cpu",
    "ddp_backend", "ddp_timeout", "fsdp", "fsdp_config", "accelerator_config", "activation_checkpointing",
    "activation_checkpointing_kwargs", "gradient_checkpointing", "gradient_checkpointing_kwargs", "local_rank",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "remove_unused_columns", "label_names", "logging_dir", "logging_strategy",
    "logging_steps", "logging_first_step", "logging_nan_inf_filter", "log_level", "log_level_replica",
    "log_on_each_node", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id",
    "trackio_static_space_id", "do_train", "do_eval", "do_predict", "resume_from_checkpoint", "eval_strategy",
    "eval_steps", "eval_delay", "eval_on_start", "eval_do_concat_batches", "eval_use_gather_object",
    "eval_accumulation_steps", "per_device_eval_batch_size", "prediction_loss_only", "include_for_metrics",
    "batch_eval_metrics", "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "save_strategy",
    "save_steps", "save_total_limit", "save_only_model", "save_on_each_node", "enable_jit_checkpoint",
    "ignore_data_skip", "restore_callback_states_from_checkpoint", "push_to_hub", "hub_model_id", "hub_strategy",
    "hub_token", "hub_private_repo", "hub_always_push", "hub_revision",
))  # fmt: skip

# What to do instead of some of the others; the last ones are fields of older versions, and of TRL.
_INSTEAD: Mapping[str, str] = {
    "train_sampling_strategy": (
        "The plan draws the batches: by length or in order, who is in a batch would depend on the other records. "
        "Leave it at 'random'; dp_poisson_sampling=False shuffles."
    ),
    "data_seed": "The plan draws the batches, from the key of the run. Leave it out.",
    "dataloader_drop_last": "Poisson batches have no fixed size; epsilon counts each draw.",
    "auto_find_batch_size": (
        "The sampling probability, and with it epsilon, would change. For memory set dp_physical_batch_size."
    ),
    "label_smoothing_factor": (
        "The Trainer smooths the mean over a batch, which has no per-sample gradient. Give DPTrainer a loss= that "
        "smooths each sample."
    ),
    "neftune_noise_alpha": "It hooks noise into the embeddings. Leave it out: there is noise enough.",
    "use_liger_kernel": "Its fused kernels have no per-sample gradients.",
    "deepspeed": _ENGINE,
    "parallelism_config": _PARTS,
    "fp16": _FP16,
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), _COMPILED),
    "include_num_input_tokens_seen": (
        "How many tokens were drawn is private: the number of drawn records is not released."
    ),
    "skip_memory_metrics": (
        "The peak of memory grows with the number of drawn records and their lengths, which are private. Leave it out."
    ),
    "group_by_length": ("Who is in a batch would depend on the lengths of all records, which no accounting covers."),
    **dict.fromkeys(
        ("packing", "padding_free"),
        "Packed records share rows, and a row is what is clipped and protected. Give each record a row.",
    ),
}
_USELESS = "A private run does not follow it, so it would change nothing. Leave it out."

# Fields of which each is read by some optimizers of `optim`; beside `optim_args`.
_OF_OPTIMIZERS = ("optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon")

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
    ("swanlab", "SWANLAB_LOG_MODEL", "false", OFF),
)

# Loggers that are told so when they are made: the attribute, and values with which they send none.
_TOLD: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "neptune": ("_log_checkpoints", OFF),
    "dvclive": ("_log_model", (*OFF, "true")),
    "wandb": ("_log_model", (*OFF, "end")),
    "swanlab": ("_log_model", OFF),
}

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


def refuse_outside(expected: str, given: Callable[[str], Any], place: str = "") -> None:
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
    refuse_outside(_TRAINER, values.get)
    refuse(
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


def _defaults(kind: type) -> dict[str, Any]:
    """The default of each field of a dataclass that its constructor takes."""
    made = {field.name: field for field in dataclasses.fields(kind) if field.init}
    return {
        name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for name, field in made.items()
    }


def refuse_fields(args: Any, *, private: bool) -> None:
    """Refuse each field that has not its default and is not followed; the twin follows all of `TrainingArguments`.

    One rule for fields of the Trainer, of `SFTConfig`, of `Seq2SeqTrainingArguments`, and those of later versions.
    """
    known = _defaults(TrainingArguments)
    for name, default in {**_defaults(type(args)), **dict.fromkeys(_INSTEAD, False), **known}.items():
        value = getattr(args, name, default)
        followed = name in FOLLOWED or (name in known and not private)
        if followed or word(value) == word(default) or value in (None, []):
            continue
        if name in known or (private and name in _INSTEAD):
            raise InvalidArgument(f"Expected {SCRIPT}, got {name}={value!r}. {_INSTEAD.get(name, _USELESS)}")
        raise InvalidArgument(
            f"Expected settings that DPTrainer follows, got {name}={value!r}, which {type(args).__name__} has and "
            "TrainingArguments has not: it would change nothing. Leave it out, and do in the data set, the collator "
            "or loss= what it asks for; settings of your own script belong into a dataclass of its own."
        )


def refuse_arguments(args: Any, privacy: PrivacyArguments) -> None:
    """Check the `TrainingArguments` of a run, and the environment that they were made in."""
    if not privacy.dp_enabled:
        refuse_fields(args, private=False)
        refuse((args.label_smoothing_factor != 0,
                "Expected label_smoothing_factor=0: the loss is one number a sample. Pass loss=."))  # fmt: skip
        return
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        integer(name, getattr(args, name), minimum=1)
    if args.max_steps <= 0:
        positive("num_train_epochs", args.num_train_epochs)
    refuse_environment(os.environ, fsdp=True)
    refuse_uploads(args, os.environ)
    refuse_outside(SCRIPT, attributes(args))
    refuse_fields(args, private=True)
    refuse(
        (privacy.dp_average is not None and args.load_best_model_at_end,
         f"Expected one model at the end, got dp_average={privacy.dp_average!r} and load_best_model_at_end=True. Leave "
         "one of them out."),
    )  # fmt: skip


def refuse_environment(environment: Mapping[str, str], *, fsdp: bool = False) -> None:
    """Check the variables that `accelerate launch` sets; with `fsdp` those about FSDP are followed, see `_fsdp.py`."""
    refuse_outside(LAUNCHER, {**environment, **({SWITCH: ""} if fsdp else {})}.get, " in the environment")


def refuse_uploads(args: Any, environment: Mapping[str, str], callbacks: Iterable[Any] = ()) -> None:
    """Refuse what sends checkpoints to a server: the key of the run is in them, and undoes the noise.

    A logger is asked for by its name in `report_to`, or is one of the callbacks.
    """
    saving, found = word(args.save_strategy) != "no", []
    loggers = {name: f"report_to={name!r}" for name in args.report_to or ()}
    for callback in callbacks:
        kind = f"the callback {type(callback).__name__}"
        names = [name for name, known in INTEGRATION_TO_CALLBACK.items() if isinstance(callback, known)]
        loggers = {**dict.fromkeys(names, kind), **loggers}
        for attribute, harmless in (_TOLD[name] for name in names if saving and name in _TOLD):
            if word(getattr(callback, attribute, None)) not in harmless:
                found.append((f"{kind} with {attribute[1:]}", f"Leave {attribute[1:]} out"))
    for name, variable, default, harmless in _UPLOADS:
        value = environment.get(variable, default)
        if saving and name in loggers and word(value) not in harmless:
            advice = {"": "Take another logger"}.get(variable, f"Set {variable}=false in the environment")
            found.append((loggers[name] + f" and {variable}={value!r}" * bool(variable), advice))
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
    refuse((found, UnsupportedModel(f"Expected a model that is not sharded, got one with {shorten(found)}. {_PARTS}")))


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


def refuse_unread(args: Any, made: Callable[[Any], object]) -> None:
    """Refuse fields for optimizers that change nothing in what is `made` of arguments, and parts of `optim_args`."""
    defaults, parts = _defaults(TrainingArguments), (args.optim_args or "").replace(" ", "").split(",")
    tries: list[tuple[dict[str, Any], dict[str, Any]]] = [
        *(({name: getattr(args, name)}, {name: defaults[name]}) for name in _OF_OPTIMIZERS),
        *(({"optim_args": part}, {"optim_args": f"{part.partition('=')[0]}="}) for part in parts if part),
    ]
    for given, other in tries:
        try:
            same = given != other and made(changed(args, given)) == made(changed(args, other))
        except FAILURES:  # of one of them there is no optimizer: it is read
            continue
        ((name, value),) = given.items()
        expect(
            not same, "a field that the optimizer of the run reads", name, getattr(value, "value", value),
            "It changes nothing there. Leave it out.",
        )  # fmt: skip


def recomputed(args: Any) -> dict[str, object]:
    """Arguments that compute activations again in the backward pass, under the names that `TrainingArguments` has."""
    name = "activation" if hasattr(args, "activation_checkpointing") else "gradient"
    return {f"{name}_checkpointing": True, f"{name}_checkpointing_kwargs": {"use_reentrant": False}}


def changed(args: Any, values: Mapping[str, object]) -> Any:
    """A copy of `TrainingArguments` with other values; the caller's own are not changed."""
    result = copy.copy(args)
    vars(result).update(values)
    return result
