"""Engines: per-sample gradients, without clipping and without noise."""

from dpfunc.engines.auto import auto
from dpfunc.engines.bookkeeping import bookkeeping
from dpfunc.engines.explain import explain
from dpfunc.engines.ghost import ghost
from dpfunc.engines.loop import loop
from dpfunc.engines.register import register_rule
from dpfunc.engines.vmap import vmap
from dpfunc.engines.vmap_grad import vmap_grad

__all__ = ["auto", "bookkeeping", "explain", "ghost", "loop", "register_rule", "vmap", "vmap_grad"]
