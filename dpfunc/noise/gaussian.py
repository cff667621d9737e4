"""The Gaussian mechanism on clipped sums.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

    Gaussian             for a plan: the noise of each step, and what it costs
    gaussian             for a loop of your own: the same noise as a `Mechanism`, with a key in each turn
    add_gaussian         for one release without a run: a sum and a key of its own
    noise_std            for a report: the standard deviation that all of these add
    mechanism_of_draw    for an author of noise: adds what a function draws, e.g. that of `Correlated`
    with_noise           for a step: what any mechanism releases, looked at
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dpfunc._utils.parts import Window, distributed, local
from dpfunc._utils.validation import expect, fail, non_negative, one_of, positive, refuse
from dpfunc.batches import own_digest
from dpfunc.errors import InvalidArgument, StateReused
from dpfunc.noise._streams import SOURCES, Leaves, Part, Source, standard_normal
from dpfunc.noise.mechanism import Mechanism, Run, Turn
from dpfunc.rng import Key, check_key, check_process, fingerprint
from dpfunc.types import Allocation, ClippedSum, Event, Params, schedule_at, stretches

_ALLOCATIONS: tuple[Allocation, ...] = ("uniform", "optimal")


def _check_clipped(clipped: ClippedSum) -> None:
    whole = isinstance(clipped, ClippedSum)
    refuse(
        (not whole,
         f"Expected a ClippedSum, got {type(clipped).__name__}. Noise is scaled by the sensitivity that a ClippedSum "
         "carries; a sum that was divided or changed has another one. Divide after the noise."),
        (whole and not clipped.sums, "Expected at least one sum to release, got none."),
    )  # fmt: skip
    for group, sensitivity in clipped.sensitivities.items():
        positive(f"sensitivities[{group!r}]", sensitivity)
    for name, value in clipped.sums.items():
        if value.dtype not in (torch.float32, torch.float64):
            raise InvalidArgument(
                f"Expected float32 or float64 sums, got {value.dtype} for {name}. Rounding in a narrow sum is larger "
                "than its sensitivity allows; cast what is released instead."
            )
        if clipped.group_of.get(name) not in clipped.sensitivities:
            raise InvalidArgument(f"Expected a clip group with a sensitivity for each sum, got none for {name}.")


def noise_std(clipped: ClippedSum, noise_multiplier: float, allocation: Allocation) -> dict[str, float]:
    """The standard deviation of the noise in each clip group.

    `uniform`: z S with S the sensitivity of all groups together. `optimal`: variance z^2 (S_g / sqrt(d_g)) sum_j S_j
    sqrt(d_j), which has the least total variance of all allocations with equal privacy,
    `sum_g S_g^2 / std_g^2 = 1 / z^2`.

    Args:
        clipped: the sum, with the sensitivity S_g and the number of coordinates d_g of each group.
        noise_multiplier: z >= 0. allocation: `uniform` or `optimal`.

    Returns:
        clip group -> standard deviation of the noise on each of its coordinates; a public fact.

    Raises:
        InvalidArgument: not a ClippedSum, or an argument outside its domain.

    Guarantees:
        the equation above (tests/noise/test_gaussian.py::test_allocations_have_equal_privacy); no other
        allocation has less total noise (test_optimal_is_optimal).

    >>> clipped = ClippedSum({"a": torch.zeros(1), "b": torch.zeros(16)}, {"a": "a", "b": "b"}, {"a": 1.0, "b": 1.0})
    >>> noise_std(clipped, 2.0, "uniform")["a"] ** 2 * 17, 4 * 2 * 17
    (136.00000000000003, 136)
    >>> {group: round(std**2, 6) for group, std in noise_std(clipped, 2.0, "optimal").items()}
    {'a': 20.0, 'b': 5.0}
    """
    _check_clipped(clipped)
    multiplier = non_negative("noise_multiplier", noise_multiplier)
    if one_of("allocation", allocation, _ALLOCATIONS) == "uniform":
        return dict.fromkeys(clipped.sensitivities, multiplier * clipped.sensitivity)
    sizes = dict.fromkeys(clipped.sensitivities, 0)
    for name, value in clipped.sums.items():
        sizes[clipped.group_of[name]] += value.numel()
    roots = {group: math.sqrt(max(size, 1)) for group, size in sizes.items()}
    total = sum(clipped.sensitivities[group] * root for group, root in roots.items())
    return {group: multiplier * math.sqrt(clipped.sensitivities[group] / root * total) for group, root in roots.items()}


def add_gaussian(
    clipped: ClippedSum, noise_multiplier: float, key: Key,
    *, allocation: Allocation = "uniform", source: Source = "secure",
) -> dict[str, Tensor]:  # fmt: skip
    """Release a clipped sum: `sum + noise_multiplier * sensitivity * N(0, 1)`. There is no std argument.

    Dwork & Roth 2014, The Algorithmic Foundations of Differential Privacy, appendix A.

    Args:
        clipped: the undivided sum with its sensitivity, in float32 or float64.
        noise_multiplier: z >= 0; 0 adds nothing and epsilon is infinite.
        key: a key that serves this release and no other: `secure_key()`, or `fold_in(key, "release", number)` of one.
        allocation: how noise is divided over clip groups, at equal privacy.
        source: `secure`, a keyed AES stream; or `device`, a ChaCha20 stream of it, drawn where the sums are.

    Returns:
        name -> sum + noise, in the dtype of the sum. Released: use it as you like.

    Raises:
        InvalidArgument: not a ClippedSum, a narrow dtype, a sum that is not finite, a bad noise multiplier, or noise
            that the dtype of the sum cannot hold.
        StateReused: the key has released something else in this process, or was made in another one.

    Guarantees:
        tests/noise/test_gaussian.py: scale (test_scale), dtype (test_noise_is_drawn_as_promised), the sum itself
        is unchanged (test_the_sum_is_kept); tests/noise/test_streams.py: determinism (test_stateless),
        independence (test_no_correlation), tails (test_tails).

    >>> from dpfunc.rng import insecure_key
    >>> clipped = ClippedSum({"w": torch.zeros(3)}, {"w": "all"}, {"all": 1.0})
    >>> add_gaussian(clipped, 1.0, insecure_key(0))["w"].shape
    torch.Size([3])
    """
    std_of = _std_of_each(clipped, noise_multiplier, allocation)
    check_key(key)
    _check_one_release(key, _finite_digest(clipped), std_of, source)
    return _with_noise(clipped, std_of, standard_normal(key, clipped.sums, source))


def _finite_digest(clipped: ClippedSum) -> str:
    """A digest of sums. Sums that are not finite are refused, since noise does not hide them."""
    return own_digest(clipped.sums, None, torch.zeros((), dtype=torch.bool, device="cpu"))[0]


def _with_noise(clipped: ClippedSum, std_of: Mapping[str, float], noise: Mapping[str, Tensor]) -> dict[str, Tensor]:
    def release(name: str, value: Tensor) -> Tensor:
        # into the memory of the noise: fresh memory costs as much as a third of drawing it
        part = local(value.detach())
        return distributed(torch.add(part, noise[name], alpha=std_of[name], out=noise[name]), value)

    return {name: release(name, value) for name, value in clipped.sums.items()}


# What each key released in this process: fingerprint -> digest. No result depends on it.
_releases: dict[str, str] = {}


def _check_one_release(key: Key, sums: str, std_of: Mapping[str, float], source: Source) -> None:
    """Check that a secret key serves one release, in one process; the same one may be repeated bit for bit."""
    if key.guessable:
        return
    check_process(key)
    release = f"{sums} {sorted(std_of.items())} {source}"
    if _releases.setdefault(fingerprint(key), release) != release:
        raise StateReused(
            "This key has released other values before: both have the same noise, and their difference has none. Take "
            'a key for each release, e.g. dpfunc.rng.fold_in(key, "release", number). Nothing was released.'
        )


def _std_of_each(clipped: ClippedSum, noise_multiplier: float, allocation: Allocation) -> dict[str, float]:
    of_group = noise_std(clipped, noise_multiplier, allocation)
    stds = {name: of_group[clipped.group_of[name]] for name in clipped.sums}
    for name, value in clipped.sums.items():
        limits = torch.finfo(value.dtype)
        if noise_multiplier and not limits.tiny <= stds[name] <= limits.max / 64:
            raise fail(f"a noise std that {value.dtype} can hold for {name}", "std", stds[name], "Scale the loss.")
    return stds


def gaussian(noise_multiplier: float, *, allocation: Allocation = "uniform", source: Source = "secure") -> Mechanism:
    """The Gaussian mechanism as a `Mechanism` without state; the arguments are those of `add_gaussian`.

    Args:
        noise_multiplier, allocation, source: see `add_gaussian`.

    Raises:
        InvalidArgument, StateReused: as `add_gaussian`, which is what `add` calls with the key of its turn.

    >>> gaussian(1.0).init({"w": torch.zeros(3)})
    ()
    """
    multiplier = non_negative("noise_multiplier", noise_multiplier)
    of_step = mechanism_of_draw(Run(None, multiplier, 1, allocation, source), _independent_draw(source))

    def add(clipped: ClippedSum, state: Any, turn: Turn) -> tuple[dict[str, Tensor], Any]:
        return add_gaussian(clipped, multiplier, turn.key, allocation=allocation, source=source), state

    return of_step._replace(add=add)


Draw: TypeAlias = Callable[[Leaves, Any, Turn], tuple[dict[str, Tensor], Any]]


def _independent_draw(source: Source) -> Draw:
    """Noise from the key of the step, independent of that of other steps."""
    return lambda like, state, turn: (standard_normal(turn.key, like, source), state)


def mechanism_of_draw(run: Run, draw: Draw, init: Callable[[Params], Any] = lambda params: ()) -> Mechanism:
    """The mechanism that adds noise of some law, times the standard deviation of each clip group, to each sum.

    A step looks itself whether what it releases is finite, in one read with other marks, and compares what its key
    releases, on disk as well.

    Args:
        run: of which the noise multiplier, allocation and source count.
        draw: (leaves, state, turn) -> noise of the shape, dtype and device of each leaf, of a DTensor the own part,
            relative to the standard deviation; and the next state. That of a share of the noise has no state, None.
        init: params -> the first state.
    """
    one_of("allocation", run.allocation, _ALLOCATIONS)
    one_of("source", run.source, SOURCES)

    def stds_of(clipped: ClippedSum, turn: Turn) -> dict[str, float]:
        check_key(turn.key)
        return _std_of_each(clipped, schedule_at(run.noise_multiplier, turn.step), run.allocation)

    def add(clipped: ClippedSum, state: Any, turn: Turn) -> tuple[dict[str, Tensor], Any]:
        stds = stds_of(clipped, turn)
        noise, after = draw(clipped.sums, state, turn)
        return _with_noise(clipped, stds, noise), after

    def add_share(clipped: ClippedSum, windows: Mapping[str, Window], turn: Turn) -> None:
        stds = stds_of(clipped, turn)
        sums = {name: clipped.sums[name] for name in windows}
        noise, _ = draw({n: Part(windows[n], v.dtype, v.device) for n, v in sums.items()}, None, turn)
        for name, part in windows.items():
            rows = sums[name].view(part.num_rows, part.num_cols)[slice(*part.rows), slice(*part.cols)]
            rows.add_(noise[name], alpha=stds[name])

    return Mechanism(init, add, add_share)


def with_noise(mechanism: Mechanism, clipped: ClippedSum, state: Any, turn: Turn) -> tuple[dict[str, Tensor], Any]:
    """Add noise by a mechanism, and refuse other names, dtypes or shapes than the sums have; its next state, too."""
    released, after = mechanism.add(clipped, state, turn)
    wanted, got = (
        {name: f"{value.dtype} {tuple(value.shape)}" for name, value in sums.items()}
        for sums in (clipped.sums, released)
    )
    expect(
        got == wanted, "noise of the names, dtypes and shapes of the sums", "what the mechanism returned",
        sorted(got.items() ^ wanted.items()), "Nothing was released and nothing was spent.",
    )  # fmt: skip
    return released, after


@dataclass(frozen=True)
class Gaussian:
    """The Gaussian mechanism as the noise of a plan: independent in each step, of any sampler and schedule.

    >>> from dpfunc.sampling import Poisson
    >>> Gaussian().events(Run(Poisson(100, 0.1), 2.0, num_steps=10), 0, 5)
    (Event(sampling_prob=0.1, noise_multiplier=2.0, num_steps=5),)
    """

    def check(self, run: Run) -> None:
        """Accept every run: each sampler states the cost of steps with Gaussian noise."""

    def events(self, run: Run, start: int, stop: int) -> tuple[Event, ...]:
        """The events of the sampler, for each piece of the schedule."""
        noise, spans = run.noise_multiplier, stretches(start, stop, run.noise_multiplier)
        return tuple(event for a, b in spans for event in run.sampler.events(a, b, schedule_at(noise, a)))

    def weights(self, run: Run, step: int) -> Sequence[float]:
        """The noise multiplier of the step."""
        return (schedule_at(run.noise_multiplier, step),)

    def mechanism(self, run: Run) -> Mechanism:
        """The Gaussian mechanism of each step, `gaussian` of these values."""
        return mechanism_of_draw(run, _independent_draw(run.source))
