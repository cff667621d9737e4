"""The zoo: losses that mix rows, and honest ones that look like them. Importing it fills the table."""

from __future__ import annotations

from isolation import (
    backward,
    forward_neighbours,
    forward_statistics,
    honest_layouts,
    honest_values,
    oddities,
    order,
    state,
)
from isolation.cases import ZOO, Loss

FAMILIES = (forward_statistics, forward_neighbours, order, backward, state, oddities, honest_layouts, honest_values)
MIXING: tuple[Loss, ...] = tuple(loss for loss in ZOO.values() if not loss.honest)
HONEST: tuple[Loss, ...] = tuple(loss for loss in ZOO.values() if loss.honest)
