"""Configuration of an adapter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dpfunc._utils.validation import boolean, integer, one_of, positive, real


@dataclass(frozen=True)
class LoRAConfig:
    """Configuration of an adapter; it is stored with the parameters.

    Args:
        targets: names of the adapted layers. rank: r >= 1. alpha: > 0.
        rslora: scale alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski 2023).
        dropout: probability on the input of A, 0 <= dropout < 1; active in training mode only, not on embeddings.
        train: `AB`, or `B` with A frozen (FFA-LoRA, Sun et al. 2024), which halves the noisy coordinates and keeps the
            noise in `B A` linear.
        init: of A: `kaiming` uniform, or `orthonormal` rows. B starts at zero.
        also_train: names of ordinary parameters that are trained too.

    >>> LoRAConfig(targets=("q",), rank=8, alpha=16.0).scale
    2.0
    """

    targets: tuple[str, ...]
    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0
    train: Literal["AB", "B"] = "AB"
    init: Literal["kaiming", "orthonormal"] = "kaiming"
    also_train: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        object.__setattr__(self, "also_train", tuple(self.also_train))
        object.__setattr__(self, "rank", integer("rank", self.rank, minimum=1))
        object.__setattr__(self, "alpha", positive("alpha", self.alpha))
        dropout = real("dropout", self.dropout, "0 <= dropout < 1", inside=lambda share: 0 <= share < 1)
        object.__setattr__(self, "dropout", dropout)
        boolean("rslora", self.rslora)
        one_of("train", self.train, ("AB", "B"))
        one_of("init", self.init, ("kaiming", "orthonormal"))

    @property
    def scale(self) -> float:
        """Factor of the product B A: `alpha / rank`, or `alpha / sqrt(rank)` with `rslora`."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
