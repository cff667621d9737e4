"""Functional LoRA: every kind of layer equals its merged one, and PEFT's; keys, modes, messages, files."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from models import Case, TinyCNN, TinyTransformer, peft_bert, tiny_bert, tiny_gpt2
from module_cases import IDS, KEY, logits, per_sample, random_b, same, snapshot
from safetensors.torch import load_file, save_file
from torch import nn
from zoo.parity import differences, truth_of, without_gradient

from dpfunc import engines, lora
from dpfunc.errors import CheckpointError, InvalidArgument, UnsupportedModel
from dpfunc.lora import LoRAConfig
from dpfunc.lora.adapter import adaptable
from dpfunc.rng import insecure_key

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def attach(module, targets, **options):
    return lora.attach(module, KEY, **{"targets": targets, "rank": 2, "alpha": 6, **options})


def test_initialisation_is_by_key():
    module = TinyTransformer()
    first, again, other = (
        lora.attach(module, insecure_key(seed), targets="linear", rank=2, alpha=2).params for seed in (5, 5, 6)
    )
    a, b = "encoder.linear1.lora_A", "encoder.linear1.lora_B"
    assert torch.equal(first[a], again[a])
    assert not torch.equal(first[a], other[a])
    assert (first[b] == 0).all()
    twin = attach(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "0|1").params  # layers start differently
    assert not torch.equal(twin["0.lora_A"], twin["1.lora_A"])


def test_ffa_trains_b_alone_and_other_parameters():
    """Constants get no gradient, nor do the parameters of the module; one inside of a target may be trained."""
    module = TinyTransformer().eval()
    adapter = attach(module, ["head"], train="B", also_train=["position", "head.bias"])
    assert set(adapter.params) == {"head.lora_B", "position", "head.base.bias"}
    assert set(adapter.constants) == {"head.lora_A"}
    params = {**random_b(adapter.params), "head.base.bias": torch.ones(3)}
    assert torch.allclose(adapter.forward(params, IDS), adapter.merge(params)(IDS), atol=1e-5)
    leaves = {name: p.requires_grad_() for name, p in adapter.params.items()}
    adapter.forward(leaves, IDS).sum().backward()
    assert leaves["head.lora_B"].grad is not None
    assert all(p.grad is None for p in (*module.parameters(), *adapter.adapted.parameters()))


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
    rows = per_sample(adapter.forward, params, torch.ones(4, 64))["1.lora_A"]
    assert len({tuple((row[0] == 0).tolist()) for row in rows}) == 4  # each sample has dropout of its own
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


BAD = {
    "rank too large": ({"rank": 17}, r"Expected rank <= 16"),
    "unknown target": ({"targets": ["encoder.linear3"]}, "Did you mean encoder.linear"),
    "no match": ({"targets": "q_proj"}, "Expected targets to select a layer.*Layers: embed"),
    "layer of another kind": ({"targets": ["encoder"]}, "Linear, Embedding, Conv2d or Conv1D.*TransformerEncoderLayer"),
    "not an expression": ({"targets": "("}, "Expected a regular expression, got targets="),
    "also_train": ({"also_train": ["hed.bias"]}, "Did you mean head.bias"),
    "a part of a name": ({"targets": ["linear1"]}, r"pass the regular expression r'\(\^\|\\.\)linear1\$'"),
    "a parent": ({"targets": ["encoder.self_attn"]}, "Inside of it: encoder.self_attn.out_proj"),
    "dropout": ({"targets": ["encoder.dropout"]}, "It is a Dropout. It cannot be adapted"),
    # of LoRAConfig
    "rank 0": ({"rank": 0}, "Expected an integer rank >= 1, got rank=0"),
    "float rank": ({"rank": 2.0}, r"got rank=2.0"),
    "alpha": ({"alpha": 0.0}, "Expected 0 < alpha < inf"),
    "dropout of embeddings": ({"dropout": 0.1, "targets": ["embed"]}, "Expected dropout=0 where embeddings alone are adapted"),
    "dropout of all": ({"dropout": 1.0}, "Expected 0 <= dropout < 1"),
    "train": ({"train": "A"}, "Expected train to be one of 'AB', 'B', 'vectors'"),
    "vectors of an embedding": ({"train": "vectors", "targets": ["embed"]}, r"Expected linear layers with train='vectors', got targets=\['embed'\]"),
    "vectors of orthonormal A": ({"train": "vectors", "init": "orthonormal"}, "Expected init='kaiming' with train='vectors'"),
    "init": ({"init": "zeros"}, "Expected init to be one of 'kaiming', 'orthonormal'"),
    "rslora": ({"rslora": "no"}, "Expected rslora to be true or false, got rslora='no'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    changes, message = BAD[name]
    with pytest.raises(InvalidArgument, match=message):
        attach(TinyTransformer(), **{"targets": ["encoder.linear1"], **changes})


class TwoNames(nn.Module):
    """The decoder has a layer of its own, and one that is the encoder's."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(4, 4)])
        self.decoder = nn.ModuleList([nn.Linear(4, 4), self.encoder[0]])

    def forward(self, x):
        return self.decoder[1](self.decoder[0](self.encoder[0](x)))


@pytest.mark.parametrize("targets", [r"decoder\.", ["decoder.0", "decoder.1"]])
def test_a_shared_layer_is_chosen_by_its_first_name(targets):
    """It was left out in silence where an expression finds it by another one; its other names may stand beside it."""
    with pytest.raises(InvalidArgument, match=r"each layer under its first name.*'decoder.1' is 'encoder.0'"):
        attach(TwoNames(), targets)
    adapter = attach(TwoNames(), r"coder\.")
    assert sorted(adapter.params) == [f"{name}.lora_{part}" for name in ("decoder.0", "encoder.0") for part in "AB"]


def test_what_is_kept_can_be_compared_and_scales_by_rank():
    config = LoRAConfig(["a", "b"], 4, 6)
    assert config == LoRAConfig(("a", "b"), 4, 6.0)
    assert (config.scale, LoRAConfig(("a",), 4, 6, rslora=True).scale) == (1.5, 3.0)


def test_params_of_another_adapter_are_refused(tmp_path):
    adapter = attach(TinyTransformer(), ["head"])
    for use in (
        lambda p: adapter.forward(p, IDS), adapter.merge, lambda p: lora.save_adapter(tmp_path / "a.safetensors", adapter, p)
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=r"got params without head.lora_B\."):
            use({"head.lora_A": adapter.params["head.lora_A"]})
        with pytest.raises(InvalidArgument, match=r"Expected params\['head.lora_B'\] of shape \(3, 2\), got \(3, 1\)"):
            use({**adapter.params, "head.lora_B": torch.zeros(3, 1)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("train", ["AB", "B"])
def test_save_and_load(tmp_path, train):
    module = TinyTransformer().eval()
    adapter = lora.attach(
        module, insecure_key(9), targets=["head", "embed"], rank=2, alpha=6, train=train, also_train="position"
    )
    params = random_b(adapter.params)
    lora.save_adapter(tmp_path / "a.safetensors", adapter, params)
    again, loaded = lora.load_adapter(tmp_path / "a.safetensors", module)
    assert again.config == adapter.config
    assert torch.equal(again.forward(loaded, IDS), adapter.forward(params, IDS))
    assert torch.equal(again.merge(loaded)(IDS), adapter.merge(params)(IDS))
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_files_that_do_not_fit(tmp_path):
    path, module = tmp_path / "a.safetensors", nn.Sequential(nn.Linear(4, 8))
    adapter = lora.attach(module, KEY, targets=["0"], rank=2, alpha=6)

    def refused(message, module=module):
        with pytest.raises(CheckpointError, match=message):
            lora.load_adapter(path, module)

    lora.save_adapter(path, adapter, adapter.params)
    refused(r"0.lora_A: saved \(2, 4\), module needs \(2, 5\)", nn.Sequential(nn.Linear(5, 8)))
    refused(r"does not fit the module: .*targets='0'", nn.Sequential(nn.ReLU()))
    save_file({"x": torch.zeros(1)}, path)
    refused("Expected an adapter with schema 'dpfunc-lora-1'")
    good = dataclasses.asdict(adapter.config)
    for damaged in ("{", json.dumps({**good, "ranks": 3}), json.dumps({**good, "rank": "two"})):
        save_file({"x": torch.zeros(1)}, path, metadata={"schema": "dpfunc-lora-1", "config": damaged})
        refused("does not fit the module")
    path.write_bytes(b"nothing")
    refused("cannot be read")


# Layers


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


@pytest.mark.parametrize("kind", [nn.Embedding, nn.Linear])
def test_a_layer_with_a_forward_of_its_own_is_refused(kind):
    # the merged module computed 8 (W + B A), where W and B A had been trained as 8 W + B A
    class Scaled(kind):
        def forward(self, x):
            return 8 * super().forward(x)

    module = nn.Sequential(Scaled(6, 4), nn.Linear(4, 6))
    with pytest.raises(UnsupportedModel, match=r"0 \(Scaled\).*also_train"):
        attach(module, ".")
    assert "0.weight" in attach(module, ["1"], also_train="^0").params


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.register_forward_hook(lambda layer, args, output: 8 * output),
        lambda layer: layer.register_forward_pre_hook(lambda layer, args: (8 * args[0],)),
        lambda layer: setattr(layer, "forward", lambda x: 8 * nn.functional.linear(x, layer.weight)),
    ],
)
def test_a_layer_with_hooks_is_refused(change):
    # the hook got W x in training, and (W + B A) x of the merged module
    module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    change(module[0])
    with pytest.raises(UnsupportedModel, match=r"0 \(Linear\).*with forward hooks.*also_train"):
        attach(module, ".")
    adapter = attach(module, ["1"])  # hooks of other layers stay
    params, x = random_b(adapter.params), torch.randn(3, 4)
    assert torch.allclose(adapter.forward(params, x), adapter.merge(params)(x), atol=1e-5)


@pytest.mark.parametrize("train", ["B", "vectors"])
def test_other_parameters_with_the_names_of_factors_are_trained(train):
    inner = attach(nn.Sequential(nn.Linear(4, 4)), "0").adapted
    outer = attach(inner, ["0.base"], train=train, also_train="lora_")
    assert {"0.lora_A", "0.lora_B"} <= outer.params.keys()
    assert not outer.params.keys() & outer.constants.keys()
    assert "0.base.lora_A" in outer.constants


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


# Vectors alone (VeRA)


def moved(params):
    generator = torch.Generator().manual_seed(4)
    return {name: p + torch.randn(p.shape, generator=generator) for name, p in params.items()}


def peft_vera(make, **options):
    from peft import VeraConfig, get_peft_model

    config = VeraConfig(task_type="SEQ_CLS", r=5, projection_prng_key=3, **options)
    theirs = get_peft_model(make(), config).eval()
    for name, p in theirs.named_parameters():
        if "vera_lambda" in name:
            p.data = 3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
    return theirs


def test_vectors_equal_vera_of_peft(tmp_path):
    """In layers of several sizes, for which A and B are cut; merged too, and as a file holds A and B once."""
    theirs, plain = peft_vera(tiny_bert, target_modules=["query", "value", "intermediate.dense"]), tiny_bert()
    values = {
        name.replace(".base_layer", "").replace(".modules_to_save.default", "").removeprefix("base_model.model."): p
        for name, p in theirs.state_dict().items()
        if "original_module" not in name
    }
    plain.load_state_dict({name: values[name] for name in plain.state_dict()})
    adapter = lora.attach(
        plain, KEY, targets=r"query|value|intermediate\.dense", rank=5, alpha=5, train="vectors"
    )  # fmt: skip
    assert {tuple(value.shape) for value in adapter.constants.values()} == {
        tuple(values[f"base_model.vera_{part}.default"].shape) for part in "AB"
    }
    constants = {name: values[f"base_model.vera_{name[-1]}.default"] for name in adapter.constants}
    adapter = dataclasses.replace(adapter, constants=constants)
    params = {
        name: values[f"{name.removesuffix(name[-6:])}vera_lambda_{name[-1]}.default"] for name in adapter.params
    }  # fmt: skip
    expected = theirs(IDS).logits
    assert not torch.allclose(plain(IDS).logits, expected, atol=1e-3)
    assert torch.allclose(adapter.forward(params, IDS).logits, expected, atol=1e-5)
    assert torch.allclose(adapter.merge(params)(IDS).logits, expected, atol=1e-5)
    lora.save_adapter(tmp_path / "a.safetensors", adapter, params)
    again, loaded = lora.load_adapter(tmp_path / "a.safetensors", plain)
    assert torch.equal(again.forward(loaded, IDS).logits, adapter.forward(params, IDS).logits)
    assert sum("lora_A" in name for name in load_file(tmp_path / "a.safetensors")) == 1


def test_vectors_begin_as_the_module_with_matrices_of_the_key():
    module = TinyTransformer().eval()
    first, again, other = (
        lora.attach(module, insecure_key(seed), targets="linear", rank=40, alpha=40, train="vectors")
        for seed in (5, 5, 6)
    )
    assert {name.rpartition(".")[2] for name in first.params} == {"lora_d", "lora_b"}
    assert len(first.constants) == 2  # of all layers, whose ranks exceed their sizes
    for name, value in first.constants.items():
        assert torch.equal(value, again.constants[name])
        assert not torch.equal(value, other.constants[name])
    assert torch.allclose(first.forward(first.params, IDS), module(IDS), atol=1e-6)  # by another kernel of torch
    params = moved(first.params)
    assert torch.allclose(first.forward(params, IDS), first.merge(params)(IDS), atol=1e-4)


@pytest.mark.parametrize("kind", ["transformer", "GPT-2", "BERT", "layers of several sizes"])
def test_gradients_of_vectors_are_those_of_single_records(kind):
    make, targets = {
        "transformer": (TinyTransformer, "linear"),
        "GPT-2": (tiny_gpt2, r"c_attn|mlp\.c_fc"),
        "BERT": (tiny_bert, r"query|value"),
        "layers of several sizes": (TinyTransformer, r"linear|head"),
    }[kind]
    adapter = lora.attach(make().eval(), KEY, targets=targets, rank=3, alpha=3, train="vectors")

    def loss_fn(params, ids):
        return logits(adapter.forward(params, ids)).flatten(1).square().mean(1)

    case = Case(loss_fn, moved(adapter.params), IDS)
    truth = truth_of(case)
    assert not without_gradient(truth)
    assert max(differences(engines.auto(), case, truth).values()) < 2e-4
