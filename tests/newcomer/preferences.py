"""A model learns which of two answers people chose (DPO). A pair is a record."""

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

import dpfunc
from dpfunc import clipping
from dpfunc.hf import (
    CollatePairs,
    Preference,
    make_loss_fn,
    preferences,
    reference_log_probabilities,
)
from dpfunc.hf import peft as adapters

# prompt, chosen, rejected
rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
tokenizer = AutoTokenizer.from_pretrained("model")
base = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
model = get_peft_model(
    base,
    LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear"
    ),
)


def answered(prompt, answer):
    before = tokenizer(prompt)["input_ids"]
    after = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    return {"input_ids": before + after, "labels": [-100] * len(before) + after}


pairs = [
    {name: answered(row["prompt"], row[name]) for name in ("chosen", "rejected")}
    for row in rows
]
data = CollatePairs(DataCollatorForSeq2Seq(tokenizer))(pairs)
# of the model before its first step
data["reference"] = reference_log_probabilities(model, data)
forward, params = adapters.functionalize(model)
plan = dpfunc.Plan.for_budget(
    epsilon=8.0,
    delta=1e-5,
    dataset_size=len(rows),
    expected_batch_size=100,
    num_steps=25,
    clip=clipping.Automatic(),
)
dp_step = dpfunc.make_dp_step(
    make_loss_fn(forward, Preference(beta=0.5)), plan, microbatch_size=64
)
state = dp_step.init(params, key=dpfunc.secure_key())
optimizer = torch.optim.AdamW(params.values(), lr=2e-2)
for batch in plan.batches(state):
    grads, state, unreleased = dp_step(params, dpfunc.take(data, batch), state)
    dpfunc.set_grads(params, grads)
    optimizer.step()
# not released: of private pairs
preferred = float((preferences.margins(forward, params, data) > 0).float().mean())
epsilon = state.ledger.epsilon(plan.delta).epsilon
