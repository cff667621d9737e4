"""Several processes under torchrun, for the examples: they share the records of each step; one writes and speaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import dpfunc
from dpfunc import distributed
from dpfunc.distributed import _object_collectives as object_collectives

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The processes of this run; `ranks` is None where there is one."""

    ranks: distributed.Ranks | None
    writes: bool

    def say(self, text: object) -> None:
        """Print, once."""
        if self.writes:
            print(text, flush=True)

    def first(self, action: Callable[[], object]) -> None:
        """One does it, e.g. a download, and the others wait."""
        distributed.once(self.ranks, action)

    def shared(self, values: T) -> T:
        """JSON values of the one that writes, on all."""
        found: T = json.loads(object_collectives.shared(json.dumps(values).encode(), self.ranks))
        return found

    def key(self, insecure_seed: int | None) -> dpfunc.rng.Key:
        """One key for all, fresh unless somebody wants to guess it."""
        key = dpfunc.secure_key() if insecure_seed is None else dpfunc.rng.insecure_key(insecure_seed)
        return key if self.ranks is None else distributed.shared_key(self.ranks, key)


def join() -> Processes:
    """Join the others, if torchrun started any."""
    ranks = distributed.from_environment(timedelta(minutes=30))
    return Processes(ranks, distributed.is_writer(ranks))
