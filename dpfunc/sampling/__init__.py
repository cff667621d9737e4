"""Samplers: they draw the batch of any step again, and carry the privacy events that they may claim."""

from dpfunc.sampling import users
from dpfunc.sampling.allocation import RandomAllocation
from dpfunc.sampling.base import Sampler, deal
from dpfunc.sampling.capped import CappedPoisson
from dpfunc.sampling.fixed import FixedSize, InOrder, Shuffled
from dpfunc.sampling.poisson import Poisson

__all__ = [
    "CappedPoisson",
    "FixedSize",
    "InOrder",
    "Poisson",
    "RandomAllocation",
    "Sampler",
    "Shuffled",
    "deal",
    "users",
]
