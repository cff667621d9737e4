"""Fine-tune SmolLM2-135M-Instruct on news under differential privacy, in a plain loop over dp_step.

    python examples/language_model/fetch_smollm.py
    python examples/language_model/train.py                     epsilon 8 and 3, and the non-private twin
    python examples/language_model/train.py --short             a few steps on a few texts
    python examples/language_model/train.py --short --model tiny    the same on a random model, without weights
    torchrun --nproc-per-node 2 examples/language_model/train.py    on two processes

One row is one document (its first tokens): that is the unit of privacy. The frozen lower layers are run once for each.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from cut import LanguageModel, continuation, cut, joined, load_model, run_lower, tiny_model, tokenize
from fetch_smollm import fetch_smollm
from torch import Tensor
from tqdm import tqdm

import dpfunc
from dpfunc import clipping, distributed
from dpfunc.hf.tasks import make_loss_fn

sys.path.append(str(Path(__file__).resolve().parents[1] / "main_job"))
from data import read_news
from fetch import FetchError, fetch_news
from processes import Processes, join

PROMPT = "The government said on Tuesday that"
TARGETS = r"q_proj|v_proj|o_proj"


@dataclass(frozen=True)
class Task:
    """What is trained and on what: hidden states (N, T, d) before the upper part, and labels (N, T)."""

    adapter: dpfunc.lora.LoRA
    loss_fn: Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor]
    train: dict[str, Tensor]
    test: dict[str, Tensor]


def read_texts(limit: int | None, test_size: int) -> tuple[list[str], list[str]]:
    """Training and test documents: without exact duplicates, shuffled by a public seed."""
    unique = list(dict.fromkeys(text.strip() for text, _ in read_news(fetch_news())))
    random.Random(0).shuffle(unique)
    return unique[test_size:][:limit], unique[:test_size]


def prepare(
    language: LanguageModel, upper_layers: int, rank: int, length: int, limit: int | None, test: int, quiet: bool
) -> Task:
    """Frozen layers, once, and adapters on the layers above them."""
    lower, upper = cut(language.model, upper_layers)
    parts = []
    for texts in read_texts(limit, test):
        ids, labels = tokenize(language, texts, length)
        parts.append({"inputs_embeds": run_lower(lower, ids, quiet), "labels": labels})
    start = dpfunc.rng.insecure_key(0)  # where the adapters start is public
    adapter = dpfunc.lora.attach(upper, start, targets=TARGETS, rank=rank, alpha=2 * rank, train="B")
    return Task(adapter, make_loss_fn(adapter.forward, "causal_lm"), *parts)


def losses(task: Task, params: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Loss and number of predicted tokens of each test document."""
    with torch.no_grad():
        chunks = [
            task.loss_fn(params, dpfunc.take(task.test, indices))
            for indices in torch.arange(len(task.test["labels"])).split(16)
        ]
    return torch.cat(chunks), (task.test["labels"][:, 1:] >= 0).sum(1)


def optimizer_of(params: dict[str, Tensor], lr: float, num_steps: int) -> Callable[[dict[str, Tensor], int], None]:
    """Adam with a linear decay to zero, as `apply(grads, step)`. Any optimizer will do: what it gets is released."""
    adam = torch.optim.Adam(list(params.values()), lr=lr)

    def apply(grads: dict[str, Tensor], step: int) -> None:
        for group in adam.param_groups:
            group["lr"] = lr * (1 - step / num_steps)
        dpfunc.set_grads(params, grads)
        adam.step()

    return apply


def start_of(task: Task) -> dict[str, Tensor]:
    return {name: param.clone().requires_grad_() for name, param in task.adapter.params.items()}


def train_plain(task: Task, lr: float, num_steps: int, batch_size: int) -> dict[str, Tensor]:
    """The non-private twin: the same model, steps and expected batch size."""
    params = start_of(task)
    apply = optimizer_of(params, lr, num_steps)
    generator = torch.Generator().manual_seed(0)
    for step in tqdm(range(num_steps), desc="non-private twin", unit="step", leave=False):
        indices = torch.randperm(len(task.train["labels"]), generator=generator)[:batch_size]
        total = {name: torch.zeros_like(param) for name, param in params.items()}
        for chunk in indices.split(16):
            loss = task.loss_fn(params, dpfunc.take(task.train, chunk)).sum() / len(indices)
            for name, grad in zip(params, torch.autograd.grad(loss, list(params.values())), strict=True):
                total[name] += grad
        apply(total, step)
    return {name: param.detach() for name, param in params.items()}


def train_private(
    task: Task, plan: dpfunc.Plan, lr: float, key: dpfunc.rng.Key, processes: Processes
) -> tuple[dict[str, Tensor], dpfunc.state.StepState]:
    """The loop of the library."""
    params = start_of(task)
    apply = optimizer_of(params, lr, plan.num_steps)
    dp_step = dpfunc.make_dp_step(task.loss_fn, plan, microbatch_size=16, ranks=processes.ranks)
    state = dp_step.init(params, key)
    name = f"DP-LoRA, epsilon {plan.epsilon:g}"
    batches = plan.batches(state, processes.ranks)
    for indices in tqdm(batches, total=state.limit, desc=name, unit="step", leave=False, disable=not processes.writes):
        step = state.step
        grads, state, _ = dp_step(params, dpfunc.take(task.train, indices), state)
        apply(grads, step)
    return {name: param.detach() for name, param in params.items()}, state


def row_of(
    name: str, task: Task, params: dict[str, Tensor], before: Tensor | None, epsilon: float | None, seconds: float
) -> tuple[dict[str, Any], Tensor]:
    """One line of the table; the change against `before` is a mean over documents with a 95 % interval."""
    losses_N, counts_N = losses(task, params)
    row = {
        "name": name,
        "epsilon": epsilon,
        "perplexity": math.exp(float((losses_N * counts_N).sum() / counts_N.sum())),
        "seconds": round(seconds, 1),
    }
    if before is not None:
        change_N = losses_N - before
        half = 1.96 * float(change_N.std()) / math.sqrt(len(change_N))
        row["loss_change"] = [float(change_N.mean()) + sign * half for sign in (-1, 0, 1)]
    return row, losses_N


def show(rows: list[dict[str, Any]]) -> None:
    """The table, for people."""
    print(f"{'':24} {'epsilon':>8} {'perplexity':>11}   change of the loss a token [95 %]   seconds")
    for row in rows:
        low, mean, high = row.get("loss_change", [0.0, 0.0, 0.0])
        epsilon = "-" if row["epsilon"] is None else f"{row['epsilon']:.2f}"
        print(
            f"{row['name']:24} {epsilon:>8} {row['perplexity']:11.2f}   {mean:+.3f} [{low:+.3f}, {high:+.3f}]"
            f"           {row['seconds']:7.0f}"
        )


@click.command(context_settings={"show_default": True})
@click.option("--epsilon", multiple=True, default=(8.0, 3.0), help="Privacy budget; several for several runs.")
@click.option("--delta", default=1e-5, help="Must be below 1 / number of training documents.")
@click.option("--steps", default=20, help="Steps of each run.")
@click.option("--batch-size", default=64, help="Expected batch size.")
@click.option("--length", default=48, help="Tokens of a document that are used.")
@click.option("--layers", default=4, help="Top layers that get adapters.")
@click.option("--rank", default=4, help="Rank of the adapters.")
@click.option("--lr", default=5e-3, help="Learning rate of Adam.")
@click.option("--test-size", default=200, help="Documents held out for the perplexity.")
@click.option("--model", default="smollm2", type=click.Choice(["smollm2", "tiny"]))
@click.option("--insecure-seed", default=None, type=int, help="A guessable privacy key, to repeat a run exactly.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the results to this JSON file.")
@click.option("--short", is_flag=True, help="A few steps on a few documents, to see that everything works.")
def main(
    epsilon: tuple[float, ...], delta: float, steps: int, batch_size: int, length: int, layers: int, rank: int,
    lr: float, test_size: int, model: str, insecure_seed: int | None, out: Path | None, short: bool,
) -> None:  # fmt: skip
    """Fine-tune with DP-LoRA and print perplexity on held-out documents before and after."""
    settings = dict(click.get_current_context().params)
    limit = None
    if short:
        epsilon, steps, batch_size, length, layers, test_size, limit = epsilon[:1], 2, 4, 12, 2, 8, 40
    try:
        processes = join()
        processes.first(lambda: (fetch_news(), model == "tiny" or fetch_smollm()))
        language = tiny_model() if model == "tiny" else load_model(fetch_smollm())
        task = prepare(language, layers, rank, length, limit, test_size, quiet=not processes.writes)
        n = len(task.train["labels"])
        plans = [
            dpfunc.Plan.for_budget(
                epsilon=budget, delta=delta, dataset_size=n, expected_batch_size=batch_size, num_steps=steps,
                clip=clipping.Automatic(),
            )
            for budget in epsilon
        ]  # fmt: skip
    except (FetchError, dpfunc.errors.DPFuncError) as error:
        raise click.ClickException(str(error)) from error
    trained = sum(param.numel() for param in task.adapter.params.values())
    processes.say(f"{n} training and {test_size} test documents of {length} tokens; {trained:,} trained parameters.")
    key = processes.key(insecure_seed)
    first, before = row_of("before", task, task.adapter.params, None, None, 0.0)
    rows, found = [first], {"before": task.adapter.params}

    def add(name: str, params: dict[str, Tensor], spent: float | None, since: float) -> None:
        rows.append(row_of(name, task, params, before, spent, time.perf_counter() - since)[0])
        found[name] = params
        processes.say(f"{name}: perplexity {rows[-1]['perplexity']:.2f} after {rows[-1]['seconds']:.0f} s")

    since = time.perf_counter()
    if processes.writes:  # the others wait
        add("non-private twin", train_plain(task, lr, steps, batch_size), None, since)
    for plan in plans:
        since = time.perf_counter()
        params, state = train_private(task, plan, lr, dpfunc.rng.fold_in(key, f"epsilon {plan.epsilon:g}"), processes)
        add(f"DP-LoRA, epsilon {plan.epsilon:g}", params, state.ledger.epsilon(delta).epsilon, since)
    distributed.shutdown()
    if not processes.writes:
        return
    show(rows)
    for row in rows:
        whole = joined(language.model, task.adapter.merge(found[row["name"]]))
        row["sample"] = continuation(language, whole, PROMPT, 4 if short else 24)
        print(f"{row['name']:24} {row['sample']!r}")
    print("The unit of privacy is one document. Each line is a run of its own; publishing several costs their sum.")
    if out:
        values = {
            "results": rows,
            "settings": {**settings, "out": None, "train_size": n, "unit": "one document", "trained": trained},
            "noise_multiplier": {f"{plan.epsilon:g}": plan.noise_multiplier for plan in plans},
        }
        out.write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    main()
