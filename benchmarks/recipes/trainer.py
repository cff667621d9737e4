"""What `dpfunc train` and `DPTrainer` reach with the budget alone: `python -m benchmarks.recipes.trainer`.

For each data set, strategy and way: accuracy on the test part after runs whose batch size, steps and rates come from
the recipe. The ways: a job of `dpfunc train`, and `DPTrainer` with `PrivacyArguments(dp_recipe=...)` on the same model
and records. Nothing is chosen here, and the test part is read once, at the end of each run. Data and parts are those of
data.py. Each run has its own secret noise; frozen layers are computed once for all runs, which does not change them.
Results are kept after each run: one that is stopped leaves those that ended. Classes of images are no task of
`dpfunc train`: there the way is `DPTrainer` alone, with a head on what a frozen vision network gives (`seen` in
data.py).
"""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.modeling_outputs import ImageClassifierOutput

from benchmarks.recipes.__main__ import NETWORK_EPSILON as EPSILON
from benchmarks.recipes.__main__ import PAGE, SEEDS, delta_of
from benchmarks.recipes.data import ROOT, SHARES, Part, load, mails, news
from benchmarks.results import FOLDER, fill, keep, markdown, rows_of
from dpfunc.hf import DPTrainer, PrivacyArguments
from dpfunc.recipes import Head
from dpfunc.train._dataset import PadRight
from dpfunc.train._frozen import compute_frozen
from dpfunc.train.config import job_from_dict
from dpfunc.train.run import LOSSES, Prepared, classification, make_trainer, prepare

RESULT = FOLDER / "recipes_trainer.json"
HEADS = ("data", "strategy", "way", "tokens", "n", "parameters", "rate of head", "majority", "recipe", "runs")
STRATEGIES = ("head", "lora")
WAYS = ("dpfunc train", "DPTrainer")
LENGTH = {"mails": 64, "bbc": 96}  # tokens
IMAGES = ("fashion-vision",)
ROWS_AT_ONCE = 1024  # of features


class ImageHead(nn.Module):
    """A `Head` on features (B, width): what a user writes in ten lines."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.classifier = Head(width, classes)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        """Logits (B, classes), and the mean loss if the labels are given."""
        logits = self.classifier(pixel_values)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


def write_parts(pairs: list[tuple[str, str]], folder: Path, ends: Mapping[str, float]) -> list[str]:
    """A table of each part, which ends at a share of the pairs in a fixed order; and the classes."""
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    start = 0
    for part, share in ends.items():
        end = round(len(pairs) * share)
        lines = [json.dumps({"text": pairs[row][0], "label": pairs[row][1]}) for row in order[start:end]]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        start = end
    return sorted({label for _, label in pairs})


def trainer_of(prepared: Prepared, way: str, folder: Path, epsilon: float = EPSILON) -> Any:
    """The trainer of a job; or one that is told the recipe's name, the budget and what fits into memory."""
    model = copy.deepcopy(prepared.model)
    if way == "dpfunc train":
        job = dataclasses.replace(prepared.job, output_dir=str(folder))
        return make_trainer(dataclasses.replace(prepared, job=job, model=model), None)
    job, records = prepared.job, prepared.records
    privacy = PrivacyArguments(
        dp_epsilon=epsilon, dp_delta=job.privacy.dp_delta, dp_recipe=job.strategy,
        dp_physical_batch_size=job.training.physical_batch_size,
    )  # fmt: skip
    return DPTrainer(
        model=model, args=arguments(folder), privacy=privacy, loss=LOSSES[job.task], train_dataset=records.train,
        eval_dataset=records.evaluation or None, data_collator=PadRight(0, job.data.max_length),
        compute_metrics=classification,
    )  # fmt: skip


def arguments(folder: Path) -> TrainingArguments:
    """No value that a recipe decides."""
    return TrainingArguments(output_dir=str(folder), report_to="none", remove_unused_columns=False)


def run(trainer: Any) -> dict[str, float]:
    """Train; seconds, metrics of the test part, and epsilon."""
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, **trainer.evaluate(), "spent": trainer.plan.guarantee().epsilon}


def measure_images(name: str, seeds: int) -> Iterator[dict[str, Any]]:
    """The result of `DPTrainer` with a head on images after each run."""
    data, runs = load(name), list[dict[str, float]]()
    width = data.train.x.shape[1]

    def records(part: Part) -> list[dict[str, Any]]:
        rows = zip(part.x, part.y.tolist(), strict=True)
        return [{"pixel_values": x, "labels": y} for x, y in rows]

    train, test = records(data.train), records(data.test)
    for _ in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            privacy = PrivacyArguments(
                dp_epsilon=EPSILON, dp_delta=delta_of(len(train)), dp_recipe="head",
                dp_physical_batch_size=ROWS_AT_ONCE,
            )  # fmt: skip
            trainer = DPTrainer(
                model=ImageHead(width, data.classes), args=arguments(Path(folder)), privacy=privacy,
                loss="image_classification", train_dataset=train, eval_dataset=test, compute_metrics=classification,
            )  # fmt: skip
            runs.append(run(trainer))
        facts = (len(train), trainer.recipe.num_parameters, trainer.recipe.noise_to_signal)
        yield result_of((name, "head", "DPTrainer"), facts, {"max_length": None}, trainer, runs)


def measure(name: str, strategy: str, ways: tuple[str, ...], seeds: int, max_length: int) -> Iterator[dict[str, Any]]:
    """The result of each way after each run: with one run, with two, ..."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pairs = mails() if name == "mails" else news()
        labels = write_parts(pairs, folder, {"train": SHARES[0], "validation": SHARES[0] + SHARES[1], "test": 1.0})
        delta = delta_of(round(len(pairs) * SHARES[0]))
        job = job_from_dict({
            "task": "text_classification", "strategy": strategy, "output_dir": str(folder / "run"),
            "model": {"path": str(ROOT / ".cache" / "model")},
            "data": {
                "train": str(folder / "train.jsonl"), "eval": str(folder / "test.jsonl"), "labels": labels,
                "max_length": max_length,
            },
            "privacy": {"dp_epsilon": EPSILON, "dp_delta": delta},
        })  # fmt: skip
        prepared = prepare(job)
        records, _ = compute_frozen(prepared.job, prepared.model, prepared.records, shows=True)
        prepared = dataclasses.replace(prepared, records=records)
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for seed in range(seeds):
            for way in ways:
                trainer = trainer_of(prepared, way, folder / f"{way} {seed}")
                runs[way].append(run(trainer))
                noise = None if prepared.recipe is None else prepared.recipe.noise_to_signal
                facts = (len(prepared.records.train), prepared.num_trained, noise)
                read = {"top_layers": prepared.job.lora.top_layers, "max_length": prepared.job.data.max_length}
                yield result_of((name, strategy, way), facts, read, trainer, runs[way])


def result_of(
    place: tuple[str, str, str],
    facts: tuple[int, int, float | None],
    read: dict[str, Any],
    trainer: Any,
    runs: list[dict[str, float]],
) -> dict[str, Any]:
    """One entry of the file."""
    plan, groups = trainer.plan, trainer.optimizer.param_groups
    return {
        **dict(zip(("data", "strategy", "way"), place, strict=True)),
        **dict(zip(("n", "parameters", "noise_to_signal"), facts, strict=True)),
        "epsilon": EPSILON, "delta": plan.delta,
        "settings": {
            "learning_rate": groups[0]["initial_lr"], "head_rate": groups[1]["initial_lr"] if groups[1:] else None,
            "steps": plan.num_steps, "batch_size": plan.sampler.expected_batch_size(0), **read,
        },
        "majority": runs[0]["eval_majority"], "accuracy": [each["eval_accuracy"] for each in runs],
        "spent": runs[0]["spent"], "seconds": statistics.median(each["seconds"] for each in runs),
    }  # fmt: skip


def spread(values: Sequence[float]) -> str:
    """Mean, lowest and highest."""
    return f"{statistics.mean(values):.3f} ({min(values):.3f} - {max(values):.3f})"


def line(result: dict[str, Any]) -> list[Any]:
    """One row of the table in docs/recipes.md."""
    settings = result["settings"]
    rate = settings["head_rate"] or settings["learning_rate"]
    return [
        *(result[key] for key in ("data", "strategy", "way")), settings["max_length"] or "", result["n"],
        result["parameters"], f"{rate:.3g}", f"{result['majority']:.3f}", spread(result["accuracy"]),
        len(result["accuracy"]),
    ]  # fmt: skip


def place(result: dict[str, Any]) -> tuple[str, ...]:
    """Of a result in its file."""
    return result["data"], result["strategy"], result["way"], str(result["settings"]["max_length"])


def tables(results: list[dict[str, Any]]) -> dict[str, str]:
    """Of docs/recipes.md."""
    return {"way": markdown(HEADS, [line(each) for each in results])}


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--strategy", type=click.Choice(STRATEGIES), multiple=True, help="All by default.")
@click.option("--way", type=click.Choice(WAYS), multiple=True, help="All by default.")
@click.option("--seeds", type=int, default=SEEDS, help="Runs of each.")
@click.option("--max-length", type=int, help="Tokens of a text that are used.")
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="File of the results.")
def main(
    names: tuple[str, ...], strategy: tuple[str, ...], way: tuple[str, ...], seeds: int, max_length: int | None,
    out: Path,
) -> None:  # fmt: skip
    """Measure, print, and keep the results; others in the file stay."""
    console = Console(width=200)
    torch.set_num_threads(1)
    for name in names or (*LENGTH, *IMAGES):
        for each in strategy or STRATEGIES:
            for result in results(name, each, way or WAYS, seeds, max_length):
                console.print(*line(result))
                keep(out, result, place)
                if out == RESULT:
                    fill(PAGE, tables(rows_of(out)))


def results(
    name: str, strategy: str, ways: tuple[str, ...], seeds: int, max_length: int | None
) -> Iterator[dict[str, Any]]:
    """Results of a data set; for images of a head with `DPTrainer` alone."""
    if name not in IMAGES:
        yield from measure(name, strategy, ways, seeds, max_length or LENGTH[name])
    elif strategy == "head" and "DPTrainer" in ways:
        yield from measure_images(name, seeds)


if __name__ == "__main__":
    main()
