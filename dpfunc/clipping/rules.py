"""Clip rules, the factor of a gradient from its norm and its bound; groups of parameters; the bounds that are enforced.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

Fields `clip_norm` and `groups` of a rule: see `Flat`.
"""

import copy
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dpfunc._utils.memory import refuse_out_of_memory
from dpfunc._utils.validation import apart, checked, count, expect, named, non_negative, positive, shorten
from dpfunc.errors import InvalidArgument
from dpfunc.types import Adjacency, ClipRule, Groups, RunRule


@dataclass(frozen=True)
class AllParameters:
    """One group: the norm is that of the whole gradient (flat clipping).

    >>> AllParameters().assign(("a.weight", "a.bias"))
    ('all', 'all')
    """

    def assign(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple("all" for _ in names)


ALL = AllParameters()


@dataclass(frozen=True)
class PerLayer:
    """One group a layer: the name up to its last dot, so that weight and bias (or lora_A and lora_B) go together.

    >>> PerLayer().assign(("a.weight", "a.bias", "b.weight"))
    ('a', 'a', 'b')
    """

    def assign(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.rpartition(".")[0] or name for name in names)


@dataclass(frozen=True)
class PerParameter:
    """Each parameter is a group of its own.

    >>> PerParameter().assign(("a.weight", "a.bias"))
    ('a.weight', 'a.bias')
    """

    def assign(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return names


@dataclass(frozen=True)
@checked({"num_blocks": count})
class Blocks:
    """`num_blocks` runs of parameters of (nearly) equal count, in the order of the parameters.

    >>> Blocks(2).assign(("a", "b", "c", "d", "e"))
    ('block0', 'block0', 'block0', 'block1', 'block1')
    """

    num_blocks: int

    def assign(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Group of each name. More blocks than parameters is an error: a block would be empty."""
        if self.num_blocks > len(names):
            raise InvalidArgument(
                f"Expected num_blocks <= the number of parameters, got num_blocks={self.num_blocks} "
                f"for {len(names)} parameters. Use PerParameter() for one group a parameter."
            )
        size, larger = divmod(len(names), self.num_blocks)
        counts = [size + 1] * larger + [size] * (self.num_blocks - larger)
        return tuple(f"block{block}" for block, count in enumerate(counts) for _ in range(count))


@dataclass(frozen=True)
class ByName:
    """Any mapping from parameter name to group name; every parameter needs an entry and no entry may be left over.

    >>> ByName({"a.weight": "body", "head.weight": "head"}).assign(("head.weight", "a.weight"))
    ('head', 'body')
    """

    group_of: Mapping[str, str]

    def assign(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if self.group_of.keys() != set(names):
            missing = [name for name in names if name not in self.group_of]
            unknown = [name for name in self.group_of if name not in names]
            close = [match for name in unknown for match in difflib.get_close_matches(name, names, n=1)]
            raise InvalidArgument(
                f"Expected ByName to name each parameter once, got it {apart(missing, unknown)}."
                + (f" Did you mean {shorten(close)}?" if close else "")
            )
        return tuple(self.group_of[name] for name in names)


@dataclass(frozen=True)
class Partition:
    """A grouping resolved against parameter names: G groups in the order of their own names."""

    group_of: Mapping[str, str]
    group_names: tuple[str, ...]
    bounds: tuple[float, ...] = ()  # of each group

    def norms(self, sq_norms: Mapping[str, Tensor]) -> Tensor:
        """Norms of each sample in each group, (B, G), from squared norms name -> (B,)."""
        members: dict[str, list[Tensor]] = {group: [] for group in self.group_names}
        for name, sq_norms_B in sq_norms.items():
            members[self.group_of[name]].append(sq_norms_B)
        sizes = [len(own) for own in members.values()]
        sq_norms_NB = torch.stack([each for own in members.values() for each in own])
        if len(set(sizes)) == 1:  # by one operation
            return torch.unflatten(sq_norms_NB, 0, (len(sizes), -1)).sum(1).T.sqrt()
        return torch.stack([part_NB.sum(0) for part_NB in sq_norms_NB.split(sizes)], dim=1).sqrt()

    def spread(self, factors_BG: Tensor) -> dict[str, Tensor]:
        """The factors (B,) of each parameter, from factors (B, G)."""
        column = {group: factors_BG[:, index] for index, group in enumerate(self.group_names)}
        return {name: column[group] for name, group in self.group_of.items()}


def partition(groups: Groups, names: tuple[str, ...]) -> Partition:
    """Resolve a grouping against the parameter names."""
    assigned = groups.assign(names)
    return Partition(dict(zip(names, assigned, strict=True)), tuple(sorted({*assigned})))


SMALLEST, LARGEST = 1e-10, 1e10  # clip norms
# Relative room between what a factor allows and the bound. It pays for the rounding of norms, products and float32
# sums, so that the bound holds for the numbers that are released and not only for the reals.
SLACK = 2.0**-13
# Squares of numbers below this lose precision in float32: such gradients are scaled by C, or 1, at most. A factor that
# makes them large would make rounding large, and what is large beside them infinite.
_TINY_NORM = 1e-12
# Smaller factors would be subnormal, with large relative rounding: they become 0.
_TINY_FACTOR = 1e-30


def check_clip_norm(name: str, clip_norm: float | Mapping[str, float]) -> float | dict[str, float]:
    """A bound, or one bound for each group, each in [1e-10, 1e10] so that float32 can hold what follows from it."""
    if not isinstance(clip_norm, Mapping):
        return _check_one(name, clip_norm)
    if not clip_norm:
        raise InvalidArgument(f"Expected {name} to name at least one group, got {name}={{}}.")
    return {str(group): _check_one(f"{name}[{group!r}]", bound) for group, bound in clip_norm.items()}


def _check_one(name: str, value: float) -> float:
    bound = positive(name, value)
    advice = "Rescale the loss: outside this range float32 gradients lose their precision."
    expect(SMALLEST <= bound <= LARGEST, f"{SMALLEST:g} <= {name} <= {LARGEST:g}", name, value, advice)
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


def safe_factors(rule: ClipRule, norms_BG: Tensor, bounds: Sequence[float], mask_B: Tensor | None) -> Tensor:
    """The rule's factors, forced to respect the bound whatever the rule returns.

    `factor <= C_g (1 - 2**-13) / norm`; for a norm below 1e-12 max(C_g, 1), but for bounds that are as small, which a
    rule of a user may have: there it is what that norm would get. It is exactly 0 for samples that are padding
    (`mask_B` false; None: no sample is) or have a norm that is not finite in any group: these contribute nothing.
    A rule that is not of this library sees one row at a time; a faulty one costs utility, not privacy. Unreleased.

    Guarantees:
        factor * norm <= C (tests/clipping/test_rules.py::test_factor_times_norm_stays_inside); a rule that looks at
        other rows cannot (tests/clipping/test_rules.py::test_a_rule_sees_one_row).
    """
    inside = [bound * (1.0 - SLACK) for bound in bounds]
    most = [min(max(bound, 1.0), bound / _TINY_NORM) for bound in inside]
    infinite, none = [math.inf] * len(inside), [0.0] * len(inside)
    inner_G, most_G, infinite_G, none_G = norms_BG.new_tensor([inside, most, infinite, none]).unbind(0)
    finite_BG = norms_BG.abs() < math.inf  # false for NaN as well
    usable_B = finite_BG.all(dim=1) if len(bounds) > 1 else finite_BG[:, 0]
    if mask_B is not None:
        usable_B &= mask_B
    safe_norms_BG = torch.where(usable_B[:, None], norms_BG, infinite_G)
    ceiling_BG = torch.where(safe_norms_BG < _TINY_NORM, most_G, inner_G / safe_norms_BG)
    factors_BG = torch.minimum(_factors(rule, safe_norms_BG, inner_G), ceiling_BG)
    return torch.where(factors_BG >= _TINY_FACTOR, factors_BG, none_G)  # 0 for NaN, and without a finite norm


def _factors(rule: ClipRule, norms_BG: Tensor, bounds_G: Tensor) -> Tensor:
    """The factors of a rule; one of others sees one row at a time, and forgets it."""
    if type(rule).__module__.partition(".")[0] == "dpfunc":
        return rule.factors(norms_BG, bounds_G)
    if not len(norms_BG):
        return torch.zeros_like(norms_BG)

    def of_row(norms_G: Tensor) -> Tensor:
        factors_1G = once.factors(norms_G[None], bounds_G)
        got = tuple(factors_1G.shape) if isinstance(factors_1G, Tensor) else type(factors_1G).__name__
        if got != (1, len(norms_G)):  # broadcast over the rows, it would be the factors of other ones
            raise InvalidArgument(
                f"Expected the factors of {type(rule).__name__} to be a tensor of the shape of norms_BG, of one row "
                f"{(1, len(norms_G))}, got {got}. Return factors.expand_as(norms_BG). Nothing was released and nothing "
                "was spent."
            )
        return factors_1G[0].to(norms_G)

    try:
        once = copy.deepcopy(rule)
        return torch.func.vmap(of_row)(norms_BG)
    except (RuntimeError, IndexError, TypeError) as error:
        refuse_out_of_memory(error)
        raise InvalidArgument(
            f"Expected the factors of {type(rule).__name__} to follow from the norms of a row by operations of torch, "
            f"got an error: {str(error).splitlines()[0]} A copy of it sees one row at a time, since a factor that "
            "depends on other rows breaks the bound. Write it without reading numbers (float, item, if), and without "
            "what cannot be copied (locks, tensors of a graph). Nothing was released and nothing was spent."
        ) from error


class Stateless:
    """Members of `RunRule`, but `at`, for a rule that has no state and releases nothing."""

    share = 0.0

    def initial(self, group_names: tuple[str, ...]) -> Any:
        """None, the state of a rule that has none."""

    def released(self, state: Any) -> None:
        """None: no statistics are released."""

    def next(self, state: Any, released: object) -> Any:
        """The state does not change."""
        return state


@dataclass(frozen=True)
class _Constant(Stateless):
    """A rule that is the same in each step."""

    rule: ClipRule

    def at(self, step: int, state: Any) -> ClipRule:
        return self.rule


def of_run(rule: ClipRule) -> RunRule:
    """A rule as one of a run."""
    return cast(RunRule, rule) if hasattr(rule, "at") else _Constant(rule)


@named
@dataclass(frozen=True)
@checked({"clip_norm": check_clip_norm})
class Flat:
    """Scale a gradient down to norm C, and leave it alone inside the ball: `factor = min(1, C / norm)`.

    Abadi et al. 2016, Deep Learning with Differential Privacy, Algorithm 1.

    Args:
        clip_norm: bound C in the units of the gradient, 1e-10..1e10; or group -> C_g. One number is the bound on the
            whole gradient: with G groups each gets C / sqrt(G).
        groups: which parameters are clipped together.

    Guarantees:
        a gradient with norm <= C (1 - 2**-13) is not changed
        (tests/clipping/test_rules.py::test_flat_is_a_no_op_inside_the_ball).

    >>> Flat(clip_norm=1.0).factors(torch.tensor([[0.5], [4.0]]), torch.tensor([1.0]))
    tensor([[1.0000],
            [0.2500]])
    """

    clip_norm: float | Mapping[str, float]
    groups: Groups = ALL

    def factors(self, norms_BG: Tensor, bounds_G: Tensor) -> Tensor:
        """`C / max(norm, C)`, which needs no constant against 0 / 0."""
        return bounds_G / torch.maximum(norms_BG, bounds_G)


@named
@dataclass(frozen=True)
@checked({"clip_norm": check_clip_norm, "gamma": non_negative})
class Automatic:
    """Normalise every gradient: `factor = C / (norm + gamma)`.

    Bu et al. 2023, Automatic Clipping, eq. (AUTO-S). C only scales the released gradient, together with the noise:
    it acts like a learning rate and has no influence on epsilon or on the signal-to-noise ratio, so it has a value
    that does not need tuning.

    Args:
        gamma: stability constant >= 0, in the units of the norm. It keeps small gradients small. The sensitivity is C
            for every gamma. 0 is AUTO-V.
        clip_norm, groups: as of `Flat`.

    Guarantees:
        a gradient of zero gives zero, never NaN (tests/clipping/test_rules.py::test_zero_gradient_stays_zero).

    >>> Automatic(gamma=1.0).factors(torch.tensor([[0.0], [3.0]]), torch.tensor([1.0]))
    tensor([[1.0000],
            [0.2500]])
    """

    clip_norm: float | Mapping[str, float] = 1.0
    gamma: float = 0.01
    groups: Groups = ALL

    def factors(self, norms_BG: Tensor, bounds_G: Tensor) -> Tensor:
        """`C / (norm + gamma)`; the infinity of 0 / 0 is limited by the ceiling that holds for every rule."""
        return bounds_G / (norms_BG + self.gamma)


def auto_v(clip_norm: float | Mapping[str, float] = 1.0, groups: Groups | None = None) -> Automatic:
    """AUTO-V, `factor = C / norm`: every gradient that is not zero gets norm C. Zero stays zero.

    Bu et al. 2023, Automatic Clipping, eq. (AUTO-V).

    >>> auto_v().gamma
    0.0
    """
    return Automatic(clip_norm, gamma=0.0, groups=groups or ALL)


def normalized(clip_norm: float | Mapping[str, float], regularizer: float, groups: Groups | None = None) -> Automatic:
    """Normalised SGD, `factor = C / (r + norm)`: the formula of AUTO-S with r for gamma, so it is that rule.

    Yang et al. 2022, Normalized/Clipped SGD with Perturbation, Algorithm 2 (DP-NSGD).

    >>> normalized(1.0, regularizer=0.1) == Automatic(1.0, gamma=0.1)
    True
    """
    return Automatic(clip_norm, gamma=positive("regularizer", regularizer), groups=groups or ALL)


@dataclass(frozen=True)
@checked({"clip_norm": check_clip_norm, "regularizer": positive})
class PSAC:
    """Weigh gradients by norm without monotone preference for small ones: `factor = C / (norm + r / (norm + r))`.

    Xia et al. 2023, Differentially Private Learning with Per-Sample Adaptive Clipping, Algorithm 1.

    Args:
        regularizer: r > 0. Gradients far below r get weight near C, as with `Flat`, so that small gradients, which
            tend to point elsewhere than the mean, do not dominate.
        clip_norm, groups: as of `Flat`.

    >>> PSAC(clip_norm=1.0, regularizer=0.1).factors(torch.tensor([[0.0], [9.9]]), torch.tensor([1.0]))
    tensor([[1.0000],
            [0.1009]])
    """

    clip_norm: float | Mapping[str, float]
    regularizer: float
    groups: Groups = ALL

    def factors(self, norms_BG: Tensor, bounds_G: Tensor) -> Tensor:
        """`C / (norm + r / (norm + r))`; at norm 0 the factor is C."""
        r = self.regularizer
        return bounds_G / (norms_BG + r / (norms_BG + r))


@dataclass(frozen=True)
@checked({"clip_norm": check_clip_norm, "threshold": positive})
class Threshold:
    """Scale all gradients alike and drop the long ones: `factor = C / Z if norm <= Z else 0`.

    Bu et al. 2021, On the Convergence of Deep Learning with Differential Privacy (global clipping). Directions between
    samples are kept, but samples above the threshold teach nothing: choose Z above most norms.

    Args:
        threshold: Z > 0, the norm above which a sample is dropped (in each group for itself).
        clip_norm, groups: as of `Flat`.

    >>> Threshold(clip_norm=1.0, threshold=10.0).factors(torch.tensor([[5.0], [11.0]]), torch.tensor([1.0]))
    tensor([[0.1000],
            [0.0000]])
    """

    clip_norm: float | Mapping[str, float]
    threshold: float
    groups: Groups = ALL

    def factors(self, norms_BG: Tensor, bounds_G: Tensor) -> Tensor:
        """`C / Z` for norms up to Z, 0 above."""
        return torch.where(norms_BG <= self.threshold, bounds_G / self.threshold, torch.zeros_like(norms_BG))
