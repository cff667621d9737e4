"""Selection of parameters by name, and what is said about wrong ones."""

from __future__ import annotations

import pytest
import torch
from models import TinyTransformer, tiny_gpt2
from torch import nn

from dpfunc.errors import InvalidArgument
from dpfunc.functional import ATTENTION, BIASES, HEADS, PROJECTOR, functionalize


def llava():
    return nn.ModuleDict({"vision_tower": nn.Linear(2, 2), "multi_modal_projector": nn.Linear(2, 2)})


@pytest.mark.parametrize(
    ("make", "trainable", "present", "absent"),
    [
        (TinyTransformer, BIASES, "bias", "embed"),
        (TinyTransformer, HEADS, "head.weight", "encoder"),
        (TinyTransformer, ATTENTION, "self_attn", "linear1"),
        (tiny_gpt2, ATTENTION, "transformer.h.0.attn.c_attn.weight", "mlp"),
        (llava, PROJECTOR, "multi_modal_projector.bias", "vision"),
        (TinyTransformer, ["head.bias"], "head.bias", "head.weight"),
        (TinyTransformer, r"linear[12]\.weight$", "linear1.weight", "bias"),
        (lambda: nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)), None, "1.weight", "0"),
    ],
)
def test_subsets(make, trainable, present, absent):
    params = functionalize(make(), trainable).params
    assert any(present in name for name in params)
    assert not any(absent in name for name in params)


def integers():
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(torch.zeros(2, dtype=torch.long), requires_grad=False))
    return module


@pytest.mark.parametrize(
    ("make", "trainable", "message"),
    [
        (TinyTransformer, "nothing_like_this", r"No name matches the regular expression 'nothing_like_this'"),
        (TinyTransformer, "(", r"Expected a regular expression, got trainable='\('"),
        (TinyTransformer, ["head.weigth"], r"unknown head.weigth. Did you mean head.weight"),
        (TinyTransformer, [], r"The list of names is empty"),
        (lambda: TinyTransformer(tied=True), ["head.weight"], r"'head.weight' is 'embed.weight'"),
        (lambda: TinyTransformer().requires_grad_(False), None, "All parameters are frozen"),
        (lambda: TinyTransformer(tied=True), HEADS, r"'head.weight' is 'embed.weight'. Choose that one, or none"),
        (tiny_gpt2, HEADS, r"'lm_head.weight' is 'transformer.wte.weight'"),
        (integers, ["w"], r"Expected floating parameters, got torch.int64 for 'w'"),
        (lambda: nn.LazyLinear(3), None, "got lazy 'weight'. Run the model once"),
        (lambda: len, None, "Expected a torch module, got builtin_function_or_method"),
    ],
)
def test_bad_selection(make, trainable, message):
    with pytest.raises(InvalidArgument, match=message):
        functionalize(make(), trainable)


@pytest.mark.parametrize("trainable", [r"(head|embed)\.", ["head.weight", "embed.weight"]])
def test_a_tied_parameter_is_chosen_by_its_first_name(trainable):
    """Its other names may be chosen beside it."""
    assert list(functionalize(TinyTransformer(tied=True), trainable).params) == ["embed.weight"]


def test_wrong_params_are_named():
    forward, params = functionalize(nn.Linear(3, 2))
    x = torch.ones(1, 3)
    with pytest.raises(InvalidArgument, match=r"got params without bias, and with the unknown bais\."):
        forward({"weight": params["weight"], "bais": params["bias"]}, x)
    with pytest.raises(InvalidArgument, match=r"Expected params\['bias'\] of shape \(2,\), got \(3,\)"):
        forward({**params, "bias": torch.zeros(3)}, x)
    with pytest.raises(InvalidArgument, match=r"got Tensor. It is the first argument: forward\(params, \*args\)"):
        forward(x, params)
