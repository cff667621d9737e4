"""All cases."""

from __future__ import annotations

from benchmarks.survey import decoders, encoders, multimodal, vision
from benchmarks.survey.case import Case

FIELDS = (decoders, encoders, vision, multimodal)


def cases() -> dict[str, Case]:
    """By name, in the order of the fields."""
    found = [case for field in FIELDS for case in field.cases()]
    named = {case.name: case for case in found}
    if len(named) != len(found):
        raise ValueError("Two cases have the same name.")
    return named
