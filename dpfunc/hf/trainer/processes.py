"""The Trainer on several processes: each has a replica and its share of every draw; nothing is wrapped."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfunc import distributed
from dpfunc.batches import batch_size
from dpfunc.distributed.launch import check_launch
from dpfunc.distributed.ranks import Ranks
from dpfunc.errors import InvalidArgument
from dpfunc.functional.fsdp import fsdp_parts
from dpfunc.plan import Plan
from dpfunc.state import StepState
from dpfunc.types import Batch


@dataclass(frozen=True)
class Replicas:
    """An Accelerator that leaves models as they are, except for their place and their autocast.

    DistributedDataParallel would average gradients that are not clipped yet. All else is the Accelerator's own.
    """

    accelerator: Any = field(repr=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)

    def prepare(self, *objects: Any) -> Any:
        """Prepare objects as the `Accelerator` does; models are not wrapped."""
        ready = [self.prepare_model(o) if isinstance(o, nn.Module) else self.accelerator.prepare(o) for o in objects]
        return ready[0] if len(ready) == 1 else tuple(ready)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = True
    ) -> nn.Module:
        """Prepare a model as the `Accelerator` does for evaluation, without wrapping it; parts stay in place."""
        place = False if fsdp_parts(model) else device_placement
        placed: nn.Module = self.accelerator.prepare_model(model, place, evaluation_mode=True)
        return placed


def ranks_of(args: Any) -> Ranks | None:
    """The processes that the Trainer knows; None where it is alone.

    Raises:
        InvalidArgument: the environment promises more processes than the Trainer finds: each would be a run of its own.
    """
    world = int(args.world_size)
    try:
        check_launch(os.environ, world)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"{error} Without an accelerator the Trainer joins other processes with TrainingArguments(use_cpu=True) "
            "only."
        ) from error
    return distributed.data_parallel() if world > 1 else None


def place(ranks: Ranks | None) -> tuple[int, int]:
    """Rank of this process in the data group, and the size of that group.

    >>> place(None)
    (0, 1)
    """
    return (0, 1) if ranks is None else (ranks.rank, ranks.size)


def placeholder_mask(plan: Plan, state: StepState, ranks: Ranks | None, batch: Batch) -> Tensor | None:
    """Mask for a process without records: it runs a placeholder with weight zero, since all processes communicate."""
    if ranks is None or len(plan.draw(state, state.step, ranks)):
        return None
    return torch.zeros(batch_size(batch), dtype=torch.bool)


def mean_loss(losses_B: Tensor, ranks: Ranks | None) -> Tensor:
    """The mean loss of the records of all processes; 0 where there are none. UNRELEASED."""
    total = torch.stack([losses_B.detach().double().sum().cpu(), torch.tensor(float(len(losses_B))).double()])
    if ranks is not None:
        total = total.to(ranks.device)
        dist.all_reduce(total, group=ranks.group)
    return (total[0] / total[1].clamp(min=1)).float()
