"""Engines: per-sample gradients, without clipping and without noise."""

from dpfunc.engines.vmap import vmap

__all__ = ["vmap"]
