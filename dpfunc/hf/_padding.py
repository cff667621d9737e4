"""Padding of short rows: how long the longest row of a batch is must not matter to the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpfunc.batches import rows
from dpfunc.engines.loop import loop
from dpfunc.errors import UnsupportedModel
from dpfunc.rng import cpu_generators, cpu_seeds, insecure_key
from dpfunc.sampling._own_rows import collated
from dpfunc.sampling._records import read, spread
from dpfunc.types import Batch, LossFn, Params

_READ = 64  # records whose lengths are compared
_ROUNDING, _ROUNDING_16_BITS = 0.02, 0.2  # of the gradient


def refuse_padding(
    loss_fn: LossFn, params: Params, model: nn.Module, dataset: Any, collate: Callable[[list[Any]], Any],
    prepare: Callable[[Any], Mapping[str, Any]],
) -> None:  # fmt: skip
    """Refuse a model whose gradient of a short row changes when the row is padded to a longer one.

    Of 64 records that are spread over the data set the shortest that has a gradient is computed alone, and in a batch
    with the longest, in evaluation mode. Where all have one length or cannot be copied, or the collator draws random
    numbers, nothing is compared. No number is in the message (tests/hf/test_padding.py::test_models).
    """
    with cpu_seeds(insecure_key(0)):
        records = read(dataset, spread(len(dataset), _READ))
    alone = [batch for record in records if (batch := _without_draws(collate, [record])) is not None]
    if len(alone) < len(records):
        return

    def gradient(batch: Batch) -> Params:
        """Of a batch of one row, whose random numbers are the same each time."""
        with cpu_seeds(insecure_key(0)):
            per_sample = loop()(loss_fn, params, dict(prepare(batch)))
        return per_sample.weighted_sum({name: torch.ones(1, device=param.device) for name, param in params.items()})

    training = model.training
    model.train(False)
    try:
        compared = _two_gradients(gradient, collate, records, alone)
    finally:
        model.train(training)
    if compared is None:
        return
    one, other = compared
    narrow = any(value.is_floating_point() and value.element_size() < 4 for value in model.parameters())
    limit = _ROUNDING_16_BITS if narrow else _ROUNDING
    if _norm({name: one[name] - other[name] for name in one}) > limit * max(_norm(one), _norm(other)):
        raise UnsupportedModel(
            "Expected the gradient of a short row to stay when the row is padded to a longer one, got another one "
            f"of {type(model).__name__}. The longest record of a batch would change the gradients of all others, and "
            "epsilon would not hold. Pad all rows to one length, in the data set or the collator "
            '(padding="max_length"); or pad on the other side, or with a mask. See docs/padding.md. Nothing was spent.'
        )


def _two_gradients(
    gradient: Callable[[Batch], Params], collate: Callable[[list[Any]], Any], records: list[Any], alone: list[Batch]
) -> tuple[Params, Params] | None:
    """The gradient of the shortest row that has one: alone, and beside the longest; None where that cannot be."""
    sizes = [sum(leaf.numel() for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)) for batch in alone]
    longest = sizes.index(max(sizes))
    for index in sorted(range(len(records)), key=sizes.__getitem__):
        if sizes[index] == sizes[longest]:
            return None
        one = gradient(alone[index])
        if _norm(one) > 0:
            both = _without_draws(collate, [records[index], records[longest]])
            return None if both is None else (one, gradient(rows(both, 0, 1)))
    return None


def _without_draws(collate: Callable[[list[Any]], Any], records: list[Any]) -> Batch | None:
    """A batch of copies; None if there are none, or the collator drew random numbers, which are those of its seed."""
    with cpu_seeds(insecure_key(0)):
        before = cpu_generators()
        batch = collated(collate, records)
        return batch if before == cpu_generators() else None


def _norm(gradient: Params) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in gradient.values()))
