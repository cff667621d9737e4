"""The values that flow between the layers: parameters, gradients, rules, sums, events of samplers, schedules.

May import: _utils and below. Privacy depends on it: yes.

Axis letters: B samples, G clip groups, T positions, d features.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from dpfunc._utils import validation as checks

if TYPE_CHECKING:  # accounting uses this file too, and must not wait for torch
    from torch import Tensor

Params = Mapping[str, "Tensor"]
"""Trainable parameters, or gradients: flat and named."""

Batch = Any
"""A pytree of tensors whose axis 0 is the privacy unit; all leaves agree on its length B."""

LossFn = Callable[[Params, Batch], "Tensor | tuple[Tensor, Any]"]
"""`(params, batch) -> losses (B,)`: one a row; rows do not influence each other. Or `(losses, aux)`, where aux is a
pytree of tensors (B, ...), which comes back in `Unreleased.aux`."""

Adjacency = Literal["add_remove", "zero_out", "replace_one"]
"""Which data sets count as neighbours. `zero_out` costs what `add_remove` costs and lets n be public."""

ADJACENCIES: tuple[Adjacency, ...] = ("add_remove", "zero_out", "replace_one")

Allocation = Literal["uniform", "optimal"]
"""How the noise is split over clip groups of different size."""


class PerSampleGrads(Protocol):
    """The gradients of B samples, which need not exist in memory."""

    @property
    def losses_B(self) -> Tensor: ...  # unreleased

    def sq_norms(self) -> dict[str, Tensor]:
        """Squared L2 norm of each sample's gradient, for each parameter: name -> (B,), float32 or float64."""

    def weighted_sum(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`sum_i factors[name][i] * grad_i[name]`; a factor of 0 removes its row even where it is not finite."""


Engine = Callable[[LossFn, Params, Batch], PerSampleGrads]


class Groups(Protocol):
    """Assignment of parameters to groups that are clipped together: the group of each name, in order."""

    def assign(self, names: tuple[str, ...]) -> tuple[str, ...]: ...


class ClipRule(Protocol):
    """Rule that scales the gradient of one sample down. It sees norms, never gradients."""

    @property
    def groups(self) -> Groups: ...

    @property
    def clip_norm(self) -> float | Mapping[str, float]: ...

    def factors(self, norms_BG: Tensor, bounds_G: Tensor) -> Tensor:
        """Scale factors (B, G) for finite norms; `dpfunc.clipping` enforces `factor * norm <= bound` after it."""


class RunRule(Protocol):
    """Further members of a clip rule whose bounds differ between steps. Within a step they are those of `at`.

    Its state is in `StepState.clip_state`: JSON values that follow from what was released. It is public.
    """

    @property
    def share(self) -> float:
        """Share of the squared bound, 0 <= share < 1, that what it releases takes from the gradient."""

    def initial(self, group_names: tuple[str, ...]) -> Any:
        """The state before the first step, for clip groups in the order of their columns in `norms_BG`."""

    def at(self, step: int, state: Any) -> ClipRule:
        """The rule of one step, whose bound stays."""

    def released(self, state: Any) -> Any:
        """Statistics that the step releases beside its gradient, a `clipping.Telemetry`; None without any."""

    def next(self, state: Any, released: Mapping[str, float | list[float]] | None) -> Any:
        """The state after a step, from the values that it released."""


@dataclass(frozen=True)
class ClippedSum:
    """The sum of clipped gradients and how far one sample can move it. UNRELEASED until noise is added.

    Args:
        sums: parameter name -> sum over the batch, float32 or float64.
        group_of: parameter name -> clip group.
        sensitivities: clip group -> L2 sensitivity of that group's sums under the plan's adjacency.

    >>> import torch
    >>> ClippedSum({"w": torch.zeros(2)}, {"w": "all"}, {"all": 1.5})
    ClippedSum(UNRELEASED, 1 parameters, sensitivity=1.5)
    """

    sums: Params
    group_of: Mapping[str, str]
    sensitivities: Mapping[str, float]

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of all sums together, `sqrt(sum_g S_g^2)`."""
        return float(sum(s * s for s in self.sensitivities.values()) ** 0.5)

    def __repr__(self) -> str:
        return f"ClippedSum(UNRELEASED, {len(self.sums)} parameters, sensitivity={self.sensitivity:.6g})"


class Unreleased(NamedTuple):
    """Values that no noise protects: look at them while debugging on public data, never publish them.

    Args:
        losses_B: of each sample. norms_BG: of its gradient, in each clip group.
        aux: what the loss returned beside its losses, detached, with the samples of this process on axis 0; None for a
            loss without it, and for a batch without rows, of which no loss is computed.
    """

    losses_B: Tensor
    norms_BG: Tensor
    aux: Any = None

    def __repr__(self) -> str:
        return "Unreleased(losses, gradient norms and aux of private samples: hidden, and not covered by epsilon)"


class MicrobatchSums(NamedTuple):
    """Clipped sums of a microbatch; losses (B,), norms (B, G), squared norms of parameters (B,) and aux, unreleased."""

    sums: dict[str, Tensor]
    losses_B: Tensor
    norms_BG: Tensor
    sq_norms: dict[str, Tensor]
    aux: Any = None


@dataclass(frozen=True, order=True)
@checks.checked(
    {"sampling_prob": checks.unit_interval, "noise_multiplier": checks.non_negative, "num_steps": checks.count}
)
class Event:
    """`num_steps` releases of a sum plus Gaussian noise, each over a Poisson sample of the data.

    Each record is in a step's batch with probability `sampling_prob`, independently; the noise has standard
    deviation `noise_multiplier * sensitivity`. `sampling_prob = 1` is the Gaussian mechanism on all data, 0 is free.
    The meaning of an event never changes. Other kinds are subclasses with a `law`, see `accounting/events.py`.

    >>> Event(sampling_prob=0.01, noise_multiplier=1.0, num_steps=1000)
    Event(sampling_prob=0.01, noise_multiplier=1.0, num_steps=1000)
    """

    sampling_prob: float
    noise_multiplier: float
    num_steps: int

    def law(self) -> tuple[Event, ...]:
        """Events that accountants know, which together cost at least as much: itself; none if no record takes part."""
        return (self,) if self.sampling_prob > 0 else ()


@dataclass(frozen=True, order=True)
@checks.checked({"dataset_size": checks.count, "cap": checks.count})
class Capped(Event):
    """Gaussian steps over a Poisson sample of which at most `cap` records are kept, a random subset if there are more.

    With `sampling_prob = 1` a batch is `cap` of all records, without replacement. n is public.

    Args:
        sampling_prob, noise_multiplier, num_steps: as of `Event`. dataset_size: number of records n, >= 1; with
            add/remove neighbours the larger one, and `sampling_prob = 1` is refused if batches are cut.
        cap: most records in a batch, >= 1.

    The others fill the batch with probability `t = P[Bin(n - 1, q) >= cap]`. If not, this is Poisson sampling. If they
    do, the record takes the place of another one, which moves the sum by two sensitivities, with probability
    `P[Bin(n, q) > cap] cap / (n t)`: Ganesh et al. 2025, arXiv 2508.15089. For `sampling_prob = 1` see
    docs/accounting.md.

    Guarantees:
        never below the truth (tests/accounting/test_events.py::test_cut_batches_against_enumeration).

    >>> from dpfunc.accounting import Ledger
    >>> events = (Capped(0.5, 1.0, 3, dataset_size=4, cap=2), Capped(0.5, 1.0, 2, dataset_size=3, cap=2))
    >>> print(f"{Ledger(events, 'zero_out').epsilon(1e-6).epsilon:.2f}")
    17.90
    """

    dataset_size: int
    cap: int

    @property
    def adjacencies(self) -> tuple[Adjacency, ...]:
        """The neighbours of a ledger that may have it."""
        fixed_size = self.sampling_prob == 1 and self.cap < self.dataset_size
        return ("zero_out", "replace_one") if fixed_size else ADJACENCIES

    def law(self) -> tuple[Event, ...]:
        """Itself; plain steps where no batch is ever cut."""
        plain = Event(self.sampling_prob, self.noise_multiplier, self.num_steps)
        return super().law() if self.cap < self.dataset_size else plain.law()


@dataclass(frozen=True, order=True)
@checks.checked(dict.fromkeys(("num_batches", "cycles", "participations"), checks.count))
class Allocated(Event):
    """Epochs of `num_batches` Gaussian steps; each record is in one batch of an epoch, drawn independently of others.

    Random allocation, or balls in bins; not a permutation, whose batches have fixed sizes (docs/accounting.md). An
    epoch is charged as a whole.

    Args:
        noise_multiplier: of each step. num_steps: number of epochs. num_batches: steps of an epoch t, >= 1.
        participations: batches of an epoch that each record is in, 1 <= k <= t: a random set of k.
        cycles: times that an epoch is repeated with the same batches, >= 1; `num_steps` counts all of them as one.

    The loss of one participation is known up to the width of a grid: Feldman and Shenfeld 2026, arXiv 2602.17284, see
    docs/accounting.md. Of k participations each is one of `floor(t / k)` batches: Feldman and Shenfeld 2025, arXiv
    2502.08202. Batches that are repeated c times tell what their mean tells, whose noise is `1 / sqrt(c)` of one:
    Choquette-Choo et al. 2025, arXiv 2410.06266.

    Guarantees:
        tests/accounting/test_allocation.py: never below the truth, hardly above it (test_an_epoch_against_integration,
        ::test_an_epoch_against_samples), and at most the figures of others (test_figures_of_the_field).

    >>> from dpfunc.accounting import Ledger
    >>> print(f"{Ledger((Allocated(1.0, 1, num_batches=100),)).epsilon(1e-5).epsilon:.3f}")
    0.621
    """

    sampling_prob: float = field(default=1.0, init=False)
    num_batches: int
    participations: int = 1
    cycles: int = 1

    def __post_init__(self) -> None:
        most, times = self.num_batches, self.participations
        checks.expect(times <= most, f"at most num_batches={most} participations", "participations", times)

    def law(self) -> tuple[Event, ...]:
        """Epochs of one participation; plain steps of all records for one batch."""
        batches = self.num_batches // self.participations
        noise = self.noise_multiplier / self.cycles**0.5
        epochs = self.num_steps * self.participations
        known = batches > 1 and noise >= 0.08  # of less noise float64 cannot hold the losses
        return (Allocated(noise, epochs, batches) if known else Event(1.0, noise, epochs),)


def _pieces(name: str, pieces: Any) -> tuple[tuple[int, float], ...]:
    checks.expect(pieces, "at least one piece in Schedule", name, pieces)
    return tuple((checks.count("num_steps", number), checks.positive("value", value)) for number, value in pieces)


@dataclass(frozen=True)
@checks.checked({"pieces": _pieces})
class Schedule:
    """A value that is constant over pieces of the run: `pieces = ((num_steps, value), ...)`.

    The last value goes on after the last piece.

    >>> decay = Schedule(((100, 1.2), (200, 0.9)))
    >>> decay.at(99), decay.at(100), decay.at(5000)
    (1.2, 0.9, 0.9)
    """

    pieces: tuple[tuple[int, float], ...]

    def at(self, step: int) -> float:
        """The value at a step, counted from 0."""
        return self.pieces[bisect(self.starts(), checks.integer("step", step)) - 1][1]

    def starts(self) -> tuple[int, ...]:
        """The steps at which the value may change, from 0."""
        return tuple(accumulate((num_steps for num_steps, _ in self.pieces[:-1]), initial=0))


def schedule_at(value: float | Schedule, step: int) -> float:
    """The value at a step, for a constant or a schedule."""
    return value.at(step) if isinstance(value, Schedule) else value


def stretches(start: int, stop: int, *values: float | Schedule) -> Iterator[tuple[int, int]]:
    """Stretches of the steps start..stop-1 in which no value changes: the first step, and the one after the last."""
    changes = {step for value in values if isinstance(value, Schedule) for step in value.starts()}
    return pairwise(sorted({start, stop, *(step for step in changes if start < step < stop)}))
