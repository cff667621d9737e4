"""The Gaussian mechanism on clipped sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfunc.checks import non_negative, one_of
from dpfunc.errors import InvalidArgument
from dpfunc.noise.streams import Source, standard_normal
from dpfunc.rng import Key
from dpfunc.types import Allocation, ClippedSum


class Mechanism(NamedTuple):
    """Noise as two functions: `init() -> state` and `add(clipped, state, key) -> (released, state)`.

    >>> gaussian(1.0).init()
    ()
    """

    init: Callable[[], Any]
    add: Callable[[ClippedSum, Any, Key], tuple[dict[str, Tensor], Any]]


def noise_std(clipped: ClippedSum, noise_multiplier: float, allocation: Allocation) -> dict[str, float]:
    """The standard deviation of the noise in each clip group.

    `uniform`: z S with S the sensitivity of all groups together. `optimal`: variance z^2 (S_g / sqrt(d_g)) sum_j S_j
    sqrt(d_j), which has the least total variance of all allocations with equal privacy,
    `sum_g S_g^2 / std_g^2 = 1 / z^2`.

    Args:
        clipped: the sum, with the sensitivity S_g and the number of coordinates d_g of each group.
        noise_multiplier: z >= 0.
        allocation: `uniform` or `optimal`.

    Guarantees:
        the equation above (tests/noise/test_gaussian.py::test_allocations_have_equal_privacy).
    """
    if one_of("allocation", allocation, ("uniform", "optimal")) == "uniform":
        return dict.fromkeys(clipped.sensitivities, noise_multiplier * clipped.sensitivity)
    sizes = dict.fromkeys(clipped.sensitivities, 0)
    for name, value in clipped.sums.items():
        sizes[clipped.group_of[name]] += value.numel()
    roots = {group: math.sqrt(max(size, 1)) for group, size in sizes.items()}
    total = sum(clipped.sensitivities[group] * root for group, root in roots.items())
    return {
        group: noise_multiplier * math.sqrt(clipped.sensitivities[group] / root * total)
        for group, root in roots.items()
    }


def add_gaussian(
    clipped: ClippedSum,
    noise_multiplier: float,
    key: Key,
    *,
    allocation: Allocation = "uniform",
    source: Source = "secure",
) -> dict[str, Tensor]:
    """Release a clipped sum: `sum + noise_multiplier * sensitivity * N(0, 1)`. There is no std argument.

    Dwork & Roth 2014, The Algorithmic Foundations of Differential Privacy, appendix A.

    Args:
        clipped: the undivided sum with its sensitivity, in float32 or float64.
        noise_multiplier: z >= 0; 0 adds nothing and epsilon is infinite.
        key: a key that serves this release and no other.
        allocation: how noise is divided over clip groups, at equal privacy.
        source: `secure`, or `device` on CUDA.

    Returns:
        name -> sum + noise, in the dtype of the sum. Released: divide it, cast it, use it as you like.

    Raises:
        InvalidArgument: not a ClippedSum, a narrow dtype, or a bad noise multiplier.

    Guarantees:
        tests/noise/test_gaussian.py: scale (test_scale), dtype (test_noise_is_drawn_as_promised), determinism
        (test_stateless), independence (test_no_correlation).

    >>> from dpfunc.rng import insecure_key
    >>> clipped = ClippedSum({"w": torch.zeros(3)}, {"w": "all"}, {"all": 1.0})
    >>> add_gaussian(clipped, 1.0, insecure_key(0))["w"].shape
    torch.Size([3])
    """
    if not isinstance(clipped, ClippedSum):
        raise InvalidArgument(
            f"Expected a ClippedSum, got {type(clipped).__name__}. Noise is scaled by the sensitivity that a "
            "ClippedSum carries; a sum that was divided or changed has another one. Divide after the noise."
        )
    multiplier = non_negative("noise_multiplier", noise_multiplier)
    if not isinstance(key, Key):
        raise InvalidArgument(f"Expected key to be a dpfunc Key, got {type(key).__name__}. Use dpfunc.secure_key().")
    if not clipped.sums:
        raise InvalidArgument("Expected at least one sum to release, got none.")
    for name, value in clipped.sums.items():
        if value.dtype not in (torch.float32, torch.float64):
            raise InvalidArgument(f"Expected float32 or float64 sums, got {value.dtype} for {name}.")
    stds = noise_std(clipped, multiplier, allocation)
    noise = standard_normal(key, clipped.sums, source)
    return {
        name: torch.add(value, noise[name], alpha=stds[clipped.group_of[name]]) for name, value in clipped.sums.items()
    }


def gaussian(noise_multiplier: float, *, allocation: Allocation = "uniform", source: Source = "secure") -> Mechanism:
    """The Gaussian mechanism as a `Mechanism` without state; the arguments are those of `add_gaussian`.

    Args:
        noise_multiplier, allocation, source: see `add_gaussian`.
    """
    non_negative("noise_multiplier", noise_multiplier)

    def add(clipped: ClippedSum, state: Any, key: Key) -> tuple[dict[str, Tensor], Any]:  # noqa: ANN401
        return add_gaussian(clipped, noise_multiplier, key, allocation=allocation, source=source), state

    return Mechanism(lambda: (), add)
