"""Discovery of the sample axis of each use of a parameter: from the trace of this step, or from a cached one.

The cache is for compiled steps: dynamo traces no dispatch mode, so a step is traced once before each compilation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from dpfunc.engines.tracing.rows import ONE_SAMPLE, Mixed, Rows, same_ids
from dpfunc.engines.tracing.trace import Trace
from dpfunc.engines.uses.sample_axis import SampleAxis
from dpfunc.errors import UnsupportedModel

Key = tuple[str, str, tuple[int, ...]]
"""Parameter, operation, dimensions of its tensors."""


class NoSampleAxis(Exception):
    """The result of a use belongs to no samples in particular; never leaves the engines."""


class SampleAxes(Protocol):
    """Source of the sample axes of results, for a tracker."""

    @property
    def trace(self) -> Trace | None:
        """The trace of this step; None where it is compiled, after a trace of the same operations."""
        ...

    def shared(self, key: Key, others: Sequence[Tensor]) -> bool:
        """True if the other arguments of a use, which are no parameters, depend on no sample."""
        ...

    def of(self, key: Key, output: Tensor) -> SampleAxis:
        """Find the sample axis of the result of a use."""
        ...

    def guessed(self, key: Key, before: tuple[int, ...], after: tuple[int, ...], private: bool) -> SampleAxis | None:
        """Guess the sample axis of a result that depends on no sample, whose rows may be read by one sample each.

        Args:
            before, after: shapes of the parameter and of the result. private: parameters have a copy for each sample.
        """
        ...

    def broadcast(self, key: Key, others: Sequence[Tensor], ndim: int) -> SampleAxis | None:
        """Find the sample axis of a result of `ndim` axes to which parameters and other tensors are broadcast."""
        ...

    def expanded(self, key: Key, before: tuple[int, ...], after: tuple[int, ...]) -> SampleAxis | None:
        """Find the sample axis of a parameter that is expanded from shape `before` to shape `after`."""
        ...

    def constant(self, value: Tensor) -> bool:
        """True if a tensor depends on no sample."""
        ...

    def note_copies(self, leaf: Tensor, axis: int) -> None:
        """Note that a leaf has a private copy of a parameter for each sample on an axis."""
        ...

    def assign_rows(self, key: Key, result: Tensor, guess: SampleAxis) -> bool:
        """Give the result of a guessed use the rows of the samples; return False if it is not the same for each."""
        ...

    def drop_guess(self, key: Key) -> None:
        """Note that the result of a use has no sample axis after all."""
        ...

    def note_read(self, what: str, value: Tensor, result: object) -> None:
        """Note that Python was given numbers of a tensor."""
        ...

    def note_shape_read(self, value: Tensor) -> None:
        """Note that Python was given the shape of a tensor."""
        ...

    def ignoring_reads(
        self, func: object, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[object]:
        """Inside, ignore reads of numbers by a function that only checks them."""
        ...


@dataclass
class DiscoveryRecorder:
    """Finds sample axes by the trace of this step, and records them for compiled steps.

    Args:
        trace: of the step. wrong: guesses by shape that gradients have shown to be wrong. known: the recorded axes.
            unclear: keys whose uses have different sample axes.
    """

    trace: Trace
    wrong: set[tuple[Key, int]] = field(default_factory=set)
    known: dict[Key, SampleAxis | None] = field(default_factory=dict)
    unclear: set[Key] = field(default_factory=set)

    def shared(self, key: Key, others: Sequence[Tensor]) -> bool:
        return all(map(self.trace.depends_on_none, others))

    def of(self, key: Key, output: Tensor) -> SampleAxis:
        return self._to_sample_axis(key, self.trace.type_of(output))

    def guessed(self, key: Key, before: tuple[int, ...], after: tuple[int, ...], private: bool) -> SampleAxis | None:
        """An axis as long as there are samples: the first one; with private copies of parameters any one.

        Types of tokens that are all zero, a state that begins with zeros, a table that is looked up alike for each
        sample: what is computed from them is the same for all, and each sample has a row of its own in it.
        """
        count = self.trace.num_samples
        sizes = list(enumerate(after))
        if not private:
            own = before[len(before) - len(after) :][:1] if len(before) >= len(after) else ()
            sizes = [] if after[:1] == own else sizes[:1]  # an axis of the parameter itself is none of the samples
        guesses = [(axis, size) for axis, size in sizes if size == count]
        if len(after) > len(before) and after[0] > count and after[0] % count == 0:  # several rows a sample
            guesses.append((0, after[0]))
        found = self._first_guess(key, guesses)
        if found is None:
            self._record(key, None)
        return found

    def drop_guess(self, key: Key) -> None:
        self._record(key, None)

    def _first_guess(self, key: Key, guesses: Iterable[tuple[int, int]]) -> SampleAxis | None:
        """The first of these axes, with their sizes, that no gradient has shown to be wrong."""
        for axis, size in guesses:
            if (key, axis) not in self.wrong:
                return SampleAxis(axis, 1, size // self.trace.num_samples, guess=(key, axis))
        return None

    def broadcast(self, key: Key, others: Sequence[Tensor], ndim: int) -> SampleAxis | None:
        """Sample axis of the other tensors, which must all have the same one."""
        found: Rows | None = None
        for tensor in others:
            kind = self.trace.type_of(tensor)
            if kind is None:
                continue
            if isinstance(kind, Mixed):
                raise NoSampleAxis
            here = kind if kind.axis == ONE_SAMPLE else kind.moved(kind.axis + ndim - tensor.ndim)
            if found is not None and not _on_one_axis(found, here):
                raise NoSampleAxis
            found = here
        if found is not None and found.axis == ONE_SAMPLE:  # of one sample, which a compiled step does not know
            self.unclear.add(key)
            return SampleAxis(ONE_SAMPLE, ids=found.ids)
        return self._to_sample_axis(key, found)

    def expanded(self, key: Key, before: tuple[int, ...], after: tuple[int, ...]) -> SampleAxis | None:
        """The first axis that was expanded to the number of samples, or to a multiple of it.

        The size is a guess: the trace of the step finds out whether it is right.
        """
        count, shift = self.trace.num_samples, len(after) - len(before)
        grown = [
            (axis, size) for axis, size in enumerate(after)
            if size and size % count == 0 and (axis < shift or (before[axis - shift] == 1 and size > 1))
        ]  # fmt: skip
        found = self._first_guess(key, sorted(grown, key=lambda found: found[1] != count))
        self._record(key, found)
        return found

    def constant(self, value: Tensor) -> bool:
        return self.trace.depends_on_none(value)

    def note_copies(self, leaf: Tensor, axis: int) -> None:
        self.trace.note_copies(leaf, axis)

    def assign_rows(self, key: Key, result: Tensor, guess: SampleAxis) -> bool:
        same = self.trace.assign_rows(result, Rows(guess.axis, self.trace.num_samples, guess.pre, guess.post))
        if same:  # a compiled step takes what is recorded, and cannot look whether it is the same
            self._record(key, guess)
        return same

    def note_read(self, what: str, value: Tensor, result: object) -> None:
        """Note a doubt, if the tensor depends on the batch."""
        self.trace.note_read(what, value, result)

    def note_shape_read(self, value: Tensor) -> None:
        """Note a doubt, if the shape follows from values of the batch."""
        self.trace.note_shape_read(value)

    @contextmanager
    def ignoring_reads(self, func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Drop doubts about numbers that a check reads, but not about an inferred number of classes."""
        classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        doubts, reads = len(self.trace.doubts), len(self.trace.reads)
        yield
        if type(classes) is int and classes != -1:  # a tensor is a number that is read
            del self.trace.doubts[doubts:]
            del self.trace.reads[reads:]

    def _to_sample_axis(self, key: Key, kind: object) -> SampleAxis:
        if not isinstance(kind, Rows) or kind.axis == ONE_SAMPLE:
            raise NoSampleAxis
        sample_axis = SampleAxis(kind.axis, kind.pre, kind.post, kind.ids, kind.slots, kind.of)
        self._record(key, sample_axis)
        return sample_axis

    def _record(self, key: Key, sample_axis: SampleAxis | None) -> None:
        if sample_axis is not None and sample_axis.guess is not None:
            sample_axis = replace(sample_axis, guess=None)
        if self.known.setdefault(key, sample_axis) != sample_axis or (
            sample_axis is not None and sample_axis.ids is not None
        ):
            self.unclear.add(key)


def _on_one_axis(one: Rows, other: Rows) -> bool:
    """True if two tensors have their samples along the same axis, or are both of one sample, the same one."""
    if (one.axis, one.pre, one.post) != (other.axis, other.pre, other.post):
        return False
    return one.axis != ONE_SAMPLE or same_ids(one.ids, other.ids)


@dataclass(frozen=True)
class CachedSampleAxes:
    """Sample axes that were recorded by a trace of the same operations, for a compiled step."""

    known: Mapping[Key, SampleAxis | None]

    @property
    def trace(self) -> None:
        return None

    def shared(self, key: Key, others: Sequence[Tensor]) -> bool:
        return self._cached(key) is None

    def of(self, key: Key, output: Tensor) -> SampleAxis:
        sample_axis = self._cached(key)
        if sample_axis is None:
            raise UnsupportedModel(f"{key[1]} of parameter {key[0]!r} has another sample axis when it is compiled.")
        return sample_axis

    def guessed(self, key: Key, before: tuple[int, ...], after: tuple[int, ...], private: bool) -> SampleAxis | None:
        return self._cached(key)

    def broadcast(self, key: Key, others: Sequence[Tensor], ndim: int) -> SampleAxis | None:
        return self._cached(key)

    def expanded(self, key: Key, before: tuple[int, ...], after: tuple[int, ...]) -> SampleAxis | None:
        return self._cached(key)

    def constant(self, value: Tensor) -> bool:
        return False  # dynamo traces custom functions, whose results need no search

    def note_copies(self, leaf: Tensor, axis: int) -> None:
        """Do nothing: no trace is active while dynamo traces."""

    def assign_rows(self, key: Key, result: Tensor, guess: SampleAxis) -> bool:
        return True

    def drop_guess(self, key: Key) -> None:
        raise UnsupportedModel(f"{key[1]} of parameter {key[0]!r} has another sample axis when it is compiled.")

    def note_read(self, what: str, value: Tensor, result: object) -> None:
        """Do nothing: dynamo does not compile reads of numbers."""

    def note_shape_read(self, value: Tensor) -> None:
        """Do nothing: dynamo does not compile shapes that follow from values."""

    def ignoring_reads(
        self, func: object, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[object]:
        return nullcontext()

    def _cached(self, key: Key) -> SampleAxis | None:
        if key not in self.known:
            raise UnsupportedModel(
                f"{key[1]} of parameter {key[0]!r} occurs when the step is compiled, and did not before. "
                "Use compile=False."
            )
        return self.known[key]
