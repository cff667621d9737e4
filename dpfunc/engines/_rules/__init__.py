"""Rules: one family of operations a file. A new family is a file, and a line here.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

from collections.abc import Callable
from typing import Any

from dpfunc.engines._rules import convolution, cross_entropy, norms, table
from dpfunc.engines._rules.table import Rule

FAMILIES = (table, convolution, norms, cross_entropy)
RULES: dict[Callable[..., Any], Rule] = {op: rule for family in FAMILIES for rule in family.RULES for op in rule.ops}
REGISTERED: dict[Callable[..., Any], Rule] = {}
"""Rules of users; see `dpfunc.engines.register_rule`."""
