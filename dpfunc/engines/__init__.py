"""Engines: per-sample gradients, without clipping and without noise."""

from dpfunc.engines.bookkeeping import bookkeeping
from dpfunc.engines.ghost import ghost
from dpfunc.engines.loop import loop
from dpfunc.engines.vmap import vmap

__all__ = ["bookkeeping", "ghost", "loop", "vmap"]
