"""Per-sample gradients that are caught during the backward pass, and clip groups that are summed in it.

The factor of a clip group is known as soon as the gradients of all its parameters are. Its clipped sum is then made at
once, and activations and gradients are dropped: the memory of a step without privacy.
Bu et al. 2022, Scalable and Efficient Training of Large Convolutional Neural Networks with Differential Privacy, give
the norms; He et al. 2023, Exploring the Limits of Differentially Private Deep Learning with Group-wise Clipping, the
groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpfunc.engines.evidence import NOTHING_FOUND, Evidence
from dpfunc.engines.guards.modes import unseen
from dpfunc.engines.numerics import exact
from dpfunc.engines.per_sample import Dense, PerSample, PerSampleGrad, Zeros, add
from dpfunc.engines.rules.table import Grads, Use
from dpfunc.engines.tracing.trace import Trace
from dpfunc.engines.uses.gradient_taps import leaf
from dpfunc.engines.uses.unwritten import Unwritten
from dpfunc.errors import InvalidArgument
from dpfunc.types import GroupFactors, Params

# Factors that are asked for at the end may differ from those that were used by rounding only.
_ROUNDING = 1e-5


@dataclass
class CaughtGrads:
    """Per-sample gradients that one backward pass has given so far, and the clip groups that they complete.

    Args:
        group_factors: factors of a group; None if no group is summed before the end. params: leaves by name. anchor: a
            leaf that makes autograd run the backward of every use. trace: of the pass.
        missing: uses without a gradient so far, by the identity of the parameter. late: names of parameters some of
            whose gradients are known only after the backward pass.
        kept: identity -> gradients of groups that are not summed so far. sums, sq_norms, factors: of the summed
            ones, by name.
        forward_done: the forward pass is over: later uses are repeated by checkpointing.
    """

    group_factors: GroupFactors | None
    params: Params
    anchor: Tensor
    trace: Trace
    missing: dict[int, int] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    kept: dict[int, list[Unwritten[PerSampleGrad]]] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    sq_norms: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, Tensor] = field(default_factory=dict)
    forward_done: bool = False
    _unsummed: dict[str, list[str]] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _later: list[tuple[Unwritten[Callable[[], Grads]], Mapping[str, int], bool]] = field(default_factory=list)
    _unformed: set[tuple[int, int]] = field(default_factory=set)

    @staticmethod
    def of(group_factors: GroupFactors | None, params: Params, trace: Trace) -> CaughtGrads:
        """Nothing so far: no group of these parameters is summed."""
        first = next(iter(params.values()))
        caught = CaughtGrads(group_factors, params, leaf((), first.dtype, first.device), trace)
        if group_factors is not None:
            for name, param in params.items():
                caught._unsummed.setdefault(group_factors.group_of[name], []).append(name)
                caught._names[id(param)] = name
        return caught

    def expect(self, targets: Mapping[str, int]) -> None:
        """Count a use of the forward pass, whose gradients will come."""
        if not self.forward_done:
            for target in targets.values():
                self.missing[target] = self.missing.get(target, 0) + 1

    def end_forward(self) -> None:
        """Note the end of the forward pass. Groups with a late parameter are summed after the backward pass."""
        self.forward_done = True
        for group in [group for group, names in self._unsummed.items() if not self.late.isdisjoint(names)]:
            del self._unsummed[group]

    def take(
        self,
        use: Use,
        targets: Mapping[str, int],
        compute: Callable[[], Grads],
        tensors: Sequence[Tensor],
        *,
        formed: bool = False,
        later: bool = False,
    ) -> None:
        """Take the gradients of a use, and sum the groups that they complete.

        Args:
            tensors: that they are computed from.
            formed: form them: now, or after the backward pass where their factors are smaller, until then.
            later: compute them after the backward pass, with all others: they are small.

        Raises:
            UnsupportedModel: more gradients than uses; a tensor that was kept for a group is written into since.
        """
        if not self.forward_done:  # the loss differentiates inside of itself
            return
        for target in targets.values():
            if not self.missing.get(target):
                raise use.refuse("its backward pass runs more often than its forward pass.")
            self.missing[target] -= 1
        if later and self.group_factors is None:
            self._later.append((Unwritten.of(use, compute, tensors, self.trace), targets, formed))
            return
        with unseen(), exact(self.anchor.device), torch.no_grad():
            self._keep(use, targets, compute(), formed)
        if self.group_factors is not None:
            self._sum_complete_groups(self.group_factors, targets.values())

    def finish(self) -> dict[int, list[PerSampleGrad]]:
        """Compute the gradients that were left for the end; identity -> the gradients of groups without a sum.

        Raises:
            UnsupportedModel: a tensor that they are computed from was written into since its use gave it.
        """
        with unseen(), exact(self.anchor.device), torch.no_grad():
            for compute, targets, formed in self._later:
                self._keep(compute.use, targets, compute.read()(), formed)
            self._later.clear()
            return {target: self._final(target) for target in tuple(self.kept)}

    def _final(self, target: int) -> list[PerSampleGrad]:
        """Gradients of all uses; each is formed, if it is, when the factors of those before are released."""
        uses, grads = self.kept.pop(target), list[PerSampleGrad]()
        for index in range(len(uses)):
            grad = uses.pop(0).read()
            grads.append(Dense(grad.dense()) if (target, index) in self._unformed else grad)
        return grads

    def _keep(self, use: Use, targets: Mapping[str, int], grads: Grads, formed: bool) -> None:
        for argument, target in targets.items():
            uses, grad = self.kept.setdefault(target, []), grads[argument]
            numbers = sum(tensor.numel() for tensor in grad.tensors)
            smaller = numbers < use.num_samples * math.prod(use.shapes[argument])
            if formed and smaller and self.group_factors is None:
                self._unformed.add((target, len(uses)))
            elif formed:
                grad = Dense(grad.dense())
            uses.append(Unwritten.of(use, grad, grad.tensors, self.trace))

    def _sum_complete_groups(self, group_factors: GroupFactors, targets: Iterable[int]) -> None:
        """Sum the groups of these parameters that have all their gradients now."""
        for group in {group_factors.group_of[self._names[target]] for target in targets if target in self._names}:
            names = self._unsummed.get(group, ())
            if names and not any(self.missing.get(id(self.params[name])) for name in names):
                self._sum_group(group_factors, group)

    def _sum_group(self, group_factors: GroupFactors, group: str) -> None:
        grads = {name: self._gradient(group_factors, name) for name in self._unsummed.pop(group)}
        with unseen(), exact(self.anchor.device), torch.no_grad():
            sq_norms = {name: grad.sq_norms() for name, grad in grads.items()}
            factors_B = group_factors.factors(group, sq_norms)
            for name, grad in grads.items():
                self.sums[name], self.factors[name] = grad.weighted_sum(factors_B), factors_B
        self.sq_norms.update(sq_norms)

    def _gradient(self, group_factors: GroupFactors, name: str) -> PerSampleGrad:
        param = self.params[name]
        uses = [use.read() for use in self.kept.pop(id(param), [])]
        return add(uses) if uses else Zeros(group_factors.num_samples, param.detach())


@dataclass(frozen=True)
class GroupwiseSums:
    """Losses and norms of B samples, sums of the clip groups that are complete, and gradients of the others.

    Args:
        losses_B: of each sample. rest: gradients of groups without a sum. caught: the sums of the others.
        group_factors: of these. evidence: about the pass.
    """

    losses_B: Tensor
    rest: PerSample
    caught: CaughtGrads = field(repr=False)
    group_factors: GroupFactors = field(repr=False)
    evidence: Evidence = NOTHING_FOUND

    def sq_norms(self) -> dict[str, Tensor]:
        """Squared norms of the gradients of each sample: name -> (B,)."""
        norms = {**self.rest.sq_norms(), **self.caught.sq_norms}
        return {name: norms[name] for name in self.caught.params}

    def is_finite(self) -> bool:
        """True if no sample has a group whose norm is not finite: it would contribute to other groups, and must not."""
        totals: dict[str, Tensor] = {}
        for name, value in self.sq_norms().items():
            group = self.group_factors.group_of[name]
            totals[group] = totals[group] + value if group in totals else value
        return bool(torch.isfinite(torch.stack(list(totals.values()))).all())

    def weighted_sum(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weighted sums over the samples: name -> parameter shape.

        Raises:
            InvalidArgument: other factors than those that the groups were summed with.
        """
        for name, used_B in self.caught.factors.items():
            same = torch.allclose(used_B, factors[name].to(used_B.dtype), rtol=_ROUNDING, atol=0)
            if not same or not torch.equal(used_B == 0, factors[name] == 0):
                raise InvalidArgument(
                    f"Expected the factors of {name!r} that its clip group was summed with, got others: they depend on "
                    "more than the norms of the group. Use a clip rule without by_group=True, or one group. Nothing "
                    "was released and nothing was spent."
                )
        sums = {**self.rest.weighted_sum({name: factors[name] for name in self.rest.grads}), **self.caught.sums}
        return {name: sums[name] for name in self.caught.params}
