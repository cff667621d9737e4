"""Errors that would end a loop halfway, found before its first step.

May import: checkpoint and below. Privacy depends on it: no.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from dpfunc._utils.validation import expect, integer, named, refuse, shorten
from dpfunc.batches import batch_size
from dpfunc.engines._guards.loss import split_aux
from dpfunc.errors import DPFuncError, InvalidArgument
from dpfunc.rng import cpu_seeds, fold_in, insecure_key, torch_seed
from dpfunc.sampling.loader import check_readable
from dpfunc.sampling.records import read
from dpfunc.step import DPStep
from dpfunc.types import Batch, Params

_KEY = fold_in(insecure_key(0), "rehearsal")
NOTHING_SPENT = "Nothing was spent."
_ENDED = "It would have ended the run."
# What code of others raises; not Ctrl-C, nor the end of the process.
FAILURES = (ArithmeticError, AssertionError, AttributeError, DPFuncError, ImportError, LookupError, NameError, OSError,
            RuntimeError, TypeError, ValueError)  # fmt: skip


@named
def rehearse(
    dp_step: DPStep,
    params: Params,
    dataset: Any,
    *,
    collate_fn: Callable[[list[Any]], Batch] | None = None,
    evaluate: Callable[[Params], object] | None = None,
    reload: Callable[[Params], Mapping[str, Tensor]] | None = None,
    records_at_once: int = 64,
) -> tuple[str, ...]:
    """Look for errors that would end a run halfway. No step is taken, nothing is released or spent.

    The loss of every record is computed, without a gradient, in batches of `records_at_once`; then one clipped sum of
    the first records, which is dropped; then `evaluate` and `reload` are called with made-up parameters, the given ones
    and about 1 % more. The time that it takes is about a third of a pass over the data.

    Args:
        dp_step: of the run, from `make_dp_step`. params: as for `dp_step.init`; they are not changed.
        dataset, collate_fn: as for `plan.loader`.
        evaluate: the evaluation of the loop, as a function of parameters; what it returns is dropped.
        reload: saves parameters as the loop does, reads them as a user would, and returns what was read, which
            is compared bit for bit. Other names in it, as of constants and buffers, are not looked at.
        records_at_once: >= 1; memory only.

    Returns:
        Warnings: computed from private records, so not to be published.

    Raises:
        InvalidArgument: a record whose loss cannot be computed, named by its index alone; a step, an evaluation or a
            reload that fails; parameters that are not read back.

    Guarantees:
        tests/test_rehearsal.py: one record among many is found (test_one_record_in_the_midst_of_many), by its index
        and in no other words (test_nothing_of_a_record_is_told); a run after it has the same bits
        (test_a_run_after_it_is_the_same).

    >>> from dpfunc import Plan, clipping, make_dp_step, sampling
    >>> records = [(torch.ones(3), number % 2) for number in range(40)]
    >>> def loss_fn(params, batch):
    ...     return torch.nn.functional.cross_entropy(batch[0] @ params["w"], batch[1], reduction="none")
    >>> plan = Plan(sampling.Poisson(40, 0.1), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=3, delta=1e-3)
    >>> rehearse(make_dp_step(loss_fn, plan), {"w": torch.zeros(3, 2)}, records)
    ()
    >>> records[17] = (torch.ones(3), 2)
    >>> rehearse(make_dp_step(loss_fn, plan), {"w": torch.zeros(3, 2)}, records)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dpfunc.errors.InvalidArgument: Expected a loss of each record, got IndexError from dataset[17]. ...
    """
    size = integer("records_at_once", records_at_once, minimum=1)
    total = check_readable(dataset)
    collate = default_collate if collate_fn is None else collate_fn
    with cpu_seeds(_KEY), torch_seed(_KEY):
        finite = [
            _finite(dp_step, params, dataset, range(start, min(start + size, total)), collate)
            for start in range(0, total, size)
        ]
        if total:
            with tried("a step that works", _ENDED):
                dp_step.clipped_grad(params, collate(read(dataset, [0])), key=_KEY)
        made_up = {name: moved(value.detach()) for name, value in params.items()}
        if evaluate is not None:
            with tried("evaluate that works", _ENDED):
                evaluate(made_up)
        if reload is not None:
            with tried("reload that works", _ENDED):
                read_back = reload({name: value.clone() for name, value in made_up.items()})
                lost = [name for name, value in made_up.items() if not _is_same(value, read_back.get(name))]
            refuse(
                (lost,
                 "Expected parameters that are read back as they were written, got others for "
                 f"{shorten(lost)}. {NOTHING_SPENT}"),
            )  # fmt: skip
    if all(finite):
        return ()
    return (
        "The loss of at least one record is not finite: its gradient will count as zero. This line was computed from "
        "private records: do not publish it.",
    )


def _finite(
    dp_step: DPStep, params: Params, dataset: Any, indices: Sequence[int], collate: Callable[[list[Any]], Batch]
) -> bool:
    """True if the losses of some records are finite; an error names the first record that has none."""

    def losses(chosen: Sequence[int]) -> Tensor:
        batch = collate(read(dataset, chosen))
        with torch.no_grad():
            found: Tensor = split_aux(dp_step.clipped_grad.loss_fn(params, batch))[0]
        expect(found.shape == (batch_size(batch),), "one loss a record", "shape of losses", tuple(found.shape))
        return found

    try:
        return bool(losses(indices).isfinite().all())
    except FAILURES as error:
        together = error
    for index in indices:
        try:
            losses([index])
        except FAILURES as error:
            raise _refusal(error, f"dataset[{index}]") from None
    raise _refusal(together, f"dataset[{indices[0]}] to dataset[{indices[-1]}] together")


def _refusal(error: Exception, place: str) -> InvalidArgument:
    """An error that names the position of a record. Only messages of this library are shown: they reveal nothing."""
    reason = f": {error}" if isinstance(error, DPFuncError) else "."
    return InvalidArgument(
        f"Expected a loss of each record, got {type(error).__name__} from {place}{reason} Compute the loss of this "
        f"record alone to see more, which is private. {NOTHING_SPENT}"
    )


def _is_same(written: Tensor, found: Tensor | None) -> bool:
    return found is not None and torch.equal(written.cpu(), found.detach().cpu().to(written.dtype))


def moved(value: Tensor) -> Tensor:
    """A parameter plus `0.01 (1 + |value|)`: of zeros and ones lost digits, or a new beginning, would not be seen."""
    return value + 0.01 * (1 + value.abs())


@contextmanager
def tried(
    expected: str, advice: str = "It would end the run.", *, place: str = "",
    failures: tuple[type[Exception], ...] = FAILURES,
) -> Iterator[None]:  # fmt: skip
    """Context in which an error of other code becomes one that says what was expected, and that nothing was spent."""
    try:
        yield
    except failures as error:
        raise InvalidArgument(
            f"Expected {expected}, got {place}{type(error).__name__}: {error} {advice} {NOTHING_SPENT}"
        ) from error
