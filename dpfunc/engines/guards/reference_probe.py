"""Compares an engine with single samples on a few rows, with perturbed parameters, before it is used for another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpfunc.engines.guards.lockstep import anywhere
from dpfunc.engines.guards.row_independence import check_isolated, perturbed_params, some_rows
from dpfunc.engines.loop import loop
from dpfunc.rng import insecure_key, torch_seed
from dpfunc.types import Batch, Engine, LossFn, Params

_GRAD_ROWS = 2


def equal_to_loop(loss_fn: LossFn, params: Params, batch: Batch, engine: Engine) -> bool:
    """True if an engine gives the gradients of single samples, on two rows whose gradients are finite.

    Raises:
        UnsupportedModel: a row's loss depends on the rows beside it, or on random numbers that cannot be switched off;
            or the engine cannot do it.
    """
    values = perturbed_params(params)
    tolerance = check_isolated(loss_fn, values, batch)
    pair = some_rows(batch, _GRAD_ROWS)
    with torch_seed(insecure_key(0)):
        single = loop()(loss_fn, values, pair)
    grads = {name: grad.dense() for name, grad in single.grads.items()}
    usable_B = torch.stack([torch.isfinite(_norms(grad)) for grad in grads.values()]).all(0)
    usable_B = ~anywhere(~usable_B, params)
    with torch_seed(insecure_key(0)):
        found: Any = engine(loss_fn, values, pair)
    norms = [_norms(grad)[usable_B] for grad in grads.values()]
    scale = max((float(norms_B.max()) for norms_B in norms if len(norms_B)), default=0.0)
    flags = []
    for name, grad_B in grads.items():
        off_B = _norms(found.grads[name].dense().to(grad_B.dtype) - grad_B)[usable_B]
        flags.append(not bool((off_B <= tolerance * scale + torch.finfo(grad_B.dtype).tiny).all()))
    return not bool(anywhere(torch.tensor(flags, device=usable_B.device), values).any())


def _norms(grads_B: Tensor) -> Tensor:
    norms_B: Tensor = torch.linalg.vector_norm(grads_B.reshape(len(grads_B), -1), dim=1)
    return norms_B
