"""Questions about images under differential privacy: LLaVA in small, in a plain loop over dp_step.

    python examples/vqa/train.py                    easy-VQA, epsilon 8, delta 1e-5
    python examples/vqa/train.py --smoke            a few steps on a few images

One record is one image with all its questions. See README.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import downloads
import torch
import vision
from fetch import FetchError
from learn import UNIT, VALIDATION, blind, make_plan, task_of
from loop import Rows, Run, Task, accuracy, train_plain, train_private
from model import load_encoder
from processes import Processes, join
from questions import ImageQuestions, Part, load
from report import PeakMemory, Row, epsilons, print_table, write_run
from vlm import VisionLanguage

import dpfunc
from dpfunc import distributed
from dpfunc.checkpoint.journal import journal_ledger

# At the place where the answer is read: keys and values of words stay frozen, and are kept.
TARGETS = r"attention\.(self\.query|output\.dense)$"
TRAINED = r"^(projector|head)\."


def cached_features(part: Part, name: str, network: vision.EfficientNetLite0, *, keep: bool) -> torch.Tensor:
    """Features of the images, from .cache/ where they are already: they depend on no parameter that is trained."""
    settings = f"{vision.FEATURE_BLOCK}-{vision.INPUT_SIZE}-{vision.GRID}"
    path = downloads.QUESTIONS.with_name(f"easy-vqa-features-{settings}") / f"{name}.pt"
    if keep and path.exists():
        return torch.load(path, weights_only=True)
    features = vision.image_features(network, part.pixels)
    if keep:
        path.parent.mkdir(exist_ok=True)
        torch.save(features, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    return features


def rows_of(data: ImageQuestions, *, keep: bool) -> dict[str, Rows]:
    """What the model is trained on and tested with: features, questions and answers of the three parts."""
    network = vision.load_vision(downloads.fetch_vision())
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    return {
        name: {
            "features": cached_features(part, name, network, keep=keep),
            "question": part.question, "answer": part.answer, "asked": part.asked,
        }
        for name, part in parts.items()
    }  # fmt: skip


def notes(data: ImageQuestions, journalled: dpfunc.Ledger) -> list[str]:
    """What a reader of the table must know."""
    return [
        "the unit of privacy is one image with all its questions; neighbours differ by one image added or removed",
        f"the journal of this folder counts {journalled.num_steps} private steps",
        f"the {len(data.validation.pixels)} validation images are not protected; settings were chosen on them",
        "image features and lower layers are frozen functions of each image or question alone: they cost no privacy",
        "the images are synthetic: one plain shape (3 forms, 8 colours) on a light ground; photographs are harder",
    ]


@click.command(context_settings={"show_default": True})
@click.option("--epsilon", default=8.0, help="Privacy budget.")
@click.option("--delta", default=1e-5, help="Must be below 1 / number of training images.")
@click.option("--steps", default=60, help="Private steps.")
@click.option("--batch-size", default=900, help="Expected number of images in a batch.")
@click.option("--rank", default=4, help="Rank of the adapters.")
@click.option("--lr", default=0.3, help="Private learning rate of the head; less of it for projector and adapters.")
@click.option("--plain-lr", default=0.1, help="The same without privacy.")
@click.option("--epochs", default=2, help="Epochs without privacy.")
@click.option("--seed", default=0, help="Starting point and non-private order. Public: not the privacy key.")
@click.option("--insecure-seed", default=None, type=int, help="A guessable privacy key, to repeat a run exactly.")
@click.option("--out", type=click.Path(path_type=Path), help="Run folder; runs/<time> by default.")
@click.option("--resume", type=click.Path(path_type=Path, exists=True), help="Go on with the private run of a folder.")
@click.option("--smoke", is_flag=True, help="Two steps on a few images, to see that everything works.")
def main(
    epsilon: float, delta: float, steps: int, batch_size: int, rank: int, lr: float, plain_lr: float, epochs: int,
    seed: int, insecure_seed: int | None, out: Path | None, resume: Path | None, smoke: bool,
) -> None:  # fmt: skip
    """Answer questions about images, privately, and print what privacy cost."""
    settings = dict(click.get_current_context().params)
    if smoke:
        steps, batch_size, epochs = min(steps, 2), 24, 1
    start = time.perf_counter()
    try:
        processes = join()
        data, encoder, rows = inputs(processes, smoke)
    except (FetchError, OSError, dpfunc.errors.DPFuncError) as error:
        raise click.ClickException(str(error)) from error
    model = VisionLanguage(encoder, data.texts, data.answers, rows["train"]["features"].shape[-1], seed).eval()
    adapter = dpfunc.lora.attach(
        model, dpfunc.rng.insecure_key(seed), targets=TARGETS, rank=rank, alpha=rank, train="B", also_train=TRAINED
    )
    task = task_of(adapter.forward, adapter.params, rows)
    n = len(data.train.pixels)
    try:
        plan = make_plan(adapter.params, epsilon=epsilon, delta=delta, n=n, batch=batch_size, steps=steps)
    except dpfunc.errors.DPFuncError as error:
        raise click.ClickException(str(error)) from error
    processes.say(describe(data, plan, time.perf_counter() - start))
    folder = resume or out or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    if processes.writes:
        folder.mkdir(parents=True, exist_ok=True)
    num_test = int(data.test.asked.sum())
    table = [Row("majority answer", data.majority_accuracy, num_test, None, None, 0, 0.0, 0.0)]
    key = processes.key(insecure_seed)
    memory, run = PeakMemory(), None
    try:
        trainings = phases(task, plan, lr, key, folder, plain_lr, epochs, seed, resume is not None, processes)
        for name, trained, params, found, seconds in trainings:
            run = found or run
            spent = epsilons(None if found is None else found.state.ledger, delta)
            count = sum(p.numel() for p in params.values())
            score = accuracy(trained, params, trained.test)
            table.append(Row(name, score, num_test, *spent, count, seconds, memory.mib()))
            memory.reset()
    except dpfunc.errors.DPFuncError as error:
        raise click.ClickException(str(error)) from error
    settings["seconds"] = time.perf_counter() - start
    distributed.shutdown()
    if processes.writes:
        write_run(folder, table, settings, adapter, run)
        print_table(table, delta, notes(data, journal_ledger(folder / "journal.jsonl")))
        print(f"Written to {folder}. Whole command: {settings['seconds']:.0f} s.")


def inputs(processes: Processes, smoke: bool) -> tuple[ImageQuestions, Any, dict[str, Rows]]:
    """Questions, the encoder of texts, and the rows of the three parts. One process downloads and computes features."""

    def read() -> tuple[ImageQuestions, Any, dict[str, Rows]]:
        data = load(downloads.fetch_questions(), 60 if smoke else None)
        return data, load_encoder(downloads.fetch_model()), rows_of(data, keep=not smoke)

    if processes.ranks is not None:
        processes.first(read)
    return read()


def describe(data: ImageQuestions, plan: dpfunc.Plan, seconds: float) -> str:
    """What will be done."""
    sizes = ", ".join(
        f"{len(part.pixels)} {name} images with {int(part.asked.sum())} questions"
        for name, part in (("training", data.train), ("validation", data.validation), ("test", data.test))
    )
    share = plan.sampler.expected_batch_size(0) / plan.sampler.dataset_size
    return (
        f"easy-VQA: {sizes}; {len(data.texts)} distinct questions, {len(data.answers)} answers.\n"
        f"Image features and lower layers are ready, once and for all ({seconds:.0f} s).\n"
        f"Plan: {plan.num_steps} steps, sampling probability {share:.3f}, noise {plan.noise_multiplier:.3f}.\n"
        f"{plan.guarantee()}"
    )


def phases(
    task: Task, plan: dpfunc.Plan, lr: float, key: dpfunc.rng.Key, folder: Path, plain_lr: float, epochs: int,
    seed: int, resume: bool, processes: Processes,
) -> Iterator[tuple[str, Task, Rows, Run | None, float]]:  # fmt: skip
    """The trainings of the table, in order; the last one is the result. Each with its time."""
    if not resume and processes.writes:  # the others wait
        for name, variant in (("question only (not private)", blind(task)), ("non-private twin", task)):
            since = time.perf_counter()
            params = train_plain(variant, plain_lr, epochs, seed)
            yield name, variant, params, None, time.perf_counter() - since
    since = time.perf_counter()
    run = train_private(
        "DP", task, plan, lr, key, processes, unit=UNIT, not_covered=[VALIDATION], folder=folder, resume=resume,
        microbatch_size="auto",
    )  # fmt: skip
    yield "DP training", task, run.params, run, time.perf_counter() - since


if __name__ == "__main__":
    sys.exit(main())
