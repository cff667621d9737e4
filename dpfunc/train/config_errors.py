"""Errors of pydantic about a job, in the form of the errors of this library: name, value, domain, what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_type_hints

from pydantic import ValidationError

from dpfunc._utils.validation import fail, suggestion, wrong_type
from dpfunc.errors import InvalidArgument

_QUOTES = "Put it in quotes: YAML reads yes, no, on and off as true and false, and digits as a number."
# The type of an error of pydantic -> domain, what to do.
KINDS = {
    "bool_parsing": ("true or false", ""),
    "bool_type": ("true or false", ""),
    "dataclass_type": ("keys under {name}", "Write `key: value` lines below it, indented."),
    "finite_number": ("a finite number", ""),
    "float_parsing": ("a finite number", ""),
    "float_type": ("a finite number", "A number has no quotes."),
    "int_parsing": ("an integer", ""),
    "int_type": ("an integer", ""),
    "string_too_short": ("text", "Leave it out, or give it a value."),
    "string_type": ("text", _QUOTES),
    "too_short": ("a list of texts", "Leave it out, or write [first, second]."),
    "tuple_type": ("a list", "Write [first, second]."),
}
_LONGEST = 200  # characters of a value in a message
UNKNOWN = "unexpected_keyword_argument"


def explained(error: ValidationError, job: type, flag: str = "") -> InvalidArgument:
    """The first problem of an error as an error of this library; an unknown key before all others.

    Args:
        error: of pydantic. job: the dataclass of the job. flag: the flag with the value, if it is not in a file.

    Returns:
        The error to raise. A list or a section in a wrong place is not shown, since it may hold anything; nor is a long
        text.
    """
    problems = error.errors(include_url=False)
    problem = next((each for each in problems if each["type"] == UNKNOWN), problems[0])
    kind, place, name = problem["type"], problem["loc"], flag or ".".join(map(str, problem["loc"]))
    if kind == "value_error":  # of a section itself, which says it in its own words
        return InvalidArgument(str(problem["ctx"]["error"]))
    if kind == UNKNOWN:
        of = place[0] if len(place) > 1 else "a job"
        return InvalidArgument(
            f"Expected a key of {of}, got {place[-1]!r}. {suggestion(str(place[-1]), _keys(job, place))}"
        )
    if kind == "missing":
        return InvalidArgument(f"Expected {name} in the job. {_keys(job, place)[str(place[-1])]}".rstrip())
    if kind == "literal_error":
        return _wrong(f"{name} to be one of {problem['ctx']['expected']}", name, problem["input"], "")
    if kind in KINDS:
        domain, hint = KINDS[kind]
        return _wrong(domain.replace("{name}", name), name, problem["input"], hint)
    return InvalidArgument(f"Expected a job that can be read, got one that cannot: {name} {problem['msg']}.")


def _wrong(domain: str, name: str, value: object, hint: str) -> InvalidArgument:
    """The error for a value, which is shown if it is a short one."""
    hidden = isinstance(value, list | dict) or len(repr(value)) > _LONGEST
    return (wrong_type if hidden else fail)(domain, name, value, hint)


def _keys(job: type, place: Sequence[int | str]) -> dict[str, str]:
    """The keys of the section of a key, with their meanings."""
    section: Any = get_type_hints(job)[str(place[0])] if len(place) > 1 else job
    return {field.name: field.metadata.get("help", "") for field in dataclasses.fields(section)}
