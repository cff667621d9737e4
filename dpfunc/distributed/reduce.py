"""Sums over processes: gathered parameters in, one packed message out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.dtensor import distributed, is_dtensor, shard_dims
from dpfunc._utils.validation import shorten
from dpfunc.distributed.mesh_axes import axes_over, cut_over
from dpfunc.distributed.ranks import Ranks, message_device
from dpfunc.errors import InvalidArgument, StepAborted
from dpfunc.types import Params


def check_layout(params: Params, ranks: Ranks) -> None:
    """Check that every shard of a parameter belongs to a process of the run.

    Raises:
        InvalidArgument: a DTensor that waits for a sum, or that is sharded over other processes: its norm would be
            that of a part.
    """
    for name, param in params.items():
        if not is_dtensor(param):
            continue
        spec: Any = param
        known = {*axes_over(param, ranks), *axes_over(param, ranks, tensor=True)}
        if shard_dims(param).keys() - known or any(p.is_partial() for p in spec.placements):
            raise InvalidArgument(
                f"Expected params[{name!r}] to be cut over processes of the run only, got {spec.placements} on "
                f"{spec.device_mesh}. Name its dimension: dpfunc.distributed.sharded(mesh, data=..., tensor=...)."
            )
        over = axes_over(param, ranks)
        if (
            set(over) & shard_dims(param).keys()
            and math.prod(spec.device_mesh.size(axis) for axis in over) != ranks.size
        ):
            raise InvalidArgument(
                f"Expected params[{name!r}] on a mesh of all {ranks.size} processes with other records, got "
                f"{spec.device_mesh}: the others would release sums of their own with the same noise. Cut it over the "
                "whole mesh that dpfunc.distributed.sharded got; replicas are a dimension of it."
            )


def gathered(params: Params, ranks: Ranks) -> dict[str, Tensor]:
    """Parameters as an engine needs them: whole where processes with other records hold other parts.

    Shards over the tensor group are kept. Costs the memory of all whole trained parameters while a step lasts.
    """
    from torch.distributed.tensor import Replicate

    result: dict[str, Tensor] = {}
    for name, param in params.items():
        over = axes_over(param, ranks)
        if not over or ranks.keeps_parts:
            result[name] = param
            continue
        spec: Any = param
        kept = [Replicate() if axis in over else p for axis, p in enumerate(spec.placements)]
        whole: Any = spec.detach().redistribute(placements=kept)
        cut = any(p.is_shard() for p in kept)
        result[name] = whole if cut else whole.to_local()
    return result


def sum_over(ranks: Ranks, sums: Params, params: Params, *, failed: bool = False) -> dict[str, Tensor]:
    """Sums over all processes, each laid out as its parameter. One all-reduce for those not sharded over the data.

    Args:
        ranks: of the run. sums: this process's clipped sums, float32 or float64, local parts as plain tensors.
        params: the parameters they belong to. failed: this process has no sums; all others raise.

    Returns:
        name -> sum. UNRELEASED, like what went in.

    Raises:
        StepAborted: another process failed.

    Guarantees:
        tests/distributed/test_data_parallel.py::test_an_error_of_one_process_aborts_the_step_on_all.
    """
    if ranks.keeps_parts:  # added already; without records there are no sums
        alone = [name for name, value in sums.items() if not is_dtensor(value) and bool(value.any())]
        if alone:
            raise InvalidArgument(f"Expected sums of all processes, got those of one for {shorten(alone)}.")
        return {name: s if is_dtensor(s) else distributed(s, params[name]) for name, s in sums.items()}
    cut = [name for name in sums if cut_over(params[name], ranks)]
    packed = _all_reduce({name: value for name, value in sums.items() if name not in cut}, ranks, failed)
    if failed:
        return {}
    return {
        name: scattered(sums[name], params[name], ranks) if name in cut else distributed(packed[name], params[name])
        for name in sums
    }


def _all_reduce(sums: Params, ranks: Ranks, failed: bool) -> dict[str, Tensor]:
    wide = any(value.dtype == torch.float64 for value in sums.values())
    device = next((value.device for value in sums.values()), ranks.device)
    device = device if device.type != "cpu" else message_device(ranks.group)
    # One message for all: the last number says how many processes failed.
    buffer = torch.zeros(sum(v.numel() for v in sums.values()) + 1, dtype=torch.float64 if wide else torch.float32)
    buffer = buffer.to(device)
    start = 0
    for value in sums.values():
        buffer[start : start + value.numel()].copy_(value.reshape(-1))
        start += value.numel()
    buffer[-1] = float(failed)
    dist.all_reduce(buffer, group=ranks.group)
    if buffer[-1] and not failed:
        raise StepAborted(
            "Another process failed while it computed its gradients; its own error says why. No process took the step, "
            "nothing was released and nothing was spent."
        )
    result, start = {}, 0
    for name, value in sums.items():
        result[name] = buffer[start : start + value.numel()].view(value.shape).to(value)
        start += value.numel()
    return result


def scattered(total: Tensor, param: Tensor, ranks: Ranks) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial

    spec: Any = param
    over = axes_over(param, ranks)
    placements = [Partial() if axis in over else p for axis, p in enumerate(spec.placements)]
    whole = DTensor.from_local(
        total, spec.device_mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    result: Tensor = whole.redistribute(placements=spec.placements)
    return result


def whole_norms(params: Params, sq_norms: Mapping[str, Tensor], ranks: Ranks) -> Mapping[str, Tensor]:
    """Squared norms of whole gradients from those of their parts, summed over the tensor group where it shards them.

    Without it each part would be clipped by a norm that is too small: a wrong sensitivity. A parameter that all hold
    alike counts once.

    Args:
        params: as the engine got them. sq_norms: name -> (B,), of what this process holds. ranks: of the run.
    """
    group = ranks.tensor_group
    cut = [name for name, p in params.items() if cut_over(p, ranks, tensor=True)]
    if group is None or not cut:
        return sq_norms
    parts_NB = torch.stack([sq_norms[name].double() for name in cut])
    dist.all_reduce(parts_NB, group=group)
    whole = dict(zip(cut, parts_NB, strict=True))
    return {name: whole[name].to(value.dtype) if name in whole else value for name, value in sq_norms.items()}
