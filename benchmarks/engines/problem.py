"""What every contestant is given: a module, one batch, and a loss of each sample; and what is right.

The truth is a loop over single samples in plain autograd: is the clipped sum right, before anything is timed?
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpfunc
from dpfunc.types import Batch, LossFn, Params


@dataclass(frozen=True)
class Problem:
    """A module in training mode whose trainable parameters require gradients, and a batch on the same device.

    Args:
        module: called as `module(inputs)`. inputs, targets: samples on axis 0.
        losses: `(output, targets) -> (B,)`.
        stand_in: builds the layer with the same parameters that a library has in place of torch's own, if any.
        jax_model: name of the same model in `jax_models.py`; or empty. no_jax_model: then, why.
        clip_norm: to which everybody clips.
    """

    module: nn.Module
    inputs: Tensor
    targets: Tensor
    losses: Callable[[Tensor, Tensor], Tensor]
    stand_in: Callable[[nn.Module], nn.Module] | None = None
    jax_model: str = ""
    no_jax_model: str = ""
    clip_norm: float = 1.0

    @property
    def batch_size(self) -> int:
        return len(self.inputs)

    def functional(self) -> tuple[LossFn, dict[str, Tensor]]:
        """The loss of each sample as a function of the trained parameters, and these."""
        forward, params = dpfunc.functionalize(self.module)

        def loss_fn(params: Params, batch: Batch) -> Tensor:
            inputs, targets = batch
            return self.losses(forward(params, inputs), targets)

        return loss_fn, params

    def to(self, device: str) -> Problem:
        inputs, targets = self.inputs.to(device), self.targets.to(device)
        return replace(self, module=self.module.to(device), inputs=inputs, targets=targets)

    def double(self) -> Problem:
        """The same problem in float64; integers stay."""
        batch = [x.double() if x.is_floating_point() else x for x in (self.inputs, self.targets)]
        return replace(self, module=copy.deepcopy(self.module).double(), inputs=batch[0], targets=batch[1])

    def copy(self) -> Problem:
        """The same data, and a module that somebody may change."""
        return replace(self, module=copy.deepcopy(self.module))

    def sizes(self) -> dict[str, int]:
        """Number of samples, of parameters, and of parameters that are trained."""
        count = lambda params: sum(p.numel() for p in params)
        whole, own = count(self.module.parameters()), count(trained(self.module).values())
        return {"batch_size": self.batch_size, "parameters": whole, "trained_parameters": own}


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name; tied ones once."""
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def classification(logits_BK: Tensor, targets_B: Tensor) -> Tensor:
    return F.cross_entropy(logits_BK, targets_B, reduction="none")


def next_token(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross entropy of each sequence: the mean over its own tokens."""
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
    return losses.view(targets_BT.shape).mean(1)


def squared_error(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().flatten(1).mean(1)


def text(batch_size: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Random sequences, and the same sequences one token on."""
    ids = torch.randint(vocabulary, (batch_size, length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def images(batch_size: int, size: int, classes: int, channels: int = 3) -> tuple[Tensor, Tensor]:
    """Random images (B, channels, size, size) and labels."""
    return torch.randn(batch_size, channels, size, size), torch.randint(classes, (batch_size,))


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

    def error(self, sums: Mapping[str, Tensor], bound: float) -> float:
        """The largest relative error of a parameter's clipped sum.

        A sum is measured against the size of its summands (a sum that cancels has no digits left), or against 1 % of
        the typical size where that is larger (some gradients are zero but for rounding). A missing parameter counts as
        zero, an unknown one or a value that is not finite as inf.
        """
        truth, sizes, worst = self.sums[bound], self.sizes[bound], 0.0
        if not sums.keys() <= truth.keys():
            return math.inf
        typical = math.sqrt(sum(size**2 for size in sizes.values()) / len(sizes))
        for name, value in truth.items():
            difference = float((sums[name].double() - value).norm()) if name in sums else float(value.norm())
            scale = max(sizes[name], 0.01 * typical)
            error = difference / scale if scale > 0 else difference
            worst = max(worst, error if math.isfinite(error) else math.inf)
        return worst

    @staticmethod
    def of(module: nn.Module, problem: Problem, bounds: Sequence[float]) -> Truth:
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
        totals = {c: {name: value.cpu() for name, value in total.items()} for c, total in totals.items()}
        return Truth(totals, sizes, norms)
