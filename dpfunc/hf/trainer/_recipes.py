"""The recipe of a model: which trained parameters are a new head, how long its inputs are, what a rate can reach.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: no.
"""

import dataclasses
import math
import warnings
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import TrainingArguments

from dpfunc._utils.validation import expect
from dpfunc.accounting import Ledger, epsilon_left
from dpfunc.errors import InvalidArgument, NoiseWarning
from dpfunc.hf.heads import head_of, measure_feature_norm, reads_unit_rows
from dpfunc.hf.trainer._run import trainable
from dpfunc.hf.trainer._settings import changed, word
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.recipes import Recipe, Strategy, recipe
from dpfunc.sampling.loader import check_readable

PHYSICAL = 64  # records differentiated at once where nobody says how many
# What a recipe decides, besides the two sizes of batches. Trainer has one rate; a new head gets its own.
_DECIDED = (
    "learning_rate", "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps",
    "optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
)  # fmt: skip
_SHORT = 0.2  # of the sum of a recipe's rates, below which a run of Adam hardly leaves its start


def model_recipe(
    strategy: Strategy, model: nn.Module, *, dataset_size: int, epsilon: float, delta: float, measure: bool = True
) -> Recipe:
    """The recipe for the trained parameters; the norm of a head's inputs is measured, else that behind a layer norm."""
    head = new_head(strategy, model)
    weight = _weight_of_linear([*head.values()])
    if strategy == "head" and weight is None:
        raise InvalidArgument(
            f"Expected one linear layer to be trained with the recipe 'head', got {sorted(head)}. Freeze the others "
            "(requires_grad_(False)); or give batch size, steps and rate yourself."
        )
    classes = getattr(getattr(model, "config", None), "num_labels", None)
    is_head = weight is not None and (strategy == "head" or len(weight) == classes)  # not words of a language model
    facts: dict[str, Any] = {}
    if weight is not None and is_head:
        own = sum(p.numel() for p in head.values())
        behind_layer_norm = math.sqrt(own / len(weight))
        norm = (measure_feature_norm(model, head) if measure or reads_unit_rows(model) else None) or behind_layer_norm
        facts = {"num_classes": len(weight), "num_head_parameters": own, "feature_norm": norm}
    size = sum(p.numel() for p in trainable(model).values())
    with warnings.catch_warnings(action="ignore", category=NoiseWarning):  # those who use a recipe show its advice
        return recipe(strategy, dataset_size=dataset_size, num_parameters=size, epsilon=epsilon, delta=delta, **facts)


def _weight_of_linear(params: list[Tensor]) -> Tensor | None:
    """The weight, where parameters are those of one linear layer."""
    weights = [p for p in params if p.dim() == 2]
    one = len(weights) == 1 and all(p.shape in (weights[0].shape, weights[0].shape[:1]) for p in params)
    return weights[0] if one else None


def new_head(strategy: Strategy, model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters of a new head: all with `head`, those that are no adapters with `lora`, else none."""
    params = trainable(model)
    if strategy == "lora":
        return head_of(params)
    return params if strategy == "head" else {}


def with_clip(privacy: PrivacyArguments, found: Recipe) -> PrivacyArguments:
    """Privacy arguments with the clip rule of a recipe, where they name neither a rule nor a bound."""
    named = privacy.dp_clip is not None or privacy.dp_max_grad_norm is not None
    return privacy if named else dataclasses.replace(privacy, **found.clip_arguments())


def with_recipe(
    model: nn.Module, train_dataset: object, args: Any, privacy: PrivacyArguments, spent: Ledger | None
) -> tuple[Recipe | None, Any, PrivacyArguments]:
    """The recipe of `dp_recipe` for what is left of the budget, and arguments with what it decides.

    Of what it decides nothing but the defaults must be given.
    """
    if privacy.dp_recipe is None or privacy.dp_epsilon is None or privacy.dp_delta is None:
        return None, args, privacy
    size, delta = privacy.public_size(check_readable(train_dataset, "train_dataset")), privacy.dp_delta
    left = epsilon_left(epsilon=privacy.dp_epsilon, delta=delta, spent=spent)
    found = model_recipe(privacy.dp_recipe, model, dataset_size=size, epsilon=left, delta=delta)
    values = found.training_arguments()
    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    for name in _DECIDED:
        given, default = (getattr(value, "value", value) for value in (getattr(args, name), defaults[name]))
        expect(
            given in (default, values.get(name, default)), f"{name} to be left out with dp_recipe", name, given,
            f"The recipe {found.strategy!r} takes {values.get(name, 'max_steps')}. Leave it out, or leave dp_recipe "
            "out and give all values yourself. Memory is decided by dp_physical_batch_size.",
        )  # fmt: skip
    if not privacy.dp_enabled:
        at_once = min(privacy.dp_physical_batch_size or PHYSICAL, found.expected_batch_size)
        steps = -(-found.expected_batch_size // at_once)
        values |= {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": steps}
    return found, changed(args, values), with_clip(privacy, found)


def short_way(trainer: Any) -> str | None:
    """Advice, with a rate that helps, for a run of Adam whose sum of rates, which bounds its way, is too small."""
    privacy, plan, args = trainer.privacy, vars(trainer).get("plan"), trainer.args
    if plan is None or privacy.dp_epsilon is None or trainer.optimizer is not None:
        return None
    params = trainable(trainer.model)
    strategy: Strategy = "lora" if len(head_of(params)) < len(params) else "head"
    known = strategy == "lora" or _weight_of_linear([*params.values()]) is not None
    if not known or "adam" not in word(args.optim):
        return None
    size, delta = plan.sampler.dataset_size, privacy.dp_delta
    num_steps = trainer._num_steps(size)
    left = epsilon_left(epsilon=privacy.dp_epsilon, delta=delta, spent=trainer._earlier)
    found = model_recipe(strategy, trainer.model, dataset_size=size, epsilon=left, delta=delta, measure=False)
    way, wanted = args.learning_rate * num_steps, found.learning_rate * found.num_steps
    if way >= _SHORT * wanted:
        return None
    steps = max(num_steps, found.num_steps // 4)
    return (
        f"learning_rate={args.learning_rate:g} over {num_steps} steps moves a parameter by at most about {way:.2g}; "
        f"private training of this model needs about {wanted:.2g}, so it will hardly leave its start. Set "
        f"learning_rate={wanted / steps:.2g} and max_steps={steps}, or PrivacyArguments(dp_recipe={strategy!r}), which "
        f"sets batch size, steps and rate ({found.expected_batch_size}, {found.num_steps}, {found.learning_rate:.2g})."
    )


def one_class(predictions: object, labels: object) -> str | None:
    """A sentence if all predictions (n, classes) are one class while the labels (n,) are several; else None."""
    if not isinstance(predictions, np.ndarray) or not isinstance(labels, np.ndarray):
        return None
    fits = predictions.ndim == 2 and predictions.shape[1] > 1 and labels.shape == predictions.shape[:1]
    chosen = np.unique(predictions.argmax(1)) if fits else labels[:0]
    if len(chosen) != 1 or len(np.unique(labels)) < 2:
        return None
    return (
        f"All {len(labels)} predictions are class {chosen[0]}, which {int((labels == chosen[0]).sum())} of the records "
        "have: the model learnt no more than that."
    )
