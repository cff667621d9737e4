"""Checks that refuse, before anything is spent, settings of a Trainer that break differential privacy."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dpfunc._utils.validation import fail, integer, positive, wrong_type
from dpfunc.engines.guards.parameters import refuse_narrow_range
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional.refuse import refuse_unsupported
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.environment import (
    Refusal,
    launch_refusals,
    refuse_environment,
    refuse_first,
    refuse_sharded_model,
    refuse_uploads,
)
from dpfunc.rng import Key

# How transformers names them; a default that does no harm is the first value.
_DEFAULT_MAX_GRAD_NORM = 1.0
_KEY_SHARING = ("checkpoint", "all_checkpoints")
_OWN_BACKWARD = ("lomo", "layerwise")


def refuse_arguments(args: Any) -> None:
    """Check the `TrainingArguments` of a private run, and the environment that they were made in.

    Raises:
        InvalidArgument: naming the first setting that cannot be used, and what to do instead.
    """
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        integer(name, getattr(args, name), minimum=1)
    if args.max_steps <= 0:
        positive("num_train_epochs", args.num_train_epochs)
    refuse_environment(os.environ, fsdp=True)
    refuse_uploads(args, os.environ)
    refusals = (*_sampling(args), *_loss(args), *_checkpointing(args), *launch_refusals(args), *_leaks(args))
    refuse_first(refusals, args, "a TrainingArguments that keeps differential privacy")


def _sampling(args: Any) -> tuple[Refusal, ...]:
    strategy = str(getattr(args, "train_sampling_strategy", "random"))
    return (
        (
            bool(getattr(args, "group_by_length", False)), "group_by_length",
            "Who is in a batch would depend on the lengths of all records, which no accounting covers.",
        ),
        (
            strategy != "random", "train_sampling_strategy",
            "The plan draws the batches: by length or in order, who is in a batch would depend on the other records. "
            "Leave it at 'random'; dp_poisson_sampling=False shuffles.",
        ),
        (
            args.dataloader_drop_last, "dataloader_drop_last",
            "Poisson batches have no fixed size; a draw that was dropped would not be what epsilon counts.",
        ),
        (
            args.auto_find_batch_size, "auto_find_batch_size",
            "The sampling probability, and with it epsilon, would change. Only memory matters here: set "
            "dp_physical_batch_size.",
        ),
    )  # fmt: skip


def _loss(args: Any) -> tuple[Refusal, ...]:
    return (
        (
            args.label_smoothing_factor != 0, "label_smoothing_factor",
            "The Trainer smooths the mean over a batch, which has no per-sample gradient. Give DPTrainer a loss= that "
            "smooths each sample.",
        ),
        (
            args.neftune_noise_alpha is not None, "neftune_noise_alpha",
            "It hooks noise into the embeddings. Leave it out: private gradients are noisy enough.",
        ),
        *(
            (
                bool(getattr(args, name, False)), name,
                "Packed records share rows, and a row is what is clipped and protected. Give each record a row.",
            )
            for name in ("packing", "padding_free")
        ),
        (
            args.use_liger_kernel, "use_liger_kernel",
            "Its fused kernels have no per-sample gradients.",
        ),
        (
            args.max_grad_norm not in (0, _DEFAULT_MAX_GRAD_NORM, None), "max_grad_norm",
            "The Trainer would clip the mean gradient, which bounds no sample. Set "
            "PrivacyArguments(dp_max_grad_norm=...) and leave this at its default.",
        ),
        (
            any(name in str(getattr(args.optim, "value", args.optim)).lower() for name in _OWN_BACKWARD),
            "optim", "It updates inside the backward pass. Use an optimizer that reads .grad, e.g. adamw_torch.",
        ),
    )  # fmt: skip


def _checkpointing(args: Any) -> tuple[Refusal, ...]:
    name = "gradient_checkpointing_kwargs"
    if getattr(args, "activation_checkpointing_kwargs", None):
        name = "activation_checkpointing_kwargs"
    options = getattr(args, name, None)
    return (
        (
            isinstance(options, Mapping) and bool(options.get("use_reentrant")), name,
            "Reentrant checkpoints hide the forward pass from per-sample gradients. Use {'use_reentrant': False}.",
        ),
    )  # fmt: skip


def _leaks(args: Any) -> tuple[Refusal, ...]:
    strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    return (
        (
            getattr(args, "include_num_input_tokens_seen", "no") not in ("no", False), "include_num_input_tokens_seen",
            "How many tokens were drawn is private: the number of drawn records is not released.",
        ),
        (
            args.push_to_hub and not args.save_only_model and strategy in _KEY_SHARING, "hub_strategy",
            "A checkpoint holds the key of the run, which undoes the noise. Use 'end' or 'every_save', or "
            "save_only_model=True.",
        ),
    )  # fmt: skip


def refuse_overrides(trainer: object, ours: type, theirs: type) -> None:
    """Refuse a subclass that overrides methods on which privacy depends.

    Raises:
        InvalidArgument: naming the method.
    """
    for name, hint in (
        ("compute_loss", "Pass loss=, a function (forward, params, batch) -> one loss a sample."),
        ("training_step", "Use callbacks, or write a loop over dpfunc.make_dp_step."),
        ("get_train_dataloader", "The plan draws the batches; pass a data_collator to change what is in them."),
        ("get_batch_samples", "The plan draws the batches."),
    ):
        if getattr(type(trainer), name) is not getattr(ours, name):
            raise InvalidArgument(f"Expected {name} of DPTrainer, got an override in {type(trainer).__name__}. {hint}")
    for name in ("_get_train_sampler", "_get_dataloader"):
        if getattr(type(trainer), name, None) is not getattr(theirs, name, None):
            raise InvalidArgument(
                f"Expected no sampler of your own, got {name} of {type(trainer).__name__}. Epsilon holds for the "
                "plan's batches; dp_poisson_sampling=False shuffles."
            )


def refuse_model(model: nn.Module) -> None:
    """Refuse a wrapped model, one that mixes samples in training mode, and trained parameters in float16.

    Raises:
        UnsupportedModel: BatchNorm in training mode, or a compiled or wrapped model.
        InvalidArgument: trained parameters in float16.
    """
    if hasattr(model, "_orig_mod") or isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise UnsupportedModel(f"Expected the model itself, got it wrapped in {type(model).__name__}.")
    refuse_narrow_range({name: param for name, param in model.named_parameters() if param.requires_grad})
    refuse_unsupported(model, checkpointing=True)


def refuse_optimizer(optimizer: Any, params: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer that leaves trained parameters as they are: the budget would be spent on them for nothing.

    Raises:
        InvalidArgument: naming a parameter that it does not have.
    """
    if optimizer is None:
        return
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    missing = [name for name, param in params.items() if id(param) not in held]
    if missing:
        raise InvalidArgument(
            f"Expected an optimizer of all {len(params)} trained parameters of the model, got one without "
            f"{len(missing)} of them, e.g. {missing[0]!r}: they would cost noise and never change. Build it from the "
            "parameters of the model that DPTrainer gets (of PEFT: after get_peft_model), or freeze the others: "
            "requires_grad_(False)."
        )


def refuse_values(model: object, privacy: object, key: object, model_init: object, compute_loss_func: object) -> None:
    """Check the constructor arguments of `DPTrainer`.

    Raises:
        InvalidArgument: naming the first that is not what it should be.
    """
    if not isinstance(privacy, PrivacyArguments):
        raise wrong_type("privacy to be PrivacyArguments", "privacy", privacy)
    if key is not None and not isinstance(key, Key):
        raise wrong_type("key to be a dpfunc Key", "key", key, "Use dpfunc.secure_key().")
    if model_init is not None or not isinstance(model, nn.Module):
        raise InvalidArgument("Expected model to be a module, and no model_init: each model is a run of its own.")
    if privacy.dp_enabled:
        refuse_sharded_model(model)
    if compute_loss_func is not None:
        raise InvalidArgument(
            "Expected no compute_loss_func, which gives one loss for a batch. Pass loss=, a function "
            "(forward, params, batch) -> one loss a sample."
        )


def refuse_unit(unit: object) -> None:
    """Check what the accounting will say is protected: a bad text would be found only when a record is written.

    Raises:
        InvalidArgument: no text, an empty one, or one with control characters.
    """
    if not isinstance(unit, str) or not unit.strip() or not unit.isprintable():
        raise fail(
            "unit to say what one row of a batch is, in one line", "unit", unit, "For example unit='one person'."
        )


def refuse_data_name(data_name: object) -> None:
    """Check the name of a data set: another type would be found out at the first checkpoint, after steps.

    Raises:
        InvalidArgument: neither None nor a text.
    """
    if data_name is not None and (not isinstance(data_name, str) or not data_name):
        raise fail("data_name to be a text", "data_name", data_name, "For example a version or a hash of the files.")


def one_draw_a_step(logical_batch_size: int) -> dict[str, object]:
    """Arguments with which the Trainer takes one logical batch a step, and clips no mean of gradients."""
    return {
        "per_device_train_batch_size": logical_batch_size,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": 0.0,
        "average_tokens_across_devices": False,  # each sample has a loss of its own: nothing to average over
    }


def changed(args: Any, values: Mapping[str, object]) -> Any:
    """A copy of `TrainingArguments` with other values; the caller's own are not changed."""
    result = copy.copy(args)
    for name, value in values.items():
        object.__setattr__(result, name, value)
    return result
