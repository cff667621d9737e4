"""A small loss over four rows, and how far an engine is from each row alone."""

from __future__ import annotations

import torch
from models import Case
from zoo.parity import differences, truth_of

from dpfunc.engines import auto

W = {"w": torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)}
X = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 2.0], [4.0, 0.0, -1.0], [0.5, 0.5, 0.5]], dtype=torch.float64)


def off(loss_fn, params, batch, engine=None):
    """The largest difference from rows alone, relative to the largest gradient."""
    case = Case(loss_fn, params, batch)
    return max(differences(engine or auto(), case, truth_of(case)).values())


def engine_of(loss_fn, params, batch):
    engine = auto()
    assert off(loss_fn, params, batch, engine) < 1e-10
    return engine.decision(loss_fn).engine


def squares(p, x):
    return (p["w"] * x).square().sum(1)
