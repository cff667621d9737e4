"""What becomes of released gradients and parameters, at no further cost: optimizers, averages, scales.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

from dpfunc.updates.adamw_bc import AdamWBC
from dpfunc.updates.averages import Ema, LastSteps
from dpfunc.updates.gradients import set_grads
from dpfunc.updates.moments import JointMoments
from dpfunc.updates.scaling import scaled_loss, unscaled

__all__ = ["AdamWBC", "Ema", "JointMoments", "LastSteps", "scaled_loss", "set_grads", "unscaled"]
