"""Runs that are killed at any change that they make to files, then resumed: loops, the Trainer, the command.

Each run is a fork of this process, which itself computes nothing. In the fork the calls that change files are counted, and
before one of them the fork kills itself with SIGKILL. Directories are listed in random order, as file systems may.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import io
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from text_job import write_job

import dpfunc
from dpfunc import clipping, sampling
from dpfunc._utils.parts import local
from dpfunc.batches import take
from dpfunc.checkpoint import load, save
from dpfunc.checkpoint.journal import Journal, journal_ledger, read_steps
from dpfunc.errors import CheckpointError
from dpfunc.plan import Plan
from dpfunc.step import make_dp_step

CHANGES = ("unlink", "rmdir", "rename", "replace", "mkdir", "ftruncate")
PACKAGES = ("torch", "numpy", "scipy", "safetensors", "transformers", "peft", "opacus", "accelerate", "tokenizers", "click",
            "rich", "randomgen", "dpfunc", "trainer_cases", "text_job")  # fmt: skip
STEPS = 6
PLAN = Plan(sampling.Poisson(40, 0.3), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=STEPS, delta=1e-3)


Told = Callable[[], object]  # a fork tells its parent, also if it is killed, of each step whose gradients it had


class Outcome(NamedTuple):
    """What a fork did: whether its own SIGKILL ended it, the changes that it counted, its value or error, its steps."""

    killed: bool
    changes: int
    value: Any
    error: str
    seen: int = 0


def forked(action: Callable[[Told], Any], kill_at: int | None = None, seed: int = 0) -> Outcome:
    """Run an action in a fork, and kill it before its change number `kill_at` (from 1), if it comes to that."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # progress bars
            os.dup2(2, 1)
            warnings.simplefilter("ignore")  # nobody sees what this process prints
            count = watch(kill_at, random.Random(seed))
            try:
                said = {"value": action(lambda: os.write(writer, b"s")), "error": ""}
            except BaseException:  # noqa: BLE001  (told to the parent)
                said = {"value": None, "error": traceback.format_exc()}
            os.write(writer, json.dumps({**said, "changes": count[0]}).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    ended = os.waitpid(child, 0)[1]
    seen = len(text) - len(text.lstrip(b"s"))
    if os.WIFSIGNALED(ended):
        return Outcome(True, kill_at or 0, None, "", seen)
    return Outcome(False, seen=seen, **json.loads(text[seen:]))


def watch(kill_at: int | None, draw: random.Random) -> list[int]:
    """Count changes of files from here on in this process, kill it at one of them, and list directories in any order."""
    count = [0]

    def change() -> None:
        count[0] += 1
        if count[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    def counted(real: Any, changes: Callable[..., bool] = lambda *args, **kwargs: True) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if changes(*args, **kwargs):
                change()
            return real(*args, **kwargs)

        return call

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))
    os.fsync = counted(lambda handle: None)  # which a kill does not depend on
    os.open = counted(os.open, lambda path, flags, *more, **others: bool(flags & os.O_CREAT))
    builtins.open = io.open = counted(open, lambda file, mode="r", *more, **others: not {*mode}.isdisjoint("wax+"))
    listed, scanned = os.listdir, os.scandir

    class Entries(list[Any]):
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            return None

        close = __exit__

    def scandir(path: Any = ".") -> Any:
        with scanned(path) as entries:
            return Entries(draw.sample(found := list(entries), len(found)))

    os.listdir = lambda path=".": draw.sample(found := listed(path), len(found))
    os.scandir = scandir  # type: ignore[assignment]  # fewer overloads
    return count


def digest(params: Any) -> str:
    """Digest of named tensors."""
    whole = hashlib.blake2b(digest_size=16)
    for name, value in sorted(params.items()):
        whole.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()


# The runs. Each goes on from what is in its folder, or begins; it returns a digest of its result.

DATA = {"x": torch.tensor([[float((7 * i + 3 * j) % 11) - 5 for j in range(3)] for i in range(40)])}


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    return (batch["x"] @ params["w"] - params["b"]).square()


def plain(folder: Path, told: Told) -> str:
    """A loop over steps, with Adam, that saves after every second step."""
    return loop(folder, told, {"w": torch.zeros(3), "b": torch.zeros(())}, None)


def sharded(folder: Path, told: Told) -> str:
    """The same loop over parameters in parts, as one process of a group: saved and loaded by what several use."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from dpfunc import distributed

    wait = timedelta(minutes=1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=wait)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    params = distributed.shard({"w": torch.zeros(3), "b": torch.zeros(())}, mesh, min_size=0)
    return loop(folder, told, params, distributed.sharded(mesh))


def loop(folder: Path, told: Told, start: dict[str, torch.Tensor], ranks: Any) -> str:
    """A loop over steps from its last checkpoint, or from these parameters."""
    params = {name: p.requires_grad_() for name, p in start.items()}
    optimizer = torch.optim.Adam(params.values(), lr=0.1)
    journal, place = Journal(folder / "journal.jsonl", PLAN), folder / "checkpoints"
    common = {"plan": PLAN, "data": DATA, "params": params, "journal": journal.path, "ranks": ranks}
    dp_step = make_dp_step(loss_fn, PLAN, journal=journal, engine="loop" if ranks else "vmap", ranks=ranks)
    try:
        saved = load(place, **common)
    except CheckpointError as error:
        if "found none. Start a new run" not in str(error):
            raise
        if read_steps(journal.path, missing="empty"):
            raise RuntimeError("steps were released before the first checkpoint was whole") from error
        state = dp_step.init(params, dpfunc.rng.insecure_key(3))
        save(place, state=state, optimizer_state=optimizer.state_dict(), keep=1, **common)
    else:
        state = saved.state
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(saved.params[name])
        optimizer.load_state_dict(dict(saved.optimizer_state or {}))
    for indices in PLAN.batches(state, ranks):
        grads, state, _ = dp_step(params, take(DATA, indices), state)
        told()
        for name, p in params.items():
            p.grad = grads[name]
        optimizer.step()
        if state.step % 2 == 0:
            save(place, state=state, optimizer_state=optimizer.state_dict(), keep=1, **common)
    return digest({name: local(p) for name, p in params.items()})


def by_trainer(folder: Path, told: Told) -> str:
    """A tiny classifier, trained by DPTrainer."""
    from trainer_cases import classifier, labelled, training_arguments

    from dpfunc.hf.trainer.arguments import PrivacyArguments
    from dpfunc.hf.trainer.trainer import DPTrainer

    privacy = PrivacyArguments(dp_noise_multiplier=1.0, dp_delta=1e-3, dp_max_grad_norm=1.0, dp_accountant="rdp")
    arguments = training_arguments(
        folder / "run", max_steps=STEPS, save_strategy="steps", save_steps=2, save_total_limit=1, logging_strategy="no"
    )
    model = classifier()
    trainer = DPTrainer(
        model, arguments, privacy=privacy, train_dataset=labelled(), callbacks=[counting(told)],
        key=dpfunc.rng.insecure_key(3),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=True)
    return digest({name: p for name, p in model.named_parameters() if p.requires_grad})


def by_command(folder: Path, told: Told) -> str:
    """A tiny language model, trained by `dpfunc train`; the start first, which says when to resume, or the reverse."""
    from click.testing import CliRunner
    from safetensors.torch import load_file

    from dpfunc.cli.main import main
    from dpfunc.train import run as train_job

    os.chdir(folder)
    make = train_job.make_trainer

    def made(*args: Any) -> Any:
        trainer = make(*args)
        trainer.add_callback(counting(told))
        return trainer

    train_job.make_trainer = made
    command = ["train", "job.yaml", "--insecure-seed", "3", *FLAGS]
    ways = [([], "Go on with the run there: --resume"), (["--resume"], "found none. Start it without --resume")]
    for flags, other in ways if os.getpid() % 2 else reversed(ways):
        done = CliRunner().invoke(main, [*command, *flags])
        if done.exit_code == 0 or other not in done.stderr:
            break
    if done.exit_code:
        raise RuntimeError(done.stderr) from done.exception
    accounting = json.loads(Path("run/privacy_accounting.json").read_text())
    counted = dpfunc.Ledger.from_json(json.dumps(accounting["ledger"]))
    if counted != journal_ledger("run/privacy_journal.jsonl"):
        raise RuntimeError(f"the accounting has {counted}")
    return digest(load_file("run/model/adapter_model.safetensors"))


def counting(told: Told) -> Any:
    """A callback of the Trainer that tells of each step whose gradients are there."""
    from transformers import TrainerCallback

    return type("Counting", (TrainerCallback,), {"on_pre_optimizer_step": lambda *args, **kwargs: told() and None})()


FLAGS = [
    "--dp_noise_multiplier",
    "1.0",
    "--dp_accountant",
    "rdp",
    "--batch_size",
    "8",
    "--steps",
    "6",
    "--keep_checkpoints",
    "1",
]


class Kind(NamedTuple):
    """A kind of run: runs it in a folder; its journal there; writes what the folder needs."""

    go: Callable[[Path, Told], str]
    journal: str
    prepare: Callable[[Path], object] | None = None  # in a fork, since tokenizers start threads


KINDS = {
    "plain": Kind(plain, "journal.jsonl"),
    "sharded": Kind(sharded, "journal.jsonl"),
    "trainer": Kind(by_trainer, "run/privacy_journal.jsonl"),
    "command": Kind(by_command, "run/privacy_journal.jsonl", prepare=write_job),
}


@dataclass
class Tally:
    """Processes that were killed, runs resumed to the uninterrupted one's result, its changes, and problems."""

    kills: int = 0
    resumed: int = 0
    changes: int = 0
    problems: list[str] = field(default_factory=list)

    def values(self) -> dict[str, int]:
        return {**vars(self), "problems": len(self.problems)}


def begin(kind: Kind, folder: Path) -> None:
    """A new folder for a run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if kind.prepare is not None and (error := forked(lambda told: kind.prepare(folder) and None).error):
        raise RuntimeError(error)


def steps_in(journal: Path, tally: Tally) -> int:
    """Steps of the run in its journal; one that cannot be read is a problem."""
    try:
        return max((len(run) for run in read_steps(journal, missing="empty").values()), default=0)
    except CheckpointError as error:
        tally.problems.append(f"{journal}: {error}")
        return STEPS


def copied(template: Path, folder: Path) -> None:
    """A run's folder before its first step."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)


def fuzz(name: str, points: int, folder: Path, seed: int = 0) -> Tally:
    """Kill runs of one kind until so many processes were killed, and compare each with one that nobody killed."""
    kind, tally, draw, number = KINDS[name], Tally(), random.Random(f"{name} {seed}"), 0
    template, place = folder / "template", folder / "run"
    begin(kind, template)
    shutil.rmtree(folder / "begun", ignore_errors=True)
    template = template.rename(folder / "begun")  # a copy does not go on beside its run
    copied(template, place)
    whole = forked(lambda told: kind.go(place, told), None, seed)
    if whole.error:
        raise RuntimeError(f"{name}: {whole.error}")
    tally.changes, expected = whole.changes, journal_ledger(place / kind.journal)
    while tally.kills < points:
        copied(template, place)
        number += 1
        seen: int = 0
        for attempt in range(20):
            # The first kills are spread over the run, those of its resumptions are anywhere.
            first = 1 + (number * 7919 + seed) % whole.changes
            at = first if attempt == 0 else draw.randint(1, 1 + whole.changes // 2) if attempt < 5 else None
            done = forked(lambda told: kind.go(place, told), at, draw.getrandbits(32))
            tally.kills += done.killed
            counted = steps_in(place / kind.journal, tally)
            seen = max(seen, done.seen if attempt == 0 else 0)
            if counted < seen:
                tally.problems.append(f"{name} {number}: {seen} steps were seen, {counted} are in the journal")
            if not done.killed:
                break
        if not (problem := done.error):
            ledger, left = journal_ledger(place / kind.journal), list(place.rglob(".saving-*"))
            wrong = {"another result": done.value != whole.value, f"the journal has {ledger}": ledger != expected}
            problem = ", ".join(text for text, found in {**wrong, f"left {left}": left}.items() if found)
        tally.resumed += not problem
        tally.problems += [f"{name}, run {number}, first killed at {first}: {problem}"] if problem else []
    return tally


def warm(names: Iterable[str], folder: Path) -> None:
    """Import what the runs import, so that forks need not; nothing is computed here, which forks might not survive."""
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name in names:
        place, kind = folder / f"warm-{name}", KINDS[name]
        begin(kind, place)

        def imported(told: Told, go: Callable[[Path, Told], str] = kind.go, place: Path = place) -> list[str]:
            go(place, told)
            return [module for module in sys.modules if module.partition(".")[0] in PACKAGES]

        done = forked(imported)
        if done.error:
            raise RuntimeError(done.error)
        for module in done.value:
            with suppress(ImportError, AttributeError):
                importlib.import_module(module)
