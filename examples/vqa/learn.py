"""What is trained, with which rates and bounds: chosen on the validation images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from loop import Rows, Task
from torch import Tensor
from vlm import per_image_loss

import dpfunc
from dpfunc import clipping

# Learning rates and shares of the clip norm by kind of parameter.
RATES = {"head": 1.0, "projector": 0.003, "adapters": 0.01}
BOUNDS = {"head": 1.0, "projector": 0.3, "adapters": 0.3}
VALIDATION = "validation and test images, which are held out: the table shows accuracy on them"
UNIT = "one image with all its questions"


def task_of(forward: Callable[..., Tensor], params: Rows, parts: dict[str, Rows]) -> Task:
    """Training of a function `(params, features, question) -> logits`: one loss an image, accuracy over questions."""

    def losses(params: Rows, rows: Rows) -> Tensor:
        return per_image_loss(forward(params, rows["features"], rows["question"]), rows["answer"], rows["asked"])

    def right(params: Rows, rows: Rows) -> tuple[int, int]:
        correct = forward(params, rows["features"], rows["question"]).argmax(-1) == rows["answer"]
        return int((correct & rows["asked"]).sum()), int(rows["asked"].sum())

    return Task(losses, right, params, **parts, rate=lambda name: RATES[kind(name)], betas=(0.9, 0.99))


def blind(task: Task) -> Task:
    """The same task without images: what the questions alone give away."""
    parts = {
        name: {**rows, "features": torch.zeros_like(rows["features"])}
        for name, rows in (("train", task.train), ("validation", task.validation), ("test", task.test))
    }
    return dataclasses.replace(task, **parts)


def kind(name: str) -> str:
    """Head, projector or adapters."""
    return "adapters" if "lora" in name else name.partition(".")[0]


def make_plan(params: Rows, *, epsilon: float, delta: float, n: int, batch: int, steps: int) -> dpfunc.Plan:
    """Automatic clipping with a bound for each kind of parameter, and the noise that the budget asks for."""
    group_of = {name: kind(name) for name in params}
    bounds = {group: BOUNDS[group] for group in sorted(set(group_of.values()))}
    return dpfunc.Plan.for_budget(
        epsilon=epsilon, delta=delta, dataset_size=n, expected_batch_size=min(batch, n), num_steps=steps,
        clip=clipping.Automatic(clip_norm=bounds, groups=clipping.ByName(group_of)),
    )  # fmt: skip
