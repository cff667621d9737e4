"""Names that are unknown: the error says where they are, or what they are called here."""

from __future__ import annotations

import pytest

import dpfunc

NAMES = {
    "DPTrainer": "Here: dpfunc.hf.DPTrainer.",
    "PrivacyArguments": "Here: dpfunc.hf.PrivacyArguments.",
    "Flat": "Here: dpfunc.clipping.Flat.",
    "Automatic": "Here: dpfunc.clipping.Automatic.",
    "Poisson": "Here: dpfunc.sampling.Poisson.",
    "register_rule": "Here: dpfunc.engines.register_rule.",
    "attach": "Here: dpfunc.lora.attach.",
    "Ranks": "Here: dpfunc.distributed.Ranks.",
    "make_record": "Here: dpfunc.checkpoint.make_record.",
    "recipe": "Here: dpfunc.recipes.recipe.",
    "InvalidArgument": "Here: dpfunc.errors.InvalidArgument.",
    "PrivacyEngine": "Here: dpfunc.make_dp_step(loss_fn, plan), which wraps nothing; docs/moving/opacus.md has more names.",
    "get_noise_multiplier": "Here: dpfunc.Plan.for_budget(",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_elsewhere(name):
    with pytest.raises(AttributeError) as caught:
        getattr(dpfunc, name)
    assert str(caught.value).startswith(f"module 'dpfunc' has no attribute '{name}'. {NAMES[name]}")


@pytest.mark.parametrize(
    "folder", ["accounting", "clipping", "distributed", "engines", "functional", "lora", "sampling"]
)
def test_each_public_name_of_a_folder_is_found(folder):
    names = {*getattr(dpfunc, folder).__all__} - {*dir(dpfunc)}
    for name in names:
        with pytest.raises(AttributeError, match=rf"dpfunc\.{folder}\.{name}\b"):
            getattr(dpfunc, name)
    assert len(names) >= 3
