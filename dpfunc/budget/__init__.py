"""Budget of a data set: what all runs on the same records may cost together, kept in a database.

May import: its folder, checkpoint and below. Privacy depends on it: no.
"""

from dpfunc.budget._events import BudgetEntry
from dpfunc.budget.budget import Budget

__all__ = ["Budget", "BudgetEntry"]
