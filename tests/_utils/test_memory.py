"""Exhausted memory is an error that says so, not an engine that cannot; the step can be taken again in smaller parts."""

from __future__ import annotations

import pytest
import torch

import dpfunc
from dpfunc import clipping, sampling, secure_key
from dpfunc._utils.memory import out_of_memory
from dpfunc.engines._levels import of_rows
from dpfunc.errors import DPFuncError, OutOfMemory

HUGE = 2**50
ROWS = 8
PARAMS = {"w": torch.ones(3)}
PLAN = dpfunc.Plan(sampling.Poisson(ROWS, 1.0), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=2, delta=1e-3)


def together(batch):
    """Number of rows that are computed at once with this one."""
    rows_B = of_rows(batch)
    return 1 if rows_B is None else len(rows_B)


def greedy(folder, kind=None, rows=4):
    """A loss that asks for too much where more rows are computed at once; `calls()` are their numbers.

    They go into a file, which is no state of a loss: one that counts its own calls is refused.
    """
    path = folder / "calls"

    def loss_fn(params, batch):
        with path.open("ab") as file:
            file.write(bytes([together(batch)]))
        if together(batch) > rows:
            if kind is not None:
                raise kind
            torch.empty(HUGE, dtype=torch.uint8)
        return (params["w"] * batch).sum(1)

    return loss_fn, lambda: list(path.read_bytes())


@pytest.mark.parametrize("kind", [None, MemoryError(), torch.OutOfMemoryError("CUDA out of memory.")])
@pytest.mark.parametrize("engine", ["auto", "vmap", "ghost"])
def test_nothing_else_is_tried(tmp_path, engine, kind):
    loss_fn, calls = greedy(tmp_path, kind)
    dp_step = dpfunc.make_dp_step(loss_fn, PLAN, engine=engine)
    state = dp_step.init(PARAMS, secure_key())
    with pytest.raises(OutOfMemory, match=rf"microbatch_size=None.* smaller than {ROWS}.*nothing was spent") as found:
        dp_step(PARAMS, torch.ones(ROWS, 3), state)
    assert [rows for rows in calls() if rows > 1] == [ROWS]  # those of one row are made up, before the batch
    assert (str(HUGE) in str(found.value)) is (kind is None)
    assert found.value.__cause__ is kind or kind is None
    assert all(isinstance(found.value, base) for base in (DPFuncError, RuntimeError, MemoryError))


def test_rows_alone_say_so_too(tmp_path):
    loss_fn, calls = greedy(tmp_path, rows=0)
    with pytest.raises(OutOfMemory, match=f"{HUGE} bytes"):
        dpfunc.make_dp_step(loss_fn, PLAN, engine="loop", microbatch_size=2)(PARAMS, torch.ones(ROWS, 3))
    assert 0 < len(calls()) <= 2  # the loop calls it with zeros first


@pytest.mark.parametrize("where", ["audited row", "automatic size"])
def test_memory_that_lacks_later_in_a_step(where):
    """While rows are computed alone for an audit, and while microbatches are measured."""

    def loss_fn(params, batch):
        if together(batch) == 1 and len(batch) == 1 and batch.any():  # not the zeros that come first
            torch.empty(HUGE, dtype=torch.uint8)
        return (params["w"] * batch).sum(1)

    size = "auto" if where == "automatic size" else None
    with pytest.raises(OutOfMemory, match=f"microbatch_size={size!r}"):
        dpfunc.make_dp_step(loss_fn, PLAN, microbatch_size=size)(PARAMS, torch.ones(ROWS, 3))


def test_the_state_can_be_used_again_in_smaller_parts(tmp_path):
    written = []
    loss_fn, _ = greedy(tmp_path)
    whole, parts = (
        dpfunc.make_dp_step(loss_fn, PLAN, microbatch_size=size, journal=written.append) for size in (None, 4)
    )
    state, batch = whole.init(PARAMS, secure_key()), torch.ones(ROWS, 3)
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            whole(PARAMS, batch, state)
    assert not written
    grads, after, _ = parts(PARAMS, batch, state)
    assert (after.step, after.ledger.num_steps, len(written)) == (1, 1, 1)
    expected, *_ = dpfunc.make_dp_step(greedy(tmp_path, rows=ROWS)[0], PLAN)(
        PARAMS, batch, dpfunc.state.allow_repeat(state)
    )
    torch.testing.assert_close(grads, expected)


def test_other_errors_stay_what_they_are(tmp_path):
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")) == "20.00 GiB"
    assert out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"))
    with pytest.raises(RuntimeError, match="odd"):
        dpfunc.make_dp_step(greedy(tmp_path, RuntimeError("odd"), rows=0)[0], PLAN, engine="loop")(
            PARAMS, torch.ones(ROWS, 3)
        )
