"""What each noise mechanism brings: how noise is added, its state, and what it costs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dpfunc._utils.processes import Window
from dpfunc.noise._streams import Source
from dpfunc.rng import Key
from dpfunc.types import Allocation, ClippedSum, Event, Params, Schedule


class Mechanism(NamedTuple):
    """Noise as two functions: `init(params) -> state` and `add(clipped, state, key) -> (released, state)`.

    The state is carried from step to step, for noise that is correlated between steps. It is secret, as the key is:
    whoever knows earlier noise can subtract it. It has tensors, numbers, strings, lists, tuples and dicts, which a
    checkpoint can hold, and is the same on all processes. Tensors under the name of a parameter (`{"previous": {name:
    tensor}}`), of its shape, are laid out as that parameter when a checkpoint is loaded.

    `add_share(clipped, windows, key)` is for noise that is a function of its key alone, and else None. It adds, in
    place, the noise of some rows of each sum. Where several processes hold terms of a sum, each adds the noise of other
    rows to its term, and the sum of all terms is what `add` would release. A term alone is not released.

    >>> from dpfunc.noise import gaussian
    >>> gaussian(1.0).init({})
    ()
    """

    init: Callable[[Params], Any]
    add: Callable[[ClippedSum, Any, Key], tuple[dict[str, Tensor], Any]]
    add_share: Callable[[ClippedSum, Mapping[str, Window], Key], None] | None = None


class Noise(Protocol):
    """The noise of a plan, e.g. `Gaussian`. Implement these methods to bring your own.

    It holds public facts only, beside the noise multiplier and the allocation of the plan. As a frozen dataclass among
    the public names of `dpfunc.noise` it can be saved in a plan.
    """

    def check(self, sampler: Any, noise_multiplier: float | Schedule) -> None:
        """Refuse a sampler, or noise that changes over the run, for which `events` does not hold.

        Raises:
            InvalidArgument: with what to use instead.
        """

    def events(self, sampler: Any, noise_multiplier: float | Schedule, start: int, stop: int) -> tuple[Event, ...]:
        """Events of the steps start..stop-1, run-length encoded: the privacy that they cost."""

    def mechanism(self, noise_multiplier: float, allocation: Allocation, source: Source) -> Mechanism:
        """The mechanism of a step with this noise multiplier; `source` as in `noise.gaussian`."""
