"""docs/extending.md: its blocks run in order, and one toy of each kind goes through a small private step or its check.

Most toys are those of the page. They are made without a change of the package: what a plan, a step or `register_rule` takes
from a user is given to it; what the page writes into a table of the package is there for one test.
"""

from __future__ import annotations

import math
import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, is_dataclass, replace
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from cases import GROUPINGS, SAMPLERS, as_batch, linear_loss, random_rows
from cases import RULES as RULE_CASES
from cases import params as zeros
from noise_cases import MECHANISMS
from pages import ROOT, blocks, text_of
from reference import loop_clipped_sum, loop_gradients

from dpfunc import (
    Journal,
    Ledger,
    Plan,
    clipping,
    engines,
    epsilon,
    load,
    make_dp_step,
    noise,
    sampling,
    save,
    secure_key,
    take,
)
from dpfunc.accounting import Event, accountant
from dpfunc.accounting.events import KINDS
from dpfunc.checkpoint import _format as format
from dpfunc.checkpoint import journal_ledger
from dpfunc.clipped import clipped_grad
from dpfunc.clipping.rules import SLACK
from dpfunc.engines import _rules as rule_tables
from dpfunc.engines import register, register_rule
from dpfunc.engines._rules import RULES
from dpfunc.engines.by_name import ENGINES
from dpfunc.errors import InvalidArgument
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.types import Schedule

PAGE = text_of("extending.md")
DATA = random_rows(0, 20)


@pytest.fixture(scope="module")
def page():
    """What the blocks of the page define, with `said` of all that they print; without what they register."""
    module, kinds = ModuleType("extending"), dict(KINDS)
    sys.modules["extending"] = module  # dataclasses look for the module of a class
    printed = StringIO()
    with redirect_stdout(printed):
        for block in blocks("extending.md"):
            exec(compile(block, "extending.md", "exec"), vars(module))
    registered = torch.linalg.vecdot in register.REGISTERED
    KINDS.clear()
    KINDS.update(kinds)
    register.REGISTERED.pop(torch.linalg.vecdot, None)
    RULES.pop(torch.linalg.vecdot, None)
    yield SimpleNamespace(**vars(module), said=printed.getvalue(), registered=registered)
    del sys.modules["extending"]


def test_the_page_adds_one_of_each(page):
    assert "epsilon" in page.said
    assert page.ledger.epsilon(1e-3) == Ledger((Event(0.5, 2.0, 40),), "zero_out").epsilon(1e-3)
    assert page.registered
    for part in ({"clip": page.Squared(1.0)}, {"sampler": page.Halves(100)}, {"noise": page.Rounded()}):
        _, state = page.one_step(**part)
        assert state.step == 1
    assert state.noise_state == {"count": 1}
    assert page.one_step(clip=page.Decay(1e3))[1].clip_state == 500.0  # no row is as long


def test_a_task_of_the_page(page):
    output = SimpleNamespace(logits=torch.tensor([[1.0], [3.0]]))
    found = page.quantile(lambda params, **inputs: output, {}, {"labels": torch.tensor([2.0, 2.0]), "x": None})
    assert torch.allclose(found, torch.tensor([0.9, 0.1]))


def one_step(loss_fn=linear_loss, params=None, data=None, noise_multiplier=1e-3, engine="auto", **parts):
    """A step of a toy plan: the plan, what was released (a sum, with hardly any noise), its batch, and the next state."""
    params, data = params or zeros(), as_batch(DATA) if data is None else data
    size = len(next(iter(data.values())))
    facts = {"sampler": sampling.Poisson(size, 0.5), "clip": clipping.Flat(1.0), **parts}
    plan = Plan(noise_multiplier=noise_multiplier, num_steps=3, delta=1e-3, adjacency="zero_out", **facts)
    dp_step = make_dp_step(loss_fn, plan, reduction="sum", engine=engine)
    state = dp_step.init(params, secure_key())
    batch = take(data, next(iter(plan.batches(state))))
    grads, after, _ = dp_step(params, batch, state)
    assert after.ledger.events == plan.events(0, 1)
    return plan, grads, batch, after


def agrees(grads, batch, factor, group_of, bounds, loss_fn=linear_loss, params=None):
    """Compare with the loop over single samples, up to the noise: 1e-3 of the sensitivity, at six deviations."""
    params = zeros() if params is None else params
    inner = {group: bound * (1 - SLACK) for group, bound in bounds.items()}
    expected = loop_clipped_sum(loss_fn, params, batch, factor, group_of, inner)
    off = max(float((grads[name].double() - expected[name]).abs().max()) for name in params)
    return off < 6e-3 * math.sqrt(sum(bound**2 for bound in bounds.values()))


def flat_factor(n, c):
    return c / max(n, c)


def row_by_row(loss_fn, params, batch):
    """An engine: differentiate the rows one by one; nothing proves that the loss keeps them apart, and they are."""
    found = loop_gradients(loss_fn, params, batch)
    grads_B = {name: torch.stack([grads[name] for _, grads in found]) for name in params}
    return SimpleNamespace(
        losses_B=torch.stack([loss for loss, _ in found]),
        sq_norms=lambda: {name: each.flatten(1).square().sum(1) for name, each in grads_B.items()},
        weighted_sum=lambda factors: {n: torch.einsum("b,b...->...", factors[n], each) for n, each in grads_B.items()},
    )


class ByKind:
    """A grouping: weights, and biases."""

    def assign(self, names):
        return tuple(name.rpartition(".")[2] for name in names)


def test_a_clip_rule_a_grouping_a_sampler_and_an_engine(page):
    """Together, against the loop over single samples; another rule is told apart."""
    bounds = {"weight": 1.0, "bias": 0.5}
    group_of = {name: name.rpartition(".")[2] for name in zeros()}
    clip = page.Squared(bounds, groups=ByKind())
    _, grads, batch, after = one_step(clip=clip, sampler=page.Halves(20), engine=row_by_row)
    assert len(batch["head.weight"]) == 10
    assert after.ledger.events == (Event(1.0, 1e-3, 1),)
    assert agrees(grads, batch, lambda n, c: flat_factor(n, c) ** 2, group_of, bounds)
    assert not agrees(grads, batch, flat_factor, group_of, bounds)
    with pytest.raises(InvalidArgument, match="adjacency"):
        Plan(page.Halves(20), clipping.Flat(1.0), 1.0, num_steps=3, delta=1e-3, adjacency="add_remove")
    got, _ = clipped_grad(linear_loss, zeros(), batch, clipping.Flat(1.0), engine=row_by_row, microbatch_size=3)
    expected, _ = clipped_grad(linear_loss, zeros(), batch, clipping.Flat(1.0))
    assert all(torch.allclose(got.sums[name], expected.sums[name], atol=1e-5) for name in zeros())


def vecdot_loss(p, b):
    return torch.linalg.vecdot(b["x"], p["w"]).square()


VECTORS = {"x": torch.randn(20, 4, generator=torch.Generator().manual_seed(1))}
WEIGHT = {"w": torch.arange(1.0, 5.0)}


def test_a_rule_of_an_operation(page):
    example = {"x": VECTORS["x"][:3].double(), "y": WEIGHT["w"].double()}
    with pytest.raises(InvalidArgument, match="what single samples give"):
        register_rule(torch.linalg.vecdot, "y", lambda grad, x, y: x * grad[:, None] * 2, needs=["x"], example=example)
    try:
        register_rule(torch.linalg.vecdot, "y", page.vecdot_grad, needs=["x"], example=example)
        _, grads, batch, _ = one_step(vecdot_loss, WEIGHT, VECTORS)
        assert agrees(grads, batch, flat_factor, {"w": "all"}, {"all": 1.0}, vecdot_loss, WEIGHT)
    finally:
        register.REGISTERED.pop(torch.linalg.vecdot, None)
        RULES.pop(torch.linalg.vecdot, None)


def test_a_noise_mechanism(monkeypatch, tmp_path, page):
    """One file and one line: its own events and state in the ledger, the journal, a saved plan and a checkpoint."""

    @dataclass(frozen=True)
    class Rounded(page.Rounded):
        def check(self, run):
            if isinstance(run.noise_multiplier, Schedule):
                raise InvalidArgument("Expected one noise_multiplier with Rounded, got a schedule.")

        def events(self, run, start, stop):
            return (Event(1.0, run.noise_multiplier, stop - start),)  # it claims no amplification by sampling

    monkeypatch.setattr(format, "_PARTS", format._PARTS | {Rounded})  # what a name in dpfunc/noise/__init__.py does
    plan, grads, batch, after = one_step(noise=Rounded())
    assert after.noise_state == {"count": 1}
    assert after.ledger.events == (Event(1.0, 1e-3, 1),)
    journal = Journal(tmp_path / "journal.jsonl", plan)
    journal(after)
    run = {"params": zeros(), "plan": plan, "data": "toys", "journal": journal.path}
    save(tmp_path, state=after, **run)
    assert load(tmp_path, **run).state == after._replace(journal=str(run["journal"]), journal_lines=1)
    assert all(bool((value.remainder(2.0**-14) == 0).all()) for value in grads.values())
    assert agrees(grads, batch, flat_factor, dict.fromkeys(zeros(), "all"), {"all": 1.0})
    with pytest.raises(InvalidArgument, match="Expected one noise_multiplier with Rounded"):
        replace(plan, noise_multiplier=Schedule(((1, 1.0),)))


def test_a_kind_of_event(monkeypatch, tmp_path, page):
    """In a step, a ledger, its file, a journal and a checkpoint by one line in the table; accountants read its law."""
    Several = page.Several
    monkeypatch.setitem(KINDS, "several", Several)
    monkeypatch.setattr(Plan, "events", lambda self, start, stop: (Several(0.5, 2.0, stop - start, sums=4),))
    plan, _, _, after = one_step()
    Journal(tmp_path / "journal.jsonl", plan)(after)
    run = {"params": zeros(), "plan": plan, "data": "toys", "journal": tmp_path / "journal.jsonl"}
    save(tmp_path, state=after, **run)
    assert load(tmp_path, **run).state.ledger == journal_ledger(run["journal"]) == after.ledger
    ledger = after.ledger.compose(Ledger((Several(0.5, 2.0, 7, 4), Event(0.5, 2.0, 1)), "zero_out"))
    assert repr(ledger) == "Ledger(9 steps, zero_out: (q=0.5, sigma=2) x 1 + several(q=0.5, sigma=2, sums=4) x 8)"
    assert Ledger.from_json(ledger.to_json()) == ledger
    assert ledger.lacks(after.ledger) == 0
    for method in ("auto", "rdp"):
        assert ledger.epsilon(1e-3, method) == Ledger((Event(0.5, 2.0, 33),), "zero_out").epsilon(1e-3, method)
    text = ledger.to_json()
    monkeypatch.undo()
    with pytest.raises(InvalidArgument, match="Expected a kind of events"):
        Ledger.from_json(text)
    with pytest.raises(InvalidArgument, match="to be an Event"):
        Ledger((Several(0.5, 2.0, 1, 4),))


def test_a_kind_of_event_without_a_law_of_its_own_is_refused(monkeypatch):
    """That of `Event` would leave out what its other fields mean."""

    @dataclass(frozen=True, order=True)
    class Louder(Event):
        factor: int

    monkeypatch.setitem(KINDS, "louder", Louder)
    ledger = Ledger((Louder(0.5, 2.0, 10, factor=4),), "zero_out")
    for method in accountant.METHODS:
        with pytest.raises(InvalidArgument, match="a law of events that accountants know"):
            ledger.epsilon(1e-3, method)


def test_every_row_of_the_page_has_its_toy():
    rows = set(re.findall(r"^\| (an? [^|(]+?) (?:\(.*\) )?\|", PAGE, flags=re.MULTILINE))
    toys = {
        "a clip rule", "a grouping", "an engine", "a sampler", "a noise mechanism", "a kind of event",
        "an operation of torch that takes a parameter",
    }  # fmt: skip
    elsewhere = {
        "a strategy of correlated noise", "an accountant", "a loss that mixes rows, or seems to", "a kind of model", "a benchmark",
    }  # fmt: skip
    assert rows == toys | elsewhere


def classes(module):
    return {
        name
        for name in module.__all__
        if isinstance(getattr(module, name), type) and name not in ("Sampler", "Noise", "Strategy", "Toeplitz")
    }


def test_each_rule_grouping_and_sampler_is_in_the_tables_of_the_tests():
    """tests/test_plan.py writes plans with each, tests/clipping/ compares each rule with its formula; `InOrder` draws
    nothing, and tests of its own stand beside the table."""
    rules = {type(make(1.0, clipping.AllParameters())).__name__ for make, _ in RULE_CASES.values()}
    others = {"Statistic", "Telemetry", "Adaptive", "Scheduled"}  # tests/clipping has files for the last two
    assert rules | {type(grouping).__name__ for grouping in GROUPINGS.values()} == classes(clipping) - others
    assert {type(sampler).__name__ for sampler in SAMPLERS.values()} | {"InOrder"} == classes(sampling)


def test_each_mechanism_and_strategy_is_in_the_table_of_the_tests():
    """tests/noise/test_mechanisms.py holds the noise of each against its events."""
    used = {type(part) for case in MECHANISMS.values() for part in (case.noise, getattr(case.noise, "strategy", None))}
    of_a_run = {"Mechanism", "Recursion", "Run", "Turn"}
    assert {each.__name__ for each in used} >= classes(noise) - of_a_run


@pytest.mark.parametrize("package", [clipping, sampling, noise], ids=lambda package: package.__name__)
def test_the_parts_of_a_plan_are_frozen(package):
    """A plan that could be changed after its budget was computed would not be the plan that was accounted."""
    for name in classes(package):
        kind = getattr(package, name)
        frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen
        assert frozen or issubclass(kind, tuple), f"{name} is no frozen dataclass and no named tuple"


def test_the_tables_of_engines_rules_and_accountants_are_whole():
    folder = Path(rule_tables.__file__).parent
    files = {path.stem for path in folder.glob("*.py") if re.search(r"^RULES\b", path.read_text(), re.M)}
    assert files - {"__init__"} == {family.__name__.split(".")[-1] for family in rule_tables.FAMILIES}
    assert get_args(get_type_hints(PrivacyArguments)["dp_accountant"]) == accountant.ACCOUNTANTS
    assert {*accountant.ACCOUNTANTS, "gaussian"} == set(accountant.BOUNDS) < set(accountant.METHODS)
    assert set(ENGINES) == set(engines.__all__) - {"explain", "register_rule", "SelfCheck", "self_check"}
    parity = (ROOT / "tests" / "engines" / "test_parity.py").read_text()
    assert all(f'"{name}": {name}()' in parity for name in ENGINES)


# prv imports opacus, for seconds
@pytest.mark.parametrize("method", [each for each in accountant.METHODS if each not in ("auto", "prv")])
def test_each_accountant_answers_itself(method):
    """A name in `Method` without a branch would be answered by another accountant."""
    ledger = Ledger((Event(1.0 if method == "gaussian" else 0.5, 2.0, 3),))
    assert epsilon(ledger, 1e-3, method).method == method
