"""Earlier calls of one private step, by which usual mistakes are found; no result depends on them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfunc._utils.dtensor import local
from dpfunc._utils.validation import warn
from dpfunc.errors import InvalidArgument, NoGradientWarning

_HEAD = 8
_STATELESS = (
    "dp_step was called without a state more than once. Each such call is a run of its own with its own ledger, and "
    "nobody adds them up. In a loop, pass the state on: begin with state = dp_step.init(params, dpfunc.secure_key()), "
    "then grads, state, unreleased = dp_step(params, batch, state). Nothing was spent."
)
_UNCHANGED = (
    "dp_step got the parameters of its first step again, with nothing written into them: each step spends budget, and "
    "so far none changes anything. An optimizer takes params.values(), not model.parameters(), and reads .grad: "
    "p.grad = grads[name] for each name, p in params.items(), then optimizer.step(). This warning comes once."
)
_WITHOUT_GRADIENT = (
    "In this step and an earlier one no record of this process had a finite gradient other than zero: budget is "
    "spent, and only noise released. Look for NaN and inf in inputs, labels and the loss (log, division, masks), and "
    "for a loss that leaves out the params it is given. This warning was computed from private data: it reveals this "
    "about two batches, and no noise protects that. Do not publish it."
)
_logger = logging.getLogger("dpfunc.step")


class _Known(NamedTuple):
    """A tensor, torch's counter of writes in place, and its first numbers: `tensor.data` is written uncounted."""

    tensor: weakref.ReferenceType[Tensor]
    version: int
    head: Tensor

    def still(self, tensor: Tensor) -> bool:
        """True if this is the same tensor, and nothing was written into it. A copy is another one."""
        same = self.tensor() is tensor and self.version == _version(tensor)
        return same and torch.equal(self.head, _head(tensor))


class Calls:
    """Facts about the earlier calls of one private step. They live as long as the step.

    >>> params, calls = {"w": torch.zeros(2)}, Calls()
    >>> calls.note(params, stateless=True, without_gradient=False)
    >>> calls.refuse_second_run()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: dp_step was called without a state more than once. ...
    """

    def __init__(self) -> None:
        self._stateless = False
        self._without_gradient = 0
        self._first: dict[str, _Known] | None = None
        self._compared = False

    def note(self, params: Mapping[str, Tensor], *, stateless: bool, without_gradient: bool) -> None:
        """Note a call whose result was released."""
        self._stateless = self._stateless or stateless
        self._without_gradient += without_gradient
        if self._first is None:
            counted = {name: p for name, p in params.items() if not p.is_inference()}  # others are never unchanged
            self._first = {name: _Known(weakref.ref(p), _version(p), _head(p)) for name, p in counted.items()}

    def refuse_second_run(self) -> None:
        """Refuse a second call without a state, which would be a second run."""
        if self._stateless:
            raise InvalidArgument(_STATELESS)

    def warn_if_nothing_changed(self, params: Mapping[str, Tensor]) -> None:
        """Log, at the second call, that nothing was written into the parameters since the first."""
        if self._first is None or self._compared:
            return
        self._compared = True
        if self._first.keys() == params.keys() and all(self._first[name].still(p) for name, p in params.items()):
            _logger.warning(_UNCHANGED)

    def warn_if_lost(self, without_gradient: bool) -> None:
        """Warn of the second step whose batch had records, none of them with a finite gradient other than zero."""
        if without_gradient and self._without_gradient == 1:
            warn(_WITHOUT_GRADIENT, NoGradientWarning)


def _version(tensor: Any) -> int:
    return int(tensor._version)


def _head(tensor: Tensor) -> Tensor:
    own = local(tensor).detach()
    return own[(0,) * (own.ndim - 1)][:_HEAD].clone() if own.ndim and own.numel() else own.clone()
