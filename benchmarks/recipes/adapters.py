"""Rates of adapters on validation data, 3 minutes a run on one CPU core: `python -m benchmarks.recipes.adapters`.

Adapters in the highest layer of all-MiniLM-L6-v2, mean pooling and a new head that starts at zero, on Rotten Tomatoes
at epsilon 3. Per-sample gradients are those of parameters that were copied for each row, and noise is torch's: for
grids, and not fit for privacy. `tests/benchmarks/test_recipes_adapters.py` compares the clipped sum with the library.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.pages import row
from benchmarks.recipes.__main__ import EPSILON
from benchmarks.recipes.data import ROOT, SHARES, reviews
from dpfunc.accounting import calibrate_noise
from dpfunc.recipes import recipe

RESULT = Path(__file__).resolve().parents[1] / "results" / "recipes_adapters.json"
DELTA, GAMMA, TOKENS, STEPS, PROB = 1e-5, 0.01, 64, 40, 0.16
RUNS: tuple[dict[str, Any], ...] = (
    {"rank": 4, "train": "B", "rate": 1e-3},
    {"rank": 4, "train": "B", "rate": 5e-3},
    {"rank": 4, "train": "B", "rate": 1e-3, "bound": 0.3},
    {"rank": 8, "train": "AB", "rate": 1e-3},
    {"rank": 8, "train": "AB", "rate": 1e-3, "head_rate": 1e-3},
)


def layer(module: Any, x_BTd: Tensor, bias_B11T: Tensor, adapters: dict[str, Tensor]) -> Tensor:
    """A layer of BERT's form with adapters at query and value, whose parameters may be one for each row."""
    attention = module.attention.self
    heads, (rows, length, width) = attention.num_attention_heads, x_BTd.shape

    def split(z: Tensor) -> Tensor:
        return z.view(rows, length, heads, width // heads).transpose(1, 2)

    def adapted(name: str, z: Tensor) -> Tensor:
        return z + (x_BTd @ adapters[f"{name}A"].transpose(-1, -2)) @ adapters[f"{name}B"].transpose(-1, -2)

    q, k, v = adapted("q", attention.query(x_BTd)), attention.key(x_BTd), adapted("v", attention.value(x_BTd))
    weights = ((split(q) @ split(k).transpose(-1, -2)) / math.sqrt(width // heads) + bias_B11T).softmax(-1)
    context = (weights @ split(v)).transpose(1, 2).reshape(rows, length, width)
    x_BTd = module.attention.output(context, x_BTd)
    return module.output(module.intermediate(x_BTd), x_BTd)  # type: ignore[no-any-return]  # of Transformers


def logits(top: nn.Module, params: dict[str, Tensor], hidden: Tensor, mask: Tensor) -> Tensor:
    """Logits (B, classes) of hidden states (B, T, width) below the highest layer."""
    bias = torch.zeros(mask.shape).masked_fill(~mask, -1e9)[:, None, None]
    x_BTd = layer(top, hidden, bias, params)
    weights = mask[..., None].float()
    features = F.layer_norm((x_BTd * weights).sum(1) / weights.sum(1), x_BTd.shape[-1:])
    return (features[:, None] @ params["W"].transpose(-1, -2) + params["b"][..., None, :]).squeeze(1)


def summed(
    top: nn.Module, params: dict[str, Tensor], trained: list[str], hidden: Tensor, mask: Tensor, y: Tensor,
    bound: float | None,
) -> dict[str, Tensor]:  # fmt: skip
    """Sum over rows of gradients scaled to norm 1; with a bound, adapters are scaled to it and the head to 1."""
    own = {
        name: p.expand(len(y), *p.shape).detach().requires_grad_() if name in trained else p
        for name, p in params.items()
    }
    loss = F.cross_entropy(logits(top, own, hidden, mask), y, reduction="sum")
    grads = dict(zip(trained, torch.autograd.grad(loss, [own[name] for name in trained]), strict=True))
    head = [name for name in trained if name in "Wb"]
    parts = [(trained, 1.0)] if bound is None else [(head, 1.0), ([n for n in trained if n not in head], bound)]
    sums = {}
    for names, most in parts:
        norms = torch.stack([grads[name].flatten(1).square().sum(1) for name in names]).sum(0).sqrt()
        for name in names:
            sums[name] = torch.einsum("n,n...->...", most / (norms + GAMMA), grads[name])
    return sums


def fresh(rank: int, width: int, classes: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Adapters whose B is zero, with A at random; and a head at zero."""
    params = {}
    for name in "qv":
        params[f"{name}A"] = (torch.rand(rank, width, generator=generator) * 2 - 1) / math.sqrt(width)
        params[f"{name}B"] = torch.zeros(width, rank)
    return {**params, "W": torch.zeros(classes, width), "b": torch.zeros(classes)}


def padded(states: list[Tensor], y: Tensor, rows: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows of like length together, in parts; their order within a batch changes nothing."""
    lengths = torch.tensor([len(states[row]) for row in rows.tolist()])
    for part in rows[lengths.argsort()].split(size):
        found = [states[row].float() for row in part.tolist()]
        hidden = nn.utils.rnn.pad_sequence(found, batch_first=True)
        mask = torch.arange(hidden.shape[1]) < torch.tensor([len(state) for state in found])[:, None]
        yield hidden, mask, y[part]


def train(
    top: nn.Module, states: list[Tensor], y: Tensor, rows: Tensor, *, rank: int, train: str, rate: float,
    head_rate: float | None = None, bound: float | None = None, seed: int = 0,
) -> tuple[dict[str, Tensor], float]:  # fmt: skip
    """Train with Adam; the parameters, and the rate of the head, by default that of the recipe for a head alone."""
    generator = torch.Generator().manual_seed(seed)
    classes, n, width = int(y.max()) + 1, len(rows), states[0].shape[1]
    params = fresh(rank, width, classes, generator)
    trained = [name for name in params if train == "AB" or not name.endswith("A")]
    if head_rate is None:
        facts = {"dataset_size": n, "num_parameters": (width + 1) * classes, "num_classes": classes}
        head_rate = recipe("head", epsilon=EPSILON, delta=DELTA, **facts).learning_rate
    sigma = calibrate_noise(epsilon=EPSILON, delta=DELTA, sampling_prob=PROB, num_steps=STEPS)
    sensitivity = 1.0 if bound is None else math.sqrt(1 + bound**2)
    groups = [{"params": [params[name]], "lr": head_rate if name in "Wb" else rate} for name in trained]
    optimizer = torch.optim.Adam(groups)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)
    for _ in range(STEPS):
        drawn = rows[torch.nonzero(torch.rand(n, generator=generator) < PROB)[:, 0]]
        totals = {name: torch.zeros_like(params[name]) for name in trained}
        for hidden, mask, labels in padded(states, y, drawn, 96):
            for name, part in summed(top, params, trained, hidden, mask, labels, bound).items():
                totals[name] += part
        for name, total in totals.items():
            noise = sigma * sensitivity * torch.randn(total.shape, generator=generator)
            params[name].grad = (total + noise) / (PROB * n)
        optimizer.step()
        scheduler.step()
    return params, head_rate


def lower_states(texts: list[str]) -> tuple[nn.Module, list[Tensor]]:
    """The highest layer, and the hidden states below it of each text."""
    from transformers import AutoModel, AutoTokenizer

    folder = ROOT / ".cache" / "model"
    model = AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="eager").eval()
    model.requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    states = []
    with torch.no_grad():
        for text in track(texts, "frozen layers"):
            tokens = tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt")
            x_BTd = model.embeddings(input_ids=tokens["input_ids"])
            for each in model.encoder.layer[:-1]:
                output = each(x_BTd, None)
                x_BTd = output[0] if isinstance(output, tuple) else output
            states.append(x_BTd[0].half())
    return model.encoder.layer[-1], states


def line(result: dict[str, Any]) -> str:
    """One row of the table in docs/recipes.md."""
    bound = "one for all" if result["bound"] is None else f"adapters {result['bound']:g}, head 1"
    cells = [
        str(result["rank"]), result["train"], f"{result['rate']:g}", f"{result['head_rate']:.3g}", bound,
        str(result["parameters"]), f"{result['validation']:.3f}",
    ]  # fmt: skip
    return row(cells)


@click.command(help=__doc__)
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="File of the results.")
def main(out: Path) -> None:
    """Run all settings, print, and write the results."""
    console = Console(width=200)
    torch.set_num_threads(1)
    pairs = reviews()
    labels = sorted({label for _, label in pairs})
    y = torch.tensor([labels.index(label) for _, label in pairs])
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    first, second = (round(len(y) * share) for share in (SHARES[0], SHARES[0] + SHARES[1]))
    top, states = lower_states([text for text, _ in pairs])
    results = []
    for settings in RUNS:
        started = time.perf_counter()
        params, head_rate = train(top, states, y, order[:first], **settings)
        right = 0
        with torch.no_grad():
            for hidden, mask, wanted in padded(states, y, order[first:second], 128):
                right += int((logits(top, params, hidden, mask).argmax(1) == wanted).sum())
        counted = [name for name in params if settings["train"] == "AB" or not name.endswith("A")]
        results.append({
            "bound": None, **settings, "head_rate": head_rate, "parameters": sum(params[n].numel() for n in counted),
            "validation": right / (second - first), "epsilon": EPSILON, "delta": DELTA, "steps": STEPS,
            "sampling_prob": PROB, "seconds": time.perf_counter() - started,
        })  # fmt: skip
        console.print(line(results[-1]))
        out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
