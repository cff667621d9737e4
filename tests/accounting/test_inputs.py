"""What must not reach the machinery: each bad input is a clear error at once; and no warning leaks from below."""

from __future__ import annotations

import math
import warnings

import pytest

from dpfunc.accounting import Ledger, calibrate_noise, epsilon
from dpfunc.accounting.accountant import METHODS
from dpfunc.errors import InvalidArgument
from dpfunc.types import Event

GOOD = {"sampling_prob": 0.01, "noise_multiplier": 1.0, "num_steps": 1000}
BAD_EVENTS = [
    {"sampling_prob": 0.0},
    {"sampling_prob": -0.1},
    {"sampling_prob": 1.5},
    {"sampling_prob": math.nan},
    {"sampling_prob": True},
    {"sampling_prob": "0.1"},
    {"noise_multiplier": -1.0},
    {"noise_multiplier": math.nan},
    {"noise_multiplier": math.inf},
    {"noise_multiplier": None},
    {"num_steps": 0},
    {"num_steps": -5},
    {"num_steps": 2.5},
    {"num_steps": 10.0},
    {"num_steps": True},
    {"num_steps": math.nan},
]


@pytest.mark.parametrize("change", BAD_EVENTS, ids=str)
def test_bad_events_are_refused(change):
    with pytest.raises(InvalidArgument, match=next(iter(change))):
        Event(**(GOOD | change))


@pytest.mark.parametrize("delta", [0, 0.0, 1, 1.0, 2, -1e-5, math.nan, math.inf, True, "1e-5", None])
@pytest.mark.parametrize("method", METHODS)
def test_bad_deltas_are_refused(delta, method):
    with pytest.raises(InvalidArgument, match="delta"):
        epsilon(Ledger((Event(**GOOD),)), delta, method)


@pytest.mark.parametrize("method", ["gdp", "PRV", "", None, "pld"])
def test_unknown_methods_are_refused(method):
    with pytest.raises(InvalidArgument, match="method"):
        epsilon(Ledger(), 1e-5, method)


def test_events_are_not_a_ledger():
    with pytest.raises(InvalidArgument, match="Ledger"):
        epsilon((Event(**GOOD),), 1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
def test_nothing_costs_nothing(method, adjacency):
    found = epsilon(Ledger(adjacency=adjacency), 1e-5, method)
    assert found.epsilon == 0.0
    assert type(found.epsilon) is float


@pytest.mark.parametrize("method", ["auto", "tilted", "prv", "rdp"])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_step_without_noise_is_no_privacy(method, adjacency):
    assert epsilon(Ledger((Event(0.5, 0.0, 1), Event(0.1, 1.0, 10)), adjacency), 1e-5, method).epsilon == math.inf
    assert epsilon(Ledger((Event(1.0, 0.0, 1),), adjacency), 1e-5).epsilon == math.inf


EXTREME = [
    (5e-324, 1.0, 1),
    (1e-300, 1e-300, 10),
    (1e-7, 1.0, 10**9),
    (1 - 1e-16, 1.0, 10),
    (0.5, 1e-160, 1),
    (0.5, 1e-3, 1),
    (0.5, 0.03, 100),
    (0.5, 1e300, 10),
    (1.0, 1e-200, 1),
    (1.0, 1e308, 1),
    (0.01, 1e5, 10**6),
    (0.01, 1.0, 10**30),
    (0.01, 1.0, 10**400),
    (1.0, 1.0, 10**400),
    (0.2, 0.3, 1000),
]


@pytest.mark.parametrize("event", EXTREME, ids=str)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_no_warning_leaks(event, adjacency):
    """Extreme but legal values: an answer >= 0, no NaN, no warning, no exception."""
    ledger = Ledger((Event(*event),), adjacency)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for delta in (0.5, 1e-5, 1e-9, 1e-300):
            found = epsilon(ledger, delta)
            assert found.epsilon >= 0
            assert found.epsilon <= epsilon(ledger, delta, "rdp").epsilon * (1 + 1e-9)


def test_large_delta_does_not_make_epsilon_negative():
    for method in ("auto", "tilted", "rdp", "prv"):
        assert 0 <= epsilon(Ledger((Event(0.01, 20.0, 1000),)), 0.5, method).epsilon <= 1e-3


def test_prv_says_why_it_refuses():
    with pytest.raises(InvalidArgument, match="delta >= 1e-09"):
        epsilon(Ledger((Event(**GOOD),)), 1e-12, "prv")
    with pytest.raises(InvalidArgument, match="grid of at most"):
        epsilon(Ledger((Event(0.2, 0.5, 10**5),)), 1e-5, "prv")
    with pytest.raises(InvalidArgument, match="noise multipliers >= "):
        epsilon(Ledger((Event(0.2, 0.001, 1),)), 1e-5, "prv")


def test_tilted_says_why_it_refuses_and_auto_takes_renyi():
    refused = {
        "delta >= 1e-200": (Event(**GOOD), 1e-250),
        "at most 1e\\+11 steps": (Event(0.01, 1.0, 10**12), 1e-5),
        "fewer steps": (Event(0.01, 1.0, 10**400), 1e-5),
        "noise multipliers >= 0.05": (Event(0.2, 0.01, 1), 1e-5),
        "of the steps without sampling": (Event(1.0, 1e-9, 1), 1e-5),
    }
    for words, (event, delta) in refused.items():
        ledger = Ledger((event, Event(0.5, 3.0, 1)))
        with pytest.raises(InvalidArgument, match=words):
            epsilon(ledger, delta, "tilted")
        found = epsilon(ledger, delta)
        assert found.method == "rdp"
        assert "no tilted: Expected" in found.note


def test_gaussian_refuses_sampling():
    with pytest.raises(InvalidArgument, match="sampling_prob = 1"):
        epsilon(Ledger((Event(1.0, 1.0, 1), Event(0.5, 1.0, 1))), 1e-5, "gaussian")


def test_importing_accounting_does_not_import_opacus():
    import subprocess
    import sys

    code = "import sys, dpfunc.accounting; print('opacus' in sys.modules, 'scipy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 0.0},
        {"epsilon": -1.0},
        {"epsilon": math.inf},
        {"delta": 0.0},
        {"delta": 1.0},
        {"sampling_prob": 0.0},
        {"sampling_prob": 1.5},
        {"num_steps": 0},
        {"num_steps": 1.5},
        {"schedule": [1.0, 2.0]},
        {"schedule": [1.0] * 99 + [0.0]},
        {"adjacency": "swap"},
        {"method": "gdp-approximation"},
        {"method": "gdp"},
    ],
    ids=str,
)
def test_bad_targets_are_refused(change):
    good = {"epsilon": 1.0, "delta": 1e-5, "sampling_prob": 0.01, "num_steps": 100}
    with pytest.raises(InvalidArgument):
        calibrate_noise(**(good | change))
