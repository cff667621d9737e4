"""What becomes of released gradients and parameters, at no further cost: optimizers, averages, scales."""

from dpfunc.updates.adamw_bc import AdamWBC
from dpfunc.updates.averages import Ema, LastSteps
from dpfunc.updates.scaling import scaled_loss, unscaled

__all__ = ["AdamWBC", "Ema", "LastSteps", "scaled_loss", "unscaled"]
