"""`lora.attach`: keys, modes, what is trained, messages; and files: what is read is what was written."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from models import TinyTransformer
from module_cases import IDS, KEY, per_sample, random_b
from safetensors.torch import save_file
from torch import nn

from dpfunc import lora
from dpfunc.errors import CheckpointError, InvalidArgument
from dpfunc.lora import LoRAConfig
from dpfunc.rng import insecure_key


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
    "dropout of all": ({"dropout": 1.0}, "Expected 0 <= dropout < 1"),
    "train": ({"train": "A"}, "Expected train to be one of 'AB', 'B'"),
    "init": ({"init": "zeros"}, "Expected init to be one of 'kaiming', 'orthonormal'"),
    "rslora": ({"rslora": "no"}, "Expected rslora to be true or false, got rslora='no'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    changes, message = BAD[name]
    with pytest.raises(InvalidArgument, match=message):
        attach(TinyTransformer(), **{"targets": ["encoder.linear1"], **changes})


def test_what_is_kept_can_be_compared_and_scales_by_rank():
    config = LoRAConfig(["a", "b"], 4, 6)
    assert config == LoRAConfig(("a", "b"), 4, 6.0)
    assert (config.scale, LoRAConfig(("a",), 4, 6, rslora=True).scale) == (1.5, 3.0)


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
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_files_that_do_not_fit(tmp_path):
    path, module = tmp_path / "a.safetensors", nn.Sequential(nn.Linear(4, 8))
    adapter = lora.attach(module, KEY, targets=["0"], rank=2, alpha=6)

    def refused(message, module=module):
        with pytest.raises(CheckpointError, match=message):
            lora.load(path, module)

    lora.save(path, adapter, adapter.params)
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
