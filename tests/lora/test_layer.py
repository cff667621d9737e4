"""Functional LoRA: equal to the merged module and to PEFT, and the module stays as it was."""

from __future__ import annotations

import pytest
import torch
from lora_cases import IDS, KEY, random_b
from models import TinyCNN, TinyTransformer, peft_bert, tiny_bert, tiny_gpt2
from module_cases import same, snapshot
from torch import nn

from dpfunc import lora
from dpfunc.errors import CheckpointError, InvalidArgument
from dpfunc.functional import functionalize
from dpfunc.rng import insecure_key

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))

KINDS = {
    "Linear": (lambda: TinyTransformer().eval(), ["encoder.linear1", "head"], IDS),
    "Embedding": (lambda: TinyTransformer().eval(), ["embed"], IDS),
    "tied embedding": (lambda: TinyTransformer(tied=True).eval(), ["encoder.linear1"], IDS),
    "Conv2d": (TinyCNN, ["conv1"], IMAGES),
    "Conv1D": (tiny_gpt2, r"c_attn|c_proj", IDS),
    "BERT": (tiny_bert, r"query|value", IDS),
}


def logits(output):
    return getattr(output, "logits", output)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"rslora": True}, {"train": "B"}, {"init": "orthonormal"}], ids=str)
def test_merge(kind, options):
    make, targets, x = KINDS[kind]
    module = make()
    adapter = lora.attach(module, KEY, targets=targets, rank=2, alpha=6, **options)
    params = random_b(adapter.params)
    merged = adapter.merge(params)
    assert torch.allclose(logits(adapter.forward(params, x)), logits(merged(x)), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(merged(x)), logits(module(x)), atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_starts_as_the_module_itself(kind):
    make, targets, x = KINDS[kind]
    module = make()
    adapter = lora.attach(module, KEY, targets=targets, rank=2, alpha=6)
    assert torch.allclose(logits(adapter.forward(adapter.params, x)), logits(module(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_module_is_unchanged(kind):
    make, targets, x = KINDS[kind]
    module = make()
    before, layout = snapshot(module), {name: id(part) for name, part in module.named_modules()}
    adapter = lora.attach(module, KEY, targets=targets, rank=2, alpha=6)
    params = random_b(adapter.params)
    torch.func.grad(lambda p: logits(adapter.forward(p, x)).sum())(params)
    adapter.merge(params)
    assert same(before, snapshot(module))
    assert layout == {name: id(part) for name, part in module.named_modules()}


def test_gradients_equal_those_through_the_merged_weight():
    module = TinyTransformer().eval()
    adapter = lora.attach(module, KEY, targets=["encoder.linear1"], rank=2, alpha=6)
    params = random_b(adapter.params)
    forward, full = functionalize(module)

    def merged(p):
        delta = 3.0 * p["encoder.linear1.lora_B"] @ p["encoder.linear1.lora_A"]
        return forward({**full, "encoder.linear1.weight": full["encoder.linear1.weight"] + delta}, IDS).square().sum()

    expected = torch.func.grad(merged)(params)
    got = torch.func.grad(lambda p: adapter.forward(p, IDS).square().sum())(params)
    for name in params:
        assert torch.allclose(got[name], expected[name], rtol=1e-4, atol=1e-5)


def test_equals_peft():
    theirs = peft_bert()
    ours = theirs.get_base_model()
    plain = tiny_bert()
    base = {n.replace(".base_layer", ""): p for n, p in ours.state_dict().items() if "lora_" not in n}
    base = {n.replace(".modules_to_save.default", ""): p for n, p in base.items() if "original_module" not in n}
    plain.load_state_dict(base)
    adapter = lora.attach(plain, KEY, targets=r"query|value", rank=2, alpha=4)
    peft_params = dict(theirs.named_parameters())
    params = {name: peft_params[f"base_model.model.{name}.default.weight"].detach() for name in adapter.params}
    assert torch.allclose(adapter.forward(params, IDS).logits, theirs(IDS).logits, atol=1e-5)


def test_initialisation_is_by_key():
    module = TinyTransformer()
    same_key = [lora.attach(module, insecure_key(5), targets=["head"], rank=2, alpha=2).params for _ in range(2)]
    other = lora.attach(module, insecure_key(6), targets=["head"], rank=2, alpha=2).params
    assert torch.equal(same_key[0]["head.lora_A"], same_key[1]["head.lora_A"])
    assert not torch.equal(same_key[0]["head.lora_A"], other["head.lora_A"])
    assert (same_key[0]["head.lora_B"] == 0).all()


def test_orthonormal_rows():
    module = nn.Sequential(nn.Linear(40, 8))
    a = lora.attach(module, KEY, targets=["0"], rank=4, alpha=4, init="orthonormal").params["0.lora_A"]
    assert torch.allclose(a @ a.T, torch.eye(4) / 3, atol=1e-6)


def test_ffa_trains_b_alone():
    adapter = lora.attach(TinyTransformer(), KEY, targets=["head"], rank=2, alpha=2, train="B", also_train=["position"])
    assert set(adapter.params) == {"head.lora_B", "position"}
    assert set(adapter.constants) == {"head.lora_A"}


def test_also_train_inside_a_target():
    module = TinyTransformer().eval()
    adapter = lora.attach(module, KEY, targets=["head"], rank=2, alpha=2, also_train=["head.bias"])
    params = {**random_b(adapter.params), "head.base.bias": torch.ones(3)}
    assert torch.allclose(adapter.forward(params, IDS), adapter.merge(params)(IDS), atol=1e-5)


def test_dropout_only_in_training_mode():
    for mode, equal in ((True, False), (False, True)):
        module = nn.Sequential(nn.Linear(64, 8)).train(mode)
        adapter = lora.attach(module, KEY, targets=["0"], rank=2, alpha=2, dropout=0.5)
        params, x = random_b(adapter.params), torch.ones(1, 64)
        outputs = [adapter.forward(params, x) for _ in range(4)]
        assert all(torch.equal(outputs[0], other) for other in outputs[1:]) == equal


@pytest.mark.parametrize("train", ["AB", "B"])
def test_save_and_load(tmp_path, train):
    module = TinyTransformer().eval()
    adapter = lora.attach(
        module, insecure_key(9), targets=["head", "embed"], rank=2, alpha=6, train=train, also_train="position"
    )
    params = random_b(adapter.params)
    lora.save(tmp_path / "a.safetensors", adapter, params)
    again, loaded = lora.load(tmp_path / "a.safetensors", module)
    assert again.config == adapter.config
    assert torch.equal(again.forward(loaded, IDS), adapter.forward(params, IDS))
    assert torch.equal(again.merge(loaded)(IDS), adapter.merge(params)(IDS))


def test_load_refuses_another_module(tmp_path):
    adapter = lora.attach(nn.Sequential(nn.Linear(4, 8)), KEY, targets=["0"], rank=2, alpha=6)
    lora.save(tmp_path / "a.safetensors", adapter, adapter.params)
    with pytest.raises(CheckpointError, match=r"0.lora_A: saved \(2, 4\), module needs \(2, 5\)"):
        lora.load(tmp_path / "a.safetensors", nn.Sequential(nn.Linear(5, 8)))
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        lora.load(tmp_path / "b.safetensors", nn.Sequential(nn.Linear(5, 8)))


BAD = {
    "rank 0": ({"rank": 0}, "Expected an integer rank >= 1, got rank=0"),
    "rank too large": ({"rank": 17}, r"Expected rank <= 16"),
    "float rank": ({"rank": 2.0}, r"got rank=2.0"),
    "alpha": ({"alpha": 0.0}, "Expected 0 < alpha < inf"),
    "dropout": ({"dropout": 1.0}, "Expected 0 <= dropout < 1"),
    "train": ({"train": "A"}, "Expected train to be one of 'AB', 'B'"),
    "init": ({"init": "zeros"}, "Expected init to be one of 'kaiming', 'orthonormal'"),
    "unknown target": ({"targets": ["encoder.linear3"]}, "Did you mean encoder.linear"),
    "no match": ({"targets": "q_proj"}, "Expected targets to select a layer.*Layers: embed"),
    "layer of another kind": ({"targets": ["encoder"]}, "Linear, Embedding, Conv2d or Conv1D.*TransformerEncoderLayer"),
    "also_train": ({"also_train": ["hed.bias"]}, "Did you mean head.bias"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    changes, message = BAD[name]
    with pytest.raises(InvalidArgument, match=message):
        lora.attach(TinyTransformer(), KEY, **{"targets": ["encoder.linear1"], "rank": 2, "alpha": 2, **changes})


def test_grouped_convolution_is_refused():
    with pytest.raises(InvalidArgument, match="Expected Conv2d with groups=1, got groups=2"):
        lora.attach(TinyCNN(), KEY, targets=["conv2"], rank=2, alpha=2)
