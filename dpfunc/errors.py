"""Exceptions: one base, one class for each thing a caller may want to catch.

May import: nothing. Privacy depends on it: no.
"""


class DPFuncError(Exception):
    """Base of every error that dpfunc raises on purpose."""


class InvalidArgument(DPFuncError, ValueError):
    """A value is outside its domain. Nothing was spent and nothing was changed."""


class UnsupportedModel(DPFuncError, ValueError):
    """A model or a loss does something that has no per-sample gradient, or would corrupt it."""


class BudgetExhausted(DPFuncError, RuntimeError):
    """The next step would spend more than the plan allows. It was not taken."""


class UnreachableBudget(DPFuncError, ValueError):
    """No noise multiplier (or number of steps) can meet the target."""


class StateReused(DPFuncError, RuntimeError):
    """A step with this key and step number was already released: its noise would be used twice."""


class SamplingMismatch(DPFuncError, RuntimeError):
    """The batch is not the one that the plan's sampler drew for this step."""


class LedgerConflict(DPFuncError, ValueError):
    """Two ledgers cannot be composed, or a ledger belongs to another run."""


class CheckpointError(DPFuncError, RuntimeError):
    """A checkpoint is missing, incomplete, or belongs to another plan, data set or model."""


class NotWritten(CheckpointError):
    """A file of a run could not be written, e.g. on a full disk. What was released before counts."""


class RankMismatch(DPFuncError, RuntimeError):
    """The processes of a run disagree about the step, the plan, the key or the parameters. Nothing was spent."""


class StepAborted(DPFuncError, RuntimeError):
    """Another process could not take the step, so none took it. Nothing was released and nothing was spent."""


class OutOfMemory(DPFuncError, RuntimeError, MemoryError):
    """The memory does not suffice for the rows of a microbatch. Nothing was released and nothing was spent."""


class NoGradientWarning(UserWarning):
    """Several batches lost half of their gradients, or all: budget was spent on noise. Computed from private data."""


class RecordsWarning(UserWarning):
    """Records come several times, or a loss uses more of them than its own row. Computed from private data."""


class EngineWarning(UserWarning):
    """The fast way of the engines does not work with this version of torch: right, but slower and with more memory."""


class NoiseWarning(UserWarning):
    """The noise hides what is to be learnt, as public facts alone say; or is all that a parameter without use gets."""


class RunWarning(UserWarning):
    """A second run whose cost nobody adds to that of the first one, or a loop over a run that has no step left."""


class InsecureKeyWarning(UserWarning):
    """The key of a run can be guessed: its noise protects nobody. For tests and public data only."""
