"""Check that the loss of a row depends on its own row alone: rows in a batch are compared with each row by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpfunc._utils.memory import refuse_out_of_memory
from dpfunc._utils.validation import shorten
from dpfunc.batches import batch_size, row_alone
from dpfunc.engines.guards.collectives import CollectiveRecorder, own_only
from dpfunc.engines.guards.lockstep import in_lockstep, refused_by_all
from dpfunc.engines.guards.loss import check_losses
from dpfunc.engines.guards.python_state import python_state, refuse_counting
from dpfunc.engines.guards.random_calls import OtherRandomCalls, RandomCall, replayed
from dpfunc.engines.guards.scope import backward_inside
from dpfunc.engines.numerics import COARSE, TOLERANCES, accumulation_dtype, tolerance_of
from dpfunc.engines.tracing.trace import Trace, following
from dpfunc.engines.uses.tensor_parallel import shard_like
from dpfunc.errors import UnsupportedModel
from dpfunc.rng import insecure_key, torch_seed
from dpfunc.types import Batch, LossFn, Params

_LOSS_ROWS = 8
_PERTURBATION = 0.02


def perturbed_params(params: Params) -> dict[str, Tensor]:
    """Parameters moved a little, so that nothing is zero by initialisation (LoRA) and gradients flow everywhere."""
    noise = _noise_like(params, 0, lambda dtype: _PERTURBATION)
    return {name: (param.detach() + noise[name]).detach() for name, param in params.items()}


def rounded_params(params: Params, units: float, seed: int) -> dict[str, Tensor]:
    """Parameters moved by about so many units of rounding each; those of 16 bits, whose tolerance is wide, stay."""
    noise = _noise_like(params, seed, lambda dtype: units * torch.finfo(dtype).eps if dtype in TOLERANCES else 0.0)
    return {name: (param.detach() + param.detach() * noise[name]).detach() for name, param in params.items()}


def _noise_like(params: Params, seed: int, scale: Callable[[torch.dtype], float]) -> dict[str, Tensor]:
    """Normal numbers of a scale for each dtype, laid out as the parameters, and the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    noise = {}
    for name, param in params.items():
        values = torch.randn(param.shape, generator=generator, dtype=accumulation_dtype(param.dtype))
        noise[name] = shard_like((scale(param.dtype) * values).to(param.device, param.dtype), param)
    return noise


def some_rows(batch: Batch, num_rows: int) -> Batch:
    """The first rows, repeated where there are fewer."""

    def take(value: Tensor) -> Tensor:
        return value[torch.arange(num_rows, device=value.device) % value.shape[0]]

    return pytree.tree_map(take, batch)


def check_isolated(loss_fn: LossFn, params: Params, batch: Batch, recorder: CollectiveRecorder | None = None) -> float:
    """Compare the losses of up to eight rows together with those of each row alone, with the same random numbers.

    Args:
        loss_fn, params, batch: as for an engine. recorder: notes the meshes of collectives inside of the loss.

    Returns:
        the relative tolerance that fits the dtypes in use.

    Raises:
        UnsupportedModel: a row's loss depends on the rows beside it, or on other ranks.
    """
    few = some_rows(batch, min(_LOSS_ROWS, max(2, batch_size(batch))))
    count = batch_size(few)
    params = {name: param.detach().requires_grad_() for name, param in params.items()}
    trace = Trace(count, recording=True)
    with warnings.catch_warnings(), torch_seed(insecure_key(0)), own_only(recorder):
        warnings.simplefilter("ignore")  # the engine that is chosen warns again
        try:
            with following(trace, few):
                together_B = _losses(loss_fn, params, few, count)
            alone_B = _alone(loss_fn, params, few, count, trace.random_calls)
            before = () if in_lockstep() else python_state(loss_fn)  # FSDP keeps what it communicates
            again_B = _alone(loss_fn, params, few, count, trace.random_calls)
            if before:
                refuse_counting(loss_fn, before)
        except OtherRandomCalls:  # nothing can be compared; an engine that computes rows alone is right nevertheless
            return COARSE
    tolerance = tolerance_of(together_B.dtype, *(value.dtype for value in params.values()))
    with refused_by_all():
        _check_isolated(together_B, alone_B, again_B, tolerance)
    return tolerance


def _losses(loss_fn: LossFn, params: Params, batch: Batch, num_samples: int) -> Tensor:
    with torch.enable_grad(), backward_inside():
        losses_B = loss_fn(params, batch)
    check_losses(losses_B, num_samples)
    return losses_B.detach()


def _alone(
    loss_fn: LossFn, params: Params, batch: Batch, num_samples: int, random_calls: Sequence[RandomCall]
) -> Tensor:
    losses = []
    try:
        for row in range(num_samples):
            with replayed(random_calls, row, num_samples):
                losses.append(_losses(loss_fn, params, row_alone(batch, row), 1))
    except (RuntimeError, ValueError, IndexError) as error:
        refuse_out_of_memory(error)
        raise UnsupportedModel(
            f"The loss of {num_samples} samples can be computed, but not that of one sample alone, so the samples of a "
            f"batch influence each other: {str(error).splitlines()[0]} Likely cause: BatchNorm in training mode; use "
            "dpfunc.replace_batchnorm(model)."
        ) from error
    return torch.cat(losses)


def _check_isolated(together_B: Tensor, alone_B: Tensor, again_B: Tensor, tolerance: float) -> None:
    together_B, alone_B, again_B = (losses_B.double() for losses_B in (together_B, alone_B, again_B))
    known_B = torch.isfinite(alone_B) & torch.isfinite(again_B)
    scale = float(alone_B[known_B].abs().max()) if bool(known_B.any()) else 0.0
    if not bool((torch.where(known_B, alone_B - again_B, 0.0).abs() <= tolerance * scale).all()):
        return  # random numbers of other libraries: together and alone cannot be compared
    off_B = torch.isfinite(together_B) != torch.isfinite(alone_B)
    off_B |= torch.where(known_B, together_B - alone_B, 0.0).abs() > tolerance * scale
    if bool(off_B.any()):
        differences = [
            f"row {i}: {alone_B[i]:.6g} alone, {together_B[i]:.6g} beside the others"
            for i in torch.nonzero(off_B).flatten().tolist()
        ]
        raise UnsupportedModel(
            f"The loss of a sample depends on the other samples of its batch, which breaks the privacy proof: "
            f"{shorten(differences)}. Likely causes: a mean over the tokens of the batch (divide by the sample's own "
            "number of tokens), BatchNorm, routing over the whole batch, in-batch negatives, padding that a model does "
            "not mask (see docs/troubleshooting.md)."
        )
