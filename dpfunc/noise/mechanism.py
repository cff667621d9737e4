"""What each noise mechanism brings: how noise is added, its state, and what it costs.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dpfunc._utils.parts import Window
from dpfunc.noise._streams import Source
from dpfunc.rng import Key
from dpfunc.types import Allocation, ClippedSum, Event, Params, Schedule


class Run(NamedTuple):
    """Public facts about a run, which a noise mechanism is built from.

    Args:
        sampler: of the plan. noise_multiplier: of the plan, a number or a `Schedule`.
        num_steps: steps of the whole run, >= 1. allocation: over clip groups, see `add_gaussian`.
        source: generator of the noise, see `add_gaussian`; no cost depends on it.

    >>> from dpfunc.sampling import Poisson
    >>> Run(Poisson(100, 0.1), 1.0, num_steps=10).allocation
    'uniform'
    """

    sampler: Any
    noise_multiplier: float | Schedule
    num_steps: int
    allocation: Allocation = "uniform"
    source: Source = "secure"


class Turn(NamedTuple):
    """The step that a mechanism takes, and the keys of the releases of the run.

    Args:
        step: number of the step, from 0. key: of its release, which draws its noise.
        key_of: step -> the key of its release; for noise that is correlated over steps, which draws that of earlier
            ones again. The mechanism must have a state: a run with `()` may go on with a new key.

    >>> from dpfunc.rng import fold_in, insecure_key
    >>> key_of = lambda step: fold_in(insecure_key(0), step)
    >>> Turn(3, key_of(3), key_of).key == fold_in(insecure_key(0), 3)
    True
    """

    step: int
    key: Key
    key_of: Callable[[int], Key]


class Mechanism(NamedTuple):
    """Noise as two functions: `init(params) -> state` and `add(clipped, state, turn) -> (released, state)`.

    The state is carried from step to step, for noise that is correlated between steps. It is secret, as the key is:
    a reader who knows earlier noise can subtract it. It has tensors, numbers, strings, lists, tuples and dicts, which a
    checkpoint can hold, and is the same on all processes. Tensors under the name of a parameter (`{"previous": {name:
    tensor}}`), of its shape, are laid out as that parameter when a checkpoint is loaded. A mechanism that takes keys of
    other steps has a state, be it a word: a run with `()` may go on with a new key.

    `add_share(clipped, windows, turn)` is for noise that is a function of keys alone, and else None. It adds, in
    place, the noise of some rows of each sum. Where several processes hold terms of a sum, each adds the noise of other
    rows to its term, and the sum of all terms is what `add` would release; the state stays. A term alone is not
    released.

    Guarantees:
        each of dpfunc: tests/noise/test_mechanisms.py.

    >>> from dpfunc.noise import gaussian
    >>> gaussian(1.0).init({})
    ()
    """

    init: Callable[[Params], Any]
    add: Callable[[ClippedSum, Any, Turn], tuple[dict[str, Tensor], Any]]
    add_share: Callable[[ClippedSum, Mapping[str, Window], Turn], None] | None = None


class Noise(Protocol):
    """The noise of a plan, e.g. `Gaussian`. Implement these methods to bring your own.

    It holds public facts only, beside those of the `Run`. As a frozen dataclass among the public names of
    `dpfunc.noise` it can be saved in a plan. A further method `weights(run, step) -> Sequence[float]` may say what the
    noise of a step is, relative to the sensitivity of its sum: weights of the independent standard normals of this
    step, the one before, .. Without it a plan has no telemetry errors, and an audit does not look at the noise.
    """

    def check(self, run: Run) -> None:
        """Refuse a run for which `events` does not hold, by its sampler, schedule or number of steps.

        Raises:
            InvalidArgument: with what to use instead.
        """

    def events(self, run: Run, start: int, stop: int) -> tuple[Event, ...]:
        """Events of the steps start..stop-1, run-length encoded: the privacy that they cost.

        What is released as a whole is charged at its first step, and later steps cost nothing: a budget then has room
        for all of it or for none, a run that ends early has paid for all, and no key is changed in its middle.
        """

    def mechanism(self, run: Run) -> Mechanism:
        """The mechanism of all steps of the run."""
