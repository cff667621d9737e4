"""A module as a pure function of its trainable parameters, without touching the module."""

from dpfunc.functional.forward import Forward, Functional, functionalize, with_params
from dpfunc.functional.names import ATTENTION, BIASES, HEADS, PROJECTOR

__all__ = ["ATTENTION", "BIASES", "HEADS", "PROJECTOR", "Forward", "Functional", "functionalize", "with_params"]
