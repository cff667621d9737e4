"""Noise that is correlated over the steps of a run: the matrix mechanism, from keys or with buffers.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dpfunc._utils.parts import distributed, local
from dpfunc._utils.validation import expect, one_of, wrong_type
from dpfunc.errors import InvalidArgument
from dpfunc.noise._streams import Leaves, Source, standard_normal
from dpfunc.noise.gaussian import Draw, mechanism_of_draw
from dpfunc.noise.mechanism import Mechanism, Run, Turn
from dpfunc.noise.strategies import Recursion, Strategy
from dpfunc.types import Event, Params, Schedule

_METHODS = ("row", "sensitivity", "recursion")
_LARGEST = 1e15  # of weights and sensitivities; float32 holds their products with any clip norm


@dataclass(frozen=True)
class Correlated:
    """Noise `noise_multiplier S_t (C^-1 z)_t` in step t: z_t is that of its key, S_t the sensitivity of its sum.

    Later noise takes back a part of earlier noise, so that sums over many steps, which the parameters are, have less of
    it. Relative to the bounds the releases are C^-1 (C x + noise_multiplier z): the run costs what one Gaussian release
    of C x costs, whose sensitivity the strategy knows. Choquette-Choo et al. 2023, arXiv 2306.08153; Denisov et al.
    2022, arXiv 2202.08312, Theorem 2.1, for gradients that depend on earlier releases.

    Args:
        strategy: the matrix C, e.g. `LambdaCGD`, `BISR`, `BandMF`, `BLT`.
        buffers: `redraw` keeps nothing: the noise of each earlier step that a step needs is drawn again from its key,
            and two sets of the parameters' size are in memory while that happens. Few steps with `LambdaCGD` and
            `BISR`, all earlier ones with others. `state` keeps the buffers of the strategy's recursion in
            `StepState.noise_state`, each of the parameters' size: one draw a step, and all processes draw all of it.

    The whole run is charged at its first step: as one release of all records; or, where records are drawn in cycles
    (`CyclicPoisson`) at least as long as C has bands, as samples of one release a cycle (Theorem 4 of the first paper).

    Sums of noise are float32 where the clipped sums are. With k weights w_i a number is off by at most
    `(k + 1) 2^-24 sum_i |w_i z_i|`, relative to the noise multiplier and S_t; with buffers, by less than 2^-15 of the
    deviation in a run of 1000 steps. Epsilon does not cover rounding, as with independent noise.

    Raises:
        InvalidArgument: no strategy, or buffers that it does not have; from `check`: a sampler that does not bound how
            often a record takes part, or a schedule of the noise multiplier.

    Guarantees:
        tests/noise/test_mechanisms.py: the law, the cost on neighbours, resumption and processes; for each strategy:
        tests/noise/test_correlated.py: rounding (test_rounding), memory (test_nothing_is_kept), the same noise with
        buffers (test_buffers_are_the_rows).

    >>> from dpfunc.noise import BISR
    >>> from dpfunc.sampling import ShuffledOnce
    >>> run = Run(ShuffledOnce(1000, 100), 2.0, num_steps=20)
    >>> Correlated(BISR(3)).events(run, 0, 20)
    (Event(sampling_prob=1.0, noise_multiplier=1.140..., num_steps=1),)
    """

    strategy: Strategy
    buffers: Literal["redraw", "state"] = "redraw"

    def __post_init__(self) -> None:
        whole = not isinstance(self.strategy, type) and all(
            callable(getattr(self.strategy, name, None)) for name in _METHODS
        )
        if not whole:
            raise wrong_type("a strategy such as noise.BISR(4)", "strategy", self.strategy)
        one_of("buffers", self.buffers, ("redraw", "state"))

    def check(self, run: Run) -> None:
        """Refuse samplers without `participation`, schedules of the noise, and buffers that a strategy does not have.

        And strategies whose noise grows beyond what float32 holds, as `BandMF((1.0, 3.0))` does by 3 a step.

        Raises:
            InvalidArgument: with what to use instead.
        """
        expect(
            getattr(run.sampler, "participation", None) is not None,
            "a sampler that bounds how often a record takes part, with correlated noise", "sampler", run.sampler,
            "With this one a record can be in all steps, and their noise does not hide that. Use ShuffledOnce, "
            "InOrder, Shuffled, RandomAllocation, or CyclicPoisson with as many groups as the strategy has bands.",
        )  # fmt: skip
        expect(
            not isinstance(run.noise_multiplier, Schedule), "one noise multiplier for all steps with correlated noise",
            "noise_multiplier", run.noise_multiplier,
        )  # fmt: skip
        if self.buffers == "state":
            self._recursion(run.num_steps)
        _check_values(self.strategy, run)

    def events(self, run: Run, start: int, stop: int) -> tuple[Event, ...]:
        """The events of the whole run if step 0 is among the steps, else none."""
        if start > 0 or stop == start:
            return ()
        steps, sigma = run.num_steps, _multiplier(run)
        cycle = getattr(run.sampler, "cycle", 0)
        participation = getattr(run.sampler, "participation", None)
        separation, most = (1, steps) if participation is None else participation(steps)
        if self.strategy.bands is not None and self.strategy.bands <= min(cycle, separation):
            events: tuple[Event, ...] = run.sampler.events(0, steps, sigma / self.strategy.sensitivity(steps, steps, 1))
            return events
        return (Event(1.0, sigma / self.strategy.sensitivity(steps, separation, most), 1),)

    def weights(self, run: Run, step: int) -> Sequence[float]:
        """Weights of the standard normals of this step, the one before, .. relative to the sensitivity of the sum."""
        return tuple((self.strategy.row(run.num_steps, step) * _multiplier(run)).tolist())

    def mechanism(self, run: Run) -> Mechanism:
        """The mechanism of all steps: with buffers as its state, or a placeholder that is never read."""
        if self.buffers == "redraw":
            state = {"noise": "of all keys", "source": run.source}
            return mechanism_of_draw(run, self._redrawing_draw(run), lambda params: dict(state))
        recursion = self._recursion(run.num_steps)
        draw, count = _buffered_draw(recursion, run.source), len(recursion.read)
        return mechanism_of_draw(run, draw, lambda params: _empty_buffers(params, count))._replace(add_share=None)

    def _recursion(self, num_steps: int) -> Recursion:
        found = self.strategy.recursion(num_steps)
        if found is None:
            raise InvalidArgument(
                f'Expected buffers="redraw" with {self.strategy!r}, which has no recursion by few buffers, got '
                'buffers="state".'
            )
        return found

    def _redrawing_draw(self, run: Run) -> Draw:
        def draw(like: Leaves, state: Any, turn: Turn) -> tuple[dict[str, Tensor], Any]:
            begun = run.source if state is None else state["source"]
            expect(
                begun == run.source, f"noise_source={begun!r}, with which the run began", "noise_source", run.source,
                "Earlier noise is drawn again: another source has other numbers. Nothing was spent.",
            )  # fmt: skip
            row = self.strategy.row(run.num_steps, turn.step)
            total: dict[str, Tensor] = {}
            for back in reversed(range(len(row))):  # the oldest first: the last sum is with the largest part
                _add(total, standard_normal(turn.key_of(turn.step - back), like, run.source), float(row[back]))
            return total, state

        return draw


def _multiplier(run: Run) -> float:
    """The noise multiplier of a run that was checked."""
    if isinstance(run.noise_multiplier, Schedule):
        raise wrong_type("one noise multiplier", "noise_multiplier", run.noise_multiplier)
    return run.noise_multiplier


def _check_values(strategy: Strategy, run: Run) -> None:
    """Refuse values of a strategy, or of a sampler, with which the run has no cost or its noise no numbers."""
    steps = run.num_steps
    participation = run.sampler.participation(steps)
    expect(
        isinstance(participation, tuple) and len(participation) == 2,
        "a pair (separation, participations) from participation(num_steps)", "participation", participation,
    )  # fmt: skip
    with np.errstate(over="ignore", invalid="ignore"):
        moved = float(strategy.sensitivity(steps, *participation))
        weights = np.concatenate([strategy.row(steps, step) for step in (0, steps - 1)])
    expect(
        1 / _LARGEST <= moved <= _LARGEST, f"a strategy of sensitivity up to {_LARGEST:g}", "strategy", strategy,
        f"Its sensitivity is {moved:g}.",
    )  # fmt: skip
    largest = float(np.abs(weights).max())
    expect(
        largest <= _LARGEST, f"a strategy whose noise has weights up to {_LARGEST:g}", "strategy", strategy,
        f"In {steps} steps C^-1 grows to {largest:g}. Weights that fall fast enough, as those of optimal_bands and "
        "optimal_buffers, keep it small.",
    )  # fmt: skip


def _add(total: dict[str, Tensor], drawn: dict[str, Tensor], weight: float) -> None:
    """Add weighted noise, leaf by leaf; the memory of the first draw is that of the sum."""
    for name, value in drawn.items():
        if name in total:
            total[name].add_(value, alpha=weight)
        else:
            total[name] = value if weight == 1 else value.mul_(weight)


def _empty_buffers(params: Params, buffers: int) -> dict[str, Any]:
    """Buffers of zeros, in the type in which gradients are summed, laid out as the parameters."""

    def zeros(param: Tensor) -> Tensor:
        part = local(param.detach())
        kind = torch.float64 if part.dtype == torch.float64 else torch.float32
        return distributed(torch.zeros_like(part, dtype=kind), param)

    return {"buffers": [{name: zeros(param) for name, param in params.items()} for _ in range(buffers)]}


def _check_shapes(buffers: list[dict[str, Tensor]], name: str, noise: Tensor) -> None:
    """Refuse a sum that is new in the run or has another shape: a buffer that is broadcast would be other noise."""
    shapes = [tuple(local(each[name]).shape) if name in each else None for each in buffers]
    if any(shape != tuple(noise.shape) for shape in shapes):
        raise InvalidArgument(
            f"Expected the parameters with which the run began, whose earlier noise is in buffers, got {name!r} of "
            f"shape {tuple(noise.shape)}, with buffers of shape {shapes[0]}. Nothing was released. Begin a new run "
            "with these parameters: dp_step.init(params, dpfunc.secure_key(), ledger=state.ledger)."
        )


def _buffered_draw(recursion: Recursion, source: Source) -> Draw:
    """Noise by a recursion: see `Recursion`. The state that is given stays as it is: a step may be taken again."""

    def draw(like: Leaves, state: Any, turn: Turn) -> tuple[dict[str, Tensor], Any]:
        noise = standard_normal(turn.key, like, source)
        before: list[dict[str, Tensor]] = state["buffers"]
        after: list[dict[str, Tensor]] = [{} for _ in before]
        for name, value in noise.items():
            _check_shapes(before, name, value)
            own = [local(buffer[name]) for buffer in before]
            value.mul_(recursion.scale)
            for weight, buffer in zip(recursion.read, own, strict=True):
                value.add_(buffer, alpha=float(weight))
            for place, weights in enumerate(recursion.keep):
                kept = value * float(recursion.write[place])  # not the noise itself, into which the sum is added
                for other in np.flatnonzero(weights):
                    kept.add_(own[other], alpha=float(weights[other]))
                after[place][name] = distributed(kept, before[place][name])
        return noise, {"buffers": after}

    return draw
