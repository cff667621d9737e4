"""Functions of torch with drawn arguments: what mixes samples is never proven, and most of what does not is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle import quiet
from sweep import Call, Verdict, batch, constant, is_proven, judged, rows_of, swept

from dpfunc.engines.tracing import operations
from dpfunc.engines.tracing.operations import known_operation


def check(seed, count):
    with quiet():
        found = swept(seed, count)
    assert not found.holes, "\n".join(found.holes)
    # it is not all refused, and there was something to refuse
    assert found.share > 0.8, found.refused
    assert found.readings[Verdict.HONEST] > 0.4 * count
    assert found.readings[Verdict.MIXES] > 0.2 * count
    return found


def test_no_function_that_mixes_samples_is_proven():
    check(seed=0, count=250)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_no_function_that_mixes_samples_is_proven_in_many_calls(seed):
    found = check(seed, 1500)
    assert len(found.names) > 900


def test_a_wrong_entry_in_the_table_is_found(monkeypatch):
    """Scans along any axis, said to keep the rows of their argument."""
    operation = torch.ops.aten.cumsum.default
    known = replace(known_operation(operation), handler=lambda call: call.type_of(call.args[0]), pure=False, number=-1)
    monkeypatch.setitem(operations._known, id(operation), (operation, known))
    with quiet():
        found = swept(0, 20, {"torch.cumsum": torch.cumsum})
    assert any("torch.cumsum" in hole for hole in found.holes)


MIXED, POSITION, HONEST, CONSTANT = Verdict.MIXES, Verdict.POSITION, Verdict.HONEST, Verdict.CONSTANT
JUDGED = [
    (torch.cumsum, (batch("B2"), 0), [MIXED]),
    (torch.cumsum, (batch("B2"), 1), [HONEST]),
    (torch.cumsum, (batch("2B"), 1), [MIXED]),
    (torch.softmax, (batch("B2"), 0), [MIXED]),
    (torch.softmax, (batch("B4"), 1), [HONEST, MIXED]),  # the second axis is as long as the batch, and holds no samples
    (torch.sum, (batch("B"),), [MIXED]),
    (torch.flip, (batch("B2"), (0,)), [MIXED]),
    (torch.sort, (batch("B"),), [MIXED, MIXED]),
    (torch.add, (batch("B2"), constant("41")), [POSITION]),
    (torch.add, (batch("B2"), constant("12")), [HONEST]),
    (torch.Tensor.zero_, (batch("B2"),), [CONSTANT]),
    (torch.bernoulli, (batch("shares"),), None),
    (torch.add, (batch("B2"), constant("222"), constant("222")), None),
]


@pytest.mark.parametrize("line", JUDGED, ids=lambda line: f"{line[0].__name__} of {line[1]}")
def test_the_judge_sees_what_is_known(line):
    function, arguments, expected = line
    call, x = Call(function.__name__, function, arguments), rows_of(0)
    with quiet():
        found = judged(call, x)
        assert found == expected
        for place, verdict in enumerate(found or []):
            assert is_proven(call, place, x) is (verdict in (HONEST, CONSTANT))
