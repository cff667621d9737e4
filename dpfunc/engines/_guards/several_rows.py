"""The loss of several rows in one call, as its author reads it, beside the losses of its rows, which a step trains.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpfunc._utils.validation import shorten, warn
from dpfunc.batches import take, tree_leaves
from dpfunc.engines._guards.loss import split_aux, uncompiled
from dpfunc.engines._guards.row_memory import RowMemory
from dpfunc.errors import NoiseWarning, RecordsWarning
from dpfunc.rng import cpu_generators, cpu_seeds, insecure_key, torch_seed
from dpfunc.types import Batch, LossFn, Params

_MOST = 8  # rows in the call
_TOLERANCE = 0.05  # of the largest loss
_PICKING = frozenset(
    (Tensor.__getitem__, torch.index_select, Tensor.index_select, torch.gather, Tensor.gather, torch.take, Tensor.take)
)
_PRIVATE = "This warning was computed from private data: do not publish it. Nothing was spent yet."


class _Picks(TorchFunctionMode):
    """Records shapes of tensors beside the batch, as long as the data, from which each row takes an entry."""

    def __init__(self, params: Params, batch: Batch, rows: int, length: int) -> None:
        super().__init__()
        self.memory, self.rows, self.length, self.shapes = RowMemory(), rows, length, list[tuple[int, ...]]()
        self.memory.note(tree_leaves(batch))
        self.trained = {id(param) for param in params.values()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func in _PICKING and max(args[0].shape, default=0) >= self.length and id(args[0]) not in self.trained:
            others = tree_leaves((args[1:], kwargs))
            if not self.memory.depends(args[0]) and any(map(self._is_own, others)):
                self.shapes.append(tuple(args[0].shape))
        self.memory.follow(func, args, kwargs, found)
        return found

    def _is_own(self, index: Any) -> bool:
        """True for one number a row, all different: an index of records. Labels and tokens repeat."""
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or not self.memory.depends(index):
            return False
        return index.shape[:1] == (self.rows,) and index.unique().numel() == self.rows


def look_at_rows(
    loss_fn: LossFn, params: Params, batch: Batch, real_B: Tensor, losses_B: Tensor, num_records: int
) -> None:
    """Warn of a loss whose value for several rows is not that of its rows, or that reads records beside the batch.

    It is called once with up to 8 rows. One that draws random numbers, or refuses several rows, tells nothing.

    Guarantees:
        tests/engines/guards/test_several_rows.py: test_losses_that_compare_rows_are_said,
        test_records_beside_the_batch_are_said.
    """
    some = take(batch, real_B.nonzero()[:_MOST, 0])
    picks, losses = _Picks(params, some, min(_MOST, len(losses_B)), num_records), None
    key, quiet = insecure_key(0), warnings.catch_warnings(action="ignore")
    with suppress(Exception), quiet, torch_seed(key), cpu_seeds(key), uncompiled(), torch.no_grad():
        before = _generators()
        with picks:
            losses = split_aux(loss_fn(dict(params), some))[0].detach()
        losses = losses if _generators() == before else None
    picks.memory.end()
    if picks.shapes:
        _warn_of_records(loss_fn, picks.shapes[0], num_records)
    if losses is not None:
        _compare(losses.float(), losses_B[: picks.rows].float())


def warn_of_unused(names: Sequence[str]) -> None:
    """Warn of parameters that the loss does not use, before noise is added to them.

    Guarantees:
        tests/test_step.py::test_parameters_that_the_loss_does_not_use_are_said.
    """
    if names:
        warn(
            f"Expected a loss that uses each trained parameter, got one that does not use [{shorten(names)}]: what a "
            "step releases for them is only noise, which moves them at random. Leave them out of params (freeze them "
            "with requires_grad_(False) before functionalize), or use them in the loss. If other batches use them, "
            "filter this warning out. Nothing was spent.",
            NoiseWarning,
        )


def _generators() -> tuple[object, ...]:
    states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return (*cpu_generators(), *(state.numpy().tobytes() for state in states))


def _warn_of_records(loss_fn: LossFn, shape: tuple[int, ...], num_records: int) -> None:
    known: dict[str, Any] = {}
    with suppress(TypeError):  # no function of Python
        found = inspect.getclosurevars(loss_fn)
        known = {**found.globals, **found.nonlocals}
    names = [n for n, v in known.items() if isinstance(v, Tensor) and max(v.shape, default=0) >= num_records]
    warn(
        f"The loss takes entries of a tensor of shape {shape} by numbers of the batch, one for each record"
        f"{f', and reads {shorten(names)}, as long as the data' if names else ''}. What records have there is not "
        "clipped with them: where an entry depends on other records (a graph, a mean, neighbours), epsilon does not "
        f"hold. Give it as leaves of the batch. If it is public, filter this warning out. {_PRIVATE}",
        RecordsWarning,
    )


def _compare(together: Tensor, rows_B: Tensor) -> None:
    expected = [rows_B] if together.shape == rows_B.shape else [rows_B.mean(), rows_B.sum()]
    if together.shape != rows_B.shape and together.numel() != 1:
        return
    largest = max(float(each.nan_to_num(0.0, 0.0, 0.0).abs().max()) for each in (together, *expected))
    close = [torch.isclose(together, e, rtol=0.0, atol=_TOLERANCE * largest, equal_nan=True).all() for e in expected]
    if not any(close):
        warn(
            f"Expected the loss of {len(rows_B)} rows in one call to be the losses of these rows, got a mean of "
            f"{float(together.mean()):.4g} in one call and of {float(rows_B.mean()):.4g} for each row. A step computes "
            "each row as a batch of one, so it trains the second loss, not the one that was written. Something "
            "compares or averages rows: negatives of the batch (SimCLR, CLIP), dice or class weights of the batch, a "
            "mean that is expanded or subtracted. Compute each loss from its own row and public numbers; views or "
            f"items that belong together are one row. {_PRIVATE}",
            RecordsWarning,
        )
