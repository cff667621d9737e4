"""Preview of book-keeping: representation, bytes and operations for each use of a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpfunc.batches import batch_size
from dpfunc.engines.bookkeeping import DEFAULT_BUDGET, FactorRecorder
from dpfunc.engines.cost import summed
from dpfunc.engines.guards.loss import check_differentiable
from dpfunc.engines.guards.scope import backward_inside
from dpfunc.engines.rules.table import Use
from dpfunc.engines.tracing.sample_axis_discovery import DiscoveryRecorder
from dpfunc.engines.tracing.trace import Trace, following
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
        parameter, op: what is used, and by which operation. representation: `formed` (B gradients in memory); factors
            that are kept, with a norm of gradients that are formed and `dropped`, or a `ghost` norm; `copies` (private
            copies without memory) or `unused`. See `dpfunc/engines/cost.py`.
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


@dataclass
class _CostRecorder(FactorRecorder):
    """Recorder of book-keeping that also notes the cost of each use."""

    num_samples: int = 0
    costs: list[UseCost] = field(default_factory=list)

    def use(self, use: Use, targets: Mapping[str, int], output: Tensor, needed: Mapping[str, Tensor | None]) -> Tensor:
        """Note the use as book-keeping does, and its cost: the choice is about the largest parameter."""
        result = super().use(use, targets, output, needed)
        choice = self.chosen[use.key]
        largest = max(use.wanted, key=lambda argument: use.shapes[argument].numel())
        for argument, name in use.wanted.items():
            chosen = argument == largest and use.rule.costs is not None
            own = choice if chosen else summed(use.shapes[argument].numel()).choose(use.num_samples)
            shape = tuple(use.shapes[argument])
            self.costs.append(UseCost(name, use.name, own.representation, shape, own.num_bytes, own.operations))
        return result

    def copies(self, tracked: Tracked, copies: Tensor, sample_axis: SampleAxis) -> None:
        """Keep the private copies, and note their cost."""
        super().copies(tracked, copies, sample_axis)
        shape = tuple(tracked.tensor.shape)
        cost = summed(tracked.tensor.numel()).choose(self.num_samples)
        self.costs.append(UseCost(tracked.name, "pointwise", "copies", shape, cost.num_bytes, cost.operations))


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
    parameter  shape   op      representation  MiB   million operations
    w          (2, 3)  linear  ghost           0.00  0.0
    all                1 uses                  0.00  0.0
    """
    num_samples = batch_size(batch)
    if num_samples < 2:
        raise InvalidArgument(f"Expected a batch of at least 2 samples, got {num_samples}.")
    with torch_seed(insecure_key(0)):
        discovery = DiscoveryRecorder(Trace(num_samples))
        leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
        budget = DEFAULT_BUDGET if memory_budget is None else memory_budget
        recorder = _CostRecorder(budget, num_samples=num_samples)
        tracker = Tracker(leaves, num_samples, discovery, recorder)
        with following(discovery.trace, batch), torch.enable_grad(), backward_inside(), tracker:
            check_differentiable(loss_fn(leaves, batch), num_samples)
    used = {cost.parameter for cost in recorder.costs}
    unused = (UseCost(n, "", "unused", tuple(p.shape), 0, 0) for n, p in params.items() if n not in used)
    return Explanation(num_samples, (*recorder.costs, *unused))
