"""functionalize: a pure function, under vmap, grad and torch.compile, and a module that never changes."""

from __future__ import annotations

import copy

import pytest
import torch
from models import TinyCNN, TinyTransformer, tiny_bert, tiny_gpt2
from module_cases import IDS, assert_close, logits, loop, per_sample, same, snapshot
from torch import nn

from dpfunc.errors import InvalidArgument
from dpfunc.functional import functionalize, with_params


class Shared(nn.Module):
    """One layer under two names, and one tensor in two layers."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = self.a
        self.c = nn.Linear(6, 6, bias=False)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(torch.tanh(self.a(x))))


class Recurrent(nn.Module):
    """nn.LSTM keeps a second list of its weights."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(50, 4), nn.LSTM(4, 4, batch_first=True)

    def forward(self, ids):
        return self.lstm(self.embed(ids))[0][:, -1]


class T5(nn.Module):
    """One embedding under three names: `shared` is also that of the encoder and of the decoder."""

    def __init__(self):
        from transformers import T5Config, T5ForConditionalGeneration

        super().__init__()
        config = T5Config(
            vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0,
            tie_word_embeddings=True, attn_implementation="eager",
        )  # fmt: skip
        self.model = T5ForConditionalGeneration(config).eval()

    def forward(self, ids):
        return self.model(input_ids=ids, decoder_input_ids=ids, use_cache=False)


def peft_gpt2():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True,
        init_lora_weights=False,
    )  # fmt: skip
    return get_peft_model(tiny_gpt2(), config).eval()


MODELS = {
    "shared": (Shared, IDS.float()),
    "cnn": (TinyCNN, torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))),
    "tied": (lambda: TinyTransformer(tied=True).eval(), IDS),
    "recurrent": (Recurrent, IDS),
    "bert": (tiny_bert, IDS),
    "gpt2": (tiny_gpt2, IDS),
    "peft": (peft_gpt2, IDS),
    "t5": (T5, IDS),
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_module_and_its_changed_copy(name):
    """Also in its gradients: those of a shared parameter are of all its uses."""
    make, x = MODELS[name]
    module = make()
    forward, params = functionalize(module)
    expected = logits(module(x))
    assert torch.allclose(logits(forward(params, x)), expected, atol=1e-5)
    got = torch.func.grad(lambda p: logits(forward(p, x)).square().sum())(params)
    expected.square().sum().backward()
    trained = {name: param for name, param in module.named_parameters() if param.requires_grad}
    assert_close(got, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()})
    changed = {k: p + 0.1 for k, p in params.items()}
    copied = with_params(module, changed)
    assert type(copied) is type(module)
    assert torch.allclose(logits(forward(changed, x)), logits(copied(x)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_module_is_never_changed(name):
    make, x = MODELS[name]
    module = make()
    before = snapshot(module)
    forward, params = functionalize(module)
    assert all(p.is_contiguous() and not p.requires_grad for p in params.values())
    changed = {k: p + 1.0 for k, p in params.items()}
    torch.func.grad(lambda p: logits(forward(p, x)).sum())(changed)
    leaf = {k: p.clone().requires_grad_() for k, p in changed.items()}
    logits(forward(leaf, x)).sum().backward()
    for p in params.values():
        p.add_(1.0)  # the parameters are copies
    with pytest.raises((IndexError, RuntimeError)):
        forward(changed, x[..., :0] if x.is_floating_point() else x + 999)
    assert same(before, snapshot(module))
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("name", ["bert", "gpt2", "peft", "recurrent"])
def test_per_sample_gradients_equal_single_samples(name):
    make, x = MODELS[name]
    forward, params = functionalize(make())
    rows = per_sample(forward, params, x)
    assert_close(rows, loop(forward, params, x))
    assert any((rows[name][0] - rows[name][1]).abs().max() > 0 for name in rows)


def test_no_gradient_reaches_parameters_that_are_not_trained():
    model = TinyTransformer()
    forward, params = functionalize(model, ["head.bias"])
    leaf = params["head.bias"].requires_grad_()
    forward({"head.bias": leaf}, torch.zeros(1, 6, dtype=torch.long)).sum().backward()
    assert leaf.grad is not None
    assert all(p.grad is None for p in model.parameters())


def test_params_are_contiguous_copies():
    layer = nn.Linear(4, 3)
    layer.weight = nn.Parameter(torch.randn(4, 3).T)
    params = functionalize(layer).params
    assert params["weight"].is_contiguous()
    assert params["weight"].data_ptr() != layer.weight.data_ptr()


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


def test_forward_follows_the_mode_of_the_module():
    """So does a deep copy of it; under vmap each sample has dropout of its own."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).train()
    forward, params = functionalize(module)
    x = torch.ones(1, 64)
    assert not torch.equal(forward(params, x), forward(params, x))
    rows = per_sample(forward, params, torch.ones(4, 64))["0.bias"]
    assert len({tuple((row == 0).tolist()) for row in rows}) == 4
    module.eval()
    assert torch.equal(forward(params, x), forward(params, x))
    assert torch.equal(copy.deepcopy(forward)(params, x), forward(params, x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared", "tied"])
def test_compiled_whole(name):
    """One graph: vmap(grad(forward)) and the squared norms."""
    make, x = MODELS[name]
    forward, params = functionalize(make())

    def step(p, batch):
        rows = per_sample(forward, p, batch)
        return rows, sum(row.flatten(1).square().sum(1) for row in rows.values())

    rows, norms = torch.compile(step, fullgraph=True)(params, x)
    expected, expected_norms = step(params, x)
    assert_close(rows, expected)
    assert_close(rows, loop(forward, params, x))
    assert torch.allclose(norms, expected_norms, rtol=1e-4)
