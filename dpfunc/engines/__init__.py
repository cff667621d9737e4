"""Engines: per-sample gradients, without clipping and without noise.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

from dpfunc.engines.capture import captured
from dpfunc.engines.check import SelfCheck, self_check
from dpfunc.engines.explain import explain
from dpfunc.engines.loop import loop
from dpfunc.engines.register import register_rule
from dpfunc.engines.vmap_grad import auto, ghost, vmap

__all__ = ["SelfCheck", "auto", "captured", "explain", "ghost", "loop", "register_rule", "self_check", "vmap"]
