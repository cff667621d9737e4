"""The definition of a per-sample gradient: vmap(grad(loss)) over batches of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dpfunc._utils.dtensor import is_dtensor
from dpfunc._utils.validation import integer, shorten
from dpfunc.engines.evidence import Evidence
from dpfunc.engines.guards.collectives import none_batched
from dpfunc.engines.guards.loss import check_differentiable, parameters_unchanged
from dpfunc.engines.per_sample import Dense, PerSample
from dpfunc.engines.tracing.trace import tracing_rows_alone
from dpfunc.errors import UnsupportedModel
from dpfunc.types import Batch, Engine, LossFn, Params

# A part of torch's message when a loss does something that vmap or grad cannot do -> advice for the user.
_TRANSLATIONS = {
    "saved tensor hooks": (
        "The loss uses gradient checkpointing (torch.utils.checkpoint), which torch does not support under vmap. "
        "Switch it off, e.g. model.gradient_checkpointing_disable(); to save memory use microbatch_size."
    ),
    "data-dependent control flow": (
        "The loss branches on the values of a tensor. For Hugging Face models with an attention mask, load the model "
        'with attn_implementation="eager", and give encoders an additive mask of shape (B, 1, 1, T) instead of (B, T).'
    ),
    "it must override the setup_context staticmethod": (
        "The loss communicates between ranks or runs an autograd.Function that torch.func does not know: tensor "
        'parallel layers, FSDP2 before torch 2.13. Use engine="bookkeeping".'
    ),
    "it does not have vmap support": (
        "The loss runs an autograd.Function that vmap does not know, such as those of DeepSpeed ZeRO-3. Use "
        'engine="bookkeeping".'
    ),
    "Batching rule not implemented for c10d": (
        "The loss communicates between ranks in place (torch.distributed): the loss of a record would depend on those "
        "of other ranks. Compute the loss of each record from its own row."
    ),
    "in-place": (
        "The loss writes into a tensor that is shared by all samples (a buffer, or a tensor made with zeros/empty). "
        "Use out-of-place operations."
    ),
}


class _NoData(TorchFunctionMode):
    """Mode that refuses to put a tensor of vmap into a module: `param.data = ...`, as in `module.to()`, is fatal."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.data.__set__ and torch._C._functorch.is_functorch_wrapped_tensor(args[1]):  # type: ignore[attr-defined]  # no stub
            raise UnsupportedModel(
                "The loss writes into the data of a parameter (module.to() inside of its forward pass), which vmap "
                'cannot do. Use engine="bookkeeping" or "loop".'
            )
        return func(*args, **(kwargs or {}))


def _refuse_split(params: Params) -> None:
    """Refuse parameters that are DTensors, which vmap cannot differentiate.

    Raises:
        UnsupportedModel: naming them.
    """
    parts = [name for name, param in params.items() if is_dtensor(param)]
    if parts:
        raise UnsupportedModel(
            f"The parameters {shorten(parts)} are DTensors (tensor parallel or FSDP2), which torch.func cannot "
            'differentiate under vmap. Use engine="bookkeeping".'
        )


def _per_row(params: Params, row: Batch, loss_fn: LossFn) -> tuple[Tensor, Tensor]:
    """The loss of one row, which the model gets as a batch of one."""
    batch_of_one = pytree.tree_map(lambda leaf: leaf.unsqueeze(0), row)
    losses_B = loss_fn(params, batch_of_one)
    check_differentiable(losses_B, 1)
    loss = losses_B.sum()
    return loss, loss.detach()


def vmap(chunk_size: int | None = None) -> Engine:
    """The engine that defines the others: `vmap(grad(loss_fn))` over batches of one.

    It cannot mix samples and needs nothing from the model but that vmap can run it. All B gradients are in memory.

    Args:
        chunk_size: samples differentiated at once, >= 1; bounds the memory of activations. None is all.

    Returns:
        An engine `(loss_fn, params, batch) -> PerSampleGrads`. Unreleased.

    Raises:
        InvalidArgument: the loss has a wrong shape, or no gradient.
        UnsupportedModel: torch cannot run the loss under vmap.

    Guarantees:
        equals a loop over single samples (tests/engines/test_parity.py).

    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum(1)
    >>> per_sample = vmap()(loss_fn, {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    >>> per_sample.sq_norms()["w"]
    tensor([25.,  1.])
    """
    size = None if chunk_size is None else integer("chunk_size", chunk_size, minimum=1)

    def engine(loss_fn: LossFn, params: Params, batch: Batch) -> PerSample:
        _refuse_split(params)
        detached = {name: param.detach() for name, param in params.items()}
        differentiate = torch.func.grad(lambda p, row: _per_row(p, row, loss_fn), has_aux=True)
        mapped = torch.func.vmap(differentiate, in_dims=(None, 0), randomness="different", chunk_size=size)
        # Frozen parameters may require gradients: without no_grad an outer graph would be kept for them, several times
        # the memory. The inner differentiation does not mind.
        if torch.compiler.is_compiling():  # dynamo traces neither modes nor the translation of errors
            with torch.no_grad(), none_batched():
                grads, losses_B = mapped(detached, batch)
            return PerSample(losses_B, {name: Dense(grad) for name, grad in grads.items()}, alone=True)
        with (
            tracing_rows_alone(batch) as trace,
            parameters_unchanged(params),
            torch.no_grad(),
            none_batched(),
            _NoData(),
        ):
            grads, losses_B = _run(mapped, detached, batch)
        if trace.doubts:
            raise UnsupportedModel(f'Under vmap a row would depend on others: {trace.doubts[0]}. Use engine="loop".')
        # An audit sees functions whose rule for vmap mixes rows; it cannot give a row the random numbers that it had.
        found = {name: Dense(grad) for name, grad in grads.items()}
        return PerSample(losses_B, found, alone=bool(trace.random_calls), evidence=Evidence(coarse=trace.coarse))

    return engine


def _run(mapped: Callable[..., Any], params: Params, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    try:
        grads, losses_B = mapped(params, batch)
        return grads, losses_B
    except RuntimeError as error:
        for symptom, advice in _TRANSLATIONS.items():
            if symptom in str(error):
                raise UnsupportedModel(f"{advice} (torch: {error})") from error
        raise
