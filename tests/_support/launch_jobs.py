"""What torchrun starts in test_launch.py: `launch_jobs.py NAME ARGUMENTS...` in each process."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import jobs
import torch
from accelerate import Accelerator
from trainer_cases import Seen, again, classifier, labelled, trained, training_arguments
from workers import caught

import dpfunc
from dpfunc import distributed, sampling, state
from dpfunc.checkpoint import chain as chain
from dpfunc.checkpoint import saving
from dpfunc.cli.main import main
from dpfunc.hf.trainer import _files as trainer_state
from dpfunc.hf.trainer.arguments import PrivacyArguments
from dpfunc.hf.trainer.trainer import DPTrainer
from dpfunc.train import generate

KEY = dpfunc.rng.insecure_key(2106)
END = "=== another part begins here"
PRIVACY = PrivacyArguments(
    dp_noise_multiplier=1.0, dp_delta=1e-3, dp_max_grad_norm=1.0, dp_engine="auto", dp_log_unreleased=True
)


def right(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def trainer_of(folder, seed, seen, privacy=PRIVACY, **changes):
    """A run whose draws have two records on average, so that a process often has none."""
    settings = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 8, "save_strategy": "steps",
        "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 3, **changes,
    }  # fmt: skip
    return DPTrainer(
        classifier(seed, dropout=0.0), training_arguments(folder, **settings), privacy=privacy, key=KEY if privacy.dp_enabled else None,
        train_dataset=labelled(), eval_dataset=labelled(12), compute_metrics=right, callbacks=[seen],
    )  # fmt: skip


def train(folder, seed, privacy=PRIVACY, **changes):
    """What a run with the Trainer gives: to be compared between numbers of processes."""
    seen = Seen()
    trainer = trainer_of(folder, seed, seen, privacy, **changes)
    output = trainer.train()
    steps = range(8 if privacy.dp_enabled else 0)
    return {
        "params": trained(trainer.model), "logs": seen.logs, "metrics": trainer.evaluate(),
        "epsilon": output.metrics.get("privacy/epsilon"), "ledger": trainer.ledger.to_json(),
        "wrapped": type(trainer.model_wrapped).__name__,
        "draws": [len(trainer.plan.draw(trainer._run.state, step, trainer._ranks)) for step in steps],
    }  # fmt: skip


def sharded_loader(ranks):
    """What accelerate makes of a loader with Poisson batches, given to a step: its error, and where the run stands."""
    plan = jobs.plan(sampler=sampling.Poisson(jobs.NUM_RECORDS, 0.5))
    dp_step, data = dpfunc.make_dp_step(jobs.loss_fn, plan, ranks=ranks), jobs.data()
    records = [{name: value[i] for name, value in data.items()} for i in range(jobs.NUM_RECORDS)]
    begun = dp_step.init(jobs.params(), dpfunc.rng.insecure_key(2150))
    batch = next(iter(Accelerator(cpu=True).prepare(plan.loader(records, begun))))
    return caught(dp_step, jobs.params(), batch, begun)


def troubles(folder, ranks):
    """One process cannot write, read or draw: what each is told, and at once."""

    full, found = mock.Mock(side_effect=OSError("the disk is full")), {}

    def patched(module, name, rank):
        return mock.patch.object(module, name, full) if ranks.rank == rank else nullcontext()

    for module, name, rank in (
        (trainer_state, "finish", 0), (trainer_state, "write_accounting", 0), (saving, "_commit", 0),
        (trainer_state.folder, "verify", 1),
    ):  # fmt: skip
        again(KEY)
        with patched(module, name, rank):
            if name == "verify":
                found[name] = caught(trainer_of(folder / "run", 10, Seen()).train, True)
            else:
                found[name] = caught(train, folder / name, 10)
    texts = [{"text": str(number)} for number in range(3)]
    (folder / "there.jsonl").touch()
    found["there"] = caught(generate.write_texts, folder / "there.jsonl", iter(texts), ranks)
    with mock.patch.object(generate, "_write", full):
        found["full"] = caught(generate.write_texts, folder / "full.jsonl", iter(texts), ranks)
    found["written"] = generate.write_texts(folder / "texts.jsonl", iter(texts), ranks)
    how, writer = generate.Sampling(num=2, batch_size=1), generate.Writer(None, None, 1.0, 1e-3, 8)
    with mock.patch.object(generate, "_drawn", full if ranks.rank == 1 else lambda *args: ["text"]):
        found["draw"] = caught(lambda: list(generate.sample(writer, [{"prompt": ""}], how, ranks)))
    return found


def trainer(folder):
    """The Trainer and what surrounds it."""
    ranks = distributed.from_environment()
    found = {"place": (ranks.rank, ranks.size), "writer": distributed.is_writer(ranks)}
    found["timeout"] = ranks.group._get_backend(ranks.device).options._timeout
    found["again"] = distributed.from_environment() == ranks  # what is there is used
    found["run"] = train(folder / "run", 10 + ranks.rank)
    found["twin"] = train(folder / "twin", 10 + ranks.rank, dataclasses.replace(PRIVACY, dp_enabled=False), max_steps=2)
    found["sharded loader"] = sharded_loader(ranks)
    found["same"] = caught(distributed.check_same, "files", "the same", ranks)
    found["other"] = caught(distributed.check_same, "files", f"files of {ranks.rank}", ranks)

    found["once"] = caught(distributed.once, ranks, mock.Mock(side_effect=OSError("the disk is full")))
    between_parts()
    found.update(troubles(folder, ranks))
    # Last: it makes the Trainer forget the other processes.
    found["alone"] = caught(lambda: trainer_of(folder / "alone", 0, Seen(), use_cpu=False))
    torch.save(found, folder / f"rank{ranks.rank}.pt")


def killed(line, *arguments):
    """`dpfunc ARGUMENTS`, whose first process is killed when that line of its journal is on disk."""
    append = chain.append_chained

    def append_and_die(file, path, *rest):
        append(file, path, *rest)
        if len(path.read_text().splitlines()) == int(line):
            os.kill(os.getpid(), signal.SIGKILL)

    chain.append_chained = append_and_die
    main(list(arguments))


PARTS = ("resume", "generate", "train", "trainer", "troubles")


def all_parts(*arguments):
    """`dpfunc` commands with `then` between them, and the Trainer, in the same processes, which leave each other once.

    `END` is printed between them. The run that is resumed comes first: nothing of it is in the memory of these processes.
    """
    distributed.from_environment(timedelta(minutes=4))
    shutdown, distributed.shutdown = distributed.shutdown, lambda: None
    words = list(arguments)
    while words != ["trainer"]:
        end = words.index("then")
        main(words[:end], standalone_mode=False)
        words = words[end + 1 :]
        between_parts()
        state._runs.clear()  # each part stands for processes of its own
    trainer(Path("trainer"))
    shutdown()


def between_parts():
    """Print `END` when each process has printed what it had to."""
    sys.stdout.flush()
    sys.stderr.flush()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        print(END, flush=True)
        print(END, file=sys.stderr, flush=True)
    torch.distributed.barrier()


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    {"killed": killed, "all_parts": all_parts}[name](*arguments)
