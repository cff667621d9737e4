"""Noise: from a ClippedSum to something that may be published."""

from dpfunc.noise.gaussian import Mechanism, add_gaussian, gaussian, noise_std

__all__ = ["Mechanism", "add_gaussian", "gaussian", "noise_std"]
