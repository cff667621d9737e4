"""Facts about one step by which it is judged whether its samples influence each other."""

from __future__ import annotations

from typing import NamedTuple

from dpfunc.engines.guards.random_calls import RandomCall


class Evidence(NamedTuple):
    """Facts that the trace of a step has found. Without any, the step is proven, and its numbers have 32 bits.

    Args:
        doubts: why it is not proven that samples do not influence each other; empty where it is.
        random_calls: operations that drew random numbers, for an audit.
        untraced: a tensor was made without an operation that the trace follows, unlike before.
        coarse: there were numbers of 16 bits. changes: the loss changes what it keeps at each call.
    """

    doubts: tuple[str, ...] = ()
    random_calls: tuple[RandomCall, ...] = ()
    untraced: bool = False
    coarse: bool = False
    changes: bool = False


NOTHING_FOUND = Evidence()
