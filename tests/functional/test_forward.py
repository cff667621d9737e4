"""functionalize: a pure function, a module that never changes, and refusals that say what to do."""

from __future__ import annotations

import copy

import pytest
import torch
from models import TinyCNN, TinyTransformer, tiny_bert, tiny_gpt2
from module_cases import same, snapshot
from torch import nn

from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.functional import ATTENTION, BIASES, HEADS, PROJECTOR, functionalize, with_params


class Shared(nn.Module):
    """One layer under two names, and one tensor in two layers."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a
        self.c = nn.Linear(4, 4, bias=False)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(torch.tanh(self.a(x))))


MODELS = {
    "shared": (Shared, lambda: (torch.randn(1, 4),)),
    "cnn": (TinyCNN, lambda: (torch.randn(1, 3, 8, 8),)),
    "tied": (lambda: TinyTransformer(tied=True).eval(), lambda: (torch.zeros(1, 6, dtype=torch.long),)),
    "bert": (tiny_bert, lambda: (torch.zeros(1, 6, dtype=torch.long),)),
    "gpt2": (tiny_gpt2, lambda: (torch.zeros(1, 6, dtype=torch.long),)),
}


def first(output):
    return getattr(output, "logits", output)


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_module_and_its_changed_copy(name):
    make, inputs = MODELS[name]
    module, x = make(), inputs()
    forward, params = functionalize(module)
    assert torch.allclose(first(forward(params, *x)), first(module(*x)), atol=1e-5)
    changed = {k: p + 0.1 for k, p in params.items()}
    assert torch.allclose(first(forward(changed, *x)), first(with_params(module, changed)(*x)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_module_is_never_changed(name):
    make, inputs = MODELS[name]
    module, x = make(), inputs()
    before = snapshot(module)
    forward, params = functionalize(module)
    changed = {k: p + 1.0 for k, p in params.items()}
    torch.func.grad(lambda p: first(forward(p, *x)).sum())(changed)
    leaf = {k: p.clone().requires_grad_() for k, p in changed.items()}
    first(forward(leaf, *x)).sum().backward()
    for p in params.values():
        p.add_(1.0)  # the parameters are copies
    assert same(before, snapshot(module))
    assert all(p.grad is None for p in module.parameters())


def test_gradient_flows_through_all_uses_of_a_shared_parameter():
    module, x = Shared(), torch.randn(1, 4)
    forward, params = functionalize(module)
    assert list(params) == ["a.weight", "a.bias"]
    got = torch.func.grad(lambda p: forward(p, x).sum())(params)
    module(x).sum().backward()
    assert torch.allclose(got["a.weight"], module.a.weight.grad, atol=1e-6)


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        (BIASES, {"embed": 0, "bias": 1}),
        (HEADS, {"head.weight": 1, "encoder": 0}),
        (ATTENTION, {"self_attn": 1, "linear1": 0}),
        (["head.bias"], {"head.bias": 1, "head.weight": 0}),
        (r"linear[12]\.weight$", {"linear1.weight": 1, "bias": 0}),
    ],
)
def test_subsets(trainable, expected):
    _, params = functionalize(TinyTransformer(), trainable)
    for part, present in expected.items():
        assert any(part in name for name in params) == bool(present)


def test_projector_subset():
    model = nn.ModuleDict({"vision_tower": nn.Linear(2, 2), "multi_modal_projector": nn.Linear(2, 2)})
    assert list(functionalize(model, PROJECTOR).params) == [
        "multi_modal_projector.weight",
        "multi_modal_projector.bias",
    ]


def test_frozen_parameters_are_constants():
    module = TinyTransformer()
    module.embed.weight.requires_grad_(False)
    _, params = functionalize(module)
    assert "embed.weight" not in params


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        ("nothing_like_this", r"No name matches the regular expression 'nothing_like_this'"),
        (["head.weigth"], r"unknown head.weigth. Did you mean head.weight"),
        ([], r"The list of names is empty"),
    ],
)
def test_bad_selection(trainable, message):
    with pytest.raises(InvalidArgument, match=message):
        functionalize(TinyTransformer(), trainable)


def test_all_frozen():
    with pytest.raises(InvalidArgument, match="All parameters are frozen"):
        functionalize(TinyTransformer().requires_grad_(False))


def test_integer_parameter():
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(torch.zeros(2, dtype=torch.long), requires_grad=False))
    with pytest.raises(InvalidArgument, match=r"Expected floating parameters, got torch.int64 for 'w'"):
        functionalize(module, ["w"])


def test_not_a_module():
    with pytest.raises(InvalidArgument, match="Expected a torch module, got function"):
        functionalize(lambda x: x)


def test_wrong_params_are_named():
    forward, params = functionalize(nn.Linear(3, 2))
    with pytest.raises(InvalidArgument, match=r"got params without bias, and with the unknown bais\."):
        forward({"weight": params["weight"], "bais": params["bias"]}, torch.ones(1, 3))
    with pytest.raises(InvalidArgument, match=r"Expected params\['bias'\] of shape \(2,\), got \(3,\)"):
        forward({**params, "bias": torch.zeros(3)}, torch.ones(1, 3))


def batchnorm_model():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))


def test_batchnorm_is_refused_with_the_count():
    with pytest.raises(UnsupportedModel, match=r"2 BatchNorm layers in training mode.*1, 4.*dpfunc.replace_batchnorm"):
        functionalize(batchnorm_model().train())


def test_batchnorm_switched_on_later_is_refused():
    module = batchnorm_model().eval()
    forward, params = functionalize(module)
    forward(params, torch.randn(1, 3, 8, 8))
    module.train()
    with pytest.raises(UnsupportedModel, match="2 BatchNorm layers"):
        forward(params, torch.randn(1, 3, 8, 8))


def test_batchnorm_without_statistics_is_refused_in_eval_too():
    with pytest.raises(UnsupportedModel, match="1 BatchNorm layers"):
        functionalize(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)).eval())


def test_gradient_checkpointing_is_refused():
    model = tiny_bert().train()
    model.activation_checkpointing_enable()
    with pytest.raises(UnsupportedModel, match=r"Gradient checkpointing is on.*gradient_checkpointing_disable\(\)"):
        functionalize(model)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.weight


def test_written_buffers_are_refused_and_the_module_keeps_its_own():
    module = Counter()
    forward, params = functionalize(module)
    with pytest.raises(UnsupportedModel, match="writes into the buffers calls"):
        forward(params, torch.ones(1, 3))
    assert module.calls == 0


def test_with_params_copies():
    module = nn.Linear(2, 1)
    before = snapshot(module)
    changed = with_params(module, {"weight": torch.full((1, 2), 7.0)})
    assert changed.weight.tolist() == [[7.0, 7.0]]
    assert torch.equal(changed.bias, module.bias)
    assert same(before, snapshot(module))
    with pytest.raises(InvalidArgument, match="Did you mean weight"):
        with_params(module, {"wieght": torch.ones(1, 2)})
    with pytest.raises(InvalidArgument, match=r"of shape \(1, 2\), got \(2,\)"):
        with_params(module, {"weight": torch.ones(2)})


def test_deepcopy_of_the_function_still_works():
    forward, params = functionalize(nn.Linear(2, 1))
    x = torch.ones(1, 2)
    assert torch.equal(copy.deepcopy(forward)(params, x), forward(params, x))
