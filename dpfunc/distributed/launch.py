"""A run that torchrun started: this process joins the process group, and shuts it down at the end."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from dpfunc._utils.processes import initialized
from dpfunc._utils.validation import fail
from dpfunc.distributed.ranks import LONGEST_WAIT, Ranks, data_parallel
from dpfunc.errors import InvalidArgument

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Launchers that say how many processes there are, and set variables that torch does not read.
_OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_TORCHRUN = "Start it with `torchrun --nproc-per-node N ...`, or one process without a launcher."


def from_environment(timeout: timedelta = timedelta(minutes=5)) -> Ranks | None:
    """The processes that torchrun started, each with a replica of the model; None where there is one process.

    Args:
        timeout: how long a process waits for the others before it gives up, > 0, at most an hour. It must be longer
            than the process that writes needs for a checkpoint.

    Returns:
        `data_parallel()`, over gloo, or over nccl with the CUDA device LOCAL_RANK. What is initialised already is used
        as it is. None where WORLD_SIZE is not set.

    Raises:
        InvalidArgument: an incomplete environment, one that promises more processes than there are, or fewer CUDA
            devices than processes.

    Guarantees:
        tests/distributed/test_launch.py::test_the_command_is_the_same_on_two_processes.

    >>> from_environment(timedelta(hours=9))
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected 0 < timeout <= 1:00:00, got timeout=9:00:00.
    """
    if not timedelta(0) < timeout <= LONGEST_WAIT:
        raise InvalidArgument(f"Expected 0 < timeout <= {LONGEST_WAIT}, got timeout={timeout}.")
    if initialized():
        return data_parallel()
    if "WORLD_SIZE" not in os.environ:
        check_launch(os.environ, 1)
        return None
    if missing := [name for name in _NEEDED if name not in os.environ]:
        raise InvalidArgument(f"Expected {missing[0]} beside WORLD_SIZE in the environment. {_TORCHRUN}")
    if torch.cuda.is_available():
        device, devices = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), torch.cuda.device_count()
        if device >= devices:
            raise fail(f"a CUDA device for each process, of {devices} devices", "LOCAL_RANK", device)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)
        atexit.register(shutdown)  # threads of a group that is still there when Python ends may abort the process
    return data_parallel()


def check_launch(environment: Mapping[str, str], num_processes: int) -> None:
    """Refuse processes that do not find each other: they would be separate runs, whose costs nobody would add up."""
    for name in ("WORLD_SIZE",) if "WORLD_SIZE" in environment else _OTHER_LAUNCHERS:
        promised = environment.get(name, "1")
        if not promised.isdigit() or int(promised) > num_processes:
            raise InvalidArgument(f"Expected {promised} processes, as {name} says, got {num_processes}. {_TORCHRUN}")
    if "WORLD_SIZE" not in environment and {"MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"} <= environment.keys():
        raise InvalidArgument(
            "Expected the number of processes that `accelerate launch` was given, got one process: with --cpu it "
            f"starts no more. {_TORCHRUN}"
        )


def check_alone(environment: Mapping[str, str]) -> None:
    """Refuse a run without ranks on several processes: they would be separate runs, whose costs nobody would add up."""
    told = {name: environment.get(name, "1") for name in ("WORLD_SIZE", *_OTHER_LAUNCHERS)}
    found = [f"{name}={count}" for name, count in told.items() if count != "1"]
    if initialized() and dist.get_world_size() > 1:
        found.append(f"the process group has {dist.get_world_size()} processes")
    if found:
        raise InvalidArgument(
            f"Expected ranks=..., because {found[0]}: without it each process is a run of its own, and nobody adds up "
            "what they cost. Pass ranks=dpfunc.distributed.from_environment(), or sharded(mesh), to make_dp_step and "
            "plan.batches; for runs on different data, unset what the launcher set."
        )


def check_ranks(ranks: Ranks | None, microbatch_size: int | str | None) -> None:
    """Check that the processes of a run can take steps together: ranks, or None and no other processes."""
    if ranks is None:
        check_alone(os.environ)
    elif not isinstance(ranks, Ranks):
        raise fail("ranks made by dpfunc.distributed.data_parallel() or sharded(mesh)", "ranks", ranks)
    elif microbatch_size == "auto" and not ranks.independent:
        raise InvalidArgument(
            'Expected a number for microbatch_size with a sharded model, got "auto": what each process measures '
            "may differ, and all must run the same microbatches."
        )


def shutdown() -> None:
    """Destroy the process group at the end of a run; a process cannot join it again. Nothing for a single process.

    Delete first what holds the group, like a `DistributedDataParallel`: one that still exists when Python ends aborts
    the process.
    """
    if initialized():
        gc.collect()  # what holds it may be in a cycle
        dist.destroy_process_group()
