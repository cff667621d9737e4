"""Small exchanges between the processes of a run. One process alone (`ranks=None`) exchanges nothing.

May import: its folder, lora and below. Privacy depends on it: yes.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.digests import checksum, digest, in_hex
from dpfunc._utils.parts import shard_dims
from dpfunc._utils.processes import arrived, reason_of_failed, tell
from dpfunc._utils.validation import shorten
from dpfunc.distributed.ranks import Ranks
from dpfunc.errors import CheckpointError, DPFuncError, InvalidArgument, RankMismatch, StepAborted
from dpfunc.rng import Key, secure_key

T = TypeVar("T")


def any_rank(flag: bool, ranks: Ranks) -> bool:
    """True if the flag is true on any process. All processes must call it."""
    value = torch.tensor([int(flag)], device=ranks.device)
    for group in reversed(ranks.groups):  # parts first: then each data group has a process that knows
        dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return bool(value.item())


@contextmanager
def together(ranks: Ranks | None, error: DPFuncError) -> Iterator[None]:
    """Context in which each process works without communication; then all continue, or all raise (others: `error`)."""
    failed, anywhere = True, False
    try:
        yield
        failed = False
    finally:
        if failed and ranks is not None:
            tell(sys.exception())
        anywhere = ranks is not None and any_rank(failed, ranks)
    if anywhere:
        raise type(error)(f"{error} Its error: {reason_of_failed()}")


def all_or_none(action: Callable[[], T], ranks: Ranks | None, what: str) -> T:
    """The result of an action on each process; if it fails on one, that one raises its error, the others their own.

    Args:
        action: what each process does; it must not communicate. ranks: of the run; None does it alone.
        what: what did not come about, with which the error of the others begins.

    Raises:
        CheckpointError: the action failed on another process.

    >>> all_or_none(lambda: 3, None, "Nothing was read")
    3
    """
    with together(ranks, CheckpointError(f"{what}: another process failed; its own error says why.")):
        return action()


def is_writer(ranks: Ranks | None) -> bool:
    """True on the one process that writes files and prints messages; always true without other processes.

    >>> is_writer(None)
    True
    """
    return ranks is None or ranks.writes


def once(ranks: Ranks | None, action: Callable[[], object]) -> None:
    """Run an action on the process that writes, while the others wait; when it fails, a StepAborted on the others.

    Args:
        ranks: of the run; None does it. action: what to do.

    >>> once(None, lambda: print("done"))
    done
    """
    with together(ranks, StepAborted("The process that writes could not go on; its own error says why.")):
        if is_writer(ranks):
            action()


def shared(value: T, ranks: Ranks | None) -> T:
    """The value of the process that writes, on all of them."""
    values = [value]
    for group in () if ranks is None else ranks.groups:  # from the first of each: in the end from that of both
        dist.broadcast_object_list(values, dist.get_global_rank(group, 0), group)
    return values[0]


def shared_key(ranks: Ranks, key: Key | None = None) -> Key:
    """One key for all processes: that of the process that writes, by default fresh from its operating system.

    Args:
        ranks: of the run. key: the key, where the caller has one (an insecure one, in tests); used on one process.
    """
    own = secure_key() if key is None else key
    return Key(*shared((bytes(own.secret), own.guessable), ranks))


def by_writer(action: Callable[[], object], ranks: Ranks | None, what: str) -> Any:
    """The JSON values that the process which writes gets from an action, on all processes; or an error on all.

    Args:
        action: what that process does. ranks: of the run; None does it. what: as in `all_or_none`.

    >>> by_writer(lambda: [1, 2], None, "Nothing was read")
    [1, 2]
    """
    own = all_or_none(lambda: json.dumps(action()) if is_writer(ranks) else "", ranks, what)
    return json.loads(shared(own, ranks))


def gathered_rows(row: Iterable[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Integers of each process of a group, in the order of their ranks; sent from `device`."""
    message = torch.tensor(list(row), dtype=torch.int64, device=device)
    table = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
    arrived(dist.all_gather(table, message, group=group, async_op=True))
    return cast(list[list[int]], torch.stack(table).tolist())


def check_same(name: str, text: str, ranks: Ranks | None, hint: str = "") -> None:
    """Check that a text is the same on all processes; a RankMismatch on all if not.

    Args:
        name: of the text, for the error message. text: of this process; only a digest is sent. ranks: of the run.
        hint: what to do about a difference, for the error message.
    """
    if ranks is None:
        return
    differing, anywhere = _differing({name: (0, digest(text))}, ranks)
    if anywhere:
        digests = [in_hex(value) for value in differing.get(name, ())]
        shown = f"{digests}, in the order of their ranks" if differing else "others say which"
        advice = f"{hint} Nothing was spent.".lstrip()
        raise RankMismatch(f"The processes of this run have different {name}: {shown}. {advice}")


def check_same_data(describe: Callable[[], str], ranks: Ranks | None) -> str:
    """Check that all processes describe their data set alike; a RankMismatch on all if not.

    Args:
        describe: reads it and must not communicate, e.g. `lambda: dpfunc.sampling.data_name(dataset)`. ranks: of the
            run.

    Returns:
        The description.

    Guarantees:
        tests/distributed/test_object_collectives.py::test_a_data_set_in_another_order_is_an_error_of_all.
    """
    unread = StepAborted("Another process could not read its data set; its own error says why. Nothing was spent.")
    with together(ranks, unread):
        text = describe()
    check_same(
        "data sets", text, ranks,
        "A draw is a list of record numbers: all processes need the same records in the same order, prepared alike. "
        "Otherwise a record can be in one batch twice. Sort lists of files, do not iterate over sets, and shuffle with "
        "the same seed. If records differ each time they are read (random numbers other than torch's), name the data "
        "set: data_name=..., a version or a hash.",
    )  # fmt: skip
    return text


def check_agreement(texts: Mapping[str, str], tensors: Mapping[str, Tensor], ranks: Ranks | None) -> None:
    """Check that all have the same texts, and those with the same part of a tensor the same numbers."""
    if ranks is None:
        return
    shapes = str([(name, tuple(t.shape), t.dtype) for name, t in tensors.items()])
    all_texts = {**texts, "names and shapes of tensors": shapes}
    differing, anywhere = _differing({name: (0, digest(text)) for name, text in all_texts.items()}, ranks)
    if not anywhere:  # the same names, so that what follows compares like with like
        differing, anywhere = _differing({n: (_part(t), checksum([(n, t)])) for n, t in tensors.items()}, ranks)
    if anywhere:
        raise RankMismatch(
            f"The processes of this run disagree about {shorten(list(differing)) or 'something that others name'}; no "
            "checkpoint was made. Each must pass the same directory, plan, state, data, parameters and optimizer "
            "state; a state is that after the last step, which all have taken. What is not sharded must be equal in "
            "every bit."
        )


def _part(tensor: Any) -> int:
    """Number that identifies this process's part of a tensor by its position in the mesh."""
    return digest(str([tensor.device_mesh.get_coordinate()[axis] for axis in shard_dims(tensor)]))


def _differing(values: Mapping[str, tuple[int, int]], ranks: Ranks) -> tuple[dict[str, list[int]], bool]:
    """Of values, name -> (part, value), those that differ with the same part; True if any process found some."""
    differing: dict[str, list[int]] = {}
    for group in ranks.groups:
        table = gathered_rows([number for pair in values.values() for number in pair], group, ranks.device)
        for index, name in enumerate(values):
            pairs = [(row[2 * index], row[2 * index + 1]) for row in table]
            if len(set(pairs)) > len(dict(pairs)):
                differing.setdefault(name, [value for _, value in pairs])
    return differing, any_rank(bool(differing), ranks)


def digest_over_ranks(text: str, ranks: Ranks | None) -> str:
    """Short digest of the texts of all processes, in the order of their ranks; the same on all."""
    value = digest(text)
    if ranks is not None:
        for group in ranks.groups:
            value = digest(str(gathered_rows([value], group, ranks.device)))
    return in_hex(value)


@torch.no_grad()
def replicate(tensors: Iterable[Tensor], ranks: Ranks | None) -> None:
    """Copy the values of the tensors on the first process to all others, in place, as a common start.

    Args:
        tensors: the same number, shapes and dtypes on all processes, e.g. `model.parameters()`. ranks: of the run.
    """
    if ranks is None:
        return
    for tensor in (tensor for tensor in tensors if tensor.numel() and not tensor.is_meta):
        message = tensor.detach().to(ranks.device, copy=True).contiguous()
        for group in ranks.groups:  # from the first of each: in the end from the one that is first in both
            dist.broadcast(message.reshape(-1).view(torch.uint8), dist.get_global_rank(group, 0), group=group)
        tensor.copy_(message)


def rank_and_size(ranks: Ranks | None) -> tuple[int, int]:
    """Number of this process among all processes of the run, and how many there are.

    >>> rank_and_size(None)
    (0, 1)
    """
    if ranks is None:
        return 0, 1
    parts = ranks.tensor_group
    number, count = (0, 1) if parts is None else (dist.get_rank(parts), dist.get_world_size(parts))
    return ranks.rank + ranks.size * number, ranks.size * count


def joint_group(ranks: Ranks) -> dist.ProcessGroup:
    """One group of all processes of the run; with a tensor group there must be no others."""
    if ranks.tensor_group is None or dist.group.WORLD is None:
        return ranks.group
    found, every = rank_and_size(ranks)[1], dist.get_world_size()
    if found != every:
        raise InvalidArgument(
            f"Expected the run to have all {every} processes of torch.distributed, got {found}. Start the processes of "
            "a run in a job of their own."
        )
    return dist.group.WORLD
