"""What the workers of tests/hf/trainer/test_fsdp.py do: runs of the Trainer whose model is in parts."""

from __future__ import annotations

import logging
import os

import torch
from trainer_cases import Seen, adapted, again, language_model, pad, stop, texts, training_arguments
from workers import caught

import dpfunc
from dpfunc import distributed
from dpfunc._utils.parts import is_dtensor, local
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.trainer import DPTrainer

PRIVACY = PrivacyArguments(dp_noise_multiplier=1.0, dp_delta=1e-3, dp_max_grad_norm=1.0, dp_log_unreleased=True)
STEPS = 4
KEYS = {"full": 7420, "adapter": 7411, "stopped": 7412}  # draws of the first: 1, 3, 1 and 0 records
ASKED = {
    "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 500, "reshard_after_forward": False,
    "activation_checkpointing": True, "use_orig_params": True,
}  # fmt: skip
LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "GPT2Block", "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_OFFLOAD_PARAMS": "false", "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false", "FSDP_USE_ORIG_PARAMS": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true", "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}  # fmt: skip
"""What `accelerate launch --use_fsdp --fsdp_version 2` sets."""


def writer(seed):
    """Without dropout: processes would draw others."""
    return language_model(seed, dropout=0.0, layers=2)


def in_bfloat16(seed):
    """An adapter in float32 on a model in bfloat16."""
    return adapted(writer(seed).to(torch.bfloat16))


MODELS = {"full": writer, "adapter": in_bfloat16, "stopped": writer}


def trainer_of(kind, folder, seed=10, model=None, callbacks=None, **changes):
    """A run over texts of different lengths, whose draws have two records on average."""
    key = dpfunc.rng.insecure_key(KEYS[kind])
    again(key)
    settings = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": STEPS, "weight_decay": 0.1,
        "save_strategy": "steps", "save_steps": STEPS // 2, "per_device_eval_batch_size": 3,
        "bf16": kind == "stopped", **changes,
    }  # fmt: skip
    return DPTrainer(
        MODELS[kind](seed) if model is None else model, training_arguments(folder, **settings), privacy=PRIVACY, key=key,
        train_dataset=texts(), eval_dataset=texts(12), data_collator=pad, callbacks=callbacks,
    )  # fmt: skip


def sharded(kind, folder, rank, **options):
    """A run whose model is in parts; each process has a model of its own, and that of the first one counts."""
    for name in LAUNCHED:
        os.environ.pop(name, None)
    if kind == "adapter":  # what the launcher has set stays there while the run lasts
        os.environ.update(LAUNCHED)
    else:
        options = {"fsdp": True, "fsdp_config": dict(ASKED), **options}
    return trainer_of(kind, folder / kind, 10 + rank, **options)


def facts(trainer, folder):
    """What a run gives, to be compared with one process."""
    seen = Seen()
    trainer.add_callback(seen)
    before = trainer.evaluate()["eval_loss"]
    output = trainer.train()
    trainer.save_model(str(folder / "model"))
    after = trainer.evaluate()["eval_loss"]
    ranks, plan, state = trainer._ranks, trainer.plan, trainer._run.state
    return {
        "params": distributed.unshard(dict(trainer._run.params)), "eval": (before, after),
        "held": sum(local(p).numel() for p in trainer.model.parameters()),
        "sharded": all(is_dtensor(p) for p in trainer.model.parameters()),
        "logs": [[log["unreleased/loss"], log["grad_norm"]] for log in seen.logs if "unreleased/loss" in log],
        "ledger": trainer.ledger.to_json(), "epsilon": output.metrics["privacy/epsilon"],
        "draws": [len(plan.draw(state, step, ranks)) for step in range(STEPS)],
    }  # fmt: skip


def two_adapters(seed):
    """Another adapter requires gradients, which is not the active one."""
    model = in_bfloat16(seed)
    model.add_adapter("other", model.peft_config["default"])
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name)
    return model


def refusals(folder, rank):
    """What is refused by all processes, where one alone would leave the others waiting; and a model that is in parts."""
    stopped = sharded("stopped", folder, rank, callbacks=[stop(STEPS // 2)])
    stopped.train()
    other = {**ASKED, "reshard_after_forward": rank == 0}
    return {
        "adapters": caught(sharded("adapter", folder / "two", rank, model=two_adapters(10)).train),
        "base": caught(sharded("adapter", folder, 5 + rank).train, True),  # the first process has another one
        "settings": caught(sharded, "full", folder, rank, fsdp_config=other),
        "values": caught(sharded, "full", folder, rank, model=writer(0).to("meta") if rank else writer(0)),
        "twice": caught(trainer_of, "full", folder / "twice", model=stopped.model),
    }


def main(folder):
    """The runs and refusals of one of two processes; what it found, and what it was told about settings."""
    ranks, told, handler = distributed.data_parallel(), [], logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("dpfunc.hf.trainer._fsdp").addHandler(handler)
    rank = str(ranks.rank)  # as torchrun says it, to accelerate
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="::1", MASTER_PORT="0"
    )
    found = {kind: facts(sharded(kind, folder, ranks.rank), folder / kind) for kind in ("full", "adapter")}
    resumed = sharded("full", folder, ranks.rank)
    resumed.train(resume_from_checkpoint=str(folder / "full" / f"checkpoint-{STEPS // 2}"))
    found["resumed"] = distributed.unshard(dict(resumed._run.params)), resumed.ledger.to_json()
    return {**found, "refused": refusals(folder, ranks.rank), "told": told}
