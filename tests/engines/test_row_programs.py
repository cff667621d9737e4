"""Random losses: a row has the same loss and gradient whoever is beside it, and that of the row alone."""

from __future__ import annotations

import pytest
import torch
from reference import loop_gradients
from row_programs import batch_of, made

from dpfunc.engines import auto
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.rng import insecure_key, torch_seed

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about slow batching rules and shapes


def credited(program, params, batch, seed):
    """Loss and gradient of each row, (B, 1 + P); None where the engine refuses."""
    try:
        with torch_seed(insecure_key(seed)):
            found = auto()(program, params, batch)
    except (UnsupportedModel, InvalidArgument):
        return None
    table = [found.losses_B[:, None]]
    for name in params:
        ones = torch.eye(len(batch), dtype=torch.float64)
        table.append(torch.stack([found.weighted_sum(dict.fromkeys(params, one))[name].flatten() for one in ones]))
    return torch.cat(table, 1)


def alone(program, params, batch):
    """The same of rows alone by ordinary autograd; None where a row fails."""
    try:
        rows = loop_gradients(program, params, batch)
    except Exception:  # noqa: BLE001  (whatever torch says of a random program)
        return None
    return torch.stack([torch.cat([loss[None], *(grads[name].flatten() for name in params)]) for loss, grads in rows])


def off(one, other):
    if not torch.equal(torch.isfinite(one), torch.isfinite(other)):
        return float("inf")
    real = torch.isfinite(one)
    scale = float(other[real].abs().max().clamp(min=1e-3)) if bool(real.any()) else 1.0
    return float((one - other)[real].abs().max()) / scale if bool(real.any()) else 0.0


def judged(seed):
    """Outcome of a program, in a word, and how far it is off."""
    program, (params, batch) = made(seed), batch_of(seed)
    found = credited(program, params, batch, seed)
    if found is None:
        return "refused", 0.0
    _, others = batch_of(seed + 10**6)
    worst = 0.0
    for row in range(2):
        beside = others.clone()
        beside[row] = batch[row]
        again = credited(program, params, beside, seed)
        if again is not None:
            worst = max(worst, off(again[row], found[row]))
    if not program.draws:
        truth = alone(program, params, batch)
        if truth is None:
            return "no row alone", worst
        worst = max(worst, off(found, truth))
    return "equal", worst


@pytest.mark.parametrize("first", [0, 30, 60, 90])
def test_rows_do_not_depend_on_those_beside_them(first):
    found = {seed: judged(seed) for seed in range(first, first + 30)}
    assert not {seed: outcome for seed, outcome in found.items() if not outcome[1] < 1e-8}
    assert sum(word == "equal" for word, _ in found.values()) > 20


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 250))
def test_rows_of_many_programs(first):
    found = {seed: judged(seed) for seed in range(first, first + 250)}
    assert not {seed: outcome for seed, outcome in found.items() if not outcome[1] < 1e-8}
