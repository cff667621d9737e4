"""Several processes: tensors in parts, their digests, and rules for communication inside of the loss.

May import: its folder, errors. Privacy depends on it: yes.

torch.distributed.tensor is not imported where it is not used. Digests are made for accidents, not for adversaries.
Where a model is sharded, all processes run the same passes in the same order: what an engine decides by the values of
its own rows is decided by all, and who fails says so in the store of the job: others wait.
"""

import hashlib
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from dpfunc.errors import StepAborted, UnsupportedModel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Window(NamedTuple):
    """The part of a tensor that is held here, with the tensor treated as a matrix (shape[0], everything else)."""

    num_rows: int
    num_cols: int
    rows: tuple[int, int]  # (start, stop) of the part
    cols: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns of the part."""
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]


def is_dtensor(tensor: object) -> TypeGuard["DTensor"]:
    """True for a DTensor. Does not import the module of DTensor: if a DTensor exists, it was imported before."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def fsdp_class(name: str) -> type | None:
    """Class of torch.distributed.fsdp, if that was imported."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None)


def any_fully_sharded(parts: Iterable[object]) -> bool:
    """True if `fully_shard` was called on one of these parts of a module."""
    kind = fsdp_class("FSDPModule")
    return kind is not None and any(isinstance(part, kind) for part in parts)


def local(tensor: Tensor) -> Tensor:
    """Part of a tensor that this process holds, without history; a tensor that is no DTensor is returned itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        part: Any = tensor.to_local()
        return cast(Tensor, part.wait() if hasattr(part, "wait") else part)  # for the communication that makes it


def local_like(tensor: Tensor, param: Tensor) -> Tensor:
    """The part of a gradient of `param` that this rank holds of `param`. May communicate."""
    if not is_dtensor(tensor):
        return tensor
    placements = param.placements if is_dtensor(param) else ()
    with torch.no_grad():
        return local(tensor if tuple(tensor.placements) == placements else tensor.redistribute(placements=placements))


def shard_like(full: Tensor, param: Tensor) -> Tensor:
    """Shard a tensor that every rank holds in full like `param`. Does not communicate."""
    if not is_dtensor(param):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)


def distributed(part: Tensor, like: Tensor, placements: Any = None) -> Tensor:
    """A local part as the tensor that it is a part of: a DTensor that is divided as `like`, or itself."""
    if not is_dtensor(like):
        return part
    from torch.distributed.tensor import DTensor

    spec: Any = like
    form: Any = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(part, spec.device_mesh, placements or spec.placements, run_check=False, **form)


def shard_dims(tensor: Tensor) -> dict[int, int]:
    """Mesh dimension -> the dimension of the tensor that it divides. Empty for tensors that are whole."""
    placements = tensor.placements if is_dtensor(tensor) else ()
    return {axis: int(p.dim) for axis, p in enumerate(placements) if hasattr(p, "dim") and not p.is_partial()}


def window(tensor: Tensor, name: str) -> Window:
    """Part of a tensor that this process holds, as rows and columns of a matrix."""
    shape = tuple(tensor.shape)
    num_rows, num_cols = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    if not is_dtensor(tensor):
        return Window(num_rows, num_cols, (0, num_rows), (0, num_cols))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    spec: Any = tensor
    if any(p.is_partial() for p in spec.placements) or any(dim > 1 for dim in shard_dims(tensor).values()):
        raise UnsupportedModel(
            f"Expected {name} to be whole or sharded along its first or second dimension, got placements "
            f"{spec.placements} of shape {shape}."
        )
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, spec.device_mesh, spec.placements)
    sizes, offsets = (*sizes, *[1] * (2 - len(sizes))), (*offsets, *[0] * (2 - len(offsets)))
    inner = math.prod(shape[2:])
    rows = (offsets[0], offsets[0] + sizes[0])
    cols = (offsets[1] * inner, (offsets[1] + sizes[1]) * inner)
    return Window(num_rows, num_cols, rows if rows[0] < num_rows else (num_rows, num_rows), cols)


_WORD = 8  # bytes
_COLUMNS = 4095  # odd: where a number of bits in a row are flipped, all of them, their sum changes


def digest(text: str | bytes) -> int:
    """Hash of a text as a non-negative integer of 63 bits."""
    raw = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 1


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """A digest of names, shapes and all bits, weighted by position: it detects one changed bit, and a changed order."""
    return checksum_and_marks(tensors, ())[0]


def checksum_and_marks(tensors: Iterable[tuple[str, Tensor]], marks: Iterable[Tensor]) -> tuple[int, list[bool]]:
    """The digest of `checksum`, and marks (0-d, bool), in one read from the device."""
    descriptions, sums = [], []
    for name, tensor in tensors:
        part = local(tensor).detach().contiguous()
        descriptions.append(f"{name}{part.dtype}{tuple(part.shape)}")
        flat = part.reshape(-1).view(torch.uint8)
        words = len(flat) // _WORD * _WORD
        head = flat[:words] if flat.storage_offset() % _WORD == 0 else flat[:words].clone()
        tail = F.pad(flat[words:], (0, -len(flat) % _WORD))  # the bytes after the last whole word, as one
        sums += [_hash_words(_condensed(head.view(torch.int64))), _hash_words(tail.view(torch.int64))]
    known = [mark.to(sums[0] if sums else torch.int64) for mark in marks]
    values = torch.stack(sums + known).tolist() if sums or known else []
    return digest(f"{descriptions}{values[: len(sums)]}"), [bool(value) for value in values[len(sums) :]]


def _condensed(words: Tensor) -> Tensor:
    """A short list of words unchanged; of a long one, sums of rows and columns, so that one or two changes show."""
    count = len(words) // _COLUMNS
    if count < 2:
        return words
    rows = words[: count * _COLUMNS].view(count, _COLUMNS)
    return torch.cat([rows.sum(0), rows.sum(1), words[count * _COLUMNS :]])


def _hash_words(words: Tensor) -> Tensor:
    """`sum_i (2 i + 1) (w_i xor (w_i >> 29))`: the shift lets high bits count in low places, too."""
    weights = torch.arange(1, 2 * len(words) + 1, 2, device=words.device)
    return (words >> 29).bitwise_xor_(words).mul_(weights).sum()


def in_hex(digest: int) -> str:
    """A digest as a text of 16 digits."""
    return f"{digest:016x}"


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
