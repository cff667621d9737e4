"""Private labelled texts -> a private language model -> synthetic labelled texts -> a classifier.

    python examples/synthetic_text/run.py --short           made-up texts, a tiny model: seconds
    python examples/synthetic_text/run.py --train mails.jsonl --test later.jsonl --model my-model/ --labels ham,spam

The language model learns to write a text for a label, with differential privacy. What it writes, and what is trained on
that, costs no more privacy.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from classify import accuracy, fit
from made import TOPICS, rows, write_model
from rich.console import Console
from rich.table import Table

from dpfunc import distributed
from dpfunc.errors import DPFuncError
from dpfunc.train.config import Job, job_from_dict
from dpfunc.train.generate import Sampling, load_writer, sample, write_texts
from dpfunc.train.run import run_job
from dpfunc.train.tables import Row, read_table

PROMPT = "Topic: {label} Text: "
SHORT_TRAIN, SHORT_TEST, SHORT_TEXTS = 2000, 300, 240


@dataclass(frozen=True)
class Result:
    """What came out."""

    on_real: float
    on_synthetic: float
    majority: float
    epsilon: float
    delta: float
    num_test: int
    num_synthetic: int


def job_of(
    train: Path, model: Path, out: Path, *, epsilon: float, delta: float, steps: int, batch_size: int, short: bool
) -> Job:
    """The training job: as a YAML file for `dpfunc train` would say it."""
    return job_from_dict(
        {
            "task": "causal_lm",
            "output_dir": str(out),
            "strategy": "full" if short else "lora",
            "model": {"path": str(model), "init": "random" if short else "pretrained"},
            "data": {"train": str(train), "prompt_template": PROMPT, "max_length": 32 if short else 128},
            "privacy": {"dp_epsilon": epsilon, "dp_delta": delta, "dp_clip": "automatic"},
            "training": {
                "learning_rate": 2e-2 if short else 1e-3, "batch_size": batch_size, "steps": steps,
                "physical_batch_size": 128 if short else 8, "save_steps": steps, "scheduler": "constant",
            },
        }
    )  # fmt: skip


def evaluate(
    real: Sequence[Row],
    synthetic: Sequence[Row],
    test: Sequence[Row],
    classes: tuple[str, ...],
    spent: tuple[float, float],
) -> Result:
    """The same classifier, trained on real and on synthetic texts, on the same real held-out texts."""

    def score(part: Sequence[Row]) -> float:
        model = fit([row["text"] for row in part], [row["label"] for row in part], classes)
        return accuracy(model, [row["text"] for row in test], [row["label"] for row in test])

    common = Counter(row["label"] for row in real).most_common(1)[0][0]
    majority = sum(row["label"] == common for row in test) / len(test)
    return Result(score(real), score(synthetic), majority, *spent, len(test), len(synthetic))


def show(result: Result) -> None:
    """The result as a table."""
    table = Table(title=f"Accuracy on {result.num_test} real held-out texts")
    for column in ("classifier trained on", "accuracy", "epsilon"):
        table.add_column(column)
    table.add_row("nothing: the most frequent label", f"{result.majority:.3f}", "none")
    table.add_row("real texts", f"{result.on_real:.3f}", "inf")
    table.add_row(f"{result.num_synthetic} synthetic texts", f"{result.on_synthetic:.3f}", f"{result.epsilon:.2f}")
    console = Console(width=100)
    console.print(table)
    console.print(f"epsilon at delta = {result.delta:g}; one text with its label is protected.")
    console.print("The held-out texts are not protected: these accuracies are for you, and not released.")


def make_up(train: Path, test: Path, model: Path) -> None:
    """Texts and a tiny model, to see how it works."""
    model.mkdir(parents=True, exist_ok=True)
    for path, count, seed in ((train, SHORT_TRAIN, 0), (test, SHORT_TEST, 1)):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(count, seed)))
    write_model(model)


@click.command(context_settings={"show_default": True})
@click.option(
    "--train", type=click.Path(exists=True, path_type=Path), help="Private texts, .jsonl or .csv: text, label."
)
@click.option("--test", type=click.Path(exists=True, path_type=Path), help="Real held-out texts of the same form.")
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="Folder of a causal language model.")
@click.option("--labels", help="The classes, with commas. They are public.")
@click.option("--epsilon", default=8.0, help="Privacy budget.")
@click.option("--delta", default=1e-5, help="Below 1 / number of private texts.")
@click.option("--steps", default=100, help="Optimizer steps.")
@click.option("--batch-size", default=256, help="Expected number of texts in a step.")
@click.option("--num", default=2000, help="Synthetic texts.")
@click.option("--out", default=Path("runs/synthetic_text"), type=click.Path(path_type=Path), help="New folder.")
@click.option("--short", is_flag=True, help="Made-up texts and a tiny model, to see how it works.")
def main(
    train: Path | None, test: Path | None, model: Path | None, labels: str | None, epsilon: float, delta: float,
    steps: int, batch_size: int, num: int, out: Path, short: bool,
) -> None:  # fmt: skip
    """Train a language model privately, sample from it, train a classifier on the samples."""
    ranks = distributed.from_environment()
    if short:
        train, test, model = out / "made" / "train.jsonl", out / "made" / "test.jsonl", out / "made" / "model"
        labels, steps, num = ",".join(TOPICS), 30, SHORT_TEXTS
        distributed.once(ranks, lambda: make_up(train, test, model))
    if train is None or test is None or model is None or labels is None:
        raise click.UsageError("Expected --train, --test, --model and --labels, or --short.")
    writes = distributed.is_writer(ranks)
    classes = tuple(label.strip() for label in labels.split(","))
    try:
        run = out / "run"
        job = job_of(
            train, model, run, epsilon=epsilon, delta=delta, steps=steps, batch_size=batch_size, short=short
        )  # fmt: skip
        real, held_out = ([*read_table(path, ["text", "label"]).values()] for path in (train, test))
        run_job(job)
        distributed.shutdown()
        if not writes:  # the rest is the work of one process
            return
        writer = load_writer(run)
        prompts = [{"prompt": PROMPT.format(label=label), "label": label} for label in classes]
        how = Sampling(num, max_new_tokens=12 if short else 128, batch_size=64)
        write_texts(out / "synthetic.jsonl", sample(writer, prompts, how))
        synthetic = [*read_table(out / "synthetic.jsonl", ["text", "label"], deduplicate=False).values()]
        result = evaluate(real, synthetic, held_out, classes, (writer.epsilon or float("inf"), delta))
    except DPFuncError as error:
        raise click.ClickException(str(error)) from error
    (out / "result.json").write_text(json.dumps(vars(result), indent=1) + "\n")
    for row in synthetic[:: max(1, num // 6)][:6]:
        click.echo(f"  {row['label']}: {row['text'][:100]}")
    show(result)


if __name__ == "__main__":
    sys.exit(main())
