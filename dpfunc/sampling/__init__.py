"""Samplers: they draw the batch of any step again, and carry the privacy events that they may claim."""

from dpfunc.batches import deal
from dpfunc.sampling import users
from dpfunc.sampling.base import Sampler
from dpfunc.sampling.fixed import FixedSize, InOrder, RandomAllocation, Shuffled
from dpfunc.sampling.poisson import CappedPoisson, Poisson

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
