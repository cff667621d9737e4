"""One job by the command, by DPTrainer and by a loop: `python -m benchmarks.beside` writes beside.json and its table.

The job is `titles` of `benchmarks.adapters`, for a head alone and for LoRA in the highest layer beside one. All three
have the same records, encoder, budget and recipe, and each run has its own noise. The loop is the block of the guide of
PEFT, taken from that page: what is measured is what a reader copies. DPTrainer is given the features of each record for
a head, and tokens for LoRA. Each run is written when it ends, and one that is written is not run again; `--page` writes
the table alone.
"""

from __future__ import annotations

import json
import re
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch
import yaml
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from scipy.stats import ttest_ind
from transformers import TrainingArguments

import dpfunc
from benchmarks import adapters
from benchmarks.adapters import PAGE, Data, interval
from benchmarks.results import FOLDER, fill, keep, markdown, rows_of
from dpfunc.cli.main import main as dpfunc_command
from dpfunc.features import load_mean_pooled
from dpfunc.hf import DPTrainer, PrivacyArguments

RESULT = FOLDER / "beside.json"
KINDS = {"head": "a head alone", "lora": "LoRA + head"}
SEEDS = 5


@dataclass(frozen=True)
class Task:
    """What each way is given.

    Args:
        model: folder of the encoder. train, test: texts with their classes. tokens: of a text. epsilon, delta: budget.
    """

    model: str
    train: list[tuple[str, str]]
    test: list[tuple[str, str]]
    tokens: int
    epsilon: float
    delta: float

    @property
    def labels(self) -> list[str]:
        """The classes, which are public."""
        return sorted({label for _, label in [*self.train, *self.test]})

    def data(self) -> Data:
        """Tokens of all records, those to train on first."""
        return adapters.tokenized([*self.train, *self.test], self.model, self.tokens)


def titles() -> Task:
    """The task of the table."""
    pairs = adapters.chosen("titles")
    split = len(pairs) * 4 // 5
    return Task(
        adapters.MODEL, pairs[:split], pairs[split:], adapters.TOKENS["titles"], adapters.EPSILON, adapters.DELTA
    )


def of_the_page() -> dict[str, Any]:
    """The functions of the loop, as a reader of the guide copies them."""
    found = re.search(r"```python\n(import dpfunc\n(?:(?!```).)*?)\nENCODER = ", PAGE.read_text("utf-8"), re.DOTALL)
    if found is None:
        raise ValueError(f"Expected the block with `ENCODER = ` in {PAGE}.")
    names: dict[str, Any] = {}
    exec(compile(found[1], "the loop of the guide", "exec"), names)
    return names


@torch.no_grad()
def accuracy(model: Any, data: Data, begin: int) -> float:
    """Share of the records from `begin` on whose most likely class is their label, by the whole model from tokens."""
    logits = model.eval()(input_ids=data.ids[begin:], attention_mask=data.mask[begin:]).logits
    return float((logits.argmax(1) == data.labels[begin:]).float().mean())


def by_command(kind: str, task: Task, seed: int, folder: Path) -> tuple[float, float]:
    """Accuracy and epsilon of `dpfunc train`, as it writes them."""
    for name, pairs in (("train", task.train), ("test", task.test)):
        lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in pairs]
        (folder / f"{name}.jsonl").write_text("".join(lines), "utf-8")
    job = {
        "task": "text_classification", "output_dir": str(folder / "run"), "strategy": kind,
        "model": {"path": task.model},
        "data": {
            "train": str(folder / "train.jsonl"), "eval": str(folder / "test.jsonl"), "labels": task.labels,
            "max_length": task.tokens, "deduplicate": False,
        },
        "privacy": {"dp_epsilon": task.epsilon, "dp_delta": task.delta}, "training": {"seed": seed},
    }  # fmt: skip
    (folder / "job.yaml").write_text(yaml.safe_dump(job), "utf-8")
    CliRunner().invoke(dpfunc_command, ["train", str(folder / "job.yaml")], catch_exceptions=False)
    metrics, spent = (
        json.loads((folder / "run" / name).read_text("utf-8")) for name in ("metrics.json", "privacy_accounting.json")
    )
    return metrics["eval_accuracy"], spent["epsilon"]


def by_trainer(kind: str, task: Task, seed: int, folder: Path) -> tuple[float, float]:
    """Accuracy and epsilon of DPTrainer."""
    torch.manual_seed(seed)
    data, split = task.data(), len(task.train)
    model: Any = load_mean_pooled(task.model, num_labels=data.classes)
    inputs = {"input_ids": data.ids[:split], "attention_mask": data.mask[:split]}
    if kind == "head":
        inputs = {"features": of_the_page()["once"](model.pooled, inputs)}
        model.backbone.requires_grad_(False)
    else:
        config = {**adapters.COMMON, "lora_alpha": 16, "layers_to_transform": [model.config.num_hidden_layers - 1]}
        model = get_peft_model(model, LoraConfig(**config))
    trainer = DPTrainer(
        model=model,
        args=TrainingArguments(str(folder / "run"), report_to="none", use_cpu=True, dataloader_pin_memory=False),
        privacy=PrivacyArguments(
            dp_epsilon=task.epsilon, dp_delta=task.delta, dp_recipe=kind, dp_physical_batch_size=256
        ),
        loss="sequence_classification",
        train_dataset=[
            {**{name: value[row] for name, value in inputs.items()}, "labels": data.labels[row]} for row in range(split)
        ],
    )
    found = trainer.train()
    return accuracy(trainer.model, data, split), found.metrics["privacy/epsilon"]


def by_loop(kind: str, task: Task, seed: int, folder: Path) -> tuple[float, float]:
    """Accuracy and epsilon of the loop of the page."""
    torch.manual_seed(seed)
    data, split = task.data(), len(task.train)
    rows = {"input_ids": data.ids[:split], "attention_mask": data.mask[:split]}
    model, ledger = of_the_page()[f"private_{kind}"](
        task.model, rows, data.labels[:split], data.classes, epsilon=task.epsilon, delta=task.delta
    )
    return accuracy(model, data, split), ledger.epsilon(task.delta).epsilon


WAYS: dict[str, Callable[[str, Task, int, Path], tuple[float, float]]] = {
    "command": by_command,
    "trainer": by_trainer,
    "loop": by_loop,
}
TITLES = {"command": "`dpfunc train`", "trainer": "`DPTrainer`", "loop": "the loop"}


def measure(way: str, kind: str, task: Task, seed: int) -> dict[str, Any]:
    """One run: accuracy on the test records, epsilon that was spent, and seconds of the CPU."""
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", dpfunc.errors.RunWarning)  # the ways are compared: none counts the others
        start = time.process_time()
        found, epsilon = WAYS[way](kind, task, seed, Path(folder))
        seconds = time.process_time() - start
    return {
        "way": way, "kind": kind, "seed": seed, "records": len(task.train), "tested": len(task.test),
        "accuracy": found, "epsilon": epsilon, "delta": task.delta, "seconds": seconds,
    }  # fmt: skip


def place(row: Any) -> tuple[Any, ...]:
    """What a run is: no two rows of the file have the same."""
    return row["kind"], list(WAYS).index(row["way"]), row["seed"]


def against(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Difference of two means, and half of its interval of 95 % by Welch's t."""
    found = ttest_ind(ours, theirs, equal_var=False).confidence_interval()
    return (found.low + found.high) / 2, (found.high - found.low) / 2


def tables(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The table of the guide, by its name there."""
    lines = []
    for kind, title in KINDS.items():
        found = {way: [row for row in rows if (row["way"], row["kind"]) == (way, kind)] for way in WAYS}
        reached = {way: [row["accuracy"] for row in each] for way, each in found.items()}
        for way, each in found.items():
            mean, half = interval(reached[way])
            gap, wide = against(reached[way], reached["command"])
            numbers = [f"{mean:.3f} ± {half:.3f}", "" if way == "command" else f"{gap:+.3f} ± {wide:.3f}"]
            lines.append([
                title, TITLES[way], *(number.replace("0.", ".") for number in numbers), len(each),
                f"{max(row['epsilon'] for row in each):.4f}",
                f"{statistics.median(row['seconds'] for row in each):.0f}",
            ])  # fmt: skip
    return {
        "beside": markdown(
            ["", "by", "accuracy", "less the command's", "runs", "epsilon spent", "CPU seconds"], lines, "---:"
        )
    }


@click.command()
@click.option("--kind", "kinds", multiple=True, type=click.Choice([*KINDS]), default=[*KINDS])
@click.option("--seeds", default=SEEDS, show_default=True)
@click.option("--page", is_flag=True, help="Write the table of the guide, and train nothing.")
def main(kinds: tuple[str, ...], seeds: int, page: bool) -> None:
    """Run the job by each way, in turn, and write each run when it ends; then the table."""
    torch.set_num_threads(1)
    task = titles()
    for seed in range(0 if page else seeds):
        for kind in kinds:
            for way in WAYS:
                if place({"way": way, "kind": kind, "seed": seed}) in map(place, rows_of(RESULT)):
                    continue
                row = measure(way, kind, task, seed)
                print(json.dumps(row), flush=True)
                keep(RESULT, row, place)
    fill(PAGE, tables(rows_of(RESULT)))


if __name__ == "__main__":
    main()
