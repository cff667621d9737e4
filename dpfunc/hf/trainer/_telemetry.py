"""Telemetry of the Trainer: accuracy beside the loss of a task, and what is logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpfunc.clipping import Telemetry
from dpfunc.errors import InvalidArgument
from dpfunc.hf._facts import Caller
from dpfunc.hf.tasks import TASKS
from dpfunc.hf.trainer._run import Loss
from dpfunc.types import Params


def with_accuracy(task: Loss, telemetry: Telemetry | None) -> Any:
    """The loss of a task by name, as `(losses, aux)` with the accuracy of each sample, if telemetry needs it."""
    if telemetry is None or not isinstance(task, str) or "accuracy" not in {each.name for each in telemetry.statistics}:
        return task
    own = TASKS[task]

    def both(forward: Caller, params: Params, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        found: list[Any] = []

        def _noted(*args: Any, **inputs: Any) -> Any:
            found.append(forward.forward(*args, **inputs))
            return found[-1]

        losses_B = own(replace(forward, forward=_noted), params, batch)
        logits, labels = getattr(found[-1], "logits", None), batch.get("labels")
        if logits is None or labels is None or labels.ndim != 1 or logits.ndim != 2 or labels.is_floating_point():
            raise InvalidArgument(
                "Expected one class a sample for dp_telemetry='accuracy', labels (B,) and logits (B, C), got others. "
                "Leave it out, or pass a loss that returns (losses, aux) and name a key of aux."
            )
        return losses_B, {"accuracy": (logits.argmax(1) == labels).float()}

    return both


def averaged(told: Sequence[Any]) -> dict[str, float]:
    """The means of released statistics over some steps, by the names that loggers get. Released."""
    means = {name: torch.tensor([step[name] for step in told]).mean(0) for name in (told[0] or () if told else ())}
    return {
        f"released/{name}{f'_{place}' if values.ndim else ''}": number
        for name, values in means.items() for place, number in enumerate(values.reshape(-1).tolist())
    }  # fmt: skip
