"""Keywords that are unknown, and values that are no numbers: the error says what is meant, by name."""

from __future__ import annotations

import doctest
import inspect
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

import dpfunc
from dpfunc import clipping, sampling
from dpfunc._utils.validation import count, positive
from dpfunc.errors import InvalidArgument
from dpfunc.hf import PrivacyArguments

PLAN = dpfunc.Plan(sampling.Poisson(1000, 0.1), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=3, delta=1e-4)
STEPS = "num_steps = epochs * dataset_size / expected_batch_size, or num_train_epochs with DPTrainer"
BOUND = "clip_norm of a clip rule, clip=dpfunc.clipping.Flat(clip_norm=...)"
SIZE = "expected_batch_size of dpfunc.Plan.for_budget, or an argument of TrainingArguments with DPTrainer"
NOISE = "noise_multiplier of dpfunc.Plan, or dpfunc.Plan.for_budget("
CALLS = {  # called with a keyword of another library -> how the advice begins
    dpfunc.Plan: {"epochs": STEPS, "max_grad_norm": BOUND, "batch_size": SIZE, "target_epsilon": "epsilon",
                  "dataset_size": "dataset_size of dpfunc.Plan.for_budget", "sample_rate": "sampling_prob of"},
    dpfunc.Plan.for_budget: {"noise_multiplier": NOISE, "target_delta": "delta", "sample_size": "dataset_size of"},
    PLAN.loader: {"batch_size": SIZE, "sampler": "sampler of dpfunc.Plan", "batch_sampler": "sampler of dpfunc.Plan",
                  "shuffle": "nothing to set", "drop_last": "nothing to set: take a step with each batch",
                  "generator": "key of dp_step.init", "in_order": "always true"},
    dpfunc.make_dp_step: {"noise_multiplier": NOISE, "target_epsilon": "dpfunc.Plan.for_budget(epsilon=..., ...)"},
    dpfunc.recipes.recipe: {"epochs": STEPS, "target_delta": "delta", "noise_multiplier": NOISE},
    PrivacyArguments: {"epochs": STEPS, "max_grad_norm": "dp_max_grad_norm", "target_epsilon": "dp_epsilon",
                       "noise_multiplier": "dp_noise_multiplier", "per_sample_max_grad_norm": "dp_max_grad_norm"},
    clipping.Flat: {"max_grad_norm": "clip_norm", "l2_norm_clip": "clip_norm"},
    sampling.Poisson: {"batch_size": SIZE, "sample_rate": "sampling_prob"},
    dpfunc.accounting.calibrate_noise: {"target_epsilon": "epsilon", "epochs": STEPS},
}  # fmt: skip


@pytest.mark.parametrize(("call", "name"), [(call, name) for call in CALLS for name in CALLS[call]])
def test_a_keyword_of_another_library(call, name):
    with pytest.raises(TypeError) as caught:
        call(**{name: 1})
    start = f"{call.__qualname__}() got an unexpected keyword argument '{name}'. Here it is {CALLS[call][name]}"
    assert str(caught.value).startswith(start)


def test_a_keyword_with_a_typing_error():
    with pytest.raises(TypeError, match=r"'allow_large_deltas'. Did you mean 'allow_large_delta'\?"):
        dpfunc.Plan.for_budget(allow_large_deltas=True)
    with pytest.raises(TypeError, match="missing 1 required"):
        clipping.Flat()


def test_values_without_names():
    """Where all have names, the message names them; that of Python counts them."""
    with pytest.raises(TypeError, match=r"^Plan.for_budget\(\) takes these by name: epsilon=, delta=, dataset_size=, "):
        dpfunc.Plan.for_budget(3.0, 1e-5, 1000, 100, 10, clipping.Flat(1.0))
    with pytest.raises(TypeError, match=r"^recipe\(\) takes these by name: dataset_size=, "):
        dpfunc.recipes.recipe("head", 1000)


def test_signature_and_doctests_stay():
    """What a reader, a type checker of arguments, a copy and doctest see of a decorated class or function."""
    assert [*inspect.signature(dpfunc.Plan).parameters][:2] == ["sampler", "clip"]
    assert [*inspect.signature(dpfunc.Plan.for_budget).parameters][:2] == ["epsilon", "delta"]
    assert [*inspect.signature(dpfunc.make_dp_step).parameters][:2] == ["loss_fn", "plan"]
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN == replace(PLAN)
    assert pickle.loads(pickle.dumps(dpfunc.make_dp_step)) is dpfunc.make_dp_step
    modules = (dpfunc.plan, dpfunc.step, dpfunc.recipes)
    found = {test.name for module in modules for test in doctest.DocTestFinder().find(module) if test.examples}
    assert {"dpfunc.step.make_dp_step", "dpfunc.recipes.recipe", "dpfunc.plan.Plan"} <= found
    assert {"dpfunc.plan.Plan.for_budget", "dpfunc.plan.Plan.loader"} <= found


@pytest.mark.parametrize("value", [10**400, -(10**5000)], ids=["large", "longer than Python writes"])
def test_integers_that_no_float_holds(value):
    with pytest.raises(dpfunc.errors.InvalidArgument, match="0 < clip_norm < inf, got clip_norm='an integer"):
        clipping.Flat(value)


FLAGS = [True, np.True_, torch.tensor(True), np.complex128(1 + 2j), torch.tensor(1j), "1", b"1", None, [1.0]]


@pytest.mark.parametrize("value", [*FLAGS, np.ones(2), torch.ones(2)], ids=repr)
def test_what_is_no_number_is_refused_by_name(value):
    """Those of numpy and torch convert themselves: a flag was 1, and a complex number its real part."""
    for check in (positive, count):
        with pytest.raises(InvalidArgument, match=r"got size="):
            check("size", value)


def test_scalars_of_numpy_and_torch_are_numbers():
    for value in (3, np.int64(3), torch.tensor(3)):
        assert count("size", value) == positive("size", value) == 3
    for value in (np.float32(3), torch.tensor(3.0), torch.tensor([3.0])):
        assert positive("size", value) == 3.0
        with pytest.raises(InvalidArgument, match="Expected an integer size >= 1"):
            count("size", value)
