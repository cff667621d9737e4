"""Sums over processes: gathered parameters in, one packed message out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.dtensor import distributed, is_dtensor, shard_dims
from dpfunc._utils.validation import shorten
from dpfunc.distributed.noise_shares import noise_windows, num_bands
from dpfunc.distributed.ranks import Ranks, axes_over, is_sharded_over, message_device
from dpfunc.engines.guards.lockstep import arrived
from dpfunc.errors import InvalidArgument, StepAborted
from dpfunc.types import Params

_AddNoise = Callable[[Params], int]
"""Adds noise to terms, in place, and returns to how many bands of rows (`noise_shares.num_bands`)."""

_ALIGNED = 16  # numbers: a sum begins on a cache line, and its checksum needs no copy


def check_placements(params: Params, ranks: Ranks) -> None:
    """Check that every shard of a parameter belongs to a process of the run.

    Raises:
        InvalidArgument: a DTensor that waits for a sum, or that is sharded over other processes: its norm would be
            that of a part.
    """
    parts: dict[str, Any] = {name: param for name, param in params.items() if is_dtensor(param)}
    for name, param in parts.items():
        axes, mesh = axes_over(param, ranks), param.device_mesh
        known = {*axes, *axes_over(param, ranks, tensor=True)}
        if shard_dims(param).keys() - known or any(p.is_partial() for p in param.placements):
            raise InvalidArgument(
                f"Expected params[{name!r}] to be sharded over processes of the run only, got {param.placements} on "
                f"{mesh}. Name its dimension: dpfunc.distributed.sharded(mesh, data=..., tensor=...)."
            )
        if set(axes) & shard_dims(param).keys() and math.prod(map(mesh.size, axes)) != ranks.size:
            raise InvalidArgument(
                f"Expected params[{name!r}] on a mesh of all {ranks.size} processes with other records, got "
                f"{mesh}: the others would release sums of their own with the same noise. Shard it over the "
                "whole mesh that dpfunc.distributed.sharded got; replicas are a dimension of it."
            )


def gathered(params: Params, ranks: Ranks) -> dict[str, Tensor]:
    """Parameters as an engine needs them: gathered where they are sharded over the data group.

    Shards over the tensor group are kept. Costs the memory of all trained parameters, gathered, while a step lasts.
    """
    from torch.distributed.tensor import Replicate

    result: dict[str, Tensor] = {}
    for name, param in params.items():
        axes = axes_over(param, ranks)
        if not axes or ranks.keeps_parts:
            result[name] = param
            continue
        spec: Any = param
        kept = [Replicate() if axis in axes else p for axis, p in enumerate(spec.placements)]
        full: Any = spec.detach().redistribute(placements=kept)
        sharded = any(p.is_shard() for p in kept)
        result[name] = full if sharded else full.to_local()
    return result


def sum_over(
    ranks: Ranks, sums: Params, params: Params, *, failed: bool = False, add_noise: _AddNoise | None = None
) -> dict[str, Tensor]:
    """Sums over all processes, each with the placements of its parameter.

    One all-reduce for all parameters that are not sharded over the data group.

    Args:
        ranks: of the run. sums: this process's clipped sums, float32 or float64, local parts as plain tensors.
        params: the parameters they belong to. failed: this process has no sums; all others raise.
        add_noise: adds this process's share of the noise, in place, to its own terms, before they are sent; no
            parameter is sharded then. None adds none.

    Returns:
        name -> sum. UNRELEASED, like what went in, but with noise, all of which was added.

    Raises:
        StepAborted: another process failed, or noise is missing. Whatever `add_noise` raises.

    Guarantees:
        tests/distributed/test_data_parallel.py::test_an_error_of_one_process_aborts_the_step_on_all;
        tests/distributed/test_noise_shares.py::test_noise_that_is_missing_is_an_error_of_all.
    """
    if ranks.keeps_parts:
        return _already_summed(sums, params)
    sharded_names = [name for name in sums if is_sharded_over(params[name], ranks)]
    replicated = {name: value for name, value in sums.items() if name not in sharded_names}
    packed = _all_reduce(replicated, ranks, failed, add_noise)
    if failed:
        return {}
    return {
        name: scattered(sums[name], params[name], ranks)
        if name in sharded_names
        else distributed(packed[name], params[name])
        for name in sums
    }


def _already_summed(sums: Params, params: Params) -> dict[str, Tensor]:
    """Sums that the engine has added over all processes; those of a process without records are zeros."""
    own_only = [name for name, value in sums.items() if not is_dtensor(value) and bool(value.any())]
    if own_only:
        raise InvalidArgument(f"Expected sums of all processes, got those of one for {shorten(own_only)}.")
    return {name: s if is_dtensor(s) else distributed(s, params[name]) for name, s in sums.items()}


def _all_reduce(sums: Params, ranks: Ranks, failed: bool, add_noise: _AddNoise | None) -> dict[str, Tensor]:
    """Sums in one message; its last two numbers are counts of processes that failed, and of bands that have noise."""
    buffer, terms = _message(sums, ranks)
    done = False
    try:
        for name, value in sums.items():
            terms[name].copy_(value)
        if add_noise is not None and not failed:
            buffer[-1] = add_noise(terms)
        done = not failed
    finally:
        buffer[-2] = float(not done)
        arrived(dist.all_reduce(buffer, group=ranks.group, async_op=True))
    failures, noisy_bands = buffer[-2:].tolist()
    if failed:
        return terms
    if failures:
        raise StepAborted(
            "Another process failed while it computed its gradients; its own error says why. No process took the step, "
            "nothing was released and nothing was spent."
        )
    shapes = {name: value.shape for name, value in sums.items()}
    if add_noise is not None and noisy_bands != num_bands(noise_windows(shapes, 0, 1)):
        raise StepAborted(
            "Expected noise in each row once, got another number of rows: nothing was released and nothing was spent."
        )
    return {name: terms[name].to(value) for name, value in sums.items()}


def _message(sums: Params, ranks: Ranks) -> tuple[Tensor, dict[str, Tensor]]:
    """Room for a term of each sum in one tensor with two more numbers, and the terms as views; zero in between."""
    device = next((value.device for value in sums.values()), ranks.device)
    device = device if device.type != "cpu" else message_device(ranks.group)
    lengths = {name: -(-value.numel() // _ALIGNED) * _ALIGNED for name, value in sums.items()}
    buffer = torch.empty(sum(lengths.values()) + 2, dtype=message_dtype(sums), device=device)
    buffer[-2:] = 0.0
    terms, start = {}, 0
    for name, value in sums.items():
        terms[name] = buffer[start:][: value.numel()].view(value.shape)
        buffer[start + value.numel() : start + lengths[name]] = 0.0
        start += lengths[name]
    return buffer, terms


def message_dtype(sums: Params) -> torch.dtype:
    """The dtype of one message for all sums."""
    is_float64 = any(value.dtype == torch.float64 for value in sums.values())
    return torch.float64 if is_float64 else torch.float32


def scattered(total: Tensor, param: Tensor, ranks: Ranks) -> Tensor:
    """Sum over the data group of a tensor that each process has, sharded as a parameter is (reduce-scatter).

    Args:
        total: the term of this process, not sharded over the data group. param: has the placements of the result.
    """
    from torch.distributed.tensor import DTensor, Partial

    spec: Any = param
    axes = axes_over(param, ranks)
    placements = [Partial() if axis in axes else p for axis, p in enumerate(spec.placements)]
    partial_sums = DTensor.from_local(
        total, spec.device_mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    result: Tensor = partial_sums.redistribute(placements=spec.placements)
    return result


def full_norms(params: Params, sq_norms: Mapping[str, Tensor], ranks: Ranks) -> Mapping[str, Tensor]:
    """Squared norms of full gradients from those of their parts, summed over the tensor group where it shards them.

    Without it each part would be clipped by a norm that is too small: a wrong sensitivity. A replicated parameter
    counts once.

    Args:
        params: as the engine got them. sq_norms: name -> (B,), of the parts on this process. ranks: of the run.
    """
    group = ranks.tensor_group
    sharded_names = [name for name, p in params.items() if is_sharded_over(p, ranks, tensor=True)]
    if group is None or not sharded_names:
        return sq_norms
    parts_NB = torch.stack([sq_norms[name].double() for name in sharded_names])
    arrived(dist.all_reduce(parts_NB, group=group, async_op=True))
    full = dict(zip(sharded_names, parts_NB, strict=True))
    return {name: full[name].to(value.dtype) if name in full else value for name, value in sq_norms.items()}
