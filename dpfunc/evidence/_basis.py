"""Basis of a certificate: the part from which its claim follows. It is the steps of runs, or a private search.

May import: its folder, checkpoint and below. Privacy depends on it: no.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpfunc.accounting.ledger import from_values
from dpfunc.types import Event

Values = Mapping[str, Any]  # those of a certificate, or the facts that one is made of
CLAIM = ("unit", "adjacency", "delta", "epsilon", "accountant", "target_epsilon", "not_covered")


@dataclass(frozen=True)
class Basis:
    """A kind of certificates.

    Args:
        schema: of the files. part: name of the part from which the claim follows.
        word: all that nobody but the author of a certificate says.
        settings: fields of the mechanism. not_covered: sentences that end the list of each such certificate.
        derive: facts, parts that are checked already -> the other parts, each computed or checked.
        events: of the own part, without those of earlier runs.
        assumptions: about the accountants and this basis; True if they are met.
    """

    schema: str
    part: str
    word: str
    settings: tuple[str, ...]
    not_covered: tuple[str, ...]
    derive: Callable[[Values, Values], dict[str, Any]]
    events: Callable[[Values], tuple[Event, ...]]
    assumptions: Callable[[Values], Mapping[str, bool | None]]


def events_in(values: Sequence[Values]) -> tuple[Event, ...]:
    """Events from their JSON values."""
    return tuple(map(from_values, values))
