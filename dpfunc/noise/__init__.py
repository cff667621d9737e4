"""Noise: from a ClippedSum to something that may be published."""

from dpfunc.noise.gaussian import Gaussian, add_gaussian, gaussian, noise_std
from dpfunc.noise.mechanism import Mechanism, Noise

__all__ = ["Gaussian", "Mechanism", "Noise", "add_gaussian", "gaussian", "noise_std"]
