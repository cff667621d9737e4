"""Values of a job by their declared type: from YAML, or from the text of a flag."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin

from dpfunc._utils.validation import fail, one_of
from dpfunc.errors import InvalidArgument

NOTHING = ("null", "none")
WORDS = {"true": True, "yes": True, "false": False, "no": False}


def convert(name: str, value: object, kind: object, *, from_text: bool = False) -> Any:  # noqa: ANN401  (of that kind)
    """A value of a declared type, or an error with name, value and domain; nothing is guessed.

    Args:
        name: as the user wrote it, for messages. value: what a YAML file or a flag holds.
        kind: `bool`, `int`, `float`, `str`, a `Literal` of strings, `tuple[str, ...]`, or one of these `| None`.
        from_text: the value is the text of a flag: `8`, `1e-5`, `true`, `a,b`, `null`.

    Raises:
        InvalidArgument: of another type, not finite, or not among the allowed ones.

    >>> convert("training.learning_rate", "1e-3", float)
    0.001
    >>> convert("data.labels", "ham,spam", tuple[str, ...], from_text=True)
    ('ham', 'spam')
    >>> convert("data.label_column", False, str)
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected text, got data.label_column=False. Put it in quotes.
    """
    if get_origin(kind) in (Union, types.UnionType):
        if value is None or (from_text and str(value).lower() in NOTHING):
            return None
        kind = next(option for option in get_args(kind) if option is not type(None))
    if get_origin(kind) is Literal:
        return one_of(name, value, get_args(kind))
    if get_origin(kind) is tuple:
        return _texts(name, value, from_text)
    if kind is bool:
        return _truth(name, value, from_text)
    if kind is int:
        return _integer(name, value, from_text)
    if kind is float:
        return _number(name, value)
    if isinstance(value, str) and not _is_text(value):
        raise InvalidArgument(f"Expected text, got {name} with half of a surrogate pair, which no text has.")
    if not isinstance(value, str) or not value:
        raise fail("text", name, value, "Leave it out, or give it a value." if not value and value is not False and
                   value != 0 else "Put it in quotes.")  # fmt: skip
    return value


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in value)


def _texts(name: str, value: object, from_text: bool) -> tuple[str, ...]:
    items = str(value).split(",") if from_text else value
    if not isinstance(items, (list, tuple)) or not items:
        raise fail("a list of texts", name, value, "Write [first, second].")
    for item in items:
        if isinstance(item, bool) or not isinstance(item, (str, int)):
            hint = "YAML reads yes, no, on and off without quotes as true and false: put them in quotes."
            raise fail(f"a list of texts as {name}", "item", item, hint)
        if not _is_text(str(item)):
            raise InvalidArgument(f"Expected a list of texts, got {name} with half of a surrogate pair in one of them.")
    return tuple(str(item).strip() if from_text else str(item) for item in items)


def _truth(name: str, value: object, from_text: bool) -> bool:
    found = WORDS.get(str(value).lower()) if from_text else value
    if not isinstance(found, bool):
        raise fail("true or false", name, value)
    return found


def _integer(name: str, value: object, from_text: bool) -> int:
    if from_text and str(value).lstrip("+-").isdigit():
        return int(str(value))
    if isinstance(value, bool) or not isinstance(value, int):
        raise fail("an integer", name, value)
    return value


def _number(name: str, value: object) -> float:
    """A finite number; also as text, because YAML 1.1 reads 1e-5 as text (it wants 1.0e-5)."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise fail("a finite number", name, value)
    return number


def suggestion(name: str, known: Iterable[str]) -> str:
    """The nearest known name, or all of them.

    >>> suggestion("dp_epsilom", ["dp_epsilon", "dp_delta"])
    "Did you mean 'dp_epsilon'?"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5) or [
        option for option in names if option.endswith(f"_{name}")
    ]
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(names)}."
