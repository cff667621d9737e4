"""Previews of a step: representation, bytes and operations for each use of a parameter.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from dpfunc.batches import batch_size
from dpfunc.engines._levels import PassResult
from dpfunc.engines._numerics import sum_cost
from dpfunc.engines._rules.table import ParameterUse
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


def _of_use(use: ParameterUse) -> list[UseCost]:
    """The cost of each parameter of a use: the choice is about the largest one, and the others are formed."""
    choice = use.choice
    largest = max(use.wanted, key=lambda argument: use.shapes[argument].numel())
    costs = []
    for argument, name in use.wanted.items():
        shape = tuple(use.shapes[argument])
        if argument == largest and use.rule.costs is not None:
            costs.append(UseCost(name, use.name, choice.representation, shape, choice.num_bytes, choice.operations))
        else:
            costs.append(_of_formed(name, use.name, shape, use.num_samples))
    return costs


def _of_formed(name: str, op: str, shape: Sequence[int], num_samples: int) -> UseCost:
    cost = sum_cost(math.prod(shape)).choose(num_samples)
    return UseCost(name, op, cost.representation, tuple(shape), cost.num_bytes, cost.operations)


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

    >>> import torch
    >>> loss_fn = lambda params, batch: torch.nn.functional.linear(batch, params["w"]).sum(1)
    >>> print(explain(loss_fn, {"w": torch.ones(2, 3)}, torch.ones(4, 3)))
    parameter  shape   op      representation  MiB   million operations
    w          (2, 3)  linear  ghost           0.00  0.0
    all                1 uses                  0.00  0.0
    """
    num_samples = batch_size(batch)
    if not num_samples:
        raise InvalidArgument("Expected a batch of at least 1 sample, got none.")
    passes: list[PassResult] = []
    with torch_seed(insecure_key(0)):
        norms = VmapGrad(on_pass=passes.append)(loss_fn, params, batch).sq_norms()
    uses = chain.from_iterable(reversed(each.uses) for each in passes)
    costs = list(chain.from_iterable(map(_of_use, uses)))
    looped = num_samples
    for each in passes:
        costs += [_of_formed(name, "vmap(grad)", params[name].shape, len(each.losses_B)) for name in each.rest]
        looped -= len(each.losses_B)
    if looped:
        costs += [_of_formed(n, "loop", params[n].shape, looped) for n, norms_B in norms.items() if norms_B.any()]
    unused = params.keys() - {cost.parameter for cost in costs}
    costs += [UseCost(n, "", "unused", tuple(params[n].shape), 0, 0) for n in filter(unused.__contains__, params)]
    return Explanation(num_samples, tuple(costs))
