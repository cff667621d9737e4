"""Audits: how many rows a step compares, what they find, and what rounding may do to a row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models import build
from torch import nn
from torch.nn import functional as F

import dpfunc
from dpfunc import clipping, engines
from dpfunc.clipped import clipped_grad, make_clipped_grad
from dpfunc.engines import audit as module
from dpfunc.engines._per_sample import Dense, PerSample
from dpfunc.engines.audit import FIRST_ROWS, Credited, audit
from dpfunc.engines.microbatches import ROWS_IN, STEPS_IN, Audits
from dpfunc.errors import UnsupportedModel
from dpfunc.rng import fold_in, insecure_key


def schedule(size, steps, counting=False):
    """Rows that each of so many steps compares."""
    audits, key = Audits(counting=counting), insecure_key(0)
    return [audits.choose_rows(fold_in(key, "step", number), torch.zeros(size)) for number in range(steps)]


@pytest.mark.parametrize("size", [1, 32, 256, 4096])
def test_one_row_in_a_hundred_steps_by_the_key(size):
    first, *later = schedule(size, 4001)
    assert len(first) == min(size, max(FIRST_ROWS, size // ROWS_IN))
    assert max(map(len, later)) == 1
    assert 20 < sum(map(len, later)) < 4000 / STEPS_IN * 2
    assert [first, *later] == schedule(size, 4001), "no clock decides"
    assert later[1000:] == schedule(size, 4001)[1001:]


def test_a_run_that_goes_on_audits_the_same_rows():
    key, batch = insecure_key(0), torch.zeros(64)
    whole, resumed = Audits(), Audits()
    rows = [whole.choose_rows(fold_in(key, "step", number), batch) for number in range(1000)]
    again = [resumed.choose_rows(fold_in(key, "step", number), batch) for number in range(500, 1000)]
    assert again[1:] == rows[501:]


def test_the_calls_of_a_loss_that_counts_them_are_as_many_in_each_step():
    assert list(map(len, schedule(64, 5, counting=True))) == [2, 1, 1, 1, 1]
    assert list(map(len, schedule(4096, 5, counting=True)))[1:] == [1, 1, 1, 1]


def test_a_function_that_runs_row_by_row_for_the_first_time_is_compared():
    audits = Audits()
    seen = ((), (), ("cdist",), (), ("cdist", "lu_solve"), ("cdist",))
    assert [audits.due(64, 0.5, names) for names in seen] == [2, 0, 1, 0, 1, 0]


def test_an_empty_batch_is_no_first_step():
    audits = Audits()
    assert [audits.due(size, 0.5) for size in (0, 8, 8)] == [0, 2, 0]


# What it finds in the values of an engine.

BATCH = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PARAMS = {"w": torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)}


def squares(p, x):
    return (p["w"] * x).square().sum(1)


def credited_of(loss_fn, params, batch, found):
    seed = torch.default_generator.get_state()
    return Credited(loss_fn, params, batch, found, found.sq_norms(), range(len(found.losses_B)), seed)


def with_fault(right, wrong):
    """The result of an engine with something wrong in one row."""
    of = lambda name, factors, value: value * (torch.tensor(factors) if name == wrong else 1)
    return SimpleNamespace(
        needs_audit=True,
        repeatable=True,
        losses_B=of("losses", [1.0, 1, 2, 1, 1], right.losses_B),
        sq_norms=lambda: {"w": of("norms", [1.0, 1, 2, 1, 1], right.sq_norms()["w"])},
        weighted_sum=lambda factors: {"w": of("sums", -1.0, right.weighted_sum(factors)["w"])},
    )


@pytest.mark.parametrize("wrong", ["losses", "norms", "sums", "nothing"])
@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_a_wrong_row_is_found(engine, wrong):
    credited = credited_of(
        squares, PARAMS, BATCH, with_fault(getattr(engines, engine)()(squares, PARAMS, BATCH), wrong)
    )
    if wrong != "sums":
        audit(credited, [1], Audits())
    if wrong == "nothing":
        audit(credited, [1, 2], Audits())
        return
    with pytest.raises(UnsupportedModel, match="computed alone, and differs"):
        audit(credited, [1, 2], Audits())


@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_parameters_finer_than_the_network_are_no_fault(engine):
    """float64 parameters behind a network in float32: what is compared was rounded in float32."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64)), 10 * torch.randn(64, 4).double()

    def loss_fn(p, x):
        return (net(x.float() @ p["w"].float()) * 30).sin().exp().sum(1).double()

    params, run = {"w": torch.randn(4, 4).double()}, getattr(engines, engine)()
    audit(credited_of(loss_fn, params, x, run(loss_fn, params, x)), range(64), Audits())


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        h = F.dropout(x, 0.3)[:, None] * torch.arange(1.0, 4.0)[:, None]
        return self.linear(F.dropout(self.attention(h, h, h)[0], 0.5)).square().sum((1, 2)) * (
            1 + (torch.rand([]) < 0.5)
        )


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_random_numbers_are_no_difference(engine, size, monkeypatch):
    """All rows of all steps are compared: each draws alone what it has drawn beside others, in groups too."""
    compared = []
    monkeypatch.setattr(Audits, "due", lambda self, count, *_: compared.append(count) or count)
    forward, params = dpfunc.functionalize(Noisy().train())
    prepared = make_clipped_grad(
        lambda p, x: forward(p, x), clipping.Flat(1.0), engine=getattr(engines, engine)(), microbatch_size=size
    )
    for key in (None, insecure_key(1), insecure_key(2)):
        prepared(params, torch.randn(5, 4), key=key)
    assert sum(compared) >= 15


def test_a_loss_that_depends_on_its_calls_is_found_in_the_first_step():
    calls = []

    def loss_fn(p, x):
        calls.append(0)
        return squares(p, x) * (1 + len(calls))

    prepared = make_clipped_grad(loss_fn, clipping.Flat(1.0))
    with pytest.raises(UnsupportedModel, match="changes what it keeps at each call"):
        prepared(PARAMS, BATCH, key=fold_in(insecure_key(1), 1))


def test_a_tensor_of_an_audited_row_is_refused_where_it_is_used():
    """Calls alternate between the pass and a row alone; each other one uses what the last one has kept."""
    kept = []

    def loss_fn(p, x):
        h = p["w"] * x
        losses = h.square().sum(1) + (kept[-1].sum() if len(kept) % 3 == 2 else 0.0)
        kept.append(h.detach())
        return losses

    prepared = make_clipped_grad(loss_fn, clipping.Flat(1.0))

    def steps():
        for step in range(3):
            prepared(PARAMS, BATCH, key=fold_in(insecure_key(1), step))

    with pytest.raises(UnsupportedModel, match="kept from an earlier call"):
        steps()


# Rounding.


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


def batched(loss_fn, params, batch):
    """The gradient of each loss of the batch as torch runs it as a whole, whether rows are apart or not."""
    leaves = {name: param.clone().requires_grad_() for name, param in params.items()}
    losses_B = loss_fn(leaves, batch)
    rows = [torch.autograd.grad(loss, tuple(leaves.values()), retain_graph=True) for loss in losses_B]
    grads = {name: Dense(torch.stack(parts)) for name, parts in zip(leaves, zip(*rows, strict=True), strict=True)}
    return PerSample(losses_B.detach(), grads)


def refused(loss_fn, params, batch):
    """Rows that an audit refuses."""
    credited, found = credited_of(loss_fn, params, batch, batched(loss_fn, params, batch)), []
    for row in range(len(batch[0])):
        try:
            audit(credited, [row], Audits())
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
    assert len(refused(mixed_at_the_kink, params, (x_Bd[:8], alone_B[:8] - 1.0))) == 8


def test_an_infinite_change_explains_nothing():
    change = module._larger(module._larger(0.5, float("inf")), float("nan"))
    assert change == 0.5


@pytest.mark.parametrize("wrong", [1.01, 0.0])
def test_an_engine_of_a_user_that_disagrees_is_not_used(wrong):
    """It leaves a parameter out, or is off by 1 %: seen before anything is released."""
    case = build("mlp")

    def off(loss_fn, params, batch):
        found = engines.loop()(loss_fn, params, batch)
        grads = {n: Dense(grad.dense() * (wrong if n == "1.weight" else 1)) for n, grad in found.grads.items()}
        return PerSample(found.losses_B, grads)

    with pytest.raises(UnsupportedModel, match=r"computed alone.*gradient of '1.weight'.*Nothing was released"):
        clipped_grad(case.loss_fn, case.params, case.batch, clipping.Flat(1.0), engine=off)


@pytest.mark.parametrize(
    "mixing",
    [
        lambda p, b: (b["x"] @ p["w"]).square() / len(b["x"]),
        lambda p, b: ((b["x"] - b["x"].mean(0)) @ p["w"]).square(),
        lambda p, b: (b["x"] @ p["w"]).square() / b["mask"].sum(),
    ],
)
def test_an_engine_of_a_user_that_mixes_rows_is_not_used(mixing):
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(4, 3, generator=generator), "mask": torch.ones(4, 2)}
    with pytest.raises(UnsupportedModel, match=r"depends on the other samples.*Likely causes"):
        clipped_grad(mixing, {"w": torch.ones(3)}, batch, clipping.Flat(1.0), engine=batched)
