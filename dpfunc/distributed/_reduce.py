"""Sums over the processes of a step: gathered parameters in, one packed message with noise out.

May import: its folder, lora and below. Privacy depends on it: yes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dpfunc._utils.parts import Window, distributed, is_dtensor, local, shard_dims
from dpfunc._utils.processes import arrived, message_device, process_context
from dpfunc._utils.validation import shorten
from dpfunc.distributed._object_collectives import together
from dpfunc.distributed.ranks import Ranks, axes_over, is_sharded_over
from dpfunc.engines._numerics import accumulation_dtype
from dpfunc.errors import InvalidArgument, StepAborted
from dpfunc.noise import Mechanism, Turn
from dpfunc.noise._streams import rows_of_a_tile
from dpfunc.noise.gaussian import with_noise
from dpfunc.types import ClippedSum, Params

_ALIGNED = 16  # numbers: a sum begins on a cache line, and its checksum needs no copy


def check_placements(params: Params, ranks: Ranks) -> None:
    """Check that every shard of a parameter belongs to a process of the run: its norm would be that of a part."""
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


def in_step(ranks: Ranks) -> AbstractContextManager[None]:
    """Context in which this process takes a step together with the others; see `process_context`."""
    return process_context("independent" if ranks.independent else ranks.group)


@contextmanager
def gathered(params: Params, ranks: Ranks) -> Iterator[Params]:
    """Context with parameters gathered from the data group; an error in it is sent in place of sums."""
    done = False
    try:
        with in_step(ranks):
            yield params if ranks.keeps_parts else _gathered(params, ranks)
        done = True
    finally:
        if not done and ranks.independent:
            _add_up(_message(_packed(zeros(params), params, ranks), ranks)[0].zero_(), ranks, failed=True)


def _gathered(params: Params, ranks: Ranks) -> dict[str, Tensor]:
    from torch.distributed.tensor import Replicate

    result: dict[str, Tensor] = dict(params)
    for name, axes in ((name, axes_over(param, ranks)) for name, param in params.items()):
        if axes:
            spec: Any = params[name]
            kept = [Replicate() if axis in axes else p for axis, p in enumerate(spec.placements)]
            full: Any = spec.detach().redistribute(placements=kept)
            result[name] = full if any(p.is_shard() for p in kept) else full.to_local()
    return result


def zeros(params: Params) -> dict[str, Tensor]:
    """Clipped sums of no rows, of which this process has the parts that it has of the parameters."""
    return {
        name: torch.zeros_like(local(param), dtype=accumulation_dtype(param.dtype)) for name, param in params.items()
    }


def release(
    ranks: Ranks, mechanism: Mechanism, clipped: ClippedSum, params: Params, noise_state: Any, turn: Turn
) -> tuple[dict[str, Tensor], Any]:
    """The clipped sum over the rows of all processes with noise, and the next state of the mechanism.

    Noise that can be divided is drawn once by all together: each adds that of some rows to its own term of the sum.

    Guarantees:
        tests/distributed/test_ranks.py::test_an_error_of_one_process_aborts_the_step_on_all;
        tests/distributed/test_reduce.py::test_noise_that_is_missing_is_an_error_of_all,
        ::test_noise_of_a_user_is_the_same_on_all_processes_or_an_error_of_all.
    """
    with in_step(ranks):
        if mechanism.add_share is None or any(is_dtensor(param) for param in params.values()):
            whole = replace(clipped, sums=sum_over(ranks, clipped.sums, params))
            with together(ranks, StepAborted("Another process could not add its noise. Nothing was released.")):
                return with_noise(mechanism, whole, noise_state, turn)
        shapes = {name: value.shape for name, value in clipped.sums.items()}
        with _added_up(clipped.sums, ranks) as (terms, bands):
            windows = noise_windows(shapes, ranks.rank, ranks.size)
            mechanism.add_share(replace(clipped, sums=terms), windows, turn)
            bands.fill_(num_bands(windows))
        if bands.item() != num_bands(noise_windows(shapes, 0, 1)):
            raise StepAborted(
                "Expected noise in each row once, got another number of rows: nothing was released and nothing was "
                "spent."
            )
        return {name: terms[name].to(value) for name, value in clipped.sums.items()}, noise_state


def noise_windows(shapes: Mapping[str, Sequence[int]], rank: int, size: int) -> dict[str, Window]:
    """The rows whose noise a process draws, of each leaf of which it draws some: about as many numbers as the others.

    Rows are divided where tiles of noise begin. The windows of all ranks together have each row of each leaf once
    (tests/distributed/test_reduce.py::test_each_number_belongs_to_one_process).
    """
    total = sum(math.prod(shape) for shape in shapes.values())
    found: dict[str, Window] = {}
    done = 0
    for name, shape in shapes.items():
        num_rows, num_cols = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        height = rows_of_a_tile(num_cols)
        for first in range(0, num_rows if num_cols else 0, height):
            stop = min(first + height, num_rows)
            numbers = (stop - first) * num_cols
            if (2 * done + numbers) * size // (2 * total) == rank:  # the middle of these rows decides
                begin = found[name].rows[0] if name in found else first
                found[name] = Window(num_rows, num_cols, (begin, stop), (0, num_cols))
            done += numbers
    return found


def num_bands(windows: Mapping[str, Window]) -> int:
    """The number of bands of rows, as tall as tiles, that windows have."""
    return sum(-(-(part.rows[1] - part.rows[0]) // rows_of_a_tile(part.num_cols)) for part in windows.values())


def sum_over(ranks: Ranks, sums: Params, params: Params) -> dict[str, Tensor]:
    """Sums over all processes, each with the placements of its parameter. UNRELEASED, like what went in."""
    if ranks.keeps_parts:  # the engine has added over all processes; those of one without records are zeros
        own = {name: value for name, value in sums.items() if not is_dtensor(value)}
        statistics = {name: value for name, value in own.items() if not is_dtensor(params[name])}  # of no engine
        if own_only := [name for name, value in own.items() if name not in statistics and bool(value.any())]:
            raise InvalidArgument(f"Expected sums of all processes, got those of one for {shorten(own_only)}.")
        terms: Params = {}
        if statistics:
            with _added_up(statistics, ranks) as (terms, _):
                pass
        return {name: s if is_dtensor(s) else distributed(terms.get(name, s), params[name]) for name, s in sums.items()}
    with _added_up(_packed(sums, params, ranks), ranks) as (terms, _):
        pass
    return {
        name: distributed(terms[name].to(value), params[name])
        if name in terms
        else scattered(value, params[name], ranks)
        for name, value in sums.items()
    }


def _packed(sums: Params, params: Params, ranks: Ranks) -> Params:
    """The sums that go into one message."""
    return {name: value for name, value in sums.items() if not is_sharded_over(params[name], ranks)}


@contextmanager
def _added_up(sums: Params, ranks: Ranks) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Context with a message for this process's sums and noise. It is sent even after an error, and gets all sums."""
    message, terms = _message(sums, ranks)
    failed = True
    try:
        for name, value in sums.items():
            terms[name].copy_(value)
        yield terms, message[-1]
        failed = False
    finally:
        failures = _add_up(message, ranks, failed)
    if failures:
        raise StepAborted(
            "Another process failed while it computed its gradients; its own error says why. No process took the step, "
            "nothing was released and nothing was spent."
        )


def _add_up(message: Tensor, ranks: Ranks, failed: bool) -> float:
    """Add up the messages of all processes; the number of those that failed."""
    message[-2] = float(failed)
    arrived(dist.all_reduce(message, group=ranks.group, async_op=True))
    return float(message[-2])


def _message(sums: Params, ranks: Ranks) -> tuple[Tensor, dict[str, Tensor]]:
    """Room for a term of each sum in one tensor with two more numbers, and the terms as views; zero in between."""
    device = next((value.device for value in sums.values()), ranks.device)
    device = device if device.type != "cpu" else message_device(ranks.group)
    lengths = {name: -(-value.numel() // _ALIGNED) * _ALIGNED for name, value in sums.items()}
    dtype = torch.float64 if any(value.dtype == torch.float64 for value in sums.values()) else torch.float32
    message = torch.empty(sum(lengths.values()) + 2, dtype=dtype, device=device)
    message[-2:] = 0.0
    terms, start = {}, 0
    for name, value in sums.items():
        terms[name] = message[start:][: value.numel()].view(value.shape)
        message[start + value.numel() : start + lengths[name]] = 0.0
        start += lengths[name]
    return message, terms


def scattered(total: Tensor, param: Tensor, ranks: Ranks) -> Tensor:
    """Sum over the data group of the terms `total` of all processes, sharded as a parameter is (reduce-scatter)."""
    from torch.distributed.tensor import Partial

    spec: Any = param
    axes = axes_over(param, ranks)
    terms: Any = distributed(total, param, [Partial() if axis in axes else p for axis, p in enumerate(spec.placements)])
    return cast(Tensor, terms.redistribute(placements=spec.placements))


def full_norms(params: Params, sq_norms: Mapping[str, Tensor], ranks: Ranks) -> Mapping[str, Tensor]:
    """Squared norms (B,) of full gradients, from those of parts over the tensor group; replicas count once."""
    sharded_names = [name for name, p in params.items() if is_sharded_over(p, ranks, tensor=True)]
    if ranks.tensor_group is None or not sharded_names:
        return sq_norms
    parts_NB = torch.stack([sq_norms[name].double() for name in sharded_names])
    arrived(dist.all_reduce(parts_NB, group=ranks.tensor_group, async_op=True))
    full = dict(zip(sharded_names, parts_NB, strict=True))
    return {name: full[name].to(value.dtype) if name in full else value for name, value in sq_norms.items()}
