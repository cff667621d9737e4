"""Preparation: a function of public facts. What one batch needs changes no bit of later ones, also in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from needs import Doubled, own_gradient
from torch.nn import functional as F

import dpfunc
from dpfunc import clipping, sampling
from dpfunc.clipped import make_clipped_grad
from dpfunc.engines import microbatches
from dpfunc.engines._row_pass import Settings
from dpfunc.engines.by_name import ENGINES
from dpfunc.engines.prepare import PreparedLoss
from dpfunc.plan import Plan
from dpfunc.rng import insecure_key
from dpfunc.state import allow_repeat

# Rows with a number above 20 need another way.


def drawn(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)))


PARAMS, NORMAL = {"w": drawn(7, 5), "v": drawn(5)}, drawn(13, 6)
LARGE = {"w": PARAMS["w"] + 30, "v": PARAMS["v"]}


def hook(p, x, out):
    p["w"].register_hook(lambda grad: grad)
    return out


def memory(p, x, out):
    zeros = torch.zeros(5)
    zeros += x[0, :5]
    return out + zeros.sum() * p["v"].sum()


def error(p, x, out):
    raise ValueError("a bad row")


NEEDS = {
    "a gradient inside": own_gradient,
    "a hook": hook,
    "memory of its own": memory,
    "a plain function": lambda p, x, out: Doubled.apply(out),
    "another use of a parameter": lambda p, x, out: out + p["w"].square().sum() * x.sum(1),
    "rows alone": lambda p, x, out: out + torch.rand((), generator=torch.Generator().manual_seed(1)),
    "a function row by row": lambda p, x, out: out + torch.special.erfcx(x).sum(1),
    "groups": lambda p, x, out: out * int(x[0, 0]),
    "no number": lambda p, x, out: out * torch.nan,
    "an error": error,
}


def out_of(p, x):
    return torch.tanh(F.linear(F.dropout(x[:, :5], 0.3) * p["v"], p["w"])).square().sum(1)


def where(needed, need):
    return lambda p, x: need(p, x, out_of(p, x)) if needed(p, x) else out_of(p, x)


# What a loss builds at its first call, and where it would be told a number.


def another_first_call(reads=False):
    kept = {}

    def loss_fn(p, x):
        first, kept["called"] = "called" not in kept, True
        out = out_of(p, x) * (1 + int((x > 20).any()) * 0 if reads else 1)
        return out.exp().log() if first else out

    return loss_fn


def random_table(draws=True):
    kept = {}

    def loss_fn(p, x):
        if "table" not in kept:
            number = torch.rand(3).sum() if draws else 1.0
            kept["table"] = torch.ones(6) * float(number)
        return out_of(p, x) + (x * kept["table"]).sum(1) * p["v"].sum()

    return loss_fn


def one_draw_more():
    kept = {}

    def loss_fn(p, x):
        kept.setdefault("draws", torch.rand(3) is None)
        return out_of(p, x)

    return loss_fn


def masked(p, x):
    some = x[:, :1].expand(1, 2**8)
    some = some[some > 20]
    return out_of(p, x) + 1e-3 * (p["v"].sum() * some).sin().square().sum()


def by_rows(need):
    return where(lambda p, x: bool((x > 20).any()), NEEDS[need])


def by_params(need):
    return where(lambda p, x: float(p["w"].sum()) > 100, NEEDS[need])


LOSSES = {
    **{f"rows need {need}": partial(by_rows, need) for need in NEEDS},
    **{f"parameters need {need}": partial(by_params, need) for need in NEEDS},
    "another first call": another_first_call,
    "another first call, which is told a number": partial(another_first_call, reads=True),
    "a random table": random_table,
    "a table": partial(random_table, draws=False),
    "one draw more at first": one_draw_more,
    "as much memory as a row has large numbers": lambda: masked,
}


def computed(run, params, batch, key):
    """Sums, losses and norms; the error where there is one."""
    try:
        clipped, unreleased = run(params, batch, key=insecure_key(key))
    except (ValueError, RuntimeError, dpfunc.errors.DPFuncError) as error:
        return [f"{type(error).__name__}: {error}"]
    return [*clipped.sums.values(), unreleased.losses_B, unreleased.norms_BG]


def fresh(name, engine, size=None):
    return make_clipped_grad(LOSSES[name](), clipping.Flat(1.0), engine=ENGINES[engine](), microbatch_size=size)


def after_another(name, engine, size, params, batch):
    goes_on = fresh(name, engine, size)
    computed(goes_on, params, batch, 1)
    return computed(goes_on, PARAMS, NORMAL, 2)


def assert_equal(found, expected):
    assert all(isinstance(value, torch.Tensor) for value in found), found
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_has_the_same_bits_after_one_that_needed_another_way(engine, name):
    params = LARGE if name.startswith("parameters") else PARAMS
    found = after_another(name, engine, None, params, NORMAL + 30)
    assert_equal(found, computed(fresh(name, engine), PARAMS, NORMAL, 2))


@pytest.mark.parametrize("name", [name for name in LOSSES if "error" not in name and "parameters" not in name])
@pytest.mark.parametrize("size", ["auto", 4])
def test_microbatches_of_a_batch_do_not_follow_from_an_earlier_one(size, name, monkeypatch):
    monkeypatch.setattr(microbatches, "_CPU_BYTES", 2**13)
    found = after_another(name, "auto", size, PARAMS, NORMAL + 30)
    assert_equal(found, computed(fresh(name, "auto", size), PARAMS, NORMAL, 2))


OTHERS = {
    "no rows": NORMAL[:0],
    "one row": NORMAL[:1],
    "rows that are dropped": NORMAL * 0,
    "longer rows": torch.cat([NORMAL, NORMAL + 30], 1),
    "numbers that are none": NORMAL * torch.nan,
    "many rows": NORMAL.repeat(5, 1),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_has_the_same_bits_after_any_other(engine, other):
    for name in ("rows need groups", "a table"):
        found = after_another(name, engine, None, PARAMS, OTHERS[other])
        assert_equal(found, computed(fresh(name, engine), PARAMS, NORMAL, 2))


@pytest.mark.parametrize("need", ["a hook", "memory of its own", "rows alone", "another use of a parameter"])
@pytest.mark.parametrize("engine", ["auto", "ghost"])
def test_a_run_that_goes_on_releases_the_same(engine, need):
    """A state is taken twice: by the run whose first batch needed another way, and by a new one. Else StateReused."""
    plan = Plan(sampling.Poisson(20, 0.5), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=3, delta=1e-3)
    make = lambda: dpfunc.make_dp_step(by_rows(need), plan, engine=engine)
    goes_on, data = make(), drawn(20, 6)
    state, odd = goes_on.init(PARAMS, dpfunc.secure_key()), 30.0
    for indices in plan.batches(state):
        batch = data[indices] + odd
        found = goes_on(PARAMS, batch, state)
        if not odd:
            again = make()(PARAMS, batch, allow_repeat(state))
            assert_equal([*found.grads.values()], [*again.grads.values()])
        state, odd = found.state, 0.0


_NEW = "import sys, test_prepare as t, torch; torch.save(t.in_a_new_process(), sys.argv[1])"
_SOME = ("rows need a hook", "parameters need a hook", "a random table", "one draw more at first", "a table")


def in_a_new_process():
    return [computed(fresh(name, engine), PARAMS, NORMAL, 2) for name in _SOME for engine in ENGINES]


@pytest.mark.slow  # a new process imports torch
def test_a_new_process_has_the_same_bits(tmp_path):
    places = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "-c", _NEW, str(tmp_path / "found")], check=True, env=os.environ | places)
    found = iter(torch.load(tmp_path / "found"))
    for name in _SOME:
        params = LARGE if name.startswith("parameters") else PARAMS
        for engine in ENGINES:
            assert_equal(after_another(name, engine, None, params, NORMAL + 30), next(found))


# What is prepared.


def prepared(loss_fn, engine="auto", params=PARAMS, batch=NORMAL):
    return ENGINES[engine]().prepare(loss_fn, params, batch)


PREPARED = {
    "rules": (lambda p, x: out_of(p, x), {"w": ("linear",), "v": ("vmap(grad)",)}, "", True),
    "a number is read": (by_rows("a hook"), {"w": ("linear",), "v": ("vmap(grad)",)}, "__bool__", True),
    "a hook": (lambda p, x: hook(p, x, out_of(p, x)), {"w": ("vmap(grad)",), "v": ("vmap(grad)",)}, "", False),
    "two ways": (lambda p, x: F.linear(x[:, :5], p["w"]).sum(1) * p["w"].sum(), {"w": ("linear", "vmap(grad)"), "v": ()}, "", True),
    "it waits for a number": (lambda p, x: (p["w"] * (0 * x).sum().item()).sum()[None] if x[0, 0] else waiting(p, x), {}, "", True),
}  # fmt: skip


def waiting(p, x):
    while x.sum() < 1:
        x = x * 2
    return p["w"].sum()[None]


@pytest.mark.parametrize("name", PREPARED)
def test_each_parameter_is_used_or_unused_by_name(name):
    loss_fn, uses, reads, rules = PREPARED[name]
    found = prepared(loss_fn)
    assert found.uses.keys() in (PARAMS.keys(), set())
    assert (found.settings.rules, found.reads or reads) == (rules, reads or found.reads)
    assert not uses or found.uses == uses
    assert found == prepared(loss_fn, params=LARGE, batch=NORMAL[:2] + 30), "no number counts"
    assert found == prepared(loss_fn, batch=NORMAL[:0]), "nor that of rows"


def test_a_loss_is_prepared_once_for_rows_of_a_shape():
    calls, engine = [], ENGINES["auto"]()

    def loss_fn(p, x):
        calls.append(tuple(x.shape))
        return F.linear(x, p["w"]).square().sum(1)

    params = {"w": torch.ones(2, 6)}
    for batch in (NORMAL, NORMAL[:3], NORMAL + 1):
        engine(loss_fn, params, batch)
    assert len(calls) == 2 + 3
    engine(loss_fn, {"w": torch.ones(3, 6)}, NORMAL)
    assert len(calls) == 2 + 3 + 3


def test_made_up_rows_leave_random_numbers_warnings_and_parameters_alone():
    import random
    import warnings

    import numpy as np

    def loss_fn(p, x):
        warnings.warn("of the loss", stacklevel=1)
        random.random(), np.random.rand(), torch.rand(3)
        p["v"].data.add_(1)
        return out_of(p, x)

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with warnings.catch_warnings(action="error"):
        prepared(loss_fn)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert torch.equal(PARAMS["v"], drawn(5))


def test_facts_are_the_same_text_whatever_an_error_said():
    """Words of an error may have addresses of this process; sets have an order of their own."""
    one, other = (
        PreparedLoss(Settings(False, since=f"<object at {place}>"), uses={"w": ("mul",)}, together=frozenset(names))
        for place, names in (("0x1", ("w", "v", "u")), ("0x2", ("u", "v", "w")))
    )
    assert one.facts == other.facts != ""
    assert one.facts != replace(one, reads="item").facts
    assert PreparedLoss(Settings()).facts == ""
