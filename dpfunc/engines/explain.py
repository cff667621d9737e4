"""Preview of book-keeping: representation, bytes and operations for each use of a parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpfunc.batches import batch_size
from dpfunc.engines.bookkeeping import DEFAULT_BUDGET, FactorRecorder
from dpfunc.engines.guards.scope import backward_inside
from dpfunc.engines.rules.cost import norm_flops
from dpfunc.engines.rules.table import Use
from dpfunc.engines.tracing.sample_axis_discovery import DiscoveryRecorder
from dpfunc.engines.tracing.trace import Trace, following
from dpfunc.engines.uses.accumulate import check_differentiable
from dpfunc.engines.uses.sample_axis import SampleAxis
from dpfunc.engines.uses.tracked import Tracked
from dpfunc.engines.uses.tracker import Tracker
from dpfunc.errors import InvalidArgument
from dpfunc.rng import insecure_key, torch_seed
from dpfunc.types import Batch, LossFn, Params


@dataclass(frozen=True)
class UseCost:
    """Representation of one use of one parameter, with its memory and operations.

    Args:
        parameter, op: what is used, and by which operation. representation: `formed` (B gradients in memory), `factors`
            (kept, and multiplied once the factors are known), `copies` (private copies without memory) or `unused`.
        shape: of the parameter. num_bytes: memory of the representation. flops: of norms and sums beyond the backward
            pass of ordinary training, without the operations of the gradient itself.
    """

    parameter: str
    op: str
    representation: str
    shape: tuple[int, ...]
    num_bytes: int
    flops: int


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
        head = ("parameter", "shape", "op", "representation", "MiB", "Mflop")
        lines = [
            (use.parameter, str(use.shape), use.op, use.representation, f"{use.num_bytes / 2**20:.2f}",
             f"{use.flops / 1e6:.1f}")
            for use in self.uses
        ]  # fmt: skip
        total = ("all", "", f"{len(lines)} uses", "", f"{self.num_bytes / 2**20:.2f}",
                 f"{sum(use.flops for use in self.uses) / 1e6:.1f}")  # fmt: skip
        widths = [max(len(row[column]) for row in (head, *lines, total)) for column in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *lines, total)
        )


@dataclass
class _CostRecorder(FactorRecorder):
    """Recorder of book-keeping that also notes the cost of each use."""

    costs: list[UseCost] = field(default_factory=list)

    def forms(self, use: Use, output: Tensor, saved: Sequence[Tensor]) -> bool:
        """Decide as the recorder of book-keeping does, and note the cost."""
        formed = super().forms(use, output, saved)
        for argument, name in use.wanted.items():
            shape = tuple(use.shapes[argument])
            numbers = use.num_samples * math.prod(shape)
            if formed:
                cost = UseCost(name, use.name, "formed", shape, 4 * numbers, 4 * numbers)
            else:
                positions = output.numel() // (use.num_samples * max(1, shape[0] if shape else 1))
                num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (output, *saved))
                flops = _norm_flops(use.num_samples, max(1, positions), shape)
                cost = UseCost(name, use.name, "factors", shape, num_bytes, flops)
            self.costs.append(cost)
        return formed

    def copies(self, tracked: Tracked, copies: Tensor, sample_axis: SampleAxis) -> None:
        """Keep the private copies, and note their cost."""
        super().copies(tracked, copies, sample_axis)
        shape = tuple(tracked.tensor.shape)
        self.costs.append(UseCost(tracked.name, "pointwise", "copies", shape, 4 * copies.numel(), 4 * copies.numel()))


def _norm_flops(num_samples: int, positions: int, shape: tuple[int, ...]) -> int:
    """The cheaper of the ghost norm and the formed one."""
    if len(shape) < 2:
        return 4 * num_samples * positions
    return num_samples * norm_flops(positions, shape[0], math.prod(shape[1:]))


def explain(loss_fn: LossFn, params: Params, batch: Batch, memory_budget: int | None = None) -> Explanation:
    """Describe what `bookkeeping` does with each use of each parameter, for batches of this shape.

    Runs the model forward.

    Args:
        loss_fn: `(params, batch) -> (B,)`. params: trainable parameters. batch: at least two samples.
        memory_budget: as for `bookkeeping`.

    Returns:
        The table of uses, in the order of the forward pass; parameters that are not used come last.

    Raises:
        InvalidArgument: fewer than two samples. UnsupportedModel: as `bookkeeping` raises it.

    Guarantees:
        every parameter is in the table (tests/engines/test_explain.py).

    >>> loss_fn = lambda params, batch: torch.nn.functional.linear(batch, params["w"]).sum(1)
    >>> print(explain(loss_fn, {"w": torch.ones(2, 3)}, torch.ones(4, 3)))
    parameter  shape   op      representation  MiB   Mflop
    w          (2, 3)  linear  factors         0.00  0.0
    all                1 uses                  0.00  0.0
    """
    num_samples = batch_size(batch)
    if num_samples < 2:
        raise InvalidArgument(f"Expected a batch of at least 2 samples, got {num_samples}.")
    with torch_seed(insecure_key(0)):
        discovery = DiscoveryRecorder(Trace(num_samples))
        leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
        recorder = _CostRecorder(DEFAULT_BUDGET if memory_budget is None else memory_budget)
        tracker = Tracker(leaves, num_samples, discovery, recorder)
        with following(discovery.trace, batch), torch.enable_grad(), backward_inside(), tracker:
            check_differentiable(loss_fn(leaves, batch), num_samples)
    used = {cost.parameter for cost in recorder.costs}
    unused = (UseCost(n, "", "unused", tuple(p.shape), 0, 0) for n, p in params.items() if n not in used)
    return Explanation(num_samples, (*recorder.costs, *unused))
