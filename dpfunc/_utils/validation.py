"""Validation of arguments: every message states the domain, the name and the value, then what to do.

May import: its folder, errors. Privacy depends on it: yes.
"""

import difflib
import functools
import hashlib
import inspect
import json
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any, SupportsFloat, SupportsIndex, TypeVar, cast

from dpfunc._utils.lazy import WORDS
from dpfunc.errors import InvalidArgument

_LARGEST_DATASET = 2**46  # gaps between drawn records add up within int64; float64 has each of these integers
Name = TypeVar("Name", bound=str)
Made = TypeVar("Made", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type[Any])


def fail(domain: str, name: str, value: object, hint: str = "") -> InvalidArgument:
    """The error for a value outside its domain: `Expected DOMAIN, got NAME=VALUE. HINT`."""
    return InvalidArgument(f"Expected {domain}, got {name}={value!r}.{f' {hint}' if hint else ''}")


def wrong_type(domain: str, name: str, value: object, hint: str = "") -> InvalidArgument:
    """The error for a value of a wrong type, which is not shown: `Expected DOMAIN, got NAME of type TYPE. HINT`."""
    return InvalidArgument(f"Expected {domain}, got {name} of type {type(value).__name__}.{f' {hint}' if hint else ''}")


def set_fields(made: object, values: Mapping[str, object]) -> None:
    """Set fields of a frozen dataclass, in its `__post_init__`, to what their checks have made of them."""
    for name, value in values.items():
        object.__setattr__(made, name, value)


def checked(checks: Mapping[str, Callable[[str, Any], object]]) -> Callable[[Kind], Kind]:
    """Class decorator, below `@dataclass`: each field becomes what its check makes of its name and value.

    The checks of the classes above it come first, its own `__post_init__`, which sees what was made, last.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... @checked({"number": count})
    ... class Bins:
    ...     number: int
    >>> Bins(0)
    Traceback (most recent call last):
        ...
    dpfunc.errors.InvalidArgument: Expected an integer number >= 1, got number=0.
    """

    def decorate(kind: Kind) -> Kind:
        before = getattr(super(kind, kind), "__post_init__", lambda made: None)
        after = vars(kind).get("__post_init__", lambda made: None)

        def check(made: Any) -> None:
            before(made)
            set_fields(made, {name: checks[name](name, getattr(made, name)) for name in checks})
            after(made)

        type.__setattr__(kind, "__post_init__", check)
        return kind

    return decorate


def expect(holds: object, domain: str, name: str, value: object, hint: str = "") -> None:
    """Check that a value is in its domain: the error is that of `fail`."""
    if not holds:
        raise fail(domain, name, value, hint)


def refuse(*rules: tuple[object, Exception | str]) -> None:
    """Raise the error of the first rule that is broken: (broken, error), where a text is an InvalidArgument."""
    for broken, error in rules:
        if broken:
            raise error if isinstance(error, Exception) else InvalidArgument(error)


def _is_no_number(value: object) -> bool:
    """True for texts, and for bools and complex numbers, also those of numpy and torch, which convert themselves."""
    kind = str(getattr(value, "dtype", ""))
    return isinstance(value, (bool, str, bytes)) or "bool" in kind or "complex" in kind


def real(
    name: str, value: object, domain: str, hint: str = "", inside: Callable[[float], bool] = math.isfinite
) -> float:
    """A finite real number inside its domain that is not a bool (scalars of numpy and torch are welcome)."""
    try:
        number = float("no" if _is_no_number(value) else cast(SupportsFloat, value))
    except OverflowError:
        raise fail(domain, name, "an integer that float64 cannot hold", hint) from None
    except (TypeError, ValueError, RuntimeError):  # also of several numbers
        raise fail(domain, name, value, hint or f"Pass a number, not {type(value).__name__}.") from None
    expect(math.isfinite(number) and inside(number), domain, name, value, hint)
    return number


def _range(domain: str, inside: Callable[[float], bool]) -> Callable[[str, object], float]:
    return lambda name, value: real(name, value, domain.format(name), inside=inside)


positive = _range("0 < {} < inf", lambda number: number > 0)
non_negative = _range("0 <= {} < inf", lambda number: number >= 0)
probability = _range("0 < {} <= 1", lambda number: 0 < number <= 1)
open_unit = _range("0 < {} < 1", lambda number: 0 < number < 1)


unit_interval = _range("0 <= {} <= 1", lambda number: 0 <= number <= 1)
below_one = _range("0 <= {} < 1", lambda number: 0 <= number < 1)


def integer(name: str, value: object, minimum: int = 0, hint: str = "") -> int:
    """An integer >= minimum; floats and bools are refused, numpy integers are welcome."""
    number = minimum - 1
    with suppress(TypeError):  # of an array, and of a tensor of floats
        number = number if _is_no_number(value) else operator.index(cast(SupportsIndex, value))
    expect(number >= minimum, f"an integer {name} >= {minimum}", name, value, hint)
    return number


def count(name: str, value: object) -> int:
    """An integer >= 1."""
    return integer(name, value, minimum=1)


def records(name: str, value: object) -> int:
    """A number of records, 1 <= dataset_size <= 2**46."""
    size = integer(name, value, minimum=1)
    expect(size <= _LARGEST_DATASET, f"{name} <= {_LARGEST_DATASET}", name, value)
    return size


def sampling_prob_of(dataset_size: object, expected_batch_size: object) -> float:
    """The sampling probability q = expected_batch_size / dataset_size, 0 < q <= 1."""
    n = records("dataset_size", dataset_size)
    domain = "0 < expected_batch_size <= dataset_size"
    size = real("expected_batch_size", expected_batch_size, domain)
    expect(0 < size <= n, domain, "expected_batch_size", expected_batch_size, f"The data set has {n} records.")
    return size / n


def total_steps(dataset_size: int | Fraction, batch_size: int, epochs: float) -> int:
    """`ceil(epochs n / B)` in exact arithmetic, with the decimal value of `epochs`: 7 / 0.07 is 99.99.. in float64."""
    return math.ceil(Fraction(repr(float(epochs))) * dataset_size / batch_size)


def one_of(name: str, value: object, allowed: Iterable[Name], hint: str = "") -> Name:
    """A string among the allowed ones."""
    names = list(allowed)
    if value not in names:
        raise fail(f"{name} to be one of {', '.join(map(repr, names))}", name, value, hint)
    return names[names.index(value)]


def boolean(name: str, value: object) -> bool:
    """True or False itself, since the text "false" would count as true."""
    if not isinstance(value, bool):
        raise fail(f"{name} to be true or false", name, value)
    return value


def line(name: str, value: object, blank: bool = False) -> str:
    """A line of text that a terminal can show: a file from elsewhere must not send it control characters."""
    if not isinstance(value, str) or not value.isprintable() or not (blank or value.strip()):
        raise fail("a line of printable text", name, value)
    return value


def hex_digits(name: str, value: object, length: int = 64) -> str:
    """A digest, fingerprint or key in hexadecimal digits."""
    if not isinstance(value, str) or len(value) != length or set(value) - set("0123456789abcdef"):
        raise fail(f"{length} hexadecimal digits", name, value)
    return value


def shorten(names: Sequence[str], limit: int = 5) -> str:
    """The first few names and how many more there are, for messages."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def optional(check: Callable[[str, Any], object]) -> Callable[[str, Any], object]:
    """The check for a value that may be None."""
    return lambda name, value: None if value is None else check(name, value)


def each(
    check: Callable[[str, Any], float], domain: str, kinds: Any = (tuple,), least: int = 1
) -> Callable[[str, Any], tuple[float, ...]]:
    """The check for a tuple of values, which is made of other kinds of sequences where they are allowed."""

    def check_all(name: str, values: Any) -> tuple[float, ...]:
        expect(isinstance(values, kinds) and len(values) >= least, domain, name, values)
        return tuple(check(name, value) for value in values)

    return check_all


def apart(missing: Iterable[str], unknown: Iterable[str]) -> str:
    """Message part with the missing and the unknown names; a kind without names is left out."""
    kinds = {"without": sorted(missing), "with the unknown": sorted(unknown)}
    return ", and ".join(f"{kind} {shorten(names)}" for kind, names in kinds.items() if names)


def suggestion(name: str, known: Iterable[str]) -> str:
    """The nearest known name, or all of them, for messages."""
    names = sorted(known)
    close = [
        *difflib.get_close_matches(name, names, n=1, cutoff=0.5),
        *(option for option in names if option.endswith(f"_{name}")),
    ]
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(names)}."


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line of the caller of dpfunc, however many functions of dpfunc are in between."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "dpfunc":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)


def named(made: Made) -> Made:
    """Decorator: the TypeError of an unknown keyword says what it is called here. For classes, above `@dataclass`.

    Signature, docstring and doctests stay: tests/_utils/test_validation.py::test_signature_and_doctests_stay.
    """
    if isinstance(made, type):
        type.__setattr__(made, "__init__", named(vars(made)["__init__"]))
        return made

    known = inspect.signature(made).parameters
    by_name = [each.name for each in known.values() if each.kind is each.KEYWORD_ONLY]
    where = made.__qualname__.removesuffix(".__init__")

    @functools.wraps(made)
    def _call(*args: Any, **options: Any) -> Any:
        for name in (name for name in options if name not in known):
            word = name.removeprefix("target_").removeprefix("per_sample_")
            here = next((option for option in (word, f"dp_{word}") if option in known), WORDS.get(word))
            hint = f"Here it is {here}." if here else suggestion(name, known)
            raise TypeError(f"{where}() got an unexpected keyword argument {name!r}. {hint}")
        if by_name and len(args) > len(known) - len(by_name):
            raise TypeError(f"{where}() takes these by name: {', '.join(f'{name}=' for name in by_name)}.")
        return made(*args, **options)

    return cast(Made, _call)


def unique_json(text: str | bytes) -> Any:
    """JSON values; an object with one name twice is an error, since readers would take different values."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in pairs:
            if name in values:
                raise ValueError(f"the name {name!r} occurs twice in one object")
            values[name] = value
        return values

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def signed(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values with a digest of all of them, against accidents: who may write the file can write another digest."""
    text = json.dumps({name: value for name, value in values.items() if name != "digest"}, sort_keys=True)
    return {**values, "digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


def unsigned(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a file without their digest, once it was compared with that of `signed`."""
    expect(
        signed(values) == values, f"a {kind} with the digest of its values", "digest", values.get("digest"),
        "The file was changed or damaged after it was written, or by hand. Restore it, or name its journal.",
    )  # fmt: skip
    return {name: value for name, value in values.items() if name != "digest"}
