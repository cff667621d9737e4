"""Several processes that run a loss in lockstep: who decides together, and what happens where one of them fails.

May import: its folder, errors. Privacy depends on it: yes.

Where a model is sharded, all processes run the same passes in the same order: what an engine decides by the values of
its own rows is decided by all, and who fails says so in the store of the job: others wait.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.parts import is_dtensor
from dpfunc.errors import StepAborted, UnsupportedModel

# In a step: the processes with other records, in lockstep; or "independent", nothing in the loss communicates.
_context: ContextVar[dist.ProcessGroup | Literal["independent"] | None] = ContextVar("dpfunc_process", default=None)
# Groups in which messages of a step that one process left are still on their way, and why it left.
broken: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()

_LOOK = timedelta(seconds=0.2)  # who waits looks so often whether another process failed
_ALIKE = 2.0  # seconds in which processes in lockstep fail, if all of them do
_FAILED, _ENDED = "dpfunc/failed", "dpfunc/ended"


@contextmanager
def process_context(processes: dist.ProcessGroup | Literal["independent"]) -> Iterator[None]:
    """Context in which a step computes gradients in lockstep with processes of other records, or independently."""
    with ExitStack() as stack:
        stack.callback(_context.reset, _context.set(processes))
        stack.push(lambda kind, error, trace: failed(error))
        yield


def arrived(work: Any) -> None:
    """Wait for a message; in lockstep over gloo only until another process fails. With nccl, devices wait."""
    while over_gloo() and not work.is_completed():
        try:
            work.wait(_LOOK)
        except RuntimeError:  # not yet; or the error of the message, which the last line raises
            if _store().check([_ENDED]):
                raise StepAborted("Another process failed.") from None
    work.wait()


class AllGather:
    """All-gather of `fully_shard`, as torch's own but for the wait."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        arrived(dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=True))


def _lockstep_group() -> dist.ProcessGroup | None:
    processes = _context.get()
    return None if processes == "independent" else processes


def over_gloo() -> bool:
    """True in lockstep with processes whose messages a thread of the host waits for."""
    group = _lockstep_group()
    return group is not None and dist.get_backend(group) == "gloo"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def tell(error: BaseException | None) -> str:
    """Store the reason why this process fails, before the message that tells the others of it."""
    text = f"process {dist.get_rank()}: {type(error).__name__}: {error}"
    _store().set(_FAILED, text)
    return text


def first_with(name: str) -> int:
    """Number of the process of the job that asked for a name first: this one, if no other did before."""
    return int(_store().compare_set(f"dpfunc/first/{name}", "", str(dist.get_rank())))


def reason_of_failed() -> str:
    """The stored error of the process that failed, read after its message has arrived."""
    return str(_store().get(_FAILED).decode())


def failed(error: BaseException | None) -> None:
    """After an error in lockstep: return if all processes fail here and can continue; else end the step on all."""
    group: Any = _lockstep_group()
    if error is None or group is None:
        return
    store, own = _store(), tell(error)
    place = f"dpfunc/{group._get_sequence_number_for_group()}"
    all_failed = store.add(f"{place}/failed", 1) == dist.get_world_size()
    end = time.monotonic() + _ALIKE
    while not all_failed and time.monotonic() < end and not any(store.check([key]) for key in (place, _ENDED)):
        time.sleep(0.01)
    verdict = store.compare_set(place, "", "all" if all_failed else own).decode()
    if verdict == "all":
        return
    first = store.compare_set(_ENDED, "", verdict).decode()
    broken[group] = (
        f"A process failed inside of a sharded model ({first}). No process took the step, nothing was released and "
        "nothing was spent. The others were waiting for it, so that these processes cannot go on together: start all "
        "of them again, from the last checkpoint."
    )
    if first == own:
        time.sleep(2 * _LOOK.total_seconds())  # where the store ends with this process, the others can read it
        raise error
    raise StepAborted(broken[group]) from error


def initialized() -> bool:
    """True if torch.distributed runs, so that there may be other ranks to communicate with."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_independent() -> bool:
    """True if nothing inside of the loss may communicate."""
    return _context.get() == "independent"


def in_lockstep() -> bool:
    """True if all processes must run the same forward and backward passes."""
    return _lockstep_group() is not None


def message_device(group: dist.ProcessGroup) -> torch.device:
    """Device for small messages of a group: the CPU, unless the backend only knows accelerators."""
    only_cuda = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if only_cuda else torch.device("cpu")


def on_any_process(flag: bool) -> bool:
    """True if a flag is set on this process, or on one with other records that runs in lockstep with it."""
    group = _lockstep_group()
    if group is None:
        return flag
    count = torch.tensor([flag], dtype=torch.float32, device=message_device(group))
    arrived(dist.all_reduce(count, dist.ReduceOp.MAX, group=group, async_op=True))
    return bool(count > 0)


def on_any_rank(params: Mapping[str, Tensor], flag: bool) -> bool:
    """The same, or on a rank that holds other parts of these parameters."""
    count = torch.tensor([flag], dtype=torch.float32, device="cpu")
    for mesh in dict.fromkeys(param.device_mesh for param in params.values() if is_dtensor(param)):
        for dim in range(mesh.ndim):
            arrived(dist.all_reduce(count, dist.ReduceOp.MAX, group=mesh.get_group(dim), async_op=True))
    return on_any_process(bool(count > 0))


@contextmanager
def refused_by_all() -> Iterator[None]:
    """Context in which a refusal by one process becomes a refusal by all. Code in it must not communicate."""
    try:
        yield
    except UnsupportedModel:
        on_any_process(True)
        raise
    if on_any_process(False):
        raise UnsupportedModel("Another process of this run refused the loss for its rows; its own error says why.")
