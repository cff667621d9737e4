"""Compares an engine with single samples on a few rows, with shaken parameters and without randomness."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torch.overrides import TorchFunctionMode

from dpfunc.checks import shorten
from dpfunc.engines.learning import shaken, some_rows
from dpfunc.engines.loop import loop
from dpfunc.engines.rules.composite import opened
from dpfunc.engines.vmap import check_losses
from dpfunc.errors import UnsupportedModel
from dpfunc.rng import insecure_key, torch_seed
from dpfunc.tree import batch_size, rows
from dpfunc.types import Batch, Engine, LossFn, Params

LOSS_ROWS, GRAD_ROWS = 8, 2
# Relative differences that rounding may make: float64, float32, and 16 bits or autocast.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
COARSE = 0.1

DROPOUTS = frozenset(
    (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)
)


@dataclass(eq=False)
class Still(TorchFunctionMode):
    """Switches dropout and random masks off inside, and notes whether autocast was on.

    Batched and single samples draw other random numbers, so they are compared without.
    """

    autocast: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  (whatever the function returns)
        kwargs = dict(kwargs or {})
        self.autocast = self.autocast or any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is Tensor.bernoulli_:
            return args[0].fill_(1.0)
        if func is torch.bernoulli:
            return torch.ones_like(args[0])
        if func is F.scaled_dot_product_attention:
            args, kwargs = args[:4], {**kwargs, **({"is_causal": args[5]} if len(args) > 5 else {}), "dropout_p": 0.0}
        if func is torch.autograd.grad or func is F.multi_head_attention_forward:
            with self:
                return opened(func)(*args, **kwargs)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Probe:
    """What single samples give, and how far an engine may be from that.

    Args:
        params, batch: shaken parameters and GRAD_ROWS rows. grads: of single samples, name -> (B, *shape).
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
        with torch_seed(insecure_key(0)), Still():
            found: Any = engine(loss_fn, self.params, self.batch)
        scale = max((float(_norms(grad)[self.usable_B].max()) for grad in self.grads.values()), default=0.0)
        differing = []
        for name, grad_B in self.grads.items():
            off_B = _norms(found.grads[name].dense().to(grad_B.dtype) - grad_B)[self.usable_B]
            if not bool((off_B <= self.tolerance * scale + torch.finfo(grad_B.dtype).tiny).all()):
                differing.append(name)
        return differing


def _norms(grads_B: Tensor) -> Tensor:
    norms_B: Tensor = torch.linalg.vector_norm(grads_B.reshape(len(grads_B), -1), dim=1)
    return norms_B


def take_probe(loss_fn: LossFn, params: Params, batch: Batch) -> Probe:
    """Losses of rows together and alone, and the gradients of two single samples.

    Raises:
        UnsupportedModel: a row's loss depends on the rows beside it, or on random numbers that cannot be switched off.
    """
    values = shaken(params)
    few = some_rows(batch, min(LOSS_ROWS, max(2, batch_size(batch))))
    count = batch_size(few)
    with torch_seed(insecure_key(0)), Still() as still, torch.no_grad():
        together_B = _losses(loss_fn, values, few, count)
        alone_B, again_B = (_alone(loss_fn, values, few, count) for _ in range(2))
    dtypes = {together_B.dtype, *(value.dtype for value in values.values())}
    tolerance = max((TOLERANCES.get(dtype, COARSE) for dtype in dtypes), default=COARSE)
    tolerance = COARSE if still.autocast else tolerance
    _check_isolated(together_B, alone_B, again_B, tolerance)
    pair = some_rows(batch, GRAD_ROWS)
    with torch_seed(insecure_key(0)), Still():
        single = loop()(loss_fn, values, pair)
    grads = {name: grad.dense() for name, grad in single.grads.items()}
    usable_B = torch.stack([torch.isfinite(_norms(grad)) for grad in grads.values()]).all(0)
    return Probe(values, pair, single.losses_B, grads, usable_B, tolerance)


def _losses(loss_fn: LossFn, params: Params, batch: Batch, num_samples: int) -> Tensor:
    losses_B = loss_fn(params, batch)
    check_losses(losses_B, num_samples)
    return losses_B


def _alone(loss_fn: LossFn, params: Params, batch: Batch, num_samples: int) -> Tensor:
    try:
        return torch.cat([_losses(loss_fn, params, rows(batch, i, i + 1), 1) for i in range(num_samples)])
    except (RuntimeError, ValueError, IndexError) as error:
        raise UnsupportedModel(
            f"The loss of {num_samples} samples can be computed, but not that of one sample alone, so the samples of a "
            f"batch influence each other: {str(error).splitlines()[0]} Likely cause: BatchNorm in training mode; use "
            "dpfunc.replace_batchnorm(model)."
        ) from error


def _check_isolated(together_B: Tensor, alone_B: Tensor, again_B: Tensor, tolerance: float) -> None:
    together_B, alone_B, again_B = (losses_B.double() for losses_B in (together_B, alone_B, again_B))
    real_B = torch.isfinite(together_B) & torch.isfinite(alone_B)
    scale = float(alone_B[real_B].abs().max()) if bool(real_B.any()) else 0.0
    if not bool((torch.where(real_B, alone_B - again_B, 0.0).abs() <= tolerance * scale).all()):
        raise UnsupportedModel(
            "The loss of a sample differs from call to call, by randomness other than dropout, so it cannot be checked "
            'that samples do not influence each other. Give the engine by name, e.g. engine="vmap".'
        )
    off_B = torch.where(real_B, together_B - alone_B, 0.0).abs() > tolerance * scale
    if bool(off_B.any()):
        said = [
            f"row {i}: {alone_B[i]:.6g} alone, {together_B[i]:.6g} beside the others"
            for i in torch.nonzero(off_B).flatten().tolist()
        ]
        raise UnsupportedModel(
            f"The loss of a sample depends on the other samples of its batch, which breaks the privacy proof: "
            f"{shorten(said)}. Likely causes: a mean over the tokens of the batch (divide by the sample's own number "
            "of tokens), BatchNorm, routing over the whole batch, in-batch negatives."
        )
