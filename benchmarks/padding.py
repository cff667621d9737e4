"""What padding costs, and what one long record takes: `python -m benchmarks.padding`.

The records of one batch have lengths of a log-normal law, from 16 to 512 tokens. Each way computes the clipped sum of
the same records, for all parameters of a small decoder: padded to the longest that there could be; to the longest of
the batch; in microbatches, as they come or in the order of their lengths, each padded to its own longest. All are
compared with the first. `in one row` fills rows of 512 tokens with several records and clips the row: it protects no
record, and shows what packing could save at most. One record of 2,048 tokens is computed plainly, with checkpoints of
the layers, and with logits in blocks of positions. CPU time, and memory that torch allocates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import MIB, allocated
from benchmarks.results import DOCS, FOLDER, fill, markdown, read, write
from dpfunc.clipped import make_clipped_grad
from dpfunc.clipping import Flat
from dpfunc.functional import functionalize
from dpfunc.hf.tasks import make_loss_fn
from dpfunc.rng import insecure_key, torch_seed

RESULT, PAGE = FOLDER / "padding.json", DOCS / "padding.md"
RECORDS, MOST, ROWS, LONG, BLOCK, VOCABULARY = 32, 512, 8, 2048, 256, 4000
Batch = dict[str, Tensor]


def decoder(layers: int = 2) -> Any:
    """A small Llama with random weights, in evaluation mode, as checkpoints want it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": layers, "num_attention_heads": 4}
    with torch_seed(insecure_key(0)):
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, max_position_embeddings=LONG)).train(False)


def records(count: int, most: int) -> list[Tensor]:
    """Token ids of so many records; half of them have fewer than 60."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.1, 0.8, count), 16, most).astype(int)
    return [torch.from_numpy(rng.integers(3, VOCABULARY, length)) for length in lengths]


def padded(rows: list[Tensor], length: int | None = None) -> Batch:
    """Rows on the right of which there is padding, to this length or to that of the longest."""
    longest = max(map(len, rows)) if length is None else length
    filled = {
        "input_ids": torch.stack([F.pad(row, (0, longest - len(row))) for row in rows]),
        "attention_mask": torch.stack([F.pad(torch.ones_like(row), (0, longest - len(row))) for row in rows]),
    }
    return {**filled, "labels": torch.where(filled["attention_mask"] == 1, filled["input_ids"], -100)}


def in_one_row(rows: list[Tensor], length: int) -> Batch:
    """All tokens one behind the other, in rows of this length: several records share a row."""
    stream = torch.cat(rows)
    cut = stream[: len(stream) // length * length].reshape(-1, length)
    return {"input_ids": cut, "attention_mask": torch.ones_like(cut), "labels": cut}


def by_blocks(model: Any, block: int) -> Callable[..., Tensor]:
    """`causal_lm` whose logits are there for one block of positions at a time, also in the backward pass."""

    def scores(hidden_BTD: Tensor, weight: Tensor, labels_BT: Tensor) -> Tensor:
        logits_BTV = F.linear(hidden_BTD, weight)
        return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="none").reshape(labels_BT.shape)

    def loss(forward: Any, params: Mapping[str, Tensor], batch: Batch) -> Tensor:
        del forward
        hidden_BTD = torch.func.functional_call(
            model.model, {name.removeprefix("model."): p for name, p in params.items() if name.startswith("model.")},
            kwargs={"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False},
        ).last_hidden_state  # fmt: skip
        labels_BT, total = batch["labels"][:, 1:], torch.zeros(())
        for start in range(0, labels_BT.shape[1], block):
            span = slice(start, start + block)
            part = checkpoint(
                scores, hidden_BTD[:, :-1][:, span], params["lm_head.weight"], labels_BT[:, span], use_reentrant=False
            )
            total = total + part.sum(1)
        return total / (labels_BT != -100).sum(1).clamp(min=1)

    return loss


def measured(step: Callable[[], Any], rounds: int) -> tuple[Any, dict[str, float]]:
    """What a step returns, its CPU seconds (the least of some rounds), and the most memory that it allocated."""
    seconds = []
    for _ in range(rounds + 1):  # the first learns what the loss does
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    result, memory = allocated(step)
    return result, {"cpu_seconds": min(seconds[1:]), "peak_mib": memory.peak / MIB}


def added(parts: list[Any]) -> dict[str, Tensor]:
    """The sum of clipped sums of different records, each of which is in one of them."""
    return {name: torch.stack([part.sums[name] for part in parts]).sum(0) for name in parts[0].sums}


def batches(quick: bool, rounds: int) -> list[dict[str, Any]]:
    """All ways of one batch."""
    rows, most = records(8 if quick else RECORDS, 64 if quick else MOST), 64 if quick else MOST
    model = decoder(1 if quick else 2)
    forward, params = functionalize(model)
    gradient = make_clipped_grad(make_loss_fn(forward, "causal_lm"), Flat(1.0), microbatch_size=ROWS)
    ordered = sorted(rows, key=len)
    ways: dict[str, list[Batch]] = {
        f"all padded to {most}": [padded(rows, most)],
        "padded to the longest of the batch": [padded(rows)],
        "microbatches as they come, each to its longest": [
            padded(rows[start : start + ROWS]) for start in range(0, len(rows), ROWS)
        ],
        "microbatches in the order of lengths": [
            padded(ordered[start : start + ROWS]) for start in range(0, len(rows), ROWS)
        ],
        "several records in one row (protects none)": [in_one_row(rows, most)],
    }
    tokens, found, truth = sum(map(len, rows)), [], None
    for name, parts in ways.items():
        sums, numbers = measured(lambda p=parts: added([gradient(params, part)[0] for part in p]), rounds)
        truth = sums if truth is None else truth
        error = max(float((sums[key] - truth[key]).norm() / truth[key].norm()) for key in truth)
        shapes = [part["input_ids"].shape for part in parts]
        share = 1 - tokens / sum(shape.numel() for shape in shapes)
        private = "protects none" not in name
        found.append({"way": name, **numbers, "padding": max(share, 0.0), "error": error if private else None})
    return found


def checkpointed(model: Any) -> None:
    """Switch on gradient checkpointing, under the name that it has in this version of Transformers."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})


def long_record(quick: bool, rounds: int) -> list[dict[str, Any]]:
    """One record of many tokens."""
    length = 64 if quick else LONG
    row = padded([torch.from_numpy(np.random.default_rng(1).integers(3, VOCABULARY, length))])
    found, truth = [], None
    for name, checkpoints, blocks in (
        ("plain", False, False), ("layers checkpointed", True, False), ("and logits in blocks of positions", True, True)
    ):  # fmt: skip
        model = decoder(4)
        forward, params = functionalize(model)
        if checkpoints:
            checkpointed(model)
            model.train()
        loss = make_loss_fn(forward, by_blocks(model, 16 if quick else BLOCK) if blocks else "causal_lm")
        gradient = make_clipped_grad(loss, Flat(1.0))
        sums, numbers = measured(lambda g=gradient, p=params: g(p, row)[0].sums, rounds)
        truth = sums if truth is None else truth
        error = max(float((sums[key] - truth[key]).norm() / truth[key].norm()) for key in truth)
        found.append({"way": name, **numbers, "error": error})
    return found


def table(rows: list[dict[str, Any]], heads: tuple[str, ...]) -> str:
    """A table of a page."""
    lines = []
    for row in rows:
        padding = [f"{100 * row['padding']:.0f} %"] if "padding" in row else []
        error = "another quantity" if row["error"] is None else f"{row['error']:.0e}"
        lines.append([row["way"], *padding, f"{row['cpu_seconds']:.2f}", f"{row['peak_mib']:.0f}", error])
    return markdown(heads, lines, "---:")


def tables(found: Mapping[str, Any]) -> dict[str, str]:
    """The tables of the page about padding."""
    heads = ("CPU seconds", "MiB at most", "from the first")
    return {
        "padding": table(found["rows"], ("a batch of 32 records", "padding", *heads)),
        "long": table(found["long"], ("one record of 2,048 tokens", *heads)),
    }


@click.command(help=__doc__.splitlines()[0])
@click.option("--rounds", default=2, type=click.IntRange(1))
@click.option("--quick", is_flag=True, help="Tiny sizes, to see that everything works; not for figures.")
@click.option("--out", default=RESULT, type=click.Path(dir_okay=False, path_type=Path))
def main(rounds: int, quick: bool, out: Path) -> None:
    torch.set_num_threads(1)
    write(out, {"quick": quick, "rows": batches(quick, rounds), "long": long_record(quick, rounds)})
    if out == RESULT:
        fill(PAGE, tables(read(out)))
    click.echo("\n\n".join(tables(read(out)).values()))


if __name__ == "__main__":
    main()
