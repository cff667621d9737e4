"""Random losses: a row has the same loss and gradient whoever is beside it, and that of the row alone."""

from __future__ import annotations

import pytest
import torch
from devices import default_of
from row_programs import alone, batch_of, credited, made
from torch.utils import _pytree as pytree

from benchmarks import rows
from dpfunc.rng import insecure_key, torch_seed

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about slow batching rules and shapes


def off(one, other):
    if not torch.equal(torch.isfinite(one), torch.isfinite(other)):
        return float("inf")
    real = torch.isfinite(one)
    scale = float(other[real].abs().max().clamp(min=1e-3)) if bool(real.any()) else 1.0
    return float((one - other)[real].abs().max()) / scale if bool(real.any()) else 0.0


def seeded(program, params, batch, seed):
    with torch_seed(insecure_key(seed)):
        found = credited(program, params, batch)
    return None if found is None else found[0]


def judged(seed, device="cpu"):
    """Outcome of a program, in a word, and how far it is off."""
    own, at_hand = (pytree.tree_map(lambda leaf: leaf.to(device), batch_of(n)) for n in (seed, seed + 10**6))
    with default_of(device):
        return _judged(seed, made(seed), *own, at_hand[1])


def _judged(seed, program, params, batch, others):
    found = seeded(program, params, batch, seed)
    if found is None:
        return "refused", 0.0
    worst = 0.0
    for row in range(2):
        beside = torch.where(torch.arange(len(batch))[:, None] == row, batch, others)
        again = seeded(program, params, beside, seed)
        if again is not None:
            worst = max(worst, off(again[row], found[row]))
    truth = None if program.draws else alone(program, params, batch)
    if truth is None:
        return "equal" if program.draws else "no row alone", worst
    return "equal", max(worst, off(found, truth))


@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_rows_do_not_depend_on_those_beside_them(first):
    found = {seed: judged(seed) for seed in range(first, first + (200 if first else 80))}
    assert not {seed: outcome for seed, outcome in found.items() if not outcome[1] < 1e-8}
    assert sum(word == "equal" for word, _ in found.values()) > 0.67 * len(found)


def test_one_record_moves_a_clipped_sum_by_at_most_the_sensitivity():
    """Removed or replaced, the random numbers of the others being those of their places; the bound is reached, too."""
    found = rows.records(range(25), "cpu")
    assert {word for word, _ in found} <= {"removed, within", "replaced, within", "refused"}
    assert 0.99 < max(share for _, share in found) <= 1.0
