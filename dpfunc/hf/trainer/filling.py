"""Filling of short rows, which must not change what a model makes of them: seen before anything is spent."""

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
from dpfunc.sampling.own_rows import collated
from dpfunc.sampling.records import read, spread
from dpfunc.types import Batch, LossFn, Params

_READ = 64  # records whose lengths are compared
_ROUNDING, _ROUNDING_16_BITS = 0.02, 0.2  # of the gradient


def refuse_filling(
    loss_fn: LossFn,
    params: Params,
    model: nn.Module,
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    prepare: Callable[[Any], Mapping[str, Any]],
) -> None:
    """Refuse a model whose gradient of a short row changes when it is filled up to a longer one.

    The longest record of a batch decides how the rows of all others are filled. Of 64 records that are spread over the
    data set the shortest that has a gradient is computed alone, and in a batch with the longest. Where all have one
    length or cannot be copied, or the collator draws random numbers, nothing is compared. No number is in the message.

    Args:
        loss_fn: one loss a sample. params: of `model`, which is in evaluation mode meanwhile: no dropout.
        dataset: of the private records. collate: list of records -> batch. prepare: moves a batch to the model.

    Guarantees:
        tests/hf/trainer/test_filling.py: FNet is refused, and models with a mask are not (test_models).
    """
    with cpu_seeds(insecure_key(0)):
        records = read(dataset, spread(len(dataset), _READ))
    alone = [batch for record in records if (batch := _without_draws(collate, [record])) is not None]
    if len(alone) < len(records):
        return
    sizes = [_size(batch) for batch in alone]
    largest = max(sizes)
    longest = records[sizes.index(largest)]
    training = model.training
    model.train(False)
    try:
        for index in sorted(range(len(records)), key=sizes.__getitem__):
            if sizes[index] == largest:
                return
            one = _gradient(loss_fn, params, dict(prepare(alone[index])))
            if _norm(one) > 0:
                both = _without_draws(collate, [records[index], longest])
                if both is None:
                    return
                other = _gradient(loss_fn, params, dict(prepare(rows(both, 0, 1))))
                break
    finally:
        model.train(training)
    narrow = any(value.is_floating_point() and value.element_size() < 4 for value in model.parameters())
    limit = _ROUNDING_16_BITS if narrow else _ROUNDING
    if _norm({name: one[name] - other[name] for name in one}) > limit * max(_norm(one), _norm(other)):
        raise UnsupportedModel(
            f"Expected the gradient of a short row to stay when the row is filled up to a longer one, got another one "
            f"of {type(model).__name__}. The longest record of a batch would change the gradients of all others, and "
            "epsilon would not hold. Fill all rows to one length, in the data set or the collator "
            '(padding="max_length"); or fill them on the other side, or with a mask. See docs/padding.md. Nothing was '
            "spent."
        )


def _without_draws(collate: Callable[[list[Any]], Any], records: list[Any]) -> Batch | None:
    """A batch of copies; None if there are none, or the collator drew random numbers, which are those of its seed."""
    with cpu_seeds(insecure_key(0)):
        before = cpu_generators()
        batch = collated(collate, records)
        return batch if before == cpu_generators() else None


def _gradient(loss_fn: LossFn, params: Params, batch: Batch) -> dict[str, Tensor]:
    """The gradient of a batch of one row, whose random numbers are the same each time."""
    with cpu_seeds(insecure_key(0)):
        per_sample = loop()(loss_fn, params, batch)
    return per_sample.weighted_sum({name: torch.ones(1, device=param.device) for name, param in params.items()})


def _norm(gradient: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in gradient.values()))


def _size(batch: Batch) -> int:
    return sum(leaf.numel() for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
