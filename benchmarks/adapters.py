"""Kinds of adapters at one epsilon, cost and accuracy: `python -m benchmarks.adapters` writes adapters.json.

The loop is that of the guide of PEFT with `dpfunc.features` and `recipe.optimizer(params, head=...)`: adapters in the
highest layer of all-MiniLM-L6-v2 beside a new head, each with its own rate. Layers below are computed once. `head` has
no adapters. Texts are the beginnings of news (BBC), of reports by Reuters, and of tweets by two people; a fifth is to
test on. `python -m benchmarks.recipes.data` fetches them. Each run is written when it ends, and one that is written is
not run again; `--page` writes the tables of the guide.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from typing import Any, NamedTuple

import click
import torch
from peft import LoraConfig, VeraConfig, get_peft_model
from scipy.stats import t as student
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

import dpfunc
from benchmarks.measure import MIB, allocated
from benchmarks.recipes.data import ROOT, news, orange
from benchmarks.results import DOCS, FOLDER, fill, keep, markdown, rows_of
from dpfunc.features import head_of, load_mean_pooled, measure_feature_norm
from dpfunc.functional import with_params
from dpfunc.hf import peft as adapters
from dpfunc.recipes import recipe

RESULT = FOLDER / "adapters.json"
PAGE = DOCS / "guides" / "peft.md"
MODEL = str(ROOT / ".cache" / "model")
EPSILON, DELTA = 3.0, 1e-4
MOST = {"titles": 1500, "reuters": 1000, "tweets": 1000}  # records
TOKENS = {"titles": 16, "reuters": 16, "tweets": 16}
KINDS: dict[str, dict[str, Any]] = {
    "head": {},
    "LoRA": {},
    "FFA": {},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "VeRA": {"r": 64, "save_projection": True},
}
COMMON = {"r": 8, "target_modules": ["query", "value"], "task_type": "SEQ_CLS"}
SEEDS = 3


class Data(NamedTuple):
    """Token ids, masks and classes of texts, in an order that does not depend on them."""

    ids: Tensor
    mask: Tensor
    labels: Tensor
    classes: int

    @property
    def split(self) -> int:
        """The first record to test on."""
        return len(self.labels) * 4 // 5


def pairs_of(name: str) -> list[tuple[str, str]]:
    """Texts with their classes."""
    if name == "reuters":
        return orange("reuters-r8-train.tab", "Text", "Category")
    if name == "tweets":
        return orange("election-tweets-2016.tab", "Content", "Author")
    return [(" ".join(text.split()[:12]), label) for text, label in news()]


def chosen(name: str) -> list[tuple[str, str]]:
    """The records of a data set with their classes, in an order that does not depend on them."""
    pairs = pairs_of(name)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))[: MOST[name]].tolist()
    return [pairs[row] for row in order]


def tokenized(pairs: list[tuple[str, str]], model: str, tokens: int) -> Data:
    """Texts as the tokenizer of a model gives them, all of one length."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    most = {"padding": "max_length", "truncation": True, "max_length": tokens, "return_tensors": "pt"}
    found = tokenizer([text for text, _ in pairs], **most)
    classes = sorted({label for _, label in pairs})
    labels = torch.tensor([classes.index(label) for _, label in pairs])
    return Data(found["input_ids"], found["attention_mask"], labels, len(classes))


def adapted(kind: str, classes: int, seed: int) -> tuple[Any, Any]:
    """The model with adapters of a kind in its highest layer, and the model around which they are."""
    torch.manual_seed(seed)
    model = load_mean_pooled(MODEL, num_labels=classes)
    last = model.config.num_hidden_layers - 1
    model.split_at(last)
    if kind == "head":
        return model, model
    config = VeraConfig if kind == "VeRA" else LoraConfig
    own = {"projection_prng_key": seed} if kind == "VeRA" else {"lora_alpha": 16}
    peft_model = get_peft_model(model, config(**{**COMMON, **own, "layers_to_transform": [last], **KINDS[kind]}))
    if kind == "FFA":
        for name, param in peft_model.named_parameters():
            param.requires_grad_(param.requires_grad and "lora_A" not in name)
    return peft_model, model


@torch.no_grad()
def lower(model: Any, data: Data) -> Tensor:
    """What the layers below the adapters give, (n, T, width), each record alone."""
    parts = [model.lower(ids, mask) for ids, mask in zip(data.ids.split(64), data.mask.split(64), strict=True)]
    return torch.cat(parts)


def accuracy(model: Any, params: dict[str, Tensor], inputs: dict[str, Tensor], data: Data) -> float:
    """Share of the test records whose most likely class is their label."""
    trained = with_params(model, params).eval()
    with torch.no_grad():
        logits = trained(**{name: value[data.split :] for name, value in inputs.items()}).logits
    return float((logits.argmax(1) == data.labels[data.split :]).float().mean())


def plan_of(model: Any, params: dict[str, Tensor], data: Data) -> Any:
    """The recipe of what is trained: of a head alone, or of adapters beside one."""
    head = head_of(params)
    facts: dict[str, Any] = {
        "dataset_size": data.split, "epsilon": EPSILON, "delta": DELTA, "num_classes": data.classes,
        "num_parameters": sum(p.numel() for p in params.values()), "feature_norm": measure_feature_norm(model, head),
    }  # fmt: skip
    if len(head) == len(params):
        return recipe("head", **facts)
    return recipe("lora", num_head_parameters=sum(p.numel() for p in head.values()), **facts)


def train(kind: str, data: Data, hidden: Tensor, seed: int, rates: str = "two") -> dict[str, Any]:
    """One private run: its accuracy, trained numbers, CPU seconds of a step, and what the first one allocates.

    One rate: as loops had it before.
    """
    model, base = adapted(kind, data.classes, seed)
    inputs = {"hidden": hidden, "attention_mask": data.mask}
    if kind == "head":
        with torch.no_grad():
            inputs = {"features": base.eval().pooled(None, data.mask, hidden)}
        forward, params = dpfunc.functionalize(model, "classifier")
    else:
        forward, params = adapters.functionalize(model)
    found = plan_of(model, params, data)
    plan = found.plan()

    def loss_fn(params: dict[str, Tensor], batch: dict[str, Any]) -> Tensor:
        return F.cross_entropy(forward(params, **batch["inputs"]).logits, batch["labels"], reduction="none")

    dp_step = dpfunc.make_dp_step(loss_fn, plan, microbatch_size=1024 if kind == "head" else 256)
    private = dpfunc.take({"inputs": inputs, "labels": data.labels}, torch.arange(data.split))
    some = dpfunc.take(private, torch.arange(128))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dpfunc.errors.RunWarning)  # a run of its own, which is thrown away
        _, memory = allocated(lambda: dp_step(params, some))
        state = dp_step.init(params, dpfunc.secure_key())
    head = head_of(params)
    own = head.values() if rates == "two" and len(head) < len(params) else ()
    optimizer = found.optimizer(params.values(), head=own)
    scheduler = found.scheduler(optimizer)
    seconds = []
    for indices in plan.batches(state):
        start = time.process_time()
        grads, state, _ = dp_step(params, dpfunc.take(private, indices), state)
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
        scheduler.step()
        seconds.append(time.process_time() - start)
    return {
        "accuracy": accuracy(model, params, inputs, data), "trained": sum(p.numel() for p in params.values()),
        "head": sum(p.numel() for p in head.values()), "seconds": statistics.median(seconds), "steps": len(seconds),
        "mib": memory.peak / MIB,
    }  # fmt: skip


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half of its interval of 95 % by Student's t."""
    scale = float(student.ppf(0.975, len(values) - 1)) / len(values) ** 0.5
    return statistics.mean(values), scale * statistics.stdev(values)


def tables(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The table of the guide, by its name there: of data sets on which each kind ran several times."""
    found = {
        (name, kind): [row for row in rows if (row["data"], row["kind"], row["rates"]) == (name, kind, "two")]
        for name in TOKENS
        for kind in KINDS
    }
    complete = [name for name in TOKENS if all(len(found[name, kind]) > 1 for kind in KINDS)]
    lines = []
    for kind in KINDS:
        first = found[complete[0], kind]
        cells = [
            {"head": "a head alone"}.get(kind, kind), f"{first[0]['trained'] - first[0]['head']:,}",
            f"{1e3 * statistics.median(row['seconds'] for row in first):.0f}",
            f"{statistics.median(row['mib'] for row in first):.1f}",
        ]  # fmt: skip
        for name in complete:
            mean, half = interval([row["accuracy"] for row in found[name, kind]])
            cells.append(f"{mean:.3f} ± {half:.3f}".replace("0.", "."))
        lines.append(cells)
    return {
        "adapters": markdown(["", "numbers of adapters", "CPU ms a step", "MiB, 128 rows", *complete], lines, "---:")
    }


@click.command()
@click.option("--data", "names", multiple=True, type=click.Choice([*TOKENS]), default=[*TOKENS])
@click.option("--kind", "kinds", multiple=True, type=click.Choice([*KINDS]), default=[*KINDS])
@click.option("--seeds", default=SEEDS, show_default=True)
@click.option("--rates", type=click.Choice(["one", "two"]), default="two", show_default=True)
@click.option("--page", is_flag=True, help="Write the tables of the guide, and train nothing.")
def main(names: tuple[str, ...], kinds: tuple[str, ...], seeds: int, rates: str, page: bool) -> None:
    """Train each kind of adapters on each data set, in turn, and write each run when it ends."""
    if page:
        fill(PAGE, tables(rows_of(RESULT)))
        return
    torch.set_num_threads(1)

    def place(row: Any) -> tuple[Any, ...]:
        return row["data"], row["kind"], row["rates"], row["seed"]

    for name in names:
        data = tokenized(chosen(name), MODEL, TOKENS[name])
        hidden = lower(adapted("LoRA", data.classes, 0)[1], data)
        for seed in range(seeds):
            for kind in kinds:
                row = {"data": name, "kind": kind, "rates": rates, "seed": seed, "records": data.split}
                if place(row) in map(place, rows_of(RESULT)):
                    continue
                row |= {"epsilon": EPSILON, "delta": DELTA, **train(kind, data, hidden, seed, rates)}
                print(json.dumps(row), flush=True)
                keep(RESULT, row, place)


if __name__ == "__main__":
    main()
