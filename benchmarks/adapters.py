"""Adapters in a loop, at one epsilon: `python -m benchmarks.adapters` writes adapters.json.

The loop is that of the guide of PEFT with `dpfunc.features` and `recipe.optimizer(params, head=...)`: adapters in the
highest layer of all-MiniLM-L6-v2 beside a new head, each with its own rate. Layers below are computed once. Texts are
BBC News, their first 12 words, and questions of easy-VQA; a fifth is to test on. `--only` runs some data and kinds.
"""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

import click
import torch
from peft import LoraConfig, VeraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

import dpfunc
from benchmarks.recipes.data import ROOT, news
from benchmarks.results import FOLDER, write
from dpfunc.features import head_of, load_mean_pooled, measure_feature_norm
from dpfunc.functional import with_params
from dpfunc.hf import peft as adapters
from dpfunc.recipes import recipe

RESULT = FOLDER / "adapters.json"
MODEL = str(ROOT / ".cache" / "model")
EPSILON, DELTA = 3.0, 1e-4
TOKENS = {"news": 48, "titles": 16, "questions": 16}
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "FFA": {},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "VeRA": {"r": 64, "save_projection": True},
}
COMMON = {"r": 8, "target_modules": ["query", "value"], "task_type": "SEQ_CLS"}


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
    if name == "questions":
        kinds = {"yes": "yes or no", "no": "yes or no", "circle": "shape", "rectangle": "shape", "triangle": "shape"}
        asked = json.loads((ROOT / ".cache" / "easy-vqa" / "train" / "questions.json").read_text())
        found = dict.fromkeys(
            (text, "not" if " not " in text else kinds.get(answer, "colour")) for text, answer, _ in asked
        )
        return [*found]
    return [(" ".join(text.split()[:12]) if name == "titles" else text, label) for text, label in news()]


def load(name: str) -> Data:
    """A data set by name."""
    pairs = pairs_of(name)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    most = {"padding": "max_length", "truncation": True, "max_length": TOKENS[name], "return_tensors": "pt"}
    tokens = tokenizer([pairs[row][0] for row in order], **most)
    classes = sorted({label for _, label in pairs})
    labels = torch.tensor([classes.index(pairs[row][1]) for row in order])
    return Data(tokens["input_ids"], tokens["attention_mask"], labels, len(classes))


def adapted(kind: str, classes: int, seed: int) -> tuple[Any, Any]:
    """The model with adapters of a kind in its highest layer, and the model around which they are."""
    torch.manual_seed(seed)
    model = load_mean_pooled(MODEL, num_labels=classes)
    last = model.config.num_hidden_layers - 1
    model.split_at(last)
    config = VeraConfig if kind == "VeRA" else LoraConfig
    scale = {} if kind == "VeRA" else {"lora_alpha": 16}
    peft_model = get_peft_model(model, config(**{**COMMON, **scale, "layers_to_transform": [last], **KINDS[kind]}))
    if kind == "FFA":
        for name, param in peft_model.named_parameters():
            param.requires_grad_(param.requires_grad and "lora_A" not in name)
    return peft_model, model


@torch.no_grad()
def lower(model: Any, data: Data) -> Tensor:
    """What the layers below the adapters give, (n, T, width), each record alone."""
    parts = [model.lower(ids, mask) for ids, mask in zip(data.ids.split(64), data.mask.split(64), strict=True)]
    return torch.cat(parts)


def accuracy(peft_model: Any, params: dict[str, Tensor], hidden: Tensor, data: Data) -> float:
    """Share of the test records whose most likely class is their label."""
    trained, rest = with_params(peft_model, params).eval(), slice(data.split, None)
    with torch.no_grad():
        logits = trained(hidden=hidden[rest], attention_mask=data.mask[rest]).logits
    return float((logits.argmax(1) == data.labels[rest]).float().mean())


def train(kind: str, data: Data, hidden: Tensor, seed: int, rates: str = "two") -> dict[str, Any]:
    """One private run; its accuracy, trained numbers, and CPU seconds of a step. One rate: as loops had it before."""
    peft_model, _ = adapted(kind, data.classes, seed)
    forward, params = adapters.functionalize(peft_model)
    head, n = head_of(params), data.split
    found = recipe(
        "lora", dataset_size=n, num_parameters=sum(p.numel() for p in params.values()), epsilon=EPSILON, delta=DELTA,
        num_classes=data.classes, num_head_parameters=sum(p.numel() for p in head.values()),
        feature_norm=measure_feature_norm(peft_model, head),
    )  # fmt: skip
    plan = found.plan()

    def loss_fn(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        logits = forward(params, hidden=batch["hidden"], attention_mask=batch["mask"]).logits
        return F.cross_entropy(logits, batch["labels"], reduction="none")

    dp_step = dpfunc.make_dp_step(loss_fn, plan, microbatch_size=128)
    state = dp_step.init(params, dpfunc.secure_key())
    optimizer = found.optimizer(params.values(), head=head.values() if rates == "two" else ())
    scheduler = found.scheduler(optimizer)
    private = {"hidden": hidden[:n], "mask": data.mask[:n], "labels": data.labels[:n]}
    seconds = []
    for indices in plan.batches(state):
        start = time.process_time()
        grads, state, _ = dp_step(params, dpfunc.take(private, indices), state)
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
        scheduler.step()
        seconds.append(time.process_time() - start)
    trained = sum(p.numel() for p in params.values())
    typical = sorted(seconds)[len(seconds) // 2]
    return {"accuracy": accuracy(peft_model, params, hidden, data), "trained": trained, "seconds": typical}


@click.command()
@click.option("--data", "names", multiple=True, type=click.Choice([*TOKENS]), default=[*TOKENS])
@click.option("--kind", "kinds", multiple=True, type=click.Choice([*KINDS]), default=[*KINDS])
@click.option("--seeds", default=3, show_default=True)
@click.option("--rates", type=click.Choice(["one", "two"]), default="two", show_default=True)
@click.option("--save/--no-save", default=True)
def main(names: tuple[str, ...], kinds: tuple[str, ...], seeds: int, rates: str, save: bool) -> None:
    """Train each kind of adapters on each data set, and write what came out beside what is there."""
    torch.set_num_threads(1)
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    for name in names:
        data = load(name)
        hidden = lower(adapted("LoRA", data.classes, 0)[1], data)
        for kind in kinds:
            runs = [train(kind, data, hidden, seed, rates) for seed in range(seeds)]
            row = {"data": name, "records": data.split, "kind": kind, "rates": rates, "runs": runs}
            print(json.dumps(row), flush=True)
            rows = [each for each in rows if (each["data"], each["kind"], each["rates"]) != (name, kind, rates)] + [row]
    if save:
        write(RESULT, {"epsilon": EPSILON, "delta": DELTA, "rows": rows})


if __name__ == "__main__":
    main()
