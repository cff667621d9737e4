"""The head beside adapters: which parameters it is, how long its inputs are; a loop with them trains as the Trainer."""

from __future__ import annotations

import math

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, OFTConfig, PromptTuningConfig, VeraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from trainer_cases import classifier, labelled, training_arguments

import dpfunc
from dpfunc.features import head_of, measure_feature_norm
from dpfunc.hf import peft as adapters
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.recipes import recipe
from dpfunc.rng import insecure_key
from dpfunc.state import allow_repeat

EPSILON, DELTA, N = 8.0, 1e-3, 120


@pytest.mark.parametrize(
    "config", [LoraConfig(task_type="SEQ_CLS", r=2), LoraConfig(task_type="SEQ_CLS", r=2, use_dora=True),
               VeraConfig(task_type="SEQ_CLS", r=2)], ids=["LoRA", "DoRA", "VeRA"],
)  # fmt: skip
def test_the_head_is_what_is_no_adapter(config):
    _, params = adapters.functionalize(get_peft_model(classifier(), config))
    assert sorted(name.rpartition(".")[2] for name in head_of(params)) == ["bias", "weight"]
    assert all("classifier" in name for name in head_of(params))
    assert len(params) > 3


OTHERS = {
    "IA3": lambda: IA3Config(task_type="SEQ_CLS", target_modules=["query"], feedforward_modules=[]),
    "OFT": lambda: OFTConfig(task_type="SEQ_CLS", r=0, oft_block_size=4, target_modules=["query"]),
    "LoHa": lambda: LoHaConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]),
    "prompt": lambda: PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2),
    "biases of the layers": lambda: LoraConfig(task_type="SEQ_CLS", r=2, bias="lora_only"),
    "biases of all layers": lambda: LoraConfig(task_type="SEQ_CLS", r=2, bias="all"),
    "new tokens": lambda: LoraConfig(task_type="SEQ_CLS", r=2, trainable_token_indices=[3]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_adapter_of_peft_is_a_head(name):
    """With the rate of a head they would be trained too fast."""
    _, params = adapters.functionalize(get_peft_model(classifier(), OTHERS[name]()))
    assert sorted(at.rpartition(".")[2] for at in head_of(params)) == ["bias", "weight"]
    assert all("classifier" in at for at in head_of(params))
    assert len(params) > 2


class Known(nn.Module):
    """A linear head on features of a known norm, whatever the tokens are."""

    def __init__(self, norm):
        super().__init__()
        self.config = type("Config", (), {"vocab_size": 20})()
        self.x = nn.Buffer(norm * F.normalize(torch.arange(1.0, 6.0), dim=0))
        self.head = nn.Linear(5, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, input_ids, attention_mask):
        logits = self.head(self.dropout(self.x)).expand(len(input_ids), 3)
        return type("Output", (), {"logits": logits})()


@pytest.mark.parametrize("norm", [0.5, 4.0, 30.0])
def test_the_norm_is_that_of_the_inputs(norm):
    model = Known(norm)
    assert measure_feature_norm(model, ["head.weight", "head.bias"]) == pytest.approx(math.sqrt(norm**2 + 1), rel=1e-5)
    assert measure_feature_norm(nn.Linear(2, 2), ["weight"]) is None


def test_measuring_changes_nothing():
    model = classifier().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    head = ["classifier.weight", "classifier.bias"]
    assert measure_feature_norm(model, head) == measure_feature_norm(model, head)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_a_loop_with_two_rates_trains_as_the_trainer(tmp_path):
    """The same key, recipe and adapters: the same parameters at the end. With one rate they are others."""
    config, data = LoraConfig(task_type="SEQ_CLS", r=2), labelled(N)
    budget = {"dp_epsilon": EPSILON, "dp_delta": DELTA, "dp_recipe": "lora"}

    def adapted():
        torch.manual_seed(4)
        return get_peft_model(classifier(dropout=0.0), config)

    free = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0}
    arguments = training_arguments(tmp_path, **{**free, "learning_rate": 5e-5, "max_grad_norm": 0.0})
    trainer = DPTrainer(
        adapted(), arguments, privacy=PrivacyArguments(**budget), train_dataset=data, key=insecure_key(0)
    )
    trainer.train()
    wanted = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    rows = {name: torch.stack([row[name] for row in data]) for name in ("input_ids", "attention_mask", "labels")}

    def loop(two_rates):
        model = adapted()
        forward, params = adapters.functionalize(model)
        head = head_of(params)
        found = recipe(
            "lora", dataset_size=N, num_parameters=sum(p.numel() for p in params.values()), epsilon=EPSILON, delta=DELTA,
            num_classes=2, num_head_parameters=sum(p.numel() for p in head.values()),
            feature_norm=measure_feature_norm(model, head),
        )  # fmt: skip

        def loss_fn(params, batch):
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            return F.cross_entropy(forward(params, **inputs).logits, batch["labels"], reduction="none")

        plan = found.plan()
        assert plan == trainer.plan
        dp_step = dpfunc.make_dp_step(loss_fn, plan)
        state = allow_repeat(dp_step.init(params, insecure_key(0)))
        optimizer = found.optimizer(params.values(), head=head.values() if two_rates else ())
        scheduler = found.scheduler(optimizer)
        for indices in plan.batches(state):
            grads, state, _ = dp_step(params, dpfunc.take(rows, indices), state)
            for name, param in params.items():
                param.grad = grads[name]
            optimizer.step()
            scheduler.step()
        return {name: float((params[name].detach() - value).abs().max()) for name, value in wanted.items()}

    assert max(loop(True).values()) < 1e-4
    assert max(loop(False).values()) > 1e-2
