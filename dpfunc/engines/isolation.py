"""Whether the loss of a row depends on its own row alone: rows together are compared with each row by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dpfunc.checks import shorten
from dpfunc.engines.collectives import Listener, own_only
from dpfunc.engines.lockstep import of_all, refused_by_all
from dpfunc.engines.rules.composite import opened
from dpfunc.engines.rules.recurrent import RECURRENT
from dpfunc.engines.scope import backward_inside
from dpfunc.engines.sharded import cut
from dpfunc.engines.sums import accumulation_dtype
from dpfunc.engines.vmap import check_losses
from dpfunc.errors import UnsupportedModel
from dpfunc.rng import insecure_key, torch_seed
from dpfunc.tree import batch_size, rows
from dpfunc.types import Batch, LossFn, Params

LOSS_ROWS = 8
SHAKE = 0.02
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
        if func in RECURRENT:  # packed sequences have one argument more before it
            at = 6 if isinstance(args[3], (list, tuple)) else 5
            args = (*args[:at], 0.0, *args[at + 1 :])
        if func is F.scaled_dot_product_attention:
            args, kwargs = args[:4], {**kwargs, **({"is_causal": args[5]} if len(args) > 5 else {}), "dropout_p": 0.0}
        if func is torch.autograd.grad or func is F.multi_head_attention_forward:
            with self:
                return opened(func)(*args, **kwargs)
        return func(*args, **kwargs)


def shaken(params: Params) -> dict[str, Tensor]:
    """Parameters moved a little, so that nothing is zero by initialisation (LoRA) and gradients flow everywhere."""
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for name, param in params.items():
        noise = torch.randn(param.shape, generator=generator, dtype=accumulation_dtype(param.dtype))
        noise = (SHAKE * noise).to(param.device, param.dtype)  # the same on all ranks
        moved[name] = (param.detach() + cut(noise, param)).detach()
    return moved


def some_rows(batch: Batch, num_rows: int) -> Batch:
    """The first rows, repeated where there are fewer."""

    def take(value: Tensor) -> Tensor:
        return value[torch.arange(num_rows, device=value.device) % value.shape[0]]

    return pytree.tree_map(take, batch)


def rows_differ(batch: Batch) -> bool:
    """Whether the first rows differ, here or on a process that runs in lockstep with this one.

    Rows that are all alike (one sample, or one and its copies in place of padding) say nothing about what rows do to
    each other.

    >>> rows_differ(torch.ones(3, 2)), rows_differ(torch.eye(2))
    (False, True)
    """
    first = [leaf[:LOSS_ROWS] for leaf in pytree.tree_leaves(batch)]
    found = any(bool((leaf != leaf[:1]).any()) for leaf in first)
    return bool(of_all(torch.tensor([found])).item())


def check_isolated(loss_fn: LossFn, params: Params, batch: Batch, listener: Listener | None = None) -> float:
    """Compare the losses of up to eight rows together with those of each row alone.

    Args:
        loss_fn, params, batch: as for an engine. listener: hears what ranks say to each other meanwhile.

    Returns:
        the relative tolerance that fits the dtypes in use.

    Raises:
        UnsupportedModel: a row's loss depends on the rows beside it, on other ranks, or on random numbers that cannot
            be switched off.
    """
    few = some_rows(batch, min(LOSS_ROWS, max(2, batch_size(batch))))
    count = batch_size(few)
    params = {name: param.detach().requires_grad_() for name, param in params.items()}
    with warnings.catch_warnings(), torch_seed(insecure_key(0)), own_only(listener), Still() as still:
        warnings.simplefilter("ignore")  # the engine that is chosen says it again
        together_B = _losses(loss_fn, params, few, count)
        alone_B, again_B = (_alone(loss_fn, params, few, count) for _ in range(2))
    dtypes = {together_B.dtype, *(value.dtype for value in params.values())}
    tolerance = COARSE if still.autocast else max(TOLERANCES.get(dtype, COARSE) for dtype in dtypes)
    with refused_by_all():
        _check_isolated(together_B, alone_B, again_B, tolerance)
    return tolerance


def _losses(loss_fn: LossFn, params: Params, batch: Batch, num_samples: int) -> Tensor:
    with torch.enable_grad(), backward_inside():
        losses_B = loss_fn(params, batch)
    check_losses(losses_B, num_samples)
    return losses_B.detach()


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
            'that samples do not influence each other. Draw them from the batch, or use engine="vmap".'
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
