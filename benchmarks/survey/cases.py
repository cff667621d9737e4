"""All cases."""

from __future__ import annotations

from benchmarks.survey import audio, decoders, encoders, multimodal, other_nets, peft_methods, vision
from benchmarks.survey.case import Case

FIELDS = (decoders, encoders, vision, multimodal, audio, peft_methods, other_nets)


def cases() -> dict[str, Case]:
    """By name, in the order of the fields."""
    found = [case for field in FIELDS for case in field.cases()]
    named = {case.name: case for case in found}
    if len(named) != len(found):
        raise ValueError("Two cases have the same name.")
    return named
