"""Samplers: they draw the batch of any step again, and carry the privacy events that they may claim."""

from dpfunc.sampling.base import Sampler, deal
from dpfunc.sampling.fixed import FixedSize, Shuffled
from dpfunc.sampling.loader import BatchSampler, CollateOrEmpty, batch_sampler, collate_or_empty
from dpfunc.sampling.poisson import Poisson

__all__ = [
    "BatchSampler",
    "CollateOrEmpty",
    "FixedSize",
    "Poisson",
    "Sampler",
    "Shuffled",
    "batch_sampler",
    "collate_or_empty",
    "deal",
]
