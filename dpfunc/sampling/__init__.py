"""Samplers: they draw the batch of any step again, and carry the privacy events that they may claim."""

from dpfunc.sampling import users
from dpfunc.sampling.base import Sampler, deal
from dpfunc.sampling.fixed import FixedSize, InOrder, Shuffled
from dpfunc.sampling.poisson import Poisson

__all__ = ["FixedSize", "InOrder", "Poisson", "Sampler", "Shuffled", "deal", "users"]
