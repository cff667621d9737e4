"""Functional LoRA inside real structures: modes, layers that are read and not called, other libraries, precision."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from lora_cases import IDS, KEY, random_b
from models import TinyTransformer, tiny_bert, tiny_gpt2
from torch import nn
from transform_cases import assert_close, logits, loop, per_sample

from dpfunc import lora
from dpfunc.errors import CheckpointError, InvalidArgument, UnsupportedModel
from dpfunc.lora.layer import adaptable


def attach(module, targets, **options):
    return lora.attach(module, KEY, **{"targets": targets, "rank": 2, "alpha": 6, **options})


def test_equals_peft_on_conv1d():
    from peft import LoraConfig, get_peft_model

    plain = tiny_gpt2()
    adapter = attach(plain, r"c_attn|mlp\.c_fc", rslora=True)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=2, lora_alpha=6, use_rslora=True, target_modules=["c_attn", "mlp.c_fc"],
        fan_in_fan_out=True, init_lora_weights=False,
    )  # fmt: skip
    expected_base = {name: p.clone() for name, p in plain.state_dict().items()}
    theirs = get_peft_model(tiny_gpt2(), config).eval()
    renamed = {
        n.replace(".base_layer", "").removeprefix("base_model.model."): p for n, p in theirs.state_dict().items()
    }
    plain.load_state_dict({name: renamed[name] for name in expected_base})
    params = {name: renamed[f"{name}.default.weight"] for name in adapter.params}
    assert torch.allclose(adapter.forward(params, IDS).logits, theirs(IDS).logits, atol=1e-5)
    assert torch.allclose(adapter.merge(params)(IDS).logits, theirs.merge_and_unload()(IDS).logits, atol=1e-5)


MODELS = {
    "BERT": (tiny_bert, r"query|value|word_embeddings", logits),
    "GPT-2": (tiny_gpt2, r"c_attn|c_proj|wte", logits),
    "transformer": (lambda: TinyTransformer().eval(), ["encoder.linear1", "head"], lambda out: out),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("train", ["AB", "B"])
def test_per_sample_gradients_equal_single_samples(name, train):
    make, targets, pick = MODELS[name]
    adapter = attach(make(), targets, train=train)
    params = random_b(adapter.params)
    rows = per_sample(adapter.forward, params, IDS, pick)
    assert_close(rows, loop(adapter.forward, params, IDS, pick))
    assert all((row.flatten(1).norm(dim=1) > 0).any() for row in rows.values())


def test_dropout_differs_between_samples_under_vmap():
    adapter = attach(nn.Sequential(nn.Linear(64, 8)).train(), ["0"], dropout=0.5)
    rows = per_sample(adapter.forward, random_b(adapter.params), torch.ones(4, 64))["0.lora_A"]
    assert len({tuple((row[0] == 0).tolist()) for row in rows}) == 4


def test_mode_follows_the_module():
    """Both ways, nested, and for the dropout of the module as well as that of the adapter."""
    inner = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    module = nn.Sequential(inner, nn.Linear(64, 4)).eval()
    adapter = attach(module, ["1"], dropout=0.5)
    params, x = random_b(adapter.params), torch.ones(1, 64)

    def random():
        return not torch.equal(adapter.forward(params, x), adapter.forward(params, x))

    assert not random()
    module.train()
    assert random()
    module.eval()
    assert not random()
    inner.train()
    assert random()
    assert [part.training for part in module.modules()] == [False, True, True, True, False]


@pytest.mark.slow
def test_mode_follows_the_module_under_compile():
    module = nn.Sequential(nn.Linear(64, 8)).eval()
    adapter = attach(module, ["0"], dropout=0.5)
    params, x = random_b(adapter.params), torch.ones(3, 64)
    step = torch.compile(lambda p, batch: per_sample(adapter.forward, p, batch), fullgraph=True, backend="aot_eager")
    for mode in (False, True, False):
        module.train(mode)
        assert torch.equal(step(params, x)["0.lora_A"], step(params, x)["0.lora_A"]) is not mode


def test_layers_whose_weight_is_read_without_a_call():
    """nn.MultiheadAttention never calls its out_proj: an adapter there must not be without effect."""
    module = TinyTransformer().eval()
    adapter = attach(module, ["encoder.self_attn.out_proj"])
    params = random_b(adapter.params)
    output = adapter.forward(params, IDS)
    assert torch.allclose(output, adapter.merge(params)(IDS), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(output, module(IDS), atol=1e-3)
    assert_close(per_sample(adapter.forward, params, IDS), loop(adapter.forward, params, IDS))


def test_fused_path_of_torch_transformers():
    """Without gradients TransformerEncoderLayer hands its weights to one kernel and calls no layer."""
    adapter = attach(TinyTransformer().eval(), ["encoder.linear1", "encoder.linear2"])
    params = random_b(adapter.params)
    with torch.no_grad():
        fused = adapter.forward(params, IDS)
    assert torch.allclose(fused, adapter.forward(params, IDS), rtol=1e-4, atol=1e-4)


def test_layers_that_are_referred_to_twice():
    """Registered under two names, and kept in a plain list: one adapter, everywhere."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b, self.all = self.a, [self.a]

        def forward(self, x):
            return self.all[0](self.b(self.a(x)))

    module, x = Twice(), torch.randn(2, 4)
    adapter = attach(module, "a|b")
    params = random_b(adapter.params)
    assert list(params) == ["a.lora_A", "a.lora_B"]
    assert torch.allclose(adapter.forward(params, x), adapter.merge(params)(x), rtol=1e-4, atol=1e-3)
    assert module.all[0] is module.a


def test_parameters_are_shared_with_the_module():
    module = TinyTransformer()
    adapter = attach(module, ["head"])
    ours = {id(p) for p in adapter._adapted.module.parameters()}
    assert all(id(p) in ours for p in module.parameters())
    modules = {id(part) for part in module.modules()}
    assert not any(id(part) in modules for part in adapter._adapted.module.modules())


@pytest.mark.parametrize(
    "options",
    [
        {"padding": 1}, {"stride": 2, "padding": "valid"}, {"padding": "same", "dilation": 2},
        {"padding": 1, "padding_mode": "circular"}, {"padding": (2, 1), "padding_mode": "reflect", "bias": False},
    ],
    ids=str,
)  # fmt: skip
def test_convolutions_equal_the_merged_one(options):
    adapter = attach(nn.Sequential(nn.Conv2d(3, 5, 3, **options)), ["0"])
    params, x = random_b(adapter.params), torch.randn(2, 3, 9, 9)
    assert torch.allclose(adapter.forward(params, x), adapter.merge(params)(x), rtol=1e-4, atol=1e-4)


def test_embedding_with_padding():
    adapter = attach(nn.Sequential(nn.Embedding(6, 4, padding_idx=0)), ["0"])
    params, x = random_b(adapter.params), torch.tensor([[0, 1, 5]])
    assert torch.allclose(adapter.forward(params, x), adapter.merge(params)(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("init", ["kaiming", "orthonormal"])
@pytest.mark.parametrize("name", ["linear", "conv", "embed"])
def test_initial_scale(name, init):
    """`A x` has variance 1/3 for inputs of variance 1, for every kind of layer."""
    parts = {"linear": nn.Linear(300, 64), "conv": nn.Conv2d(30, 64, 3), "embed": nn.Embedding(300, 64)}
    a = lora.attach(
        nn.ModuleDict(parts), KEY, targets=[name], rank=48, alpha=1, init=init
    ).params[f"{name}.lora_A"]  # fmt: skip
    power = a.flatten(1).square().sum(1).mean() / (300 if name == "embed" else 1)
    assert float(power) == pytest.approx(1 / 3, rel=0.05)


def test_layers_of_one_adapter_start_differently():
    params = attach(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "0|1").params
    assert not torch.equal(params["0.lora_A"], params["1.lora_A"])


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


def test_frozen_parameters_stay_out_of_the_graph():
    module = TinyTransformer().eval()
    adapter = attach(module, ["head"], train="B")
    leaves = {name: p.requires_grad_() for name, p in adapter.params.items()}
    adapter.forward(leaves, IDS).sum().backward()
    assert leaves["head.lora_B"].grad is not None
    assert all(p.grad is None for p in module.parameters())
    assert all(p.grad is None for p in adapter._adapted.module.parameters())


def test_parametrized_layers_are_no_candidates():
    module = nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    assert [adaptable(part) for part in module] == [True, False]


HINTS = {
    "last part of names": (["query"], r"pass the regular expression r'\(\^\|\\.\)query\$'"),
    "block": (["bert.encoder.layer.0.attention.self"], "Inside of it: bert.encoder.layer.0.attention.self.query"),
    "other kind": (["dropout"], "It is a Dropout. It cannot be adapted"),
    "not an expression": ("(", "Expected a regular expression, got targets="),
}


@pytest.mark.parametrize("name", HINTS)
def test_hints(name):
    targets, message = HINTS[name]
    with pytest.raises(InvalidArgument, match=message):
        attach(tiny_bert(), targets)


def test_params_of_another_adapter_are_refused(tmp_path):
    adapter = attach(TinyTransformer(), ["head"])
    for use in (
        lambda p: adapter.forward(p, IDS), adapter.merge, lambda p: lora.save(tmp_path / "a.safetensors", adapter, p)
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=r"got params without head.lora_B\."):
            use({"head.lora_A": adapter.params["head.lora_A"]})
        with pytest.raises(InvalidArgument, match=r"Expected params\['head.lora_B'\] of shape \(3, 2\), got \(3, 1\)"):
            use({**adapter.params, "head.lora_B": torch.zeros(3, 1)})
    assert list(tmp_path.iterdir()) == []


def test_files_that_do_not_fit(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "a.safetensors"
    adapter = attach(nn.Sequential(nn.Linear(4, 8)), ["0"])
    lora.save(path, adapter, adapter.params)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
    with pytest.raises(CheckpointError, match=r"does not fit the module: .*targets='0'"):
        lora.load(path, nn.Sequential(nn.ReLU()))
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="Expected an adapter with schema 'dpfunc-lora-1'"):
        lora.load(path, nn.Sequential(nn.Linear(4, 8)))
    good = dataclasses.asdict(adapter.config)
    for damaged in ("{", json.dumps({**good, "ranks": 3}), json.dumps({**good, "rank": "two"})):
        save_file({"x": torch.zeros(1)}, path, metadata={"schema": "dpfunc-lora-1", "config": damaged})
        with pytest.raises(CheckpointError, match="does not fit the module"):
            lora.load(path, nn.Sequential(nn.Linear(4, 8)))
