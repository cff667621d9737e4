"""Compares an engine with single samples on a few rows, with perturbed parameters, before it is used for another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpfunc.engines.guards.lockstep import anywhere
from dpfunc.engines.guards.row_independence import check_isolated, perturbed_params, some_rows
from dpfunc.engines.loop import loop
from dpfunc.rng import insecure_key, torch_seed
from dpfunc.types import Batch, Engine, LossFn, Params

_GRAD_ROWS = 2


@dataclass(frozen=True)
class _Probe:
    """Losses and gradients of a few single samples, and how far an engine may be from them.

    Args:
        params, batch: perturbed_params parameters and GRAD_ROWS rows. grads: of single samples, name -> (B, *shape).
        usable_B: rows with finite gradients. tolerance: relative.
    """

    params: Params
    batch: Batch
    losses_B: Tensor
    grads: Mapping[str, Tensor]
    usable_B: Tensor
    tolerance: float

    def differing(self, loss_fn: LossFn, engine: Engine) -> list[str]:
        """The parameters whose per-sample gradients differ; empty if the engine agrees.

        Raises:
            UnsupportedModel: the engine cannot do it.
        """
        with torch_seed(insecure_key(0)):
            found: Any = engine(loss_fn, self.params, self.batch)
        norms = [_norms(grad)[self.usable_B] for grad in self.grads.values()]
        scale = max((float(norms_B.max()) for norms_B in norms if len(norms_B)), default=0.0)
        flags = []
        for name, grad_B in self.grads.items():
            off_B = _norms(found.grads[name].dense().to(grad_B.dtype) - grad_B)[self.usable_B]
            flags.append(not bool((off_B <= self.tolerance * scale + torch.finfo(grad_B.dtype).tiny).all()))
        differs = anywhere(torch.tensor(flags, device=self.usable_B.device), self.params).tolist()
        return [name for name, flag in zip(self.grads, differs, strict=True) if flag]


def _norms(grads_B: Tensor) -> Tensor:
    norms_B: Tensor = torch.linalg.vector_norm(grads_B.reshape(len(grads_B), -1), dim=1)
    return norms_B


def take_probe(loss_fn: LossFn, params: Params, batch: Batch) -> _Probe:
    """Losses of rows together and alone, and the gradients of two single samples.

    Raises:
        UnsupportedModel: a row's loss depends on the rows beside it, or on random numbers that cannot be switched off.
    """
    values = perturbed_params(params)
    tolerance = check_isolated(loss_fn, values, batch)
    pair = some_rows(batch, _GRAD_ROWS)
    with torch_seed(insecure_key(0)):
        single = loop()(loss_fn, values, pair)
    grads = {name: grad.dense() for name, grad in single.grads.items()}
    usable_B = torch.stack([torch.isfinite(_norms(grad)) for grad in grads.values()]).all(0)
    return _Probe(values, pair, single.losses_B, grads, ~anywhere(~usable_B, params), tolerance)
