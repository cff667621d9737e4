"""The zoo: losses that mix rows, and honest ones that look like them. Importing it fills the table."""

from __future__ import annotations

from importlib import import_module

from isolation.cases import ZOO, Loss

FAMILIES = (
    "forward_statistics",
    "forward_neighbours",
    "forward_writes",
    "order",
    "mistakes",
    "backward",
    "state",
    "state_modules",
    "oddities",
    "operators",
    "memory",
    "honest_layouts",
    "honest_values",
    "honest_backward",
    "honest_sharing",
)
for _family in FAMILIES:
    import_module(f"isolation.{_family}")

MIXING: tuple[Loss, ...] = tuple(loss for loss in ZOO.values() if not loss.honest)
HONEST: tuple[Loss, ...] = tuple(loss for loss in ZOO.values() if loss.honest)
