"""The Trainer on several processes: each has a replica and its share of every draw; nothing is wrapped."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfunc import distributed
from dpfunc.batches import batch_size
from dpfunc.checkpoint.format import Checkpoint
from dpfunc.checkpoint.journal import append_line
from dpfunc.checkpoint.resume_policy import History, Note, note_line, read_notes
from dpfunc.distributed.launch import check_launch
from dpfunc.distributed.ranks import Ranks
from dpfunc.errors import CheckpointError, InvalidArgument
from dpfunc.plan import Plan
from dpfunc.state import StepState
from dpfunc.types import Batch

NUM_PROCESSES = "num_processes"
"""Key of the number of processes that wrote a checkpoint, in its `extra` values."""

NUM_NOTES = "num_process_notes"
"""Key of the number of notes beside the journal when the checkpoint was written."""

NOTES = "privacy_processes.jsonl"


@dataclass(frozen=True)
class Replicas:
    """An Accelerator that leaves models as they are, except for their place and their autocast.

    DistributedDataParallel would average gradients that are not clipped yet. All else is the Accelerator's own.
    """

    accelerator: Any = field(repr=False)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (whatever the Accelerator has)
        return getattr(self.accelerator, name)

    def prepare(self, *objects: Any) -> Any:  # noqa: ANN401
        """Prepare objects as the `Accelerator` does; models are not wrapped."""
        ready = [self.prepare_model(o) if isinstance(o, nn.Module) else self.accelerator.prepare(o) for o in objects]
        return ready[0] if len(ready) == 1 else tuple(ready)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = True
    ) -> nn.Module:
        """Prepare a model as the `Accelerator` does for evaluation, that is without wrapping it."""
        placed: nn.Module = self.accelerator.prepare_model(model, device_placement, evaluation_mode=True)
        return placed


def ranks_of(args: Any) -> Ranks | None:  # noqa: ANN401  (TrainingArguments)
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


def as_saved(journal: Path, ranks: Ranks | None) -> dict[str, int]:
    """Values that `check_processes` reads from the `extra` of a checkpoint.

    >>> as_saved(Path("no/journal.jsonl"), None)
    {'num_processes': 1, 'num_process_notes': 0}
    """
    return {NUM_PROCESSES: place(ranks)[1], NUM_NOTES: len(read_notes(journal.with_name(NOTES)))}


def check_processes(saved: Checkpoint, journal: Path, ranks: Ranks | None) -> None:
    """Check that a run with another number of processes repeats no step.

    Sums over other numbers of processes differ in their last bits. A repeated step would release other gradients with
    the same noise. A note beside the journal says who computed which steps.

    Args:
        saved: what is resumed; its `extra` has `as_saved`. journal: of the run. ranks: of now.

    Raises:
        CheckpointError: steps after the checkpoint were released by another number of processes, or notes were lost.
        StepAborted: the same, on the processes that do not write.

    Guarantees:
        tests/distributed/test_launch.py::test_steps_are_repeated_by_as_many_processes_as_before.
    """
    distributed.once(ranks, lambda: check_number(saved, journal.with_name(NOTES), place(ranks)[1]))


def check_number(saved: Checkpoint, notes: Path, now: int) -> None:
    """Apply the rule of `check_processes` on the process that writes; write a note if the number changes."""
    before = {NUM_PROCESSES: int(saved.extra.get(NUM_PROCESSES, 1))}
    known, count = read_notes(notes), int(saved.extra.get(NUM_NOTES, 0))
    if len(known) < count:
        raise CheckpointError(
            f"Expected {notes} with at least {count} notes, as when {saved.path} was saved, got {len(known)}. It says "
            "how many processes released which steps: restore it."
        )
    history = History({"key": saved.state.key.secret.hex(), "layout": before}, known, None)
    for step in range(saved.state.step, saved.state.charged):
        by = history.layout_of(step)[NUM_PROCESSES]
        if by != now:
            raise CheckpointError(
                f"Expected {by} processes, as when step {step} was released, got {now}. The checkpoint {saved.path} is "
                f"of step {saved.state.step}, the journal goes on to step {saved.state.charged - 1}. Steps in between "
                "are repeated with the same noise, which must be bit for bit, and sums over another number of "
                f"processes differ in their last bits. Go on with {by}; at the next checkpoint the number may change."
            )
    if history.layout_of(saved.state.charged)[NUM_PROCESSES] != now:
        append_line(notes, note_line(Note(history.run, saved.state.step, {NUM_PROCESSES: now}, {})))
