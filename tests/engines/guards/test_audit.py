"""Audits: how many rows a step compares, and what rounding may do to a row."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dpfunc import engines
from dpfunc.engines.evidence import Evidence
from dpfunc.engines.guards import audit as module
from dpfunc.engines.guards.audit import FIRST_ROWS, ROWS_IN, STEPS_IN, TIME_SHARE, Audits, audit, credited_by
from dpfunc.errors import UnsupportedModel


def schedule(size, steps, *, step_seconds=1.0, row_seconds, doubts=()):
    """Rows that each of so many steps compares, where a step and a row alone take these times."""
    audits, batch = Audits(), torch.zeros(size, 1)
    for _ in range(steps):
        wanted = audits.due(batch, Evidence(doubts=doubts), seconds=step_seconds)
        yield wanted
        audits.paid(wanted, wanted * row_seconds)


@pytest.mark.parametrize("size", [32, 256, 4096])
@pytest.mark.parametrize("share", [1e-4, 1 / 32, 0.2, 3.0])
def test_rows_take_their_share_of_the_time(size, share):
    """At most one row in 100 and 1 % of the time, and yet one row in 20 steps; the first step is not counted."""
    first, *later = schedule(size, 2001, row_seconds=share)
    assert first == max(FIRST_ROWS, size // ROWS_IN)
    assert max(later) <= max(1, size // ROWS_IN)
    assert all(sum(later[start : start + STEPS_IN]) >= 1 for start in range(2001 - STEPS_IN))
    taken, allowed = sum(later) * share / 2000, max(TIME_SHARE, share / STEPS_IN)
    assert taken <= 1.01 * allowed
    possible = max(1 / STEPS_IN, min(TIME_SHARE / share, size // ROWS_IN))
    assert sum(later) / 2000 >= 0.9 * possible, "what may be taken is taken"


def test_no_clock_is_needed_where_a_step_has_doubts():
    assert list(schedule(64, 5, row_seconds=10.0, doubts=("a doubt",))) == [8] * 5
    assert list(schedule(256, 5, row_seconds=10.0, doubts=("a doubt",))) == [32] * 5


def test_a_batch_of_a_new_size_is_audited():
    audits = Audits()
    sizes = [200, 200, 201, 201, 350, 7, 7]
    wanted = []
    for size in sizes:
        wanted.append(audits.due(torch.zeros(size, 1), seconds=1.0))
        audits.paid(wanted[-1], 100.0 * wanted[-1])
    assert wanted == [2, 0, 2, 0, 3, 1, 0]


def product(x_Bd, w):
    """x w, in another order of the sum for a row alone: kernels of some machines do so by themselves, others do not."""
    return x_Bd.flip(1) @ w.flip(0) if len(x_Bd) == 1 else x_Bd @ w


def at_the_kink(params, batch):
    """Each row's number is compared with what it is alone: rounding decides whether its gradient is there."""
    x_Bd, alone_B = batch
    z_B = product(x_Bd, params["w"])
    return torch.relu(z_B - alone_B) + 1e-3 * z_B


def mixed_at_the_kink(params, batch):
    return at_the_kink(params, batch) * (1 + 0.01 * (len(batch[0]) - 1))


def kinks(dtype):
    """Parameters, rows and what each row gives alone, some of which differ in the last digits beside others."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(3000, generator=generator, dtype=dtype)
    x_Bd = torch.randn(64, 3000, generator=generator, dtype=dtype)
    alone_B = torch.cat([product(x_1d, w) for x_1d in x_Bd.split(1)])
    assert int((product(x_Bd, w) > alone_B).sum()) > 4
    return {"w": w}, (x_Bd, alone_B)


def refused(loss_fn, params, batch):
    """Rows that an audit refuses."""
    per_sample = engines.bookkeeping()(loss_fn, params, batch)
    credited, found = credited_by(per_sample, per_sample.sq_norms()), []
    for row in range(len(batch[0])):
        try:
            audit(loss_fn, params, batch, credited, [row])
        except UnsupportedModel:
            found.append(row)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_that_rounding_decides_is_no_fault(dtype, monkeypatch):
    """A ReLU whose input is zero but for rounding: the kernels of a batch and of a row alone may decide differently."""
    params, batch = kinks(dtype)
    assert not refused(at_the_kink, params, batch)
    monkeypatch.setattr(module, "_TRIES", 0)
    assert refused(at_the_kink, params, batch), "the rows of this test differ"


def test_a_fault_beside_a_kink_is_found():
    """Rounding explains a gradient that jumps, not a loss that depends on the size of its batch."""
    params, (x_Bd, alone_B) = kinks(torch.float32)
    assert len(refused(mixed_at_the_kink, params, (x_Bd, alone_B - 1.0))) == 64


def test_an_infinite_change_explains_nothing():
    change = module._larger(module._larger(0.5, float("inf")), float("nan"))
    assert change == 0.5


def test_a_step_that_is_not_proven_is_given_less():
    """Where nothing but the audit stands between a loss and its release, rounding explains a tenth at most."""
    params, batch = kinks(torch.float32)
    per_sample = engines.bookkeeping()(at_the_kink, params, batch)
    credited = credited_by(per_sample, per_sample.sq_norms())
    doubted = dataclasses.replace(credited, evidence=Evidence(doubts=("a doubt",)))
    differing = [
        row for row in range(64) if batch_gradient(per_sample, row) != batch_gradient(None, row, params, batch)
    ]
    assert differing
    for row in differing:
        audit(at_the_kink, params, batch, credited, [row])
        with pytest.raises(UnsupportedModel):
            audit(at_the_kink, params, batch, doubted, [row])


def batch_gradient(per_sample, row, params=None, batch=None):
    """True if the ReLU of a row lets its gradient through, beside the others or alone."""
    if per_sample is None:
        per_sample = engines.bookkeeping()(at_the_kink, params, tuple(part[row : row + 1] for part in batch))
        row = 0
    return bool(per_sample.sq_norms()["w"][row] > 1.0)
