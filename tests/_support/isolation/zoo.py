"""The zoo: losses that mix rows, and honest ones that look like them. Importing it fills the table."""

from __future__ import annotations

from importlib import import_module

from isolation.cases import ZOO, Loss

for _family in ("forward", "backward", "around", "honest"):
    import_module(f"isolation.{_family}")

MIXING: tuple[Loss, ...] = tuple(loss for loss in ZOO.values() if not loss.honest)
HONEST: tuple[Loss, ...] = tuple(loss for loss in ZOO.values() if loss.honest)
