"""Where the samples are in what a parameter was used for: read off the trace of this step, or as an earlier trace said.

The second is for compiled steps: dynamo traces no dispatch mode, so a step is traced once before each compilation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from dpfunc.engines.tracing.rows import WHOLE, Mixed, Rows, same_ids
from dpfunc.engines.tracing.trace import Trace
from dpfunc.engines.uses.sample_axis import Layout
from dpfunc.errors import UnsupportedModel

Key = tuple[str, str, tuple[int, ...]]
"""Parameter, operation, dimensions of its tensors."""


class Unplaced(Exception):
    """The result of a use belongs to no samples in particular; never leaves the engines."""


class Places(Protocol):
    """Source of knowledge about where the samples are; its methods are described here."""

    def shared(self, key: Key, others: Sequence[Tensor]) -> bool:
        """True if what a use has beside parameters depends on no sample."""
        ...

    def of(self, key: Key, output: Tensor) -> Layout:
        """Of the result of a use."""
        ...

    def guessed(self, key: Key, before: tuple[int, ...], after: tuple[int, ...], private: bool) -> Layout | None:
        """Of the result of a use that depends on no sample: rows of it may still be looked at by one sample each."""
        ...

    def broadcast(self, key: Key, others: Sequence[Tensor], ndim: int) -> Layout | None:
        """Of the result of a use that broadcasts to `ndim` axes."""
        ...

    def expanded(self, key: Key, before: tuple[int, ...], after: tuple[int, ...]) -> Layout | None:
        """Of a parameter that is expanded."""
        ...

    def constant(self, value: Tensor) -> bool:
        """True if a tensor depends on no sample."""
        ...

    def copied(self, leaf: Tensor, axis: int) -> None:
        """A leaf holds a private copy of a parameter for each sample on an axis."""
        ...

    def assigned(self, result: Tensor, layout: Layout) -> bool:
        """True if the result of a guessed use is the same for each sample; then it has their rows from here on."""
        ...

    def taken(self, what: str, value: Tensor, result: object) -> None:
        """A tensor was given to Python."""
        ...

    def measured(self, value: Tensor) -> None:
        """The shape of a tensor was looked at."""
        ...

    def trusting(self, func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[object]:
        """A function that only checks values."""
        ...


@dataclass
class Traced:
    """Places that the trace of this step knows.

    Args:
        trace: of the step. wrong: guesses by shape that gradients have shown to be wrong. known: what was said, for
            compiled steps. unclear: keys whose uses lie differently.
    """

    trace: Trace
    wrong: set[tuple[Key, int]] = field(default_factory=set)
    known: dict[Key, Layout | None] = field(default_factory=dict)
    unclear: set[Key] = field(default_factory=set)

    def shared(self, key: Key, others: Sequence[Tensor]) -> bool:
        return all(self.trace.type_of(tensor) is None for tensor in others)

    def of(self, key: Key, output: Tensor) -> Layout:
        return self._laid(key, self.trace.type_of(output))

    def guessed(self, key: Key, before: tuple[int, ...], after: tuple[int, ...], private: bool) -> Layout | None:
        """An axis as long as there are samples: the first one; with private copies of parameters any one.

        Types of tokens that are all zero, a state that begins with zeros, a table that is looked up alike for each
        sample: what is computed from them is the same for all, and each sample has a row of its own in it.
        """
        count = self.trace.num_samples
        for axis, size in enumerate(after):
            own = axis - (len(after) - len(before))  # an axis of the parameter itself is none of the samples
            if size == count and (axis == 0 or private) and not (own >= 0 and before[own] == size and not private):
                if (key, axis) in self.wrong:
                    continue
                self._say(key, Layout(axis))
                return Layout(axis, guess=(key, axis))
        first = after[0] if len(after) > len(before) else 0
        if first > count and first % count == 0 and (key, 0) not in self.wrong:  # several rows a sample
            self._say(key, Layout(0, 1, first // count))
            return Layout(0, 1, first // count, guess=(key, 0))
        self._say(key, None)
        return None

    def broadcast(self, key: Key, others: Sequence[Tensor], ndim: int) -> Layout | None:
        """That of the others, which must be one."""
        found: Rows | None = None
        for tensor in others:
            kind = self.trace.type_of(tensor)
            if kind is None:
                continue
            if isinstance(kind, Mixed):
                raise Unplaced
            here = kind if kind.axis == WHOLE else kind.moved(kind.axis + ndim - tensor.ndim)
            if found is not None and (here.axis, here.pre, here.post) != (found.axis, found.pre, found.post):
                raise Unplaced
            if found is not None and found.axis == WHOLE and not same_ids(found.ids, here.ids):
                raise Unplaced
            found = here
        if found is not None and found.axis == WHOLE:  # of one sample, which a compiled step does not know
            self.unclear.add(key)
            return Layout(WHOLE, ids=found.ids)
        return self._laid(key, found)

    def expanded(self, key: Key, before: tuple[int, ...], after: tuple[int, ...]) -> Layout | None:
        """The first axis that was expanded to the number of samples, or to a multiple of it.

        The size is a guess: the trace of the step finds out whether it is right.
        """
        count, shift = self.trace.num_samples, len(after) - len(before)
        grown = [
            (axis, size) for axis, size in enumerate(after)
            if size and size % count == 0 and (axis < shift or (before[axis - shift] == 1 and size > 1))
        ]  # fmt: skip
        for axis, size in sorted(grown, key=lambda found: found[1] != count):
            if (key, axis) not in self.wrong:
                self._say(key, Layout(axis, 1, size // count))
                return Layout(axis, 1, size // count, guess=(key, axis))
        self._say(key, None)
        return None

    def constant(self, value: Tensor) -> bool:
        return self.trace.type_of(value) is None

    def copied(self, leaf: Tensor, axis: int) -> None:
        """Its memory has the rows of the samples from here on."""
        self.trace.copied(leaf, axis)

    def assigned(self, result: Tensor, layout: Layout) -> bool:
        return self.trace.assigned(result, Rows(layout.axis, self.trace.num_samples, layout.pre, layout.post))

    def taken(self, what: str, value: Tensor, result: object) -> None:
        """A doubt, if the tensor depends on the batch."""
        self.trace.taken(what, value, result)

    def measured(self, value: Tensor) -> None:
        """A doubt, if the shape follows from values of the batch."""
        self.trace.measured(value)

    @contextmanager
    def trusting(self, func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Numbers that a check reads change nothing; but a number of classes that is found out is one of the batch."""
        classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        doubts, reads = len(self.trace.doubts), len(self.trace.reads)
        yield
        if classes != -1:
            del self.trace.doubts[doubts:]
            del self.trace.reads[reads:]

    def _laid(self, key: Key, kind: object) -> Layout:
        if not isinstance(kind, Rows) or kind.axis == WHOLE:
            raise Unplaced
        layout = Layout(kind.axis, kind.pre, kind.post, kind.ids, kind.slots, kind.of)
        self._say(key, layout)
        return layout

    def _say(self, key: Key, layout: Layout | None) -> None:
        if self.known.setdefault(key, layout) != layout or (layout is not None and layout.ids is not None):
            self.unclear.add(key)


@dataclass(frozen=True)
class Remembered:
    """Places as a trace of the same operations said."""

    known: Mapping[Key, Layout | None]

    def shared(self, key: Key, others: Sequence[Tensor]) -> bool:
        return self._recalled(key) is None

    def of(self, key: Key, output: Tensor) -> Layout:
        layout = self._recalled(key)
        if layout is None:
            raise UnsupportedModel(f"{key[1]} of parameter {key[0]!r} lies differently when it is compiled.")
        return layout

    def guessed(self, key: Key, before: tuple[int, ...], after: tuple[int, ...], private: bool) -> Layout | None:
        return self._recalled(key)

    def broadcast(self, key: Key, others: Sequence[Tensor], ndim: int) -> Layout | None:
        return self._recalled(key)

    def expanded(self, key: Key, before: tuple[int, ...], after: tuple[int, ...]) -> Layout | None:
        return self._recalled(key)

    def constant(self, value: Tensor) -> bool:
        """dynamo traces custom functions."""
        return False

    def copied(self, leaf: Tensor, axis: int) -> None:
        """Ignore it: nothing is followed while dynamo traces."""

    def assigned(self, result: Tensor, layout: Layout) -> bool:
        return True

    def taken(self, what: str, value: Tensor, result: object) -> None:
        """dynamo does not compile that."""

    def measured(self, value: Tensor) -> None:
        """dynamo does not compile shapes that follow from values."""

    def trusting(self, func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[object]:
        return nullcontext()

    def _recalled(self, key: Key) -> Layout | None:
        if key not in self.known:
            raise UnsupportedModel(
                f"{key[1]} of parameter {key[0]!r} occurs when the step is compiled, and did not before. "
                "Use compile=False."
            )
        return self.known[key]
