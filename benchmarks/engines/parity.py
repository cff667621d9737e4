"""Before anything is timed: is the clipped sum right? The truth is a loop over single samples in plain autograd."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.engines.problem import Problem, trained


@dataclass(frozen=True)
class Truth:
    """What a loop over single samples finds.

    Args:
        sums: clip norm C -> sum over samples of `min(1, C / norm) * gradient`: name -> float64.
        sizes: clip norm C -> name -> sum of the norms of those summands, which cannot cancel. norms: one a sample.
    """

    sums: Mapping[float, Mapping[str, Tensor]]
    sizes: Mapping[float, Mapping[str, float]]
    norms: Sequence[float]

    def error(self, sums: Mapping[str, Tensor] | None, bound: float) -> float:
        """How far a clipped sum is off; see `relative_error`."""
        return relative_error(sums, self.sums[bound], self.sizes[bound])

    @staticmethod
    def of(module: nn.Module, problem: Problem, bounds: Sequence[float]) -> Truth:
        """Call the module with one sample of the problem at a time."""
        params = trained(module)
        totals = {c: {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()} for c in bounds}
        sizes: dict[float, dict[str, float]] = {c: dict.fromkeys(params, 0.0) for c in bounds}
        norms = []
        for i in range(problem.batch_size):
            row = slice(i, i + 1)
            loss = problem.losses(module(problem.inputs[row]), problem.targets[row])[0]
            grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
            found = {name: grad for name, grad in zip(params, grads, strict=True) if grad is not None}
            norms.append(math.sqrt(sum(float(grad.double().square().sum()) for grad in found.values())))
            for bound, total in totals.items():
                factor = min(1.0, bound / norms[-1]) if norms[-1] > 0 else 1.0
                for name, grad in found.items():
                    total[name].add_(grad, alpha=factor)
                    sizes[bound][name] += factor * float(grad.norm())
        return Truth(totals, sizes, norms)


def relative_error(sums: Mapping[str, Tensor] | None, truth: Mapping[str, Tensor], sizes: Mapping[str, float]) -> float:
    """The largest relative error of a parameter's sum.

    A sum is measured against the size of its summands (a sum that cancels has no digits left), or against 1 % of the
    typical size where that is larger (some gradients are zero but for rounding). A missing parameter counts as zero,
    an unknown one or a value that is not finite as inf.
    """
    sums = sums or {}
    if not sums.keys() <= truth.keys():
        return math.inf
    typical = math.sqrt(sum(size**2 for size in sizes.values()) / len(sizes))
    worst = 0.0
    for name, value in truth.items():
        difference = float((sums[name].double() - value).norm()) if name in sums else float(value.norm())
        scale = max(sizes[name], 0.01 * typical)
        error = difference / scale if scale > 0 else difference
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst
