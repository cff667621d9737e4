"""Processes that share a step: those with other records, and those with other parts of the parameters; their launch.

May import: its folder, lora and below. Privacy depends on it: yes.
"""

from __future__ import annotations

import atexit
import gc
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.parts import is_dtensor, shard_dims
from dpfunc._utils.processes import broken, initialized, message_device
from dpfunc._utils.validation import expect, fail
from dpfunc.errors import InvalidArgument, StepAborted
from dpfunc.types import Batch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_Reference: TypeAlias = "weakref.ReferenceType[dist.ProcessGroup]"
LONGEST_WAIT = timedelta(hours=1)
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Launchers that say how many processes there are, and set variables that torch does not read.
_OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_TORCHRUN = "Start it with `torchrun --nproc-per-node N ...`, or one process without a launcher."


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, as this one sees them. Made by `data_parallel` and `sharded`.

    Args:
        data, tensor: references to `group` and `tensor_group`. Torch alone holds groups: one that a script still holds
            when Python ends is taken apart too late, and the process aborts.
        rank, size: the rank of this process in `group`, and how many there are.
        independent: nothing inside of the loss communicates, so that a process with an error can still tell the others.
        dummy: one public row, a batch of length 1, that processes without records run with weight zero. None: zeros.
        keeps_parts: the engine takes parts of parameters, and its sums are those of all processes.
        tensor_axes: names of the mesh dimensions of the tensor group.
    """

    data: _Reference = field(repr=False)
    tensor: _Reference | None = field(repr=False)
    rank: int
    size: int
    independent: bool
    dummy: Batch | None = field(default=None, repr=False)
    keeps_parts: bool = False
    tensor_axes: tuple[str, ...] = ()

    @property
    def group(self) -> dist.ProcessGroup:
        """Processes with different records; sums are added over it."""
        return _held(self.data)

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """Processes with the same records and other parts of the same parameters, or None."""
        return None if self.tensor is None else _held(self.tensor)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups that this process belongs to: the data group, then the tensor group if there is one."""
        return (self.group,) if self.tensor_group is None else (self.group, self.tensor_group)

    @property
    def writes(self) -> bool:
        """True on the one process that writes journals and checkpoints."""
        return all(dist.get_rank(group) == 0 for group in self.groups)

    @property
    def device(self) -> torch.device:
        """Device for small messages: one that the backend of the group can send from."""
        return message_device(self.group)


def _held(reference: _Reference) -> dist.ProcessGroup:
    group = reference()
    if group is None:
        raise InvalidArgument(
            "Expected ranks of a process group that is there, got ranks of one that this process has left. Join again, "
            "in a new process, with dpfunc.distributed.from_environment()."
        )
    if group in broken:
        raise StepAborted(broken[group])
    return group


def axes_over(param: Tensor, ranks: Ranks, *, tensor: bool = False) -> tuple[int, ...]:
    """The dimensions of a DTensor's mesh whose processes belong to the data group, or to the tensor group."""
    group = ranks.tensor_group if tensor else ranks.group
    if group is None or not is_dtensor(param):
        return ()
    mesh: Any = param.device_mesh
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    members = set(dist.get_process_group_ranks(group))

    def belongs(axis: int) -> bool:
        processes = set(dist.get_process_group_ranks(mesh.get_group(axis)))
        # where this process alone is in both groups, the name of the dimension decides
        return (names[axis] in ranks.tensor_axes) == tensor if len(processes) == 1 else processes <= members

    return tuple(axis for axis in range(mesh.ndim) if belongs(axis))


def is_sharded_over(param: Tensor, ranks: Ranks, *, tensor: bool = False) -> bool:
    """True if a parameter is sharded over the data group, or with `tensor` over the tensor group."""
    return bool(set(axes_over(param, ranks, tensor=tensor)) & shard_dims(param).keys())


def data_parallel(group: dist.ProcessGroup | None = None, *, dummy: Batch | None = None) -> Ranks:
    """Ranks for processes that each have a replica of the model and a share of the records.

    Args:
        group: a process group with a finite timeout; None is all processes.
        dummy: see `Ranks`.

    Returns:
        Ranks for `make_dp_step(..., ranks=...)` and `plan.batches(state, ranks)`. Nothing inside of the loss may
        communicate: for models that are sharded use `sharded`.

    Raises:
        InvalidArgument: torch.distributed is not initialised, or waits longer than an hour.

    Guarantees:
        the released gradients and the ledger are those of one process, for any number of processes
        (tests/distributed/test_ranks.py::test_any_number_of_processes_gives_the_same).

    >>> data_parallel()
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected torch.distributed to be initialised. Call \
torch.distributed.init_process_group(timeout=timedelta(minutes=5)) in each process, under torchrun.
    """
    _check_initialised()
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, dist.ProcessGroup):
        raise InvalidArgument(f"Expected a process group that this process belongs to, got group={chosen!r}.")
    _check_timeout(chosen)
    return Ranks(weakref.ref(chosen), None, dist.get_rank(chosen), dist.get_world_size(chosen), True, dummy)


def sharded(
    mesh: DeviceMesh, *, data: Sequence[str] = ("dp",), tensor: Sequence[str] = (), dummy: Batch | None = None
) -> Ranks:
    """Ranks for a sharded model (FSDP2, HSDP, tensor parallelism), whose loss communicates.

    Args:
        mesh: of all processes, with names. data: the dimensions whose processes have different records: those of
            `fully_shard`, and the replicas of HSDP. tensor: those of `parallelize_module`, whose processes have the
            same records and parts of the same parameters.
        dummy: see `Ranks`. It must run through the model.

    Returns:
        As `data_parallel`. All processes run the same number of microbatches of the same shapes. After an error of one
        in the loss all raise (nccl: after its timeout), nothing was released: resume the job from its checkpoint.

    Raises:
        InvalidArgument: dimensions that the mesh does not have, that are named twice or not at all, or that are meant
            for context, sequence or pipeline parallelism.
    """
    _check_initialised()
    named = tuple(mesh.mesh_dim_names or ())
    if not data or sorted((*data, *tensor)) != sorted(named):
        raise InvalidArgument(
            f"Expected data and tensor to name each dimension of the mesh {named} once, and data at least one, got "
            f"data={tuple(data)}, tensor={tuple(tensor)}. Context, sequence and pipeline parallelism put parts of a "
            "record's gradient on several processes and are not supported."
        )
    groups = []
    for dims in filter(None, map(tuple, (data, tensor))):
        part = mesh if len(dims) == len(named) == 1 else mesh[dims]
        groups.append(part.get_group() if len(dims) == 1 else part._flatten("_".join(dims)).get_group())
        _check_timeout(groups[-1])
    held = [weakref.ref(group) for group in groups]
    rank, size = dist.get_rank(groups[0]), dist.get_world_size(groups[0])
    return Ranks(held[0], held[1] if tensor else None, rank, size, False, dummy, tensor_axes=tuple(tensor))


def _check_timeout(group: dist.ProcessGroup) -> None:
    """Refuse a timeout of more than an hour: a process that died or hangs must become an error for the others."""
    timeout = None
    with suppress(RuntimeError, AttributeError):  # backends without options have no timeout that could be read
        timeout = group._get_backend(message_device(group)).options._timeout
    if timeout is not None and timeout > LONGEST_WAIT:
        raise InvalidArgument(
            f"Expected a process group with a timeout of at most {LONGEST_WAIT}, got {timeout}: a process that died "
            "would stop all others for good. Call init_process_group(timeout=timedelta(minutes=5))."
        )


def _check_initialised() -> None:
    if not initialized():
        raise InvalidArgument(
            "Expected torch.distributed to be initialised. Call "
            "torch.distributed.init_process_group(timeout=timedelta(minutes=5)) in each process, under torchrun."
        )


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
        expect(device < devices, f"a CUDA device for each process, of {devices} devices", "LOCAL_RANK", device)
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
    sizes = {name: environment.get(name, "1") for name in ("WORLD_SIZE", *_OTHER_LAUNCHERS)}
    found = [f"{name}={count}" for name, count in sizes.items() if count != "1"]
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
