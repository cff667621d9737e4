"""Preparation of a loss for rows of one shape: what a pass must know before it, from nothing but public facts.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

A loss is called with made-up rows and parameters, so that nothing of it follows from records, from earlier batches or
from the step: a run that goes on in a new process has the same bits. What a batch cannot do with it goes to groups or
to the loop for that batch, and is not remembered.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from dpfunc.engines._levels import FirstRead, NeedsLoop
from dpfunc.engines._per_sample import Kept
from dpfunc.engines._row_pass import Rows, Settings, first_settings_that_work, run_pass
from dpfunc.engines._rules.table import ParameterUse
from dpfunc.engines.loop import MAX_TRIAL_READS, Trial, made_up, made_up_row, quiet_trial, warm_up


@dataclass(frozen=True)
class PreparedLoss:
    """Public facts about a loss for rows of one shape, learnt from made-up rows.

    Args:
        settings: those with which made-up rows could be computed together.
        reads: name of the function by which Python has read numbers of them; empty without one.
        uses: name of each parameter -> operations that use it, `vmap(grad)` for those without a rule; none where the
            loss does not use it. Empty if no made-up row could be computed.
        together: parameters with one use by a rule, and others: their gradients are measured together.
        why_loop: why no rows can be computed together; empty where that is to be tried.
        unused: parameters without a use; empty where rows may go other ways than made-up ones.
        known: uses of parameters, by their shapes: a memo, which changes no result.
    """

    settings: Settings
    reads: str = ""
    uses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    together: frozenset[str] = frozenset()
    why_loop: str = ""
    unused: tuple[str, ...] = ()
    known: dict[object, ParameterUse] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def facts(self) -> str:
        """All facts as text, which is the same in each process; empty if no made-up row could be computed."""
        settings = self.settings.rules, self.settings.own_memory, self.settings.plain_functions  # not their reason
        found = settings, self.reads, self.uses, sorted(self.together), self.why_loop, self.unused
        return repr(found) if self.uses else ""


def prepare(rows: Rows, *, rules: bool) -> PreparedLoss:
    """Prepare the loss for rows of this shape. Neither their values nor their number are used.

    Two made-up rows are computed, each as a batch of its own: ones; and zeros where Python reads numbers, or where ones
    are no row of the loss. With `rows.source`, parameters are the module's own.
    """
    found = PreparedLoss(Settings(rules))
    for value in (1, 0):
        call = Trial() if rows.source else warm_up(rows.loss_fn, rows.params, rows.batch, value)
        if call.backward:  # a loss may catch torch's error for ever
            return replace(found, why_loop="the loss calls backward(), which torch refuses inside of vmap")
        if call.failed or rows.are_split:
            continue
        with quiet_trial():
            params = rows.params if rows.source else made_up(rows.params)
            own = replace(rows, params=params, batch=made_up_row(rows.batch, value), positions=range(1))
            found = _prepared_by(own, found)
            if found.uses and not found.reads:
                break
    unused = () if found.reads else tuple(name for name, operations in found.uses.items() if not operations)
    return replace(found, unused=unused)


def _prepared_by(row: Rows, before: PreparedLoss) -> PreparedLoss:
    """Run one made-up row, and add what it shows to the facts that are known already."""

    def attempt(settings: Settings) -> PreparedLoss:
        kept = Kept()
        result = run_pass(row, settings, {}, kept, MAX_TRIAL_READS)
        of_rules = [(name, use.name) for use in result.uses for name in use.wanted.values()]
        uses = {name: dict.fromkeys(before.uses.get(name, ())) for name in row.params}
        for name, operation in (*reversed(of_rules), *((name, "vmap(grad)") for name in result.rest)):
            uses[name][operation] = None
        together = before.together.union(name for name in result.rest if kept.counts.get(name) == 1)
        reads = before.reads or result.reads
        return PreparedLoss(settings, reads, {name: tuple(ops) for name, ops in uses.items()}, together)

    try:
        found, settings = first_settings_that_work(before.settings, attempt)
    except FirstRead as stop:
        return replace(before, reads=str(stop))
    except NeedsLoop:
        return before
    return replace(found, settings=settings)
