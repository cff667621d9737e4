"""Fine-tune a pretrained transformer under differential privacy, in a plain loop over dp_step.

    python examples/main_job/train.py                       BBC News, epsilon 3, delta 1e-5
    python examples/main_job/train.py --data mail           spam detection on public mails
    python examples/main_job/train.py --data my.csv --model my-bert/   your own
    torchrun --nproc-per-node 2 examples/main_job/train.py  the same on two processes

The frozen lower layers are run once for each text and kept; LoRA and head are trained on top of them.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import torch
from data import DataError, TextData, load
from fetch import FetchError, fetch_model
from model import Encoder, ModelError, Upper, load_encoder, lower_part, per_sample_loss
from processes import Processes, join
from report import PeakMemory, Row, print_table, write_metrics
from torch import Tensor
from tqdm import tqdm

import dpfunc
from dpfunc import clipping, distributed
from dpfunc.accounting.record import Record
from dpfunc.checkpoint import make_record
from dpfunc.checkpoint.journal import Journal, journal_ledger

HEAD = r"^head\."
# Chosen on the validation part of BBC News: adapters get a smaller bound and learning rate than the head, whose signal
# would drown in their noise otherwise.
LORA_BOUND = 0.3
LORA_RATE = 0.1
TWIN = "accuracy of the non-private twin, which was trained on the same texts"
VALIDATION = "validation and test texts, which are held out: the curve and the table show accuracy on them"


@dataclass(frozen=True)
class Parts:
    """Tensors of the three parts: hidden states, masks, labels."""

    train: dict[str, Tensor]
    validation: dict[str, Tensor]
    test: dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """What is trained: a function of parameters, the parameters it starts with, and the data it is called with."""

    forward: Callable[..., Tensor]
    params: dict[str, Tensor]
    parts: Parts


def accuracy(task: Task, params: dict[str, Tensor], part: dict[str, Tensor]) -> float:
    """Share of correct predictions."""
    right = 0
    with torch.no_grad():
        for start in range(0, len(part["label"]), 128):
            rows = {name: value[start : start + 128] for name, value in part.items()}
            right += int((task.forward(params, rows["hidden"], rows["mask"]).argmax(1) == rows["label"]).sum())
    return right / len(part["label"])


def prepare(encoder: Encoder, data: TextData, first_layer: int, max_length: int, quiet: bool) -> Parts:
    """Frozen lower layers, once."""
    parts = []
    for split in (data.train, data.validation, data.test):
        tensors = lower_part(encoder, split.texts, first_layer, max_length, quiet)
        parts.append({**tensors, "label": torch.tensor(split.labels)})
    return Parts(*parts)


def adam(params: dict[str, Tensor], lr: float, num_steps: int) -> tuple[torch.optim.Optimizer, Callable[[int], None]]:
    """Any optimizer will do: what it gets is released. Linear decay to zero."""
    rates = [lr * (LORA_RATE if "lora" in name else 1.0) for name in params]
    optimizer = torch.optim.Adam([{"params": [p], "lr": rate} for p, rate in zip(params.values(), rates, strict=True)])

    def set_rate(step: int) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / num_steps)

    return optimizer, set_rate


def train_plain(task: Task, lr: float, epochs: int, seed: int) -> dict[str, Tensor]:
    """The non-private twin: the same model and parameters, ordinary batches of 64."""
    params = {name: p.clone().requires_grad_() for name, p in task.params.items()}
    data, generator = task.parts.train, torch.Generator().manual_seed(seed)
    n = len(data["label"])
    optimizer, set_rate = adam(params, lr, epochs * math.ceil(n / 64))
    step = 0
    for _ in tqdm(range(epochs), desc="non-private twin", unit="epoch", leave=False):
        for indices in torch.randperm(n, generator=generator).split(64):
            rows = dpfunc.take(data, indices)
            set_rate(step)
            loss = per_sample_loss(task.forward(params, rows["hidden"], rows["mask"]), rows["label"]).mean()
            for (_, p), grad in zip(params.items(), torch.autograd.grad(loss, list(params.values())), strict=True):
                p.grad = grad
            optimizer.step()
            step += 1
    return {name: p.detach() for name, p in params.items()}


def with_groups(plan: dpfunc.Plan, params: dict[str, Tensor]) -> dpfunc.Plan:
    """The same plan with a bound for the head and a smaller one for the adapters. Epsilon does not depend on bounds."""
    group_of = {name: "adapters" if "lora" in name else "head" for name in params}
    bound = plan.clip.clip_norm
    bounds = {"head": bound, "adapters": LORA_BOUND * bound}
    clip = dataclasses.replace(plan.clip, clip_norm=bounds, groups=clipping.ByName(group_of))
    return dataclasses.replace(plan, clip=clip)


def spent_curve(plan: dpfunc.Plan) -> list[tuple[int, float]]:
    """Epsilon after a few numbers of steps, found once before training: an accountant in every step would be slow."""
    steps = sorted({round(plan.num_steps * share / 12) for share in range(1, 13)} - {0})
    return [(step, plan.guarantee(step).epsilon) for step in steps]


def spent_after(curve: list[tuple[int, float]], step: int) -> float:
    """An upper bound on epsilon after a step, from the curve."""
    return next(epsilon for at, epsilon in curve if at >= step)


@dataclass(frozen=True)
class Run:
    """A finished private run. `norms` are unreleased; `twin` is the validation accuracy of the non-private twin."""

    params: dict[str, Tensor]
    state: dpfunc.StepState
    curve: list[tuple[int, float]]
    spent: list[tuple[int, float]]
    norms: list[float]
    record: Record
    twin: float | None


def train_private(
    name: str, task: Task, plan: dpfunc.Plan, lr: float, key: dpfunc.Key, folder: Path | None, resume: bool,
    processes: Processes, twin: float | None = None,
) -> Run:  # fmt: skip
    """The loop. With a folder it keeps a journal and checkpoints, from which it can be resumed."""

    def loss_fn(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return per_sample_loss(task.forward(params, batch["hidden"], batch["mask"]), batch["label"])

    data = task.parts.train
    journal = Journal(folder / "journal.jsonl", plan) if folder else None
    dp_step = dpfunc.make_dp_step(loss_fn, plan, microbatch_size=32, journal=journal, ranks=processes.ranks)
    params = {n: p.clone().requires_grad_() for n, p in task.params.items()}
    optimizer, set_rate = adam(params, lr, plan.num_steps)
    curve: list[tuple[int, float]] = []
    norms: list[float] = []
    if resume and folder:
        saved = dpfunc.load(
            folder / "checkpoint",
            plan=plan,
            params=params,
            data=data,
            journal=folder / "journal.jsonl",
            ranks=processes.ranks,
        )
        for n, p in params.items():
            p.data.copy_(saved.params[n])
        optimizer.load_state_dict(dict(saved.optimizer_state or {}))
        state = saved.state
        curve, norms = [tuple(point) for point in saved.extra["curve"]], list(saved.extra["norms"])
        twin = saved.extra["twin"]
        processes.say(f"Resumed at step {state.step}; {state.ledger.num_steps} steps are in the ledger.")
    else:
        state = dp_step.init(params, key)
    spent = spent_curve(plan)

    def checkpoint() -> None:
        if folder:
            dpfunc.save(
                folder / "checkpoint", params=params, state=state, plan=plan, data=data,
                optimizer_state=optimizer.state_dict(),
                extra=processes.shared({"curve": curve, "norms": norms, "twin": twin}),
                journal=folder / "journal.jsonl", ranks=processes.ranks,
            )  # fmt: skip

    checkpoint()
    bar = tqdm(
        plan.batches(state, processes.ranks), desc=name, total=state.limit, initial=state.step, unit="step",
        disable=not processes.writes,
    )  # fmt: skip
    for indices in bar:
        set_rate(state.step)
        grads, state, unreleased = dp_step(params, dpfunc.take(data, indices), state)
        for n, p in params.items():
            p.grad = grads[n]
        optimizer.step()
        bar.set_postfix_str(f"epsilon <= {spent_after(spent, state.step):.2f} of {plan.epsilon:g}")
        if state.step > state.limit - 4:
            norms += unreleased.norms_BG.square().sum(1).sqrt().tolist()
        if state.step % max(1, plan.num_steps // 8) == 0 or state.step == state.limit:
            curve.append((state.step, accuracy(task, params, task.parts.validation)))
            checkpoint()
    record = make_record(
        dp_step, state, unit="one text", not_covered=[VALIDATION, *([TWIN] if twin is not None else [])]
    )
    return Run({n: p.detach() for n, p in params.items()}, state, curve, spent, norms, record, twin)


def two_epsilons(ledger: dpfunc.Ledger, delta: float) -> tuple[float, float]:
    """Epsilon by two accountants."""
    tight, rdp = (dpfunc.epsilon(ledger, delta, method).epsilon for method in ("auto", "rdp"))
    return tight, rdp


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
    except (DataError, FetchError, ModelError, dpfunc.DPFuncError, OSError) as error:
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
        upper, dpfunc.insecure_key(seed), targets=r"query|value", rank=rank, alpha=rank, train="B", also_train=HEAD
    )
    lora = Task(adapter.forward, adapter.params, parts)
    head = Task(*head_only(upper, parts))
    test_size = len(data.test.texts)

    def row(name: str, task: Task, params: dict[str, Tensor], ledger: dpfunc.Ledger | None, since: float) -> Row:
        spent = (math.inf, math.inf) if ledger is None else two_epsilons(ledger, delta)
        count = sum(p.numel() for p in params.values())
        score = accuracy(task, params, task.parts.test)
        return Row(name, score, test_size, *spent, count, time.perf_counter() - since, memory.mib())

    for step in phases(lora, head, plan, lr, key, folder, resume is not None, seed, smoke, processes):
        memory.reset()
        since = time.perf_counter()
        try:
            name, task, params, ledger, run = step()
        except dpfunc.DPFuncError as error:
            raise click.ClickException(str(error)) from error
        rows.append(row(name, task, params, ledger, since))
    settings["seconds"] = time.perf_counter() - start
    distributed.shutdown()
    if processes.writes:
        write_all(folder, rows, settings, plan, adapter, run)
        print_table(rows, delta, notes(data, journal_ledger(folder / "journal.jsonl")))
        print(
            f"Written to {folder}: privacy_accounting.json, ledger.json, journal.jsonl, checkpoint/, "
            f"adapter.safetensors, metrics.json, run.png.\nNot to be shared: checkpoint/, UNRELEASED_norms.png.\n"
            f"Whole command: {settings['seconds']:.0f} s."
        )


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
    folder: Path, rows: list[Row], settings: dict[str, Any], plan: dpfunc.Plan, adapter: dpfunc.lora.LoRA, run: Run
) -> None:
    """The run folder, besides the journal and the checkpoints, which are there already."""
    (folder / "privacy_accounting.json").write_text(run.record.to_json() + "\n")
    (folder / "ledger.json").write_text(run.state.ledger.to_json() + "\n")
    dpfunc.lora.save(folder / "adapter.safetensors", adapter, run.params)
    write_metrics(folder, rows, {k: str(v) if isinstance(v, Path) else v for k, v in settings.items()})
    from plots import plot_norms, plot_run

    plot_run(folder / "run.png", run.curve, run.spent, plan.epsilon, run.twin)
    plot_norms(folder, run.norms, run.record.max_grad_norm)


def head_only(upper: Upper, parts: Parts) -> tuple[Callable[..., Tensor], dict[str, Tensor], Parts]:
    """A linear head on the pooled output of the whole frozen encoder, which is therefore computed once as well."""
    pooled = []
    with torch.no_grad():
        for part in (parts.train, parts.validation, parts.test):
            chunks = zip(part["hidden"].split(128), part["mask"].split(128), strict=True)
            features = torch.cat([upper.pool(hidden, mask) for hidden, mask in chunks])
            pooled.append({"hidden": features, "mask": part["mask"][:, :1], "label": part["label"]})
    forward, params = dpfunc.functionalize(upper.head)
    return lambda p, features, mask: forward(p, features), params, Parts(*pooled)


def phases(
    lora: Task, head: Task, plan: dpfunc.Plan, lr: float, key: dpfunc.Key, folder: Path, resume: bool, seed: int,
    smoke: bool, processes: Processes,
) -> Iterator[Callable[[], tuple[str, Task, dict[str, Tensor], dpfunc.Ledger | None, Run]]]:  # fmt: skip
    """The three trainings of the table, in order; the last one is the result."""
    nothing: Run | None = None
    twin: list[float] = []

    def plain() -> tuple[str, Task, dict[str, Tensor], dpfunc.Ledger | None, Run | None]:
        params = train_plain(lora, 1e-2, 1 if smoke else 2, seed)
        twin.append(accuracy(lora, params, lora.parts.validation))
        return "non-private twin (LoRA)", lora, params, None, nothing

    def private_head() -> tuple[str, Task, dict[str, Tensor], dpfunc.Ledger | None, Run]:
        run = train_private("DP head only", head, plan, lr, dpfunc.fold_in(key, "head"), None, False, processes)
        return "DP head only", head, run.params, run.state.ledger, run

    def private_lora() -> tuple[str, Task, dict[str, Tensor], dpfunc.Ledger | None, Run]:
        run = train_private(
            "DP-LoRA", lora, with_groups(plan, lora.params), lr, dpfunc.fold_in(key, "lora"), folder, resume, processes,
            *twin,
        )  # fmt: skip
        return "DP-LoRA", lora, run.params, run.state.ledger, run

    if not resume and processes.writes:  # the others wait
        yield plain
    yield from (private_lora,) if resume else (private_head, private_lora)


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
