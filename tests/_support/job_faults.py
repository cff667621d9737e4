"""Faults planted into the Trainer of a job, and replays that find them; for tests and `python -m benchmarks.evidence`."""

from __future__ import annotations

import dataclasses

import torch
from text_job import run, write_job

from dpfunc import clipping
from dpfunc.clipped import make_clipped_grad
from dpfunc.hf.trainer.trainer import DPTrainer

FLAGS = ("--steps", "8", "--save_steps", "8", "--dp_epsilon", "1", "--insecure-seed", "70417")
_step = DPTrainer.training_step


def finished(folder, patch):
    """A folder with a finished run of a small classifier; paths of its job are relative to the folder."""
    patch.chdir(folder)
    write_job(folder, "text_classification")
    done = run("train", "job.yaml", *FLAGS)
    assert done.exit_code == 0, done.output
    return folder / "run"


def drawn_divisor(trainer, model, inputs, *rest):
    loss = _step(trainer, model, inputs, *rest)
    for param in trainer._run.params.values():
        param.grad /= max(1, len(inputs["labels"])) / 32
    return loss


def _loss(trainer):
    """Mean loss of the batch, which no noise protects."""
    return trainer.seen_losses.mean() if len(trainer.seen_losses) else torch.tensor(0.0)


def _seeing(then):
    """A step that keeps the losses of its batch, and what is done with them."""

    def step(trainer, model, inputs, *rest):
        inner = trainer._run.dp_step

        def keeping(*args, **options):
            result = inner(*args, **options)
            trainer.seen_losses = result.unreleased.losses_B
            trainer.seen_norms = result.unreleased.norms_BG
            return result

        keeping.clipped_grad = inner.clipped_grad  # which the Trainer asks for its loss
        trainer._run = dataclasses.replace(trainer._run, dp_step=keeping)
        loss = _step(trainer, model, inputs, *rest)
        trainer._run = dataclasses.replace(trainer._run, dp_step=inner)
        then(trainer)
        return loss

    return step


def _stop(trainer):
    """Patience of one step for the mean loss of the batch."""
    loss, before = float(_loss(trainer)), getattr(trainer, "loss_before", float("inf"))
    trainer.control.should_training_stop, trainer.loss_before = loss > before, loss


def _rate(trainer):
    trainer.optimizer.param_groups[0]["lr"] = 0.01 * float(_loss(trainer))


def _bound(trainer):
    if len(trainer.seen_norms):
        inner = trainer._run.dp_step
        clipped = make_clipped_grad(
            inner.clipped_grad.loss_fn, clipping.Flat(float(trainer.seen_norms.median())),
            engine=inner.clipped_grad.engine, microbatch_size=16,
        )  # fmt: skip
        trainer._run = dataclasses.replace(trainer._run, dp_step=dataclasses.replace(inner, clipped_grad=clipped))


def batch_statistics(trainer, model, inputs, *rest):
    """The first word of each text is one that depends on all texts of the batch."""
    ids = inputs["input_ids"].clone()
    if len(ids):
        ids[:, 0] = ids.sum() % 20
    return _step(trainer, model, {**inputs, "input_ids": ids}, *rest)


def private_tokenizer(trainer, model, inputs, *rest):
    """Numbers of words by their rank in the batch: a vocabulary fitted on it."""
    known = inputs["input_ids"].unique()
    return _step(trainer, model, {**inputs, "input_ids": torch.searchsorted(known, inputs["input_ids"])}, *rest)


def memory_bank(trainer, model, inputs, *rest):
    """The first word is one of the batch before."""
    ids, bank = inputs["input_ids"].clone(), getattr(trainer, "bank", None)
    if bank is not None and len(ids):
        ids[:, 0] = bank
    trainer.bank = int(inputs["input_ids"].sum()) % 20
    return _step(trainer, model, {**inputs, "input_ids": ids}, *rest)


def private_line(trainer, model, inputs, *rest):
    print(len(inputs["labels"]), "records")
    return _step(trainer, model, inputs, *rest)


# fault -> training step, and words of what moves
JOB_FAULTS = {
    "batch statistics": (batch_statistics, "rows of other records"),
    "a divisor by the drawn size": (drawn_divisor, "['exp_avg']"),
    "a stop that depends on losses": (_seeing(_stop), "number of steps"),
    "a learning rate that follows losses": (_seeing(_rate), "['params']"),
    "a memory bank": (memory_bank, "rows of other records"),
    "a tokenizer fitted on private data": (private_tokenizer, "rows of other records"),
    "a clip bound that follows norms": (_seeing(_bound), "sensitivity"),
    "a line with the number of records": (private_line, "what it prints"),
}
