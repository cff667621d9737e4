"""Bounds that change over a run as was planned.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, cast

from torch import Tensor

from dpfunc._utils.validation import expect, wrong_type
from dpfunc.clipping.rules import Stateless
from dpfunc.types import ClipRule, Groups, Schedule


@dataclass(frozen=True)
class Scheduled(Stateless):
    """A rule whose bounds are multiplied by a schedule: in step t they are `clip_norm * scale.at(t)`.

    The noise of each step is that of its bound, so that epsilon does not depend on the schedule.

    Args:
        rule: a rule with one bound over the run, e.g. `Flat`.
        scale: of `clip_norm`, by step.

    Raises:
        InvalidArgument: another rule, or a product that is outside the domain of `clip_norm`.

    Guarantees:
        clipping and noise have the same bound in each step, with each engine, also after a resumption
        (tests/clipping/test_scheduled.py::test_noise_follows_the_bound, test_a_resumed_run_has_its_bound).

    >>> from dpfunc.clipping import Flat
    >>> rule = Scheduled(Flat(2.0), Schedule(((100, 1.0), (100, 0.5))))
    >>> rule.at(99, None).clip_norm, rule.at(100, None).clip_norm
    (2.0, 1.0)
    """

    rule: ClipRule
    scale: Schedule

    def __post_init__(self) -> None:
        known = is_dataclass(self.rule) and not isinstance(self.rule, type) and not hasattr(self.rule, "at")
        expect(known, "a rule with one bound over the run, e.g. clipping.Flat(1.0)", "rule", self.rule)
        if not isinstance(self.scale, Schedule):
            raise wrong_type("scale to be a dpfunc.types.Schedule", "scale", self.scale)
        for step in self.scale.starts():
            self.at(step, None)

    @property
    def clip_norm(self) -> float | Mapping[str, float]:
        """The bound of the first step."""
        return self.at(0, None).clip_norm

    @property
    def groups(self) -> Groups:
        """Clip groups of the rule."""
        return self.rule.groups

    def factors(self, norms_BG: Tensor, bounds_G: Tensor) -> Tensor:
        """Scale factors (B, G) of the rule."""
        return self.rule.factors(norms_BG, bounds_G)

    def at(self, step: int, state: Any) -> ClipRule:
        """The rule with the bounds of a step."""
        bound, scale = self.rule.clip_norm, self.scale.at(step)
        if isinstance(bound, Mapping):
            scaled: Any = {group: scale * each for group, each in bound.items()}
        else:
            scaled = scale * bound
        rule: Any = self.rule
        return cast(ClipRule, replace(rule, clip_norm=scaled))
