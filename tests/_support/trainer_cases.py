"""What the Trainer's tests share: a tiny classifier, a tiny language model, data, arguments, a plain loop."""

from __future__ import annotations

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
)

import dpfunc
from dpfunc.functional import functionalize
from dpfunc.hf.tasks import infer_task, make_loss_fn
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.state import allow_repeat

NUM_RECORDS = 60
PRIVACY = PrivacyArguments(dp_epsilon=8.0, dp_delta=1e-3, dp_max_grad_norm=1.0)
NOISY = PrivacyArguments(dp_noise_multiplier=1.0, dp_delta=1e-3, dp_max_grad_norm=1.0)


def classifier(seed=0, dropout=0.1):
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def language_model(seed=0, dropout=0.1, layers=1):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=40, n_embd=16, n_layer=layers, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def adapted(base=None, **options):
    """A language model with adapters by PEFT."""
    from peft import LoraConfig, get_peft_model

    base = language_model() if base is None else base
    torch.manual_seed(5)
    config = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True, **options)
    return get_peft_model(base, config)


def labelled(num_records=NUM_RECORDS):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 50, (num_records, 6), generator=generator)
    return [
        {"input_ids": row, "attention_mask": torch.ones(6, dtype=torch.long), "labels": torch.tensor(i % 2), "age": i}
        for i, row in enumerate(ids)
    ]


def texts(num_records=NUM_RECORDS):
    """Token lists of different length, as a tokenizer gives them."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(3, 10, (num_records,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, 40, (n,), generator=generator).tolist()} for n in lengths]


def pad(records):
    """A collator for `texts`: zeros to the right, without a label and masked."""
    longest = max(len(record["input_ids"]) for record in records)
    ids = torch.zeros(len(records), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, record in enumerate(records):
        size = len(record["input_ids"])
        ids[row, :size] = torch.tensor(record["input_ids"])
        mask[row, :size] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def training_arguments(folder, **changes):
    """Logical batch 4 * 3 = 12 of 60 records, two epochs of 5 steps."""
    values = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_train_epochs": 2,
        "learning_rate": 1e-2, "logging_steps": 2, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**values, **changes})


def private(model, folder, *, key=None, privacy=NOISY, data=None, changes=None, **options):
    arguments = training_arguments(folder, **(changes or {}))
    if key is not None:
        again(key)
    data = labelled() if data is None else data
    return DPTrainer(model, arguments, privacy=privacy, key=key, train_dataset=data, **options)


def at(event, action, step=None):
    """A callback that calls `action(args, state, control)` at an event: after this step, or at each."""

    def act(self, args, state, control, **kwargs):
        if step in (None, state.global_step):
            action(args, state, control)

    return type("At", (TrainerCallback,), {event: act})()


def stop(step=None):
    """A callback that ends a run after a step, by default the first one."""
    return at("on_step_end", lambda args, state, control: setattr(control, "should_training_stop", True), step)


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


class Seen(TrainerCallback):
    """A logger, as far as the Trainer knows."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def plain_loop(model, data, collate, plan, key, make_optimizer, microbatch_size=4):
    """The same run by hand: `dp_step`, `.grad`, `optimizer.step()`."""
    forward, _ = functionalize(model.eval())
    model.train()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, scheduler = make_optimizer(list(params.values()))
    loss_fn = make_loss_fn(forward, infer_task(model))
    dp_step = dpfunc.make_dp_step(loss_fn, plan, microbatch_size=microbatch_size)
    state = allow_repeat(dp_step.init(params, key))
    for indices in plan.batches(state):
        records = [data[int(index)] for index in indices]
        batch = collate(records) if records else {"labels": torch.zeros(0)}
        grads, state, _ = dp_step({name: p.detach() for name, p in params.items()}, batch, state)
        for name, p in params.items():
            p.grad = grads[name]
        optimizer.step()
        scheduler.step()
    return {name: p.detach() for name, p in params.items()}


def again(key):
    """The same run once more in this process, on the same data."""
    allow_repeat(dpfunc.state.StepState(0, 10, 0, key, (), dpfunc.Ledger()))


def trained(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
