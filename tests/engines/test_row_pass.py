"""One pass over rows: no operation runs row by row, however many rows there are."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.launches.cases import ALL_CASES, CASES
from benchmarks.launches.counts import launches_of
from dpfunc.engines import auto

LONG = ("checkpointed", "decoder", "llava", "lora", "t5")


def operations_of(name, rows):
    """Names of the operations of a pass, forward and backward, after the loss was looked at."""
    problem, engine = ALL_CASES[name].problem(batch_size=rows), auto()
    run = partial(engine, *problem.functional(), (problem.inputs, problem.targets))
    run()
    return [operation for operation, _ in launches_of(run).trace]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in LONG else name
        for name, case in CASES.items()
        if case.engine == "auto"
    ],
)
def test_more_rows_launch_no_more_operations(name):
    """Less than one for each further row: gradients of large kernels are formed in pieces that fit a cache (resnet18)."""
    few, some, many = (len(operations_of(name, rows)) for rows in (2, 8, 32))
    assert few == some
    assert many - some < 10
