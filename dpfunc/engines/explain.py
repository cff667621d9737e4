"""Previews of a step: representation, bytes and operations for each use of a parameter; rows that fit into memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfunc.batches import batch_size, rows, tree_map
from dpfunc.engines._guards.kept_state import refuse_counting
from dpfunc.engines._guards.loss import backward_inside
from dpfunc.engines._levels import Passed
from dpfunc.engines._numerics import summed
from dpfunc.engines._rules.table import Use
from dpfunc.engines.loop import RowAlone, state_before
from dpfunc.engines.vmap_grad import VmapGrad
from dpfunc.errors import InvalidArgument
from dpfunc.rng import insecure_key, torch_seed
from dpfunc.types import Batch, LossFn, Params


@dataclass(frozen=True)
class UseCost:
    """Representation of one use of one parameter, with its memory and operations.

    Args:
        parameter, op: what is used, and by which operation. representation: `formed` (B gradients in memory); factors
            that are kept, with a norm of gradients that are formed and `dropped`, or a `ghost` norm; or `unused`. See
            `dpfunc/engines/_numerics.py`.
        shape: of the parameter. num_bytes: kept until the factors of the clip rule are known. operations: of gradients,
            norms and weighted sum, where training without privacy has one product of the sum.
    """

    parameter: str
    op: str
    representation: str
    shape: tuple[int, ...]
    num_bytes: int
    operations: int


@dataclass(frozen=True)
class Explanation:
    """The uses of all parameters; `str` is a table. Public if the shapes of the batch are.

    >>> Explanation(2, (UseCost("w", "linear", "formed", (3, 4), 96, 48),)).num_bytes
    96
    """

    num_samples: int
    uses: tuple[UseCost, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the representations of all uses together."""
        return sum(use.num_bytes for use in self.uses)

    def __str__(self) -> str:
        head = ("parameter", "shape", "op", "representation", "MiB", "million operations")
        lines = [
            (use.parameter, str(use.shape), use.op, use.representation, f"{use.num_bytes / 2**20:.2f}",
             f"{use.operations / 1e6:.1f}")
            for use in self.uses
        ]  # fmt: skip
        total = ("all", "", f"{len(lines)} uses", "", f"{self.num_bytes / 2**20:.2f}",
                 f"{sum(use.operations for use in self.uses) / 1e6:.1f}")  # fmt: skip
        widths = [max(len(row[column]) for row in (head, *lines, total)) for column in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *lines, total)
        )


def _of_use(use: Use) -> list[UseCost]:
    """The cost of each parameter of a use: the choice is about the largest one, and the others are formed."""
    choice = use.choice
    largest = max(use.wanted, key=lambda argument: use.shapes[argument].numel())
    costs = []
    for argument, name in use.wanted.items():
        shape = tuple(use.shapes[argument])
        chosen = argument == largest and use.rule.costs is not None
        own = choice if chosen else summed(math.prod(shape)).choose(use.num_samples)
        costs.append(UseCost(name, use.name, own.representation, shape, own.num_bytes, own.operations))
    return costs


def explain(loss_fn: LossFn, params: Params, batch: Batch) -> Explanation:
    """Describe what `auto` does with each use of each parameter, for batches of this shape.

    Runs the model forward and backward.

    Args:
        loss_fn: `(params, batch) -> (B,)`. params: trainable parameters. batch: at least one sample.

    Returns:
        The table of uses, in the order of the forward pass; then parameters whose gradients are formed by `vmap(grad)`,
        or by the `loop` where rows are computed alone; parameters that are not used come last.

    Raises:
        InvalidArgument: no samples. InvalidArgument, UnsupportedModel: as `auto` raises them.

    Guarantees:
        every parameter is in the table (tests/engines/test_explain.py).

    >>> loss_fn = lambda params, batch: torch.nn.functional.linear(batch, params["w"]).sum(1)
    >>> print(explain(loss_fn, {"w": torch.ones(2, 3)}, torch.ones(4, 3)))
    parameter  shape   op      representation  MiB   million operations
    w          (2, 3)  linear  ghost           0.00  0.0
    all                1 uses                  0.00  0.0
    """
    num_samples = batch_size(batch)
    if not num_samples:
        raise InvalidArgument("Expected a batch of at least 1 sample, got none.")
    passes: list[Passed] = []
    with torch_seed(insecure_key(0)):
        norms = VmapGrad(told=passes.append)(loss_fn, params, batch).sq_norms()
    costs = [cost for passed in passes for use in reversed(passed.uses) for cost in _of_use(use)]
    formed = [(name, "vmap(grad)", len(passed.losses_B)) for passed in passes for name in passed.rest]
    alone = num_samples - sum(len(passed.losses_B) for passed in passes)
    formed += [(name, "loop", alone) for name, norms_B in norms.items() if alone and norms_B.any()]
    for name, op, count in formed:
        shape = tuple(params[name].shape)
        cost = summed(math.prod(shape)).choose(count)
        costs.append(UseCost(name, op, cost.representation, shape, cost.num_bytes, cost.operations))
    used = {cost.parameter for cost in costs}
    unused = (UseCost(n, "", "unused", tuple(p.shape), 0, 0) for n, p in params.items() if n not in used)
    return Explanation(num_samples, (*costs, *unused))


# Activations of one microbatch on a CPU. Twice as much or half as much changes the time of a step by a few per cent.
_CPU_BYTES = 2**28
# The same on an accelerator, as a share of its memory: the rest is for the model, gradients and what kernels need.
_DEVICE_SHARE = 4


def automatic_size(loss_fn: LossFn, params: Params, batch: Batch) -> int:
    """The largest microbatch whose activations stay within a fixed number of bytes; at least 1.

    One and two samples run forward, and what autograd saves is counted. The result depends on shapes and device alone,
    never on time, so that a step that is repeated takes the same microbatches.
    """
    few = rows(batch, 0, 2)
    if batch_size(few) < 2:
        return 1
    before = state_before(loss_fn, params, rows(few, 0, 1))
    one, two = (_saved_bytes(loss_fn, params, tree_map(torch.clone, rows(few, 0, count))) for count in (1, 2))
    refuse_counting(loss_fn, before)
    device = next(iter(params.values())).device
    of_device = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory // _DEVICE_SHARE
    return max(1, (of_device or _CPU_BYTES) // max(1, two - one))


def _saved_bytes(loss_fn: LossFn, params: Params, batch: Batch) -> int:
    storages: dict[int, torch.UntypedStorage] = {}  # alive until they are counted: a freed one could count twice

    def count(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    rows_together = RowAlone(batch, 0)
    try:
        with torch_seed(insecure_key(0)), torch.enable_grad(), backward_inside(), hooks, rows_together:
            loss_fn(leaves, batch)
    finally:
        rows_together.memory.end()
    return sum(storage.nbytes() for storage in storages.values())
