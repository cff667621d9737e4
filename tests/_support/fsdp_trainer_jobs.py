"""What torchrun starts in tests/hf/trainer/test_fsdp.py: runs of the Trainer whose model is in parts."""

from __future__ import annotations

import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import torch

import dpfunc
from dpfunc import distributed
from dpfunc._utils.dtensor import is_dtensor, local
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.trainer import DPTrainer

PRIVACY = PrivacyArguments(dp_noise_multiplier=1.0, dp_delta=1e-3, dp_max_grad_norm=1.0, dp_log_unreleased=True)
RUNS = {
    "full": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2, "use_orig_params": True}},
    "classifier": {
        "fsdp": True,
        "fsdp_config": {
            "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 500, "reshard_after_forward": False,
            "activation_checkpointing": True,
        },
    },
    "adapter": {},
}  # fmt: skip
LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "GPT2Block", "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_OFFLOAD_PARAMS": "false", "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false", "FSDP_USE_ORIG_PARAMS": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_SYNC_MODULE_STATES": "true", "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}  # fmt: skip
"""What `accelerate launch --use_fsdp --fsdp_version 2` sets."""


def caught(function, *args, **kwargs):
    """The type and the message of an error."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  (told to the test)
        return type(error).__name__, str(error)
    return "nothing", ""


def writer(seed):
    """A language model with tied embeddings, of two blocks, without dropout: processes would draw others."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=41, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def adapted(seed):
    from peft import LoraConfig, get_peft_model

    base = writer(seed).to(torch.bfloat16)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True))


def model(kind, seed):
    from launch_jobs import model as classifier

    return {"full": writer, "adapter": adapted, "classifier": classifier}[kind](seed)


def trainer_of(kind, folder, seed=10, key=None, privacy=PRIVACY, made=None, **changes):
    from trainer_cases import labelled, pad, texts, training_arguments

    settings = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 6, "save_strategy": "steps",
        "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 3,
        "weight_decay": 0.1, **changes,
    }  # fmt: skip
    classes = kind == "classifier"
    return DPTrainer(
        model(kind, seed) if made is None else made, training_arguments(folder, **settings), privacy=privacy,
        key=key or dpfunc.insecure_key(7410 + list(RUNS).index(kind)), train_dataset=labelled() if classes else texts(),
        eval_dataset=labelled(13) if classes else texts(13), data_collator=None if classes else pad,
    )  # fmt: skip


def facts(trainer, folder):
    """What is compared with one process."""
    from trainer_cases import Seen

    seen = Seen()
    trainer.add_callback(seen)
    output = trainer.train()
    trainer.save_model(str(folder / "model"))
    params = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    return {
        "params": distributed.unshard(params),
        "held": sum(local(p).numel() for p in trainer.model.parameters()),
        "cut": all(is_dtensor(p) for p in trainer.model.parameters()),
        "logs": seen.logs,
        "eval": trainer.evaluate()["eval_loss"],
        "ledger": trainer.ledger.to_json(),
        "epsilon": output.metrics["privacy/epsilon"],
    }


def sharded(kind, folder, rank, **options):
    """A sharded run of each process's own model: that of the first one counts."""
    if kind == "adapter":
        os.environ.update(LAUNCHED)
    try:
        return trainer_of(kind, folder / kind, 10 + rank, **RUNS[kind], **options)
    finally:
        for name in LAUNCHED:
            os.environ.pop(name, None)


def main(folder):
    from trainer_cases import again

    ranks = distributed.from_environment(timedelta(seconds=60))
    found = {}
    for kind in RUNS:
        found[kind] = facts(sharded(kind, folder, ranks.rank), folder / kind)
        torch.distributed.barrier()
        if ranks.rank == 0:
            shutil.rmtree(folder / kind / "checkpoint-6")
        torch.distributed.barrier()
        resumed = sharded(kind, folder, ranks.rank)
        resumed.train(resume_from_checkpoint=True)
        found[kind]["resumed"] = distributed.unshard(dict(resumed._run.params))
        found[kind]["resumed ledger"] = resumed.ledger.to_json()
    torch.save(found, folder / f"rank{ranks.rank}.pt")
    distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
