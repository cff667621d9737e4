"""Runs of a private Trainer, and a callback that kills one."""

from __future__ import annotations

import os
import signal

from trainer_cases import (
    PRIVACY,
    classifier,
    labelled,
    training_arguments,
)
from transformers import TrainerCallback

import dpfunc
from dpfunc.hf.trainer.trainer import DPTrainer

DATA = labelled()
CHANGES = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1}
KEY = dpfunc.insecure_key(11)


class KillAt(TrainerCallback):
    """SIGKILL when the private gradients of a step are there and the optimizer has not stepped."""

    def __init__(self, step):
        self.step = step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def run(folder, *, data=DATA, key=None, privacy=PRIVACY, changes=None, **options):
    arguments = training_arguments(folder, **{**CHANGES, **(changes or {})})
    return DPTrainer(classifier(), arguments, privacy=privacy, key=key, train_dataset=data, **options)
