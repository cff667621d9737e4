"""What becomes of released gradients and parameters, at no further cost: averages over steps."""

from dpfunc.updates.averages import Ema, LastSteps

__all__ = ["Ema", "LastSteps"]
