"""Samplers: they draw the batch of any step again, and carry the privacy events that they may claim.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

from dpfunc.batches import deal
from dpfunc.sampling import users
from dpfunc.sampling.base import Sampler
from dpfunc.sampling.fixed import FixedSize, InOrder, RandomAllocation, Shuffled, ShuffledOnce
from dpfunc.sampling.poisson import CappedPoisson, CyclicPoisson, Poisson
from dpfunc.sampling.records import data_name
from dpfunc.sampling.views import mean_over_views

__all__ = [
    "CappedPoisson",
    "CyclicPoisson",
    "FixedSize",
    "InOrder",
    "Poisson",
    "RandomAllocation",
    "Sampler",
    "Shuffled",
    "ShuffledOnce",
    "data_name",
    "deal",
    "mean_over_views",
    "users",
]
