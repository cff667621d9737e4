"""What every contestant is given: a module, one batch, and a loss of each sample."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
        """How many samples the batch has."""
        return len(self.inputs)

    def functional(self) -> tuple[LossFn, dict[str, Tensor]]:
        """The loss of each sample as a function of the trained parameters, and these."""
        forward, params = dpfunc.functionalize(self.module)

        def loss_fn(params: Params, batch: Batch) -> Tensor:
            inputs, targets = batch
            return self.losses(forward(params, inputs), targets)

        return loss_fn, params

    def to(self, device: str) -> Problem:
        """The same problem on another device."""
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
        parameters = list(self.module.parameters())
        return {
            "batch_size": self.batch_size,
            "parameters": sum(p.numel() for p in parameters),
            "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        }


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name; tied ones once."""
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def classification(logits_BK: Tensor, targets_B: Tensor) -> Tensor:
    """Cross entropy of each sample."""
    return F.cross_entropy(logits_BK, targets_B, reduction="none")


def next_token(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross entropy of each sequence: the mean over its own tokens."""
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
    return losses.view(targets_BT.shape).mean(1)


def squared_error(output: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error of each sample."""
    return (output - targets).square().flatten(1).mean(1)


def text(batch_size: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Random sequences, and the same sequences one token on."""
    ids = torch.randint(vocabulary, (batch_size, length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def images(batch_size: int, size: int, classes: int, channels: int = 3) -> tuple[Tensor, Tensor]:
    """Random images (B, channels, size, size) and labels."""
    return torch.randn(batch_size, channels, size, size), torch.randint(classes, (batch_size,))
