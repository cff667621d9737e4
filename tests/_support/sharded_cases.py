"""Steps of sharded models, compared with those of whole ones."""

from __future__ import annotations

from functools import cache

import torch
from workers import run


@cache
def expected(way, engine, **options):
    """The run of one process; `options` are those that change its result."""
    return run(1, "fsdp_jobs:train_with", way, engine, whole=True, **options)[0]


def close(found, wanted, tolerance=1e-6):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


def check(found, wanted, tolerance=1e-6):
    """Close to one process, and the same in all; somebody had no records in a step in which others had some."""
    for params, ledger, _, _ in found:
        close(params, wanted[0], tolerance)
        assert ledger == wanted[1]
        for name, value in found[0][0].items():
            assert torch.equal(params[name], value)
    dealt = list(zip(*(counts for _, _, counts, _ in found), strict=True))
    assert [sum(row) for row in dealt] == wanted[2]
    assert any(0 in row and sum(row) for row in dealt)
