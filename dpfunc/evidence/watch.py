"""A step that a replay watches: what it is given, what it sums, and releases that are those of an earlier run.

May import: its folder, checkpoint and below. Privacy depends on it: no.
"""

import functools
import hashlib
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpfunc._utils.digests import checksum
from dpfunc.batches import tree_map
from dpfunc.distributed._agreement import Rows
from dpfunc.noise import Mechanism, Noise, Run, Turn
from dpfunc.plan import Plan
from dpfunc.rng import Key, fingerprint
from dpfunc.sampling import Sampler
from dpfunc.state import StepState, allow_repeat
from dpfunc.step import DPStep, StepResult
from dpfunc.types import Batch, ClippedSum, Event, Params, Unreleased

Add: TypeAlias = Callable[[ClippedSum, Any, Turn], tuple[dict[str, Tensor], Any]]  # of a mechanism of noise
_DEEP = 8  # objects inside of objects
_IGNORED = -100  # a label without a loss


@dataclass(frozen=True)
class Release:
    """One noisy release of a run, beside the sum that it was made of. UNRELEASED: the sum has no noise.

    Args:
        clipped: the sum. facts: its sensitivities, clip groups and key of the noise, which must not depend on records.
        values: the sum with noise. state: of the mechanism of the noise, after it.
    """

    clipped: ClippedSum
    facts: Mapping[str, object]
    values: dict[str, Tensor]
    state: Any


@dataclass
class Tape:
    """Record of one run of a loop. `forced` is the run whose releases it gets; `without` records that are not drawn."""

    forced: "Tape | None" = None
    without: Tensor | None = None
    releases: list[Release] = field(default_factory=list)
    rows: list[list[bytes]] = field(default_factory=list)
    draws: list[Tensor] = field(default_factory=list)
    seen: list[dict[str, object]] = field(default_factory=list)  # what the loop has after each step, by its place

    def __repr__(self) -> str:
        return "Tape()"

    def around(self, inner: Add, run: Run) -> Add:
        """The addition of noise, which notes what is summed, and releases again what a forced run released."""

        def add(clipped: ClippedSum, state: Any, turn: Turn) -> tuple[dict[str, Tensor], Any]:
            kept = replace(clipped, sums={n: v.detach().cpu().clone() for n, v in clipped.sums.items()})
            values, after = inner(clipped, state, turn)
            place = len(self.releases)
            if self.forced is not None and place < len(self.forced.releases):
                before = self.forced.releases[place]
                values, after = before.values, before.state
            facts = {
                "sensitivity": kept.sensitivities,
                "clip groups": kept.group_of,
                "key of the noise": fingerprint(turn.key),
            }
            self.releases.append(Release(kept, facts, values, after))
            return {name: value.clone() for name, value in values.items()}, after

        return add


@dataclass(frozen=True)
class WatchedNoise:
    """The noise of a plan, each addition of which goes through `watch.around`. Its repr is that of the noise: it is the
    same plan.
    """

    noise: Noise
    watch: Any

    def __repr__(self) -> str:
        return repr(self.noise)

    def check(self, run: Run) -> None:
        self.noise.check(_own(run))

    def events(self, run: Run, start: int, stop: int) -> tuple[Event, ...]:
        return self.noise.events(_own(run), start, stop)

    def mechanism(self, run: Run) -> Mechanism:
        inner = self.noise.mechanism(_own(run))
        return Mechanism(inner.init, self.watch.around(inner.add, run))


@dataclass(frozen=True)
class WatchedSampler:
    """A sampler without some records. Its repr is that of the sampler: it is the same plan."""

    sampler: Sampler
    tape: Tape

    def __repr__(self) -> str:
        return repr(self.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def indices(self, key: Key, step: int) -> Tensor:
        drawn = self.sampler.indices(key, step)
        return drawn if self.tape.without is None else drawn[~torch.isin(drawn, self.tape.without)]


def _own(run: Run) -> Run:
    return run._replace(sampler=run.sampler.sampler) if isinstance(run.sampler, WatchedSampler) else run


@dataclass(frozen=True)
class WatchedStep(DPStep):
    """A step that notes its batches, and releases again what a run released before."""

    tape: Tape = field(default_factory=Tape, repr=False, compare=False)

    def init(self, params: Params, key: Key, ledger: Any = None, *, num_records: int | None = None) -> StepState:
        return allow_repeat(super().init(params, key, ledger, num_records=num_records))

    def __call__(
        self, params: Params, batch: Batch, state: StepState | None = None, *, mask_B: Tensor | None = None
    ) -> StepResult:
        drawn = torch.zeros(0, device="cpu") if state is None else self.plan.draw(state, state.step)
        self.tape.draws.append(drawn)
        real = batch if mask_B is None else tree_map(lambda leaf: leaf[mask_B.to(leaf.device)], batch)
        self.tape.rows.append(_digests_of_rows(real))
        return super().__call__(params, batch, state, mask_B=mask_B)

    def _places(self, rows: Rows) -> Sequence[int] | None:
        """Places at which each record draws its dropout as in the first run, although that in the batch differs.

        A place says nothing of records: masks by place have the same law. But two sums are compared for the same masks.
        """
        tape, step, drawn = self.tape, len(self.tape.draws) - 1, self.tape.draws[-1]
        alone = rows.mask_B is None and len(tape.rows[-1]) == len(drawn)
        if not alone or tape.forced is None or step >= len(tape.forced.draws):
            return None
        place_of = {record: place for place, record in enumerate(tape.forced.draws[step].tolist())}
        return [place_of.get(record, len(place_of) + record) for record in drawn.tolist()]


def watched(dp_step: DPStep, tape: Tape) -> WatchedStep:
    """The same step, whose batches, sums and releases are noted on a tape; it has no budget and no journal."""
    plan = replace(watched_plan(dp_step.plan, tape), epsilon=None)  # a budget costs time to check
    return WatchedStep(**settings_of(dp_step) | {"plan": plan, "journal": None}, tape=tape)


def watched_plan(plan: Plan, tape: Tape) -> Plan:
    """The same plan, by its repr, whose draws and noise are those of a tape.

    Args:
        plan: of a run. tape: record of one run of the loop; a tape with `forced` gives the releases of that run again.

    Returns:
        A plan whose noise and sampler write to the tape. What is written is UNRELEASED.

    Guarantees:
        tests/evidence/test_neighbours.py::test_loops_that_hold.
    """
    return replace(plan, sampler=WatchedSampler(plan.sampler, tape), noise=WatchedNoise(plan.noise, tape))


def settings_of(dp_step: DPStep) -> dict[str, Any]:
    """The arguments of a step, to make one of another class with the same ones: nothing private is among them."""
    return {each.name: getattr(dp_step, each.name) for each in fields(DPStep) if each.name != "_calls"}


def _digests_of_rows(batch: Batch) -> list[bytes]:
    """A digest of each row, without its padding: how far rows are padded depends on the longest one of the batch."""
    leaves = [leaf.detach().cpu() for leaf in pytree.tree_leaves(batch)]
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    real = None if mask is None or mask.ndim < 2 else mask.detach().cpu().bool()
    digests = []
    for number in range(len(leaves[0])):
        digest = hashlib.blake2b(digest_size=12)
        for leaf in leaves:
            row = leaf[number] if real is None else _real(leaf[number], real[number])
            digest.update(row.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        digests.append(digest.digest())
    return digests


def _real(values: Tensor, real: Tensor) -> Tensor:
    """The values of a row at its real tokens; of a row of another length, such as a target, all but ignored labels."""
    if values.shape[: real.ndim] == real.shape:
        return values[real]
    return values if values.is_floating_point() else values[values != _IGNORED]


class Running(NamedTuple):
    """A plain loop that is under way, and what it has yielded, which alone is compared."""

    loop: Any
    yielded: Any


def described(value: object, place: str = "loop", above: tuple[int, ...] = ()) -> dict[str, object]:
    """Place -> comparable value, for all values that a loop carries; values marked as private are left out.

    What cannot be compared has a value that is equal to nothing, so that a run on the same data differs in it, and the
    result of the replay names it.
    """
    if isinstance(value, Unreleased) or id(value) in above:
        return {}
    match value:
        case Tensor():
            return {place: checksum([("", value)])}
        case None | bool() | int() | float() | complex() | str() | bytes():
            return {place: repr(value)}
        case Key():
            return {place: fingerprint(value)}
    parts = _parts(value)
    if parts is None or len(above) > _DEEP:
        return {f"{place} of type {type(value).__name__}": _pickled(value)}
    inside = (*above, id(value))
    return {
        at: part for name, inner in parts.items() for at, part in described(inner, f"{place}{name}", inside).items()
    }


def _pickled(value: object) -> object:
    """A digest of an object without parts, such as an array or a date; where there is none, equal to nothing."""
    try:
        return hashlib.blake2b(pickle.dumps(value), digest_size=12).digest()
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError):
        return object()


def _parts(value: Any) -> Mapping[str, object] | None:
    for kinds, parts in _KINDS:
        if isinstance(value, kinds):
            return parts(value)
    state: Any = object.__getstate__(value)  # its attributes; where it has slots, the pair of both
    own = {**(state[0] or {}), **state[1]} if isinstance(state, tuple) else state or {}
    return {f".{name}": part for name, part in own.items()} if own else None


def _of_function(own: FunctionType) -> Mapping[str, object]:
    """Values that a function closes over, its defaults and its attributes."""
    cells = own.__closure__ or ()
    closed = {f" over {name}": cell for name, cell in zip(own.__code__.co_freevars, cells, strict=True)}
    kept = {name: getattr(cell, "cell_contents", None) for name, cell in closed.items()}
    return {**kept, ".__defaults__": own.__defaults__, ".__kwdefaults__": own.__kwdefaults__, **vars(own)}


_Kind: TypeAlias = type[Any] | tuple[type[Any], ...]
# What has parts that are no attributes -> its parts, by their place.
_KINDS: tuple[tuple[_Kind, Callable[[Any], Mapping[str, object] | None]], ...] = (
    (Running, lambda own: {"": own.yielded}),
    ((DPStep, Plan), lambda own: {}),  # of the replay itself: they hold its tape
    ((type, ModuleType), lambda own: {"": own.__name__}),
    (FunctionType, _of_function),
    ((MethodType, BuiltinFunctionType), lambda own: {"": own.__name__, ".__self__": own.__self__}),
    (functools.partial, lambda own: {".func": own.func, ".args": own.args, ".keywords": own.keywords}),
    ((nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler), lambda own: _parts(own.state_dict())),
    (torch.Generator, lambda own: {".state": own.get_state()}),
    (StepState, lambda own: _parts({**own._asdict(), "ledger": own.ledger.to_json()})),
    (Mapping, lambda own: {f"[{name!r}]": part for name, part in own.items()}),
    ((list, tuple, deque), lambda own: {"": len(own), **{f"[{number}]": part for number, part in enumerate(own)}}),
    ((set, frozenset), lambda own: {"": repr(sorted(map(repr, own)))}),
)
