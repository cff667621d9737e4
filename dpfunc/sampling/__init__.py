"""Who is in the batch of a step: samplers that can draw any step again and that carry what they may claim."""

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
