"""Fine-tune a pretrained transformer under differential privacy, in a plain loop over dp_step.

    python examples/main_job/train.py                       BBC News, epsilon 3, delta 1e-5
    python examples/main_job/train.py --data mail           spam detection on public mails
    python examples/main_job/train.py --data my.csv --model my-bert/   your own
    torchrun --nproc-per-node 2 examples/main_job/train.py  the same on two processes

The frozen lower layers are run once for each text and kept; LoRA and head are trained on top of them.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from data import DataError, TextData, load
from fetch import FetchError, fetch_model
from loop import Rows, Run, Task, accuracy, train_plain, train_private, verify
from model import Encoder, ModelError, Upper, load_encoder, lower_part, per_sample_loss
from processes import Processes, join
from report import PeakMemory, Row, epsilons, print_table, write_run
from torch import Tensor

import dpfunc
from dpfunc import clipping, distributed
from dpfunc.checkpoint.journal import journal_ledger
from dpfunc.evidence import check

HEAD = r"^head\."
# Chosen on the validation part of BBC News: adapters get a smaller bound and learning rate than the head, whose signal
# would drown in their noise otherwise.
LORA_BOUND = 0.3
LORA_RATE = 0.1
VALIDATION = "validation and test texts, which are held out: the curve and the table show accuracy on them"


def losses(forward: Callable[..., Tensor], params: Rows, rows: Rows) -> Tensor:
    """One loss a text."""
    return per_sample_loss(forward(params, rows["hidden"], rows["mask"]), rows["label"])


def right(forward: Callable[..., Tensor], params: Rows, rows: Rows) -> tuple[int, int]:
    """Number of right predictions, and of texts."""
    correct = forward(params, rows["hidden"], rows["mask"]).argmax(1) == rows["label"]
    return int(correct.sum()), len(correct)


def task_of(forward: Callable[..., Tensor], params: Rows, parts: list[Rows]) -> Task:
    """Training of a function `(params, hidden, mask) -> logits`."""
    return Task(
        partial(losses, forward), partial(right, forward), params, *parts,
        rate=lambda name: LORA_RATE if "lora" in name else 1.0,
    )  # fmt: skip


def prepare(encoder: Encoder, data: TextData, first_layer: int, max_length: int, quiet: bool) -> list[Rows]:
    """Frozen lower layers, once: hidden states, masks and labels of the three parts."""
    return [
        {**lower_part(encoder, split.texts, first_layer, max_length, quiet), "label": torch.tensor(split.labels)}
        for split in (data.train, data.validation, data.test)
    ]


def with_groups(plan: dpfunc.Plan, params: Rows) -> dpfunc.Plan:
    """The same plan with a bound for the head and a smaller one for the adapters. Epsilon does not depend on bounds."""
    group_of = {name: "adapters" if "lora" in name else "head" for name in params}
    bound = plan.clip.clip_norm
    bounds = {"head": bound, "adapters": LORA_BOUND * bound}
    clip = dataclasses.replace(plan.clip, clip_norm=bounds, groups=clipping.ByName(group_of))
    return dataclasses.replace(plan, clip=clip)


@click.command(context_settings={"show_default": True})
@click.option("--data", "data_name", default="bbc", help="bbc, mail, or a CSV/JSONL file with text and label.")
@click.option("--model", "model_path", type=click.Path(path_type=Path), help="Folder of a BERT-like encoder.")
@click.option("--epsilon", default=3.0, help="Privacy budget.")
@click.option("--delta", default=1e-5, help="Must be below 1 / number of training texts.")
@click.option("--steps", default=40, help="Private steps.")
@click.option("--batch-size", default=256, help="Expected batch size.")
@click.option("--rank", default=4, help="Rank of the adapters.")
@click.option("--lr", default=1e-2, help="Learning rate of the head; a tenth of it for the adapters.")
@click.option("--clip-norm", default=None, type=float, help="Flat clipping at this norm instead of automatic clipping.")
@click.option("--max-length", default=96, help="Tokens of a text that are used.")
@click.option("--layers", default=1, help="Top layers that get adapters.")
@click.option("--seed", default=0, help="Split and non-private order. Public: not the privacy key.")
@click.option("--insecure-seed", default=None, type=int, help="A guessable privacy key, to repeat a run exactly.")
@click.option("--out", type=click.Path(path_type=Path), help="Run folder; runs/<time> by default.")
@click.option("--resume", type=click.Path(path_type=Path, exists=True), help="Go on with the DP-LoRA run of a folder.")
@click.option("--smoke", is_flag=True, help="A few steps on a few texts, to see that everything works.")
def main(
    data_name: str, model_path: Path | None, epsilon: float, delta: float, steps: int, batch_size: int, rank: int,
    lr: float, clip_norm: float | None, max_length: int, layers: int, seed: int, insecure_seed: int | None,
    out: Path | None, resume: Path | None, smoke: bool,
) -> None:  # fmt: skip
    """Fine-tune with DP-LoRA and print what privacy cost."""
    settings = dict(click.get_current_context().params)
    if smoke:
        steps, batch_size, max_length = min(steps, 4), 24, 24
    start = time.perf_counter()
    try:
        processes = join()
        processes.first(lambda: (load(data_name, seed), model_path or fetch_model()))  # downloads
        data = load(data_name, seed, 200 if smoke else None)
        encoder = load_encoder(model_path or fetch_model())
        if not 1 <= layers <= encoder.num_layers:
            raise DataError(f"Expected 1 <= layers <= {encoder.num_layers}, got layers={layers}.")
        first_layer = encoder.num_layers - layers
        n = len(data.train.texts)
        plan = dpfunc.Plan.for_budget(
            epsilon=epsilon, delta=delta, dataset_size=n, expected_batch_size=min(batch_size, n), num_steps=steps,
            clip=clipping.Automatic() if clip_norm is None else clipping.Flat(clip_norm),
        )  # fmt: skip
    except (DataError, FetchError, ModelError, dpfunc.errors.DPFuncError, OSError) as error:
        raise click.ClickException(str(error)) from error
    processes.say(describe(data, plan, batch_size))
    folder = resume or out or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    if processes.writes:
        folder.mkdir(parents=True, exist_ok=True)
    rows = [Row("majority class", data.majority_accuracy, len(data.test.texts), None, None, 0, 0.0, 0.0)]
    memory = PeakMemory()
    memory.reset()
    parts = prepare(encoder, data, first_layer, max_length, quiet=not processes.writes)
    processes.say(
        f"Layers 1-{first_layer} are frozen: run once for each text and kept ({time.perf_counter() - start:.0f} s)."
    )
    torch.manual_seed(seed)
    upper = Upper(encoder, first_layer, len(data.classes)).eval()
    key = processes.key(insecure_seed)
    adapter = dpfunc.lora.attach(  # where the adapters start is public
        upper, dpfunc.rng.insecure_key(seed), targets=r"query|value", rank=rank, alpha=rank, train="B", also_train=HEAD
    )
    lora, head = task_of(adapter.forward, adapter.params, parts), head_only(upper, parts)
    test_size = len(data.test.texts)

    for step in phases(lora, head, plan, lr, key, folder, resume is not None, seed, smoke, processes):
        memory.reset()
        since = time.perf_counter()
        try:
            name, task, params, run = step()
        except dpfunc.errors.DPFuncError as error:
            raise click.ClickException(str(error)) from error
        score, count = accuracy(task, params, task.test), sum(p.numel() for p in params.values())
        spent = epsilons(None if run is None else run.state.ledger, delta)
        rows.append(Row(name, score, test_size, *spent, count, time.perf_counter() - since, memory.mib()))
    settings["seconds"] = time.perf_counter() - start
    distributed.shutdown()
    if processes.writes:
        replayed = write_all(folder, rows, settings, lora, with_groups(plan, lora.params), lr, adapter, run, processes)
        print_table(rows, delta, notes(data, journal_ledger(folder / "journal.jsonl")))
        print(
            f"Written to {folder}: privacy_accounting.json, ledger.json, journal.jsonl, checkpoint/, "
            "adapter.safetensors, metrics.json, run.png.\n"
            "Not to be shared: checkpoint/, UNRELEASED_norms.png, UNRELEASED_replay.json.\n"
            f"Replay on neighbouring texts: {replayed}.\n"
            f"Certificate: {folder / 'certificate.json'}. {checked(folder / 'certificate.json')} Anyone can check it: "
            "dpfunc certify --check FILE\n"
            f"Whole command: {settings['seconds']:.0f} s."
        )


def checked(certificate: Path) -> str:
    """The result of `dpfunc certify --check`, in one sentence."""
    findings = check(certificate)
    wrong = [finding.name for finding in findings if not finding.agrees]
    if wrong:
        raise click.ClickException(f"The certificate {certificate} does not follow from its steps: {wrong}.")
    return f"All {len(findings)} checks of it agree."


def describe(data: TextData, plan: dpfunc.Plan, batch_size: int) -> str:
    """What will be done."""
    n = len(data.train.texts)
    return (
        f"{data.name}: {n} training, {len(data.validation.texts)} validation, {len(data.test.texts)} test texts in "
        f"{len(data.classes)} classes; {data.duplicates} exact duplicates removed before the split.\n"
        f"Plan: {plan.num_steps} steps, sampling probability {batch_size / n:.3f}, noise {plan.noise_multiplier:.3f}.\n"
        f"{plan.guarantee()}"
    )


def write_all(
    folder: Path, rows: list[Row], settings: dict[str, Any], lora: Task, plan: dpfunc.Plan, lr: float,
    adapter: dpfunc.lora.LoRA, run: Run, processes: Processes,
) -> str:  # fmt: skip
    """The run folder, besides the journal and the checkpoints, which are there already; and what its replay found."""
    from plots import plot_norms, plot_run

    replayed, evidence = "of one process only", []
    if processes.ranks is None:
        found = verify(lora, plan, lr)
        replayed, evidence = "holds" if found.holds else "DOES NOT HOLD", [folder / "UNRELEASED_replay.json"]
        found.save(*evidence, Path(__file__), plan)
    write_run(folder, rows, settings, adapter, run, evidence)
    plot_run(folder / "run.png", run.curve, run.spent, plan.epsilon, run.twin)
    plot_norms(folder, run.norms, run.record.max_grad_norm)
    return replayed


def head_only(upper: Upper, parts: list[Rows]) -> Task:
    """A linear head on the pooled output of the whole frozen encoder, which is therefore computed once as well.

    Of each text alone, but for rounding: see `model.lower_part`.
    """
    pooled = []
    with torch.no_grad():
        for part in parts:
            chunks = zip(part["hidden"].split(128), part["mask"].split(128), strict=True)
            features = torch.cat([upper.pool(hidden, mask) for hidden, mask in chunks])
            pooled.append({"hidden": features, "mask": part["mask"][:, :1], "label": part["label"]})
    forward, params = dpfunc.functionalize(upper.head)
    return task_of(lambda p, features, mask: forward(p, features), params, pooled)


def phases(
    lora: Task, head: Task, plan: dpfunc.Plan, lr: float, key: dpfunc.rng.Key, folder: Path, resume: bool, seed: int,
    smoke: bool, processes: Processes,
) -> Iterator[Callable[[], tuple[str, Task, Rows, Run | None]]]:  # fmt: skip
    """The three trainings of the table, in order; the last one is the result."""
    twin: list[float] = []

    def plain() -> tuple[str, Task, Rows, None]:
        params = train_plain(lora, 1e-2, 1 if smoke else 2, seed)
        twin.append(accuracy(lora, params, lora.validation))
        return "non-private twin (LoRA)", lora, params, None

    def private(name: str, task: Task, own: dpfunc.Plan, **options: Any) -> tuple[str, Task, Rows, Run]:
        secret = dpfunc.rng.fold_in(key, "head" if task is head else "lora")
        run = train_private(
            name, task, own, lr, secret, processes, unit="one text", not_covered=[VALIDATION], **options
        )  # fmt: skip
        return name, task, run.params, run

    if not resume and processes.writes:  # the others wait
        yield plain
    if not resume:
        yield lambda: private("DP head only", head, plan)
    groups = with_groups(plan, lora.params)
    yield lambda: private("DP-LoRA", lora, groups, folder=folder, resume=resume, twin=twin[0] if twin else None)


def notes(data: TextData, journalled: dpfunc.Ledger) -> list[str]:
    """What a reader of the table must know."""
    return [
        "the unit of privacy is one text; neighbours differ by one text added or removed",
        f"the journal of this folder counts {journalled.num_steps} private steps",
        "each line is a run of its own: publishing several costs what their ledgers compose to",
        "validation and test texts are held out and not protected; settings were chosen on BBC validation texts",
        f"majority class: {data.majority_accuracy:.3f} of the test texts",
    ]


if __name__ == "__main__":
    sys.exit(main())
