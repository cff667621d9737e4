"""Files of adapters: what is read is what was written, or an error says how the module differs."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from models import TinyTransformer
from module_cases import IDS, KEY, random_b
from safetensors.torch import save_file
from torch import nn

from dpfunc import lora
from dpfunc.errors import CheckpointError
from dpfunc.rng import insecure_key


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
