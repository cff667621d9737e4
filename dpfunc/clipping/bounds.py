"""Bounds of clipping: their division over groups, the sensitivity, and the one place that enforces them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dpfunc._utils.memory import refuse_out_of_memory
from dpfunc._utils.validation import fail, positive, shorten
from dpfunc.errors import InvalidArgument
from dpfunc.types import Adjacency, ClipRule

_SMALLEST, _LARGEST = 1e-10, 1e10
# Relative room between what a factor allows and the bound. It pays for the rounding of norms, products and float32
# sums, so that the bound holds for the numbers that are released and not only for the reals.
SLACK = 2.0**-13
# Squares of numbers below this lose precision in float32; such norms are treated as this large.
_TINY_NORM = 1e-12
# Smaller factors would be subnormal, with large relative rounding: they become 0.
_TINY_FACTOR = 1e-30


def check_clip_norm(clip_norm: float | Mapping[str, float]) -> float | dict[str, float]:
    """A bound, or one bound for each group, each in [1e-10, 1e10] so that float32 can hold what follows from it."""
    if not isinstance(clip_norm, Mapping):
        return _check_one("clip_norm", clip_norm)
    if not clip_norm:
        raise InvalidArgument("Expected clip_norm to name at least one group, got clip_norm={}.")
    return {str(group): _check_one(f"clip_norm[{group!r}]", bound) for group, bound in clip_norm.items()}


def _check_one(name: str, value: float) -> float:
    bound = positive(name, value)
    if not _SMALLEST <= bound <= _LARGEST:
        advice = "Rescale the loss: outside this range float32 gradients lose their precision."
        raise fail(f"{_SMALLEST:g} <= {name} <= {_LARGEST:g}", name, value, advice)
    return bound


def group_bounds(clip_norm: float | Mapping[str, float], group_names: tuple[str, ...]) -> dict[str, float]:
    """Bound C_g of each group: as a mapping says, or `clip_norm / sqrt(G)` of one on the whole gradient."""
    if not isinstance(clip_norm, Mapping):
        return {group: clip_norm / math.sqrt(len(group_names)) for group in group_names}
    if set(clip_norm) != set(group_names):
        raise InvalidArgument(
            f"Expected clip_norm to name the groups [{shorten(group_names)}], got [{shorten(tuple(clip_norm))}]. "
            "Give one number to divide it equally, or one bound for each group of `groups`."
        )
    return {group: clip_norm[group] for group in group_names}


def group_sensitivities(bounds: Mapping[str, float], adjacency: Adjacency) -> dict[str, float]:
    """Sensitivity of each sum: C_g for a record that is added, removed or zeroed out, 2 C_g for one replaced."""
    scale = 2.0 if adjacency == "replace_one" else 1.0
    return {group: scale * bound for group, bound in bounds.items()}


def safe_factors(rule: ClipRule, norms_BG: Tensor, bounds_G: Tensor, mask_B: Tensor) -> Tensor:
    """The rule's factors, forced to respect the bound whatever the rule returns.

    `factor <= C_g (1 - 2**-13) / max(norm, 1e-12)`, and exactly 0 for samples that are padding (`mask_B` false) or
    have a norm that is not finite in any group, so that such a sample contributes exactly nothing.
    A rule that is not of this library sees one row at a time; a faulty one costs utility, not privacy. Unreleased.

    Guarantees:
        factor * norm <= C (tests/clipping/test_bounds.py::test_factor_times_norm_stays_inside); a rule that looks at
        other rows cannot (tests/clipping/test_bounds.py::test_a_rule_sees_one_row).
    """
    usable_B1 = (mask_B & (norms_BG.abs() < math.inf).all(dim=1))[:, None]  # false for NaN as well
    safe_norms_BG = torch.where(usable_B1, norms_BG, 1.0)
    inner_G = bounds_G * (1.0 - SLACK)
    ceiling_BG = inner_G / safe_norms_BG.clamp(min=_TINY_NORM)
    factors_BG = torch.minimum(_factors(rule, safe_norms_BG, inner_G), ceiling_BG)
    keep_BG = usable_B1 & (factors_BG >= _TINY_FACTOR)  # false for NaN as well
    return torch.where(keep_BG, factors_BG, 0.0)


def _factors(rule: ClipRule, norms_BG: Tensor, bounds_G: Tensor) -> Tensor:
    """The factors of a rule; one of others sees one row at a time, and forgets it."""
    if type(rule).__module__.partition(".")[0] == "dpfunc":
        return rule.factors(norms_BG, bounds_G)
    if not len(norms_BG):
        return torch.zeros_like(norms_BG)
    try:
        once = copy.deepcopy(rule)
        factors_BG: Tensor = torch.func.vmap(lambda norms_G: once.factors(norms_G[None], bounds_G)[0])(norms_BG)
    except (RuntimeError, IndexError, TypeError) as error:
        refuse_out_of_memory(error)
        raise InvalidArgument(
            f"Expected the factors of {type(rule).__name__} to follow from the norms of a row by operations of torch, "
            f"got an error: {str(error).splitlines()[0]} A copy of it sees one row at a time, since a factor that "
            "depends on other rows breaks the bound. Write it without reading numbers (float, item, if), and without "
            "what cannot be copied (locks, tensors of a graph). Nothing was released and nothing was spent."
        ) from error
    return factors_BG.expand_as(norms_BG)
