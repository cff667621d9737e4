"""A language model learns what the assistant says in chats; a chat is a record."""

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

import dpfunc
from dpfunc import clipping
from dpfunc.hf import chat_messages, chat_tokens, show_chat
from dpfunc.hf import peft as adapters
from dpfunc.hf.tasks import make_loss_fn

tokenizer = AutoTokenizer.from_pretrained("model")
rows = [json.loads(line) for line in Path("chats.jsonl").read_text().splitlines()]
dataset = [
    chat_tokens(tokenizer, chat_messages(row), max_length=16) for row in rows
]
shown = show_chat(tokenizer)  # of a made-up chat: what is learnt stands in [[ ]]
collate = DataCollatorForSeq2Seq(tokenizer, padding="max_length", max_length=16)
base = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
adapter = LoraConfig(
    task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear"
)
model = get_peft_model(base, adapter)
forward, params = adapters.functionalize(model)
loss_fn = make_loss_fn(forward, "causal_lm")
public = dict(collate(dataset[:50]))
before = float(loss_fn(params, public).mean())
plan = dpfunc.Plan.for_budget(
    epsilon=8.0,
    delta=1e-5,
    dataset_size=len(dataset),
    expected_batch_size=100,
    num_steps=30,
    clip=clipping.Automatic(),
)
dp_step = dpfunc.make_dp_step(loss_fn, plan, microbatch_size=64)
state = dp_step.init(params, key=dpfunc.secure_key())
optimizer = torch.optim.AdamW(params.values(), lr=2e-2)
for batch in plan.loader(dataset, state, collate_fn=collate):
    grads, state, unreleased = dp_step(params, dict(batch), state)
    dpfunc.set_grads(params, grads)
    optimizer.step()
after = float(loss_fn(params, public).mean())
epsilon = state.ledger.epsilon(plan.delta).epsilon
