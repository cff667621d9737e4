"""A causal language model learns the lines of a text file with LoRA."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpfunc
from dpfunc import clipping
from dpfunc.hf import peft as adapters
from dpfunc.hf.tasks import infer_task, make_loss_fn

lines = Path("lines.txt").read_text().splitlines()
tokenizer = AutoTokenizer.from_pretrained("model")
data = dict(
    tokenizer(
        lines,
        padding="max_length",
        truncation=True,
        max_length=8,
        return_tensors="pt",
    )
)
data = {name: data[name] for name in ("input_ids", "attention_mask")}
data["labels"] = torch.where(data["attention_mask"] == 1, data["input_ids"], -100)
base = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
adapter = LoraConfig(
    task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear"
)
model = get_peft_model(base, adapter)
forward, params = adapters.functionalize(model)
loss_fn = make_loss_fn(forward, infer_task(model))
public = {name: value[:50] for name, value in data.items()}
before = float(loss_fn(params, public).mean())
plan = dpfunc.Plan.for_budget(
    epsilon=8.0,
    delta=1e-5,
    dataset_size=len(lines),
    expected_batch_size=200,
    num_steps=40,
    clip=clipping.Automatic(),
)
dp_step = dpfunc.make_dp_step(loss_fn, plan, microbatch_size=64)
state = dp_step.init(params, key=dpfunc.secure_key())
optimizer = torch.optim.AdamW(params.values(), lr=2e-2)
for indices in plan.batches(state):
    grads, state, unreleased = dp_step(params, dpfunc.take(data, indices), state)
    dpfunc.set_grads(params, grads)
    optimizer.step()
after = float(loss_fn(params, public).mean())
folder = adapters.save(model, params, "adapter")
epsilon = state.ledger.epsilon(plan.delta).epsilon
