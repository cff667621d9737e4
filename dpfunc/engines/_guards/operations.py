"""Operations of torch that no engine runs: those that write without saying so, and control flow, which runs unseen.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from dpfunc.errors import UnsupportedModel

# Operations that write into tensors of a module without saying so, on devices that a test may not have.
UNDECLARED = frozenset(
    function
    for name in (
        "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats", "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts", "native_batch_norm", "_native_batch_norm_legit",
        "_batch_norm_with_update",
    )
    for packet in (getattr(torch.ops.aten, name),)
    for function in (getattr(torch, name, packet), packet, *(getattr(packet, each) for each in packet.overloads()))
)  # fmt: skip


_CONTROL_FLOW = ("cond", "while_loop", "scan", "map", "map_impl", "associative_scan")


def refuse_undeclared(func: Callable[..., Any]) -> None:
    """Refuse operations that write statistics without declaring it, and torch's control flow, which runs unseen."""
    if isinstance(func, HigherOrderOperator) and func.name() in _CONTROL_FLOW:
        raise UnsupportedModel(
            f"The loss has control flow of torch ({func.name()}), whose operations a step cannot follow. "
            "Use torch.where where a condition is each row's own, and if or for in Python where it is the same for all."
        )
    if func in UNDECLARED:
        name = getattr(func, "__name__", str(func))
        raise UnsupportedModel(
            f"The loss writes values of the batch ({name}) into tensors that were made outside of it (a buffer of a "
            "module): records of one step would reach the gradients of the next. Use model.eval(), or replace the "
            "layer."
        )
