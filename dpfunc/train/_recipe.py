"""Values that a job leaves out: rate, batch size and steps from the recipe of its strategy; how texts are pooled.

May import: its folder, features and below. Privacy depends on it: no.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from torch import nn

from dpfunc._utils.validation import refuse
from dpfunc.accounting import Ledger, epsilon_left
from dpfunc.errors import InvalidArgument
from dpfunc.hf.pooled import wants_mean
from dpfunc.hf.trainer._recipes import PHYSICAL, model_recipe, with_clip
from dpfunc.recipes import Recipe, Strategy
from dpfunc.train.config import FEATURES, PAIRS, Job

_RECIPES: dict[str, Strategy] = {
    "head": "head", "lora": "lora", "qlora": "lora", "projector": "projector", "full": "pretrained",
}  # fmt: skip


def with_shape(job: Job) -> Job:
    """The job with what decides the shape of its model: how tokens are pooled, and which layers get adapters."""
    pooling, lora = _pooling(job), job.lora
    by_recipe = job.training.learning_rate is None and lora.targets is None and lora.top_layers is None
    if job.strategy == "lora" and pooling == "mean" and by_recipe:
        lora = dataclasses.replace(lora, top_layers=1)
    return dataclasses.replace(job, model=dataclasses.replace(job.model, pooling=pooling), lora=lora)


def _pooling(job: Job) -> Literal["model", "mean"]:
    """Input of a head made from tokens: as the job says; `auto` takes the mean where the model was made so."""
    pools = job.task in PAIRS and job.data.text_pair_column is None and job.strategy in ("head", "lora")
    if job.model.pooling == "auto":
        return "mean" if pools and job.model.init == "pretrained" and wants_mean(job.model_path) else "model"
    refuse(
        (job.model.pooling == "mean" and not pools,
         "Expected model.pooling: mean with classes or numbers of single texts and strategy head or lora only, got "
         f"task={job.task!r}, strategy={job.strategy!r}, data.text_pair_column={job.data.text_pair_column!r}."),
    )  # fmt: skip
    return job.model.pooling


def with_recipe(
    job: Job, model: nn.Module, dataset_size: int, spent: Ledger | None = None
) -> tuple[Job, Recipe | None]:
    """The job with the values that it leaves out, and the recipe for the rest of the budget, or None."""
    # What is given stays: tests/train/test_recipe.py::test_what_is_given_stays
    training, missing = job.training, job.training.missing
    if not missing:
        return job, None
    recipe = _recipe_of(job, model, dataset_size, spent)
    by_recipe = training.learning_rate is None and training.optimizer == "adamw_torch" and training.head_rate is None
    batch = training.batch_size or recipe.expected_batch_size
    at_once = max(1, PHYSICAL // job.data.units_size)  # units that have the usual number of records
    filled = dataclasses.replace(
        training,
        learning_rate=training.learning_rate or recipe.learning_rate,
        head_rate=recipe.head_rate if by_recipe else training.head_rate,
        batch_size=batch,
        steps=recipe.num_steps if "steps" in missing else training.steps,
        physical_batch_size=(training.physical_batch_size or job.privacy.dp_physical_batch_size or min(at_once, batch)),
    )
    return dataclasses.replace(job, training=filled, privacy=with_clip(job.privacy, recipe)), recipe


def _recipe_of(job: Job, model: nn.Module, dataset_size: int, spent: Ledger | None) -> Recipe:
    strategy, epsilon, delta = _RECIPES.get(job.strategy), job.privacy.dp_epsilon, job.privacy.dp_delta
    if strategy == "pretrained" and job.task in FEATURES:
        strategy = "full"  # of a small network that begins at random
    named = " and ".join(f"training.{name}" for name in job.training.missing)
    if strategy is None:
        raise InvalidArgument(f"Expected {named} in the job: there is no recipe for strategy={job.strategy!r}.")
    if epsilon is None or delta is None:
        raise InvalidArgument(
            f"Expected {named} in the job: the recipe needs privacy.dp_epsilon and privacy.dp_delta, which have no "
            "default."
        )
    epsilon = epsilon_left(epsilon=epsilon, delta=delta, spent=spent)
    # A model in 4 bits is not run in evaluation mode before it is trained: bitsandbytes would pack it for inference.
    return model_recipe(
        strategy, model, dataset_size=dataset_size, epsilon=epsilon, delta=delta, measure=job.strategy != "qlora"
    )


def recipe_lines(recipe: Recipe | None, missing: Sequence[str]) -> list[str]:
    """Lines that say which values come from the recipe, and why; and a warning if the noise hides everything."""
    if recipe is None:
        return []
    reasons = recipe.reasons()
    names = [*missing, *(["head_rate"] if "learning_rate" in missing and "head_rate" in reasons else [])]
    lines = [
        f"recipe {recipe.strategy}, from {recipe.dataset_size} records, {recipe.num_parameters:,} trained parameters, "
        f"epsilon={recipe.epsilon:g} and delta={recipe.delta:g}, which are public:",
        *(f"  {name} = {reasons[name]}" for name in names),
    ]
    advice = recipe.advice()
    return lines if advice is None else [*lines, f"WARNING: this will hardly learn. {advice}"]
