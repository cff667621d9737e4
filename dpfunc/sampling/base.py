"""Protocol of samplers.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

from typing import Protocol

from torch import Tensor

from dpfunc.rng import Key
from dpfunc.types import Adjacency, Event


class Sampler(Protocol):
    """Sampler of the records of each batch. The probability comes from it, never from the length of a loader.

    A sampler holds public facts only; the key is an argument. Implement these methods to bring your own, and claim in
    `events` no more than its proof gives. A further method `participation(num_steps) -> (separation, participations)`
    may bound, for correlated noise, how often a record takes part in the first `num_steps` steps: at most so many
    times, and two of them are at least `separation` steps apart. A number `cycle` says, as of `CyclicPoisson`, that
    records are in groups that take turns, and that `events` are Poisson samples of one group: correlated noise of at
    most so many bands is then charged by them. No other sampler has an attribute of this name.
    """

    @property
    def dataset_size(self) -> int:
        """Number of records n in the data set, or a public bound on it."""

    @property
    def adjacencies(self) -> tuple[Adjacency, ...]:
        """The neighbours for which `events` holds."""

    def indices(self, key: Key, step: int) -> Tensor:
        """The records in the batch of a step: int64, a function of the run's key and the step. Unreleased."""

    def expected_batch_size(self, step: int) -> float:
        """The expected number of records, a public fact."""

    def events(self, start: int, stop: int, noise_multiplier: float) -> tuple[Event, ...]:
        """Events of the steps start..stop-1 with this noise: the privacy that they cost.

        What is released as a whole, e.g. a shuffled epoch, is charged at its first step, and its later steps cost
        nothing: a schedule of the noise then changes at steps that cost something.
        """
