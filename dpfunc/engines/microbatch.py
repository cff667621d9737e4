"""A microbatch size from the memory of one sample's activations. Speed and memory only: the sum is the same."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfunc.batches import batch_size, rows, tree_map
from dpfunc.engines.guards.kept_state import refuse_counting
from dpfunc.engines.guards.loss import backward_inside
from dpfunc.engines.loop import RowAlone, state_before
from dpfunc.rng import insecure_key, torch_seed
from dpfunc.types import Batch, LossFn, Params

# Activations of one microbatch on a CPU. Twice as much or half as much changes the time of a step by a few per cent.
_CPU_BYTES = 2**28
# The same on an accelerator, as a share of its memory: the rest is for the model, gradients and what kernels need.
_DEVICE_SHARE = 4


def automatic_size(loss_fn: LossFn, params: Params, batch: Batch) -> int:
    """The largest microbatch whose activations stay within a fixed number of bytes; at least 1.

    One and two samples run forward, and what autograd saves is counted. The result depends on shapes and device alone,
    never on time, so that a step that is repeated takes the same microbatches.

    >>> loss_fn = lambda params, batch: (params["w"] * batch).square().sum(1)
    >>> automatic_size(loss_fn, {"w": torch.ones(2**20)}, torch.ones(2, 2**20)) < 100
    True
    """
    few = rows(batch, 0, 2)
    if batch_size(few) < 2:
        return 1
    before = state_before(loss_fn, params, rows(few, 0, 1))
    one, two = (_saved_bytes(loss_fn, params, tree_map(torch.clone, rows(few, 0, count))) for count in (1, 2))
    refuse_counting(loss_fn, before)
    device = next(iter(params.values())).device
    allowed = _CPU_BYTES
    if device.type == "cuda":
        allowed = torch.cuda.get_device_properties(device).total_memory // _DEVICE_SHARE
    return max(1, allowed // max(1, two - one))


def _saved_bytes(loss_fn: LossFn, params: Params, batch: Batch) -> int:
    bytes_by_storage: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        bytes_by_storage[storage.data_ptr()] = storage.nbytes()
        return tensor

    leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    rows_together = RowAlone(batch, 0)
    try:
        with torch_seed(insecure_key(0)), torch.enable_grad(), backward_inside(), hooks, rows_together:
            losses_B = loss_fn(leaves, batch)
    finally:
        rows_together.memory.end()
    total = sum(bytes_by_storage.values())
    del losses_B  # alive until here: freed storages could be counted twice
    return total
