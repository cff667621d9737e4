"""PrivacyArguments: complete, free of contradictions, and a plan that is what they say."""

from __future__ import annotations

from dataclasses import fields

import pytest
from transformers import HfArgumentParser

from dpfunc.accounting import Ledger, calibrate_noise
from dpfunc.clipping import Automatic, Flat
from dpfunc.errors import InvalidArgument, UnreachableBudget
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.sampling import Poisson, Shuffled
from dpfunc.types import Event

GUIDE = {"dp_epsilon": 8.0, "dp_delta": 1e-5, "dp_max_grad_norm": 1.0}


def test_flags_of_a_command_line():
    flags = "--dp_epsilon 8 --dp_delta 1e-5 --dp_max_grad_norm 0.5 --dp_physical_batch_size 4 --no_dp_secure_mode"
    (parsed,) = HfArgumentParser(PrivacyArguments).parse_args_into_dataclasses(flags.split())
    assert parsed == PrivacyArguments(
        dp_epsilon=8.0, dp_delta=1e-5, dp_max_grad_norm=0.5, dp_physical_batch_size=4, dp_secure_mode=False
    )
    assert parsed.dp_enabled
    assert parsed.dp_poisson_sampling


def test_noise_is_computed_from_the_budget():
    plan = PrivacyArguments(**GUIDE).plan(dataset_size=20_000, expected_batch_size=200, num_steps=100)
    noise = calibrate_noise(epsilon=8.0, delta=1e-5, sampling_prob=0.01, num_steps=100)
    assert plan.noise_multiplier == pytest.approx(noise)
    assert plan.sampler == Poisson(20_000, 0.01)
    assert plan.clip == Flat(1.0)
    assert 7.9 < plan.guarantee().epsilon <= 8.0


def test_a_noise_multiplier_is_used_as_it_is():
    arguments = PrivacyArguments(dp_noise_multiplier=1.25, dp_delta=1e-5, dp_max_grad_norm=1.0)
    plan = arguments.plan(1000, 10, 50)
    assert (plan.noise_multiplier, plan.epsilon, plan.num_steps) == (1.25, None, 50)


def test_without_poisson_no_amplification_is_claimed():
    plan = PrivacyArguments(**GUIDE, dp_poisson_sampling=False).plan(1000, 100, 20)
    assert plan.sampler == Shuffled(1000, 100)
    assert plan.adjacency == "zero_out"
    assert plan.ledger() == Ledger((Event(1.0, plan.noise_multiplier, 2),), "zero_out")  # two epochs, each on all data
    assert plan.guarantee().epsilon <= 8.0
    assert plan.noise_multiplier > PrivacyArguments(**GUIDE).plan(1000, 100, 20).noise_multiplier
    with pytest.raises(InvalidArgument, match="Expected adjacency"):
        PrivacyArguments(**GUIDE, dp_poisson_sampling=False, dp_adjacency="add_remove").plan(1000, 100, 20)


def test_a_ceiling_leaves_fewer_steps():
    arguments = PrivacyArguments(dp_noise_multiplier=1.0, dp_delta=1e-5, dp_max_grad_norm=1.0, dp_max_epsilon=2.0)
    plan = arguments.plan(1000, 20, 1000)
    assert 0 < plan.num_steps < 1000
    assert plan.guarantee().epsilon <= 2.0 < plan.guarantee(plan.num_steps + 1).epsilon
    spent = Ledger((Event(0.02, 1.0, plan.num_steps // 2),))
    assert arguments.plan(1000, 20, 1000, spent).num_steps == plan.num_steps - plan.num_steps // 2
    with pytest.raises(UnreachableBudget, match="dp_max_epsilon"):
        arguments.plan(10, 10, 5)


def test_earlier_phases_count():
    spent = Ledger((Event(0.01, 1.0, 50),))
    alone = PrivacyArguments(**GUIDE).plan(20_000, 200, 100)
    after = PrivacyArguments(**GUIDE).plan(20_000, 200, 100, spent)
    assert after.noise_multiplier > alone.noise_multiplier
    assert spent.compose(after.ledger()).epsilon(1e-5).epsilon <= 8.0


def test_clip_rules():
    """A norm alone is flat clipping; automatic clipping needs none."""
    budget = {"dp_epsilon": 8.0, "dp_delta": 1e-5}
    assert PrivacyArguments(**GUIDE).clip() == Flat(1.0)
    assert PrivacyArguments(**GUIDE, dp_clip="automatic").clip() == Automatic(1.0)
    assert PrivacyArguments(**budget, dp_clip="automatic").clip() == PrivacyArguments(**budget).clip() == Automatic(1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dp_delta": 1e-5, "dp_max_grad_norm": 1.0}, "exactly one of dp_epsilon and dp_noise_multiplier, got neither"),
        ({**GUIDE, "dp_noise_multiplier": 1.0}, "exactly one of dp_epsilon and dp_noise_multiplier, got both"),
        ({"dp_epsilon": 8.0, "dp_max_grad_norm": 1.0}, "dp_delta to be given"),
        ({"dp_epsilon": 8.0, "dp_delta": 1e-5, "dp_clip": "flat"}, "dp_max_grad_norm to be given"),
        ({**GUIDE, "dp_epsilon": 0.0}, "0 < dp_epsilon"),
        ({**GUIDE, "dp_delta": 1.0}, "0 < dp_delta < 1"),
        ({**GUIDE, "dp_max_epsilon": 3.0}, "dp_max_epsilon together with dp_noise_multiplier"),
        ({**GUIDE, "dp_physical_batch_size": 0}, "dp_physical_batch_size >= 1"),
        ({**GUIDE, "dp_clip": "flatt"}, "dp_clip to be one of"),
        ({**GUIDE, "dp_engine": "hooks"}, "dp_engine to be one of"),
        ({**GUIDE, "dp_accountant": "gdp-approximation"}, "under-reports"),
        ({**GUIDE, "dp_adjacency": "bounded"}, "dp_adjacency to be one of"),
        ({**GUIDE, "dp_warn_at": 90}, "0 < dp_warn_at <= 1"),
        ({**GUIDE, "dp_epsilon": None, "dp_noise_multiplier": 1.0, "dp_warn_at": 0.5}, "there is no budget of which"),
    ],
)
def test_incomplete_and_contradicting_values_are_refused(values, message):
    with pytest.raises(InvalidArgument, match=message):
        PrivacyArguments(**values)
    with pytest.raises(InvalidArgument, match="dp_enabled=True"):  # the twin needs no values
        PrivacyArguments(dp_enabled=False).plan(1000, 10, 10)
    large = {**GUIDE, "dp_delta": 1e-2}
    with pytest.raises(InvalidArgument, match="delta < 1 / dataset_size"):
        PrivacyArguments(**large).plan(1000, 10, 10)
    assert PrivacyArguments(**large, dp_allow_large_delta=True).plan(1000, 10, 10).delta == 1e-2


SWITCHES = [field.name for field in fields(PrivacyArguments) if isinstance(field.default, bool)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**GUIDE, "dp_epsilom": 1.0}, "Did you mean 'dp_epsilon'"),
        ({"epsilon": 8.0}, "Did you mean 'dp_epsilon'"),
        ({"max_grad_norm": 1.0}, "Did you mean '(dp|per_sample)_max_grad_norm'"),
        ({**GUIDE, "target_epsilon": 3.0}, "dp_epsilon and target_epsilon, which contradict"),
        ({**GUIDE, "disable_dp": "no"}, "disable_dp to be true or false"),
        ({**GUIDE, "zzz": 1}, "Known: disable_dp, dp_accountant"),
        # `dp_enabled:` without a value, as YAML has it, would train without privacy
        *[({**GUIDE, name: value}, f"Expected {name} to be true or false, got {name}=")
          for name in SWITCHES for value in ("false", None, 0)],
    ],
)  # fmt: skip
def test_names_and_switches_that_do_not_fit_are_refused(values, message):
    with pytest.raises(InvalidArgument, match=message):
        PrivacyArguments.from_names(values)


def test_names_of_other_libraries_are_read():
    ours = PrivacyArguments(dp_epsilon=8.0, dp_delta=1e-5, dp_max_grad_norm=1.0, dp_dry_run=True)
    names = {"target_epsilon": 8.0, "target_delta": 1e-5, "per_sample_max_grad_norm": 1.0, "dry_run": True}
    assert PrivacyArguments.from_names(names) == ours
    assert PrivacyArguments.from_names({**names, "disable_dp": False, "dp_epsilon": 8.0}) == ours
    assert not PrivacyArguments.from_names({"disable_dp": True}).dp_enabled
    assert (
        PrivacyArguments.from_names({**GUIDE, "dp_epsilon": None, "noise_multiplier": 2.0}).dp_noise_multiplier == 2.0
    )
