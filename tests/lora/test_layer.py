"""Functional LoRA: every kind of layer equals its merged one, and PEFT's; the module stays as it was."""

from __future__ import annotations

import pytest
import torch
from models import TinyCNN, TinyTransformer, peft_bert, tiny_bert, tiny_gpt2
from module_cases import IDS, KEY, logits, random_b, same, snapshot
from torch import nn

from dpfunc import lora
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.lora._layer import adaptable

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Twice(nn.Module):
    """One layer that is registered under two names, and kept in a plain list."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b, self.all = self.a, [self.a]

    def forward(self, x):
        return self.all[0](self.b(self.a(x)))


def transformer(tied=False):
    return TinyTransformer(tied=tied).eval()


def convolution(**options):
    return lambda: nn.Sequential(nn.Conv2d(3, 5, 3, **options)), ["0"], IMAGES


KINDS = {
    "Linear": (transformer, ["encoder.linear1", "head"], IDS),
    "Embedding": (transformer, ["embed"], IDS),
    "embedding with padding": (lambda: nn.Sequential(nn.Embedding(6, 4, padding_idx=0)), ["0"], torch.tensor([[0, 1]])),
    "tied embedding": (lambda: transformer(tied=True), ["encoder.linear1"], IDS),
    # nn.MultiheadAttention never calls its out_proj: an adapter there must not be without effect
    "weight that is read without a call": (transformer, ["encoder.self_attn.out_proj"], IDS),
    "registered twice": (Twice, "a|b", torch.randn(2, 4)),
    "Conv2d": (TinyCNN, ["conv1"], IMAGES),
    "padding": convolution(padding=1),
    "stride": convolution(stride=2, padding="valid"),
    "dilation": convolution(padding="same", dilation=2),
    "circular": convolution(padding=1, padding_mode="circular"),
    "reflect": convolution(padding=(2, 1), padding_mode="reflect", bias=False),
    "Conv1D": (tiny_gpt2, r"c_attn|c_proj", IDS),
    "BERT": (tiny_bert, r"query|value", IDS),
}


def attach(module, targets, **options):
    return lora.attach(module, KEY, **{"targets": targets, "rank": 2, "alpha": 6, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_merge(kind):
    """With B = 0 it is the module itself; then it is the merged module, which is another one."""
    make, targets, x = KINDS[kind]
    module = make()
    plain = logits(module(x))
    for options in ({}, {"rslora": True}, {"train": "B"}, {"init": "orthonormal"}):
        adapter = attach(module, targets, **options)
        torch.testing.assert_close(logits(adapter.forward(adapter.params, x)), plain, rtol=1e-4, atol=1e-5)
        params = random_b(adapter.params)
        merged = logits(adapter.merge(params)(x))
        rounding = {"rtol": 1e-4, "atol": 1e-3 + 1e-6 * float(merged.detach().abs().max())}
        assert torch.allclose(logits(adapter.forward(params, x)), merged, **rounding), options
        assert not torch.allclose(merged, plain, atol=1e-3), options
        with torch.no_grad():  # TransformerEncoderLayer then hands its weights to one kernel and calls no layer
            assert torch.allclose(logits(adapter.forward(params, x)), merged, **rounding), options


@pytest.mark.parametrize("kind", KINDS)
def test_module_is_unchanged(kind):
    make, targets, x = KINDS[kind]
    module = make()
    before, layout = snapshot(module), {name: id(part) for name, part in module.named_modules()}
    adapter = attach(module, targets)
    params = random_b(adapter.params)
    torch.func.grad(lambda p: logits(adapter.forward(p, x)).sum())(params)
    adapter.merge(params)
    assert same(before, snapshot(module))
    assert layout == {name: id(part) for name, part in module.named_modules()}
    ours = {id(p) for p in adapter.adapted.parameters()}
    assert all(id(p) in ours for p in module.parameters())  # they share the tensors, and no module
    assert not {*map(id, module.modules())} & {*map(id, adapter.adapted.modules())}


def peft_gpt2():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM", r=2, lora_alpha=4, use_rslora=True, target_modules=["c_attn", "mlp.c_fc"],
        fan_in_fan_out=True, init_lora_weights=False,
    )  # fmt: skip
    return get_peft_model(tiny_gpt2(), config).eval()


@pytest.mark.parametrize(
    ("make", "plain", "targets", "rslora"),
    [(peft_bert, tiny_bert, r"query|value", False), (peft_gpt2, tiny_gpt2, r"c_attn|mlp\.c_fc", True)],
    ids=["BERT", "GPT-2"],
)
def test_equals_peft(make, plain, targets, rslora):
    theirs, plain = make(), plain()
    values = {
        name.replace(".base_layer", "").replace(".modules_to_save.default", "").removeprefix("base_model.model."): p
        for name, p in theirs.state_dict().items()
        if "original_module" not in name
    }
    plain.load_state_dict({name: values[name] for name in plain.state_dict()})
    adapter = attach(plain, targets, alpha=4, rslora=rslora)
    params = {name: values[f"{name}.default.weight"] for name in adapter.params}
    expected = theirs(IDS).logits
    assert torch.allclose(adapter.forward(params, IDS).logits, expected, atol=1e-5)
    assert torch.allclose(adapter.merge(params)(IDS).logits, expected, atol=1e-5)


@pytest.mark.parametrize("init", ["kaiming", "orthonormal"])
@pytest.mark.parametrize("name", ["linear", "conv", "embed"])
def test_initial_scale(name, init):
    """`A x` has variance 1/3 for inputs of variance 1, for every kind of layer."""
    parts = {"linear": nn.Linear(300, 64), "conv": nn.Conv2d(30, 64, 3), "embed": nn.Embedding(300, 64)}
    a = attach(nn.ModuleDict(parts), [name], rank=48, init=init).params[f"{name}.lora_A"]
    power = a.flatten(1).square().sum(1).mean() / (300 if name == "embed" else 1)
    assert float(power) == pytest.approx(1 / 3, rel=0.05)
    if (name, init) == ("linear", "orthonormal"):
        assert torch.allclose(a @ a.T, torch.eye(48) / 3, atol=1e-6)


def test_layers_that_cannot_be_adapted():
    module = nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    assert [adaptable(part) for part in module] == [True, False]
    with pytest.raises(InvalidArgument, match="Expected Conv2d with groups=1, got groups=2"):
        attach(TinyCNN(), ["conv2"])


def test_half_precision_and_merging_in_float32():
    module = nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16()
    adapter = attach(module, ["0"])
    assert {p.dtype for p in adapter.params.values()} == {torch.bfloat16}
    params = random_b(adapter.params)
    merged = adapter.merge(params)[0].weight
    wide = {name: p.double() for name, p in params.items()}
    exact = module[0].weight.double() + 3.0 * wide["0.lora_B"] @ wide["0.lora_A"]
    assert merged.dtype == torch.bfloat16
    assert (merged.double() - exact).abs().max() <= exact.abs().max() * 2**-8  # one rounding


def test_quantised_weights_get_float_adapters_and_cannot_be_merged():
    class Quantised(nn.Linear):
        """The form of 4-bit layers: a packed integer weight."""

        def __init__(self):
            super().__init__(8, 6, bias=False)
            self.weight = nn.Parameter(torch.ones(24, 1, dtype=torch.uint8), requires_grad=False)

        def forward(self, x):
            return x[..., :6]

    adapter = attach(nn.Sequential(Quantised()), ["0"])
    shapes = {name: (tuple(p.shape), p.dtype) for name, p in adapter.params.items()}
    assert shapes == {"0.lora_A": ((2, 8), torch.float32), "0.lora_B": ((6, 2), torch.float32)}
    params, x = random_b(adapter.params), torch.randn(3, 8)
    expected = x[:, :6] + 3.0 * x @ params["0.lora_A"].T @ params["0.lora_B"].T
    assert torch.allclose(adapter.forward(params, x), expected, atol=1e-4)
    with pytest.raises(UnsupportedModel, match=r"weight of 0 is torch.uint8"):
        adapter.merge(params)
