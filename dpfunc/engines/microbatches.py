"""Microbatches: how many rows fit into memory."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfunc.batches import rows, tree_map
from dpfunc.engines._guards.kept_state import python_state, refuse_counting
from dpfunc.engines._guards.loss import backward_inside
from dpfunc.engines._row_alone import RowAlone
from dpfunc.engines.prepare import aside, made_up, made_up_row
from dpfunc.rng import insecure_key, torch_seed
from dpfunc.types import Batch, LossFn, Params

# Activations of one microbatch on a CPU. Twice as much or half as much changes the time of a step by a few per cent.
_CPU_BYTES = 2**28
# The same on an accelerator, as a share of its memory: the rest is for the model, gradients and what kernels need.
_DEVICE_SHARE = 4


def prepared_size(loss_fn: LossFn, params: Params, batch: Batch) -> int | None:
    """The largest microbatch whose activations stay within a fixed number of bytes; None where numbers decide.

    It follows from made-up rows and the device, never from the time: a step that is repeated takes the same
    microbatches.
    """
    found = set[int | None]()
    for value in (1, 0):
        with aside():
            num_bytes, told = saved_bytes(loss_fn, made_up(params), made_up_row(batch, value))
            found.add(None if told else _largest(params, num_bytes))
    return found.pop() if len(found) == 1 else None


def size_by_row(loss_fn: LossFn, params: Params, batch: Batch) -> int:
    """The same by the first row of a batch, for this batch alone: the loss reads its numbers."""
    before = python_state(loss_fn)
    num_bytes, _ = saved_bytes(loss_fn, params, rows(batch, 0, 1))
    refuse_counting(loss_fn, before)
    return _largest(params, num_bytes)


def _largest(params: Params, num_bytes: int) -> int:
    device = next(iter(params.values())).device
    of_device = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory // _DEVICE_SHARE
    return max(1, (of_device or _CPU_BYTES) // max(1, num_bytes))


def saved_bytes(loss_fn: LossFn, params: Params, row: Batch) -> tuple[int, bool]:
    """Bytes that autograd saves of a row, and if the loss has read numbers of it.

    The row runs forward twice: what both calls save are parameters and constants, which are not counted.
    """
    saved: dict[int, torch.UntypedStorage] = {}  # alive until they are counted: a freed one could count twice
    shared = set[int]()

    def count(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    for _ in range(2):
        shared, own = set(saved), tree_map(torch.clone, row)
        alone = RowAlone(own, 0)
        try:
            with torch_seed(insecure_key(0)), torch.enable_grad(), backward_inside(), hooks, alone:
                loss_fn(leaves, own)
        finally:
            alone.memory.end()
    return sum(storage.nbytes() for key, storage in saved.items() if key not in shared), alone.told
