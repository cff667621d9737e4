"""Checks that refuse, before anything is spent, a model, optimizer or subclass that breaks differential privacy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dpfunc._utils.validation import fail, wrong_type
from dpfunc.engines.guards.parameters import refuse_narrow_range
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional.refuse import refuse_unsupported
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.settings import refuse_sharded_model
from dpfunc.rng import Key


def refuse_overrides(trainer: object, ours: type, theirs: type) -> None:
    """Refuse a subclass that overrides methods on which privacy depends."""
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
    missing = [name for name, param in params.items() if id(param) not in held]
    if missing:
        raise InvalidArgument(
            f"Expected an optimizer of all {len(params)} trained parameters of the model, got one without "
            f"{len(missing)} of them, e.g. {missing[0]!r}: they would cost noise and never change. Build it from the "
            "parameters of the model that DPTrainer gets (of PEFT: after get_peft_model), or freeze the others: "
            "requires_grad_(False)."
        )


def refuse_values(
    model: object, privacy: object, key: object, model_init: object, compute_loss_func: object, unit: object,
    data_name: object,
) -> None:  # fmt: skip
    """Check the constructor arguments of `DPTrainer`: some would be found out at the first checkpoint, after steps."""
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
    if not isinstance(unit, str) or not unit.strip() or not unit.isprintable():
        raise fail(
            "unit to say what one row of a batch is, in one line", "unit", unit, "For example unit='one person'."
        )
    if data_name is not None and (not isinstance(data_name, str) or not data_name):
        raise fail("data_name to be a text", "data_name", data_name, "For example a version or a hash of the files.")


def recomputed(args: Any) -> dict[str, object]:
    """Arguments that compute activations again in the backward pass, under the names that `TrainingArguments` has."""
    name = "activation" if hasattr(args, "activation_checkpointing") else "gradient"
    return {f"{name}_checkpointing": True, f"{name}_checkpointing_kwargs": {"use_reentrant": False}}


def changed(args: Any, values: Mapping[str, object]) -> Any:
    """A copy of `TrainingArguments` with other values; the caller's own are not changed."""
    result = copy.copy(args)
    for name, value in values.items():
        object.__setattr__(result, name, value)
    return result
