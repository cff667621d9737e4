"""functionalize under vmap, grad and torch.compile, on models of other libraries too."""

from __future__ import annotations

import pytest
import torch
from models import TinyTransformer, tiny_bert, tiny_gpt2
from torch import nn
from transform_cases import assert_close, logits, loop, per_sample

from dpfunc.functional import functionalize, with_params

IDS = torch.randint(50, (3, 6), generator=torch.Generator().manual_seed(0))


def peft_gpt2():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=2,
        lora_alpha=4,
        target_modules=["c_attn"],
        fan_in_fan_out=True,
        init_lora_weights=False,
    )
    return get_peft_model(tiny_gpt2(), config).eval()


def lstm():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lstm = nn.Embedding(50, 4), nn.LSTM(4, 4, batch_first=True)

        def forward(self, ids):
            return self.lstm(self.embed(ids))[0][:, -1]

    return Last()


@pytest.mark.parametrize(
    ("make", "pick"), [(tiny_bert, logits), (tiny_gpt2, logits), (peft_gpt2, logits)], ids=["BERT", "GPT-2", "PEFT"]
)
def test_per_sample_gradients_equal_single_samples(make, pick):
    forward, params = functionalize(make())
    rows = per_sample(forward, params, IDS, pick)
    assert_close(rows, loop(forward, params, IDS, pick))
    assert any((rows[name][0] - rows[name][1]).abs().max() > 0 for name in rows)


def test_trained_peft_model_can_be_saved_as_it_is():
    model = peft_gpt2()
    forward, params = functionalize(model)
    assert all("lora_" in name for name in params)
    trained = {name: p + 0.1 for name, p in params.items()}
    saved = with_params(model, trained)
    assert type(saved) is type(model)
    assert torch.equal(saved(IDS).logits, forward(trained, IDS).logits)


def test_recurrent_layers_take_the_parameters_that_are_passed():
    """nn.LSTM keeps a second list of its weights."""
    module = lstm()
    forward, params = functionalize(module)
    changed = {name: p + 0.5 for name, p in params.items()}
    assert torch.allclose(forward(changed, IDS), with_params(module, changed)(IDS))
    assert_close(per_sample(forward, changed, IDS), loop(forward, changed, IDS))


def test_forward_follows_the_mode_of_the_module():
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).train()
    forward, params = functionalize(module)
    x = torch.ones(1, 64)
    assert not torch.equal(forward(params, x), forward(params, x))
    module.eval()
    assert torch.equal(forward(params, x), forward(params, x))


def test_dropout_differs_between_samples_under_vmap():
    forward, params = functionalize(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).train())
    rows = per_sample(forward, params, torch.ones(4, 64))["0.bias"]
    assert len({tuple((row == 0).tolist()) for row in rows}) == 4


COMPILED = {
    "MLP": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), IDS.float()),
    "transformer, tied": (lambda: TinyTransformer(tied=True).eval(), IDS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_whole(name):
    """One graph: vmap(grad(forward)) and the squared norms."""
    make, x = COMPILED[name]
    forward, params = functionalize(make())

    def step(p, batch):
        rows = per_sample(forward, p, batch)
        return rows, sum(row.flatten(1).square().sum(1) for row in rows.values())

    rows, norms = torch.compile(step, fullgraph=True)(params, x)
    expected, expected_norms = step(params, x)
    assert_close(rows, expected)
    assert_close(rows, loop(forward, params, x))
    assert torch.allclose(norms, expected_norms, rtol=1e-4)
