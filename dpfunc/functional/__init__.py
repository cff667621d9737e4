"""A module as a pure function of its trainable parameters, without touching the module.

May import: its folder, accounting, clipping, engines, noise, sampling, updates and below. Privacy depends on it: no.
"""

from dpfunc.functional.batchnorm import count_batchnorm, replace_batchnorm
from dpfunc.functional.forward import Forward
from dpfunc.functional.modules import Functional, functionalize, with_params
from dpfunc.functional.names import ATTENTION, BIASES, HEADS, PROJECTOR

__all__ = [
    "ATTENTION",
    "BIASES",
    "HEADS",
    "PROJECTOR",
    "Forward",
    "Functional",
    "count_batchnorm",
    "functionalize",
    "replace_batchnorm",
    "with_params",
]
