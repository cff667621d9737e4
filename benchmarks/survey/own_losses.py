"""`python -m benchmarks.survey.own_losses`: losses of the inferred tasks beside those that the models compute.

For each model of the survey whose batch has labels: the loss of each row by `make_loss_fn(forward, infer_task(model))`,
in the batch, and the model's own loss for this row alone.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import click
import torch
from rich.progress import track
from torch import nn

from benchmarks.results import FOLDER, write
from benchmarks.survey.case import BATCH, Case
from benchmarks.survey.measure import cases
from dpfunc.errors import DPFuncError
from dpfunc.functional import functionalize
from dpfunc.hf._facts import facts_of
from dpfunc.hf.losses import IGNORED
from dpfunc.hf.tasks import infer_task, make_loss_fn

SAME = 1e-4
OUT = FOLDER / "own_losses.json"


def chosen() -> list[Case]:
    """One case a family, with all parameters, of models of Transformers."""
    found = [case for case in cases().values() if case.trained == "full" and case.field not in ("PEFT", "other")]
    return list({(case.field, case.family): case for case in reversed(found)}.values())[::-1]


def differences(module: nn.Module, task: str, batch: dict[str, torch.Tensor]) -> float:
    """The largest difference of a row's loss from the model's own, relative to that."""
    forward, params = functionalize(module)
    found = 0.0
    with torch.no_grad():
        together = make_loss_fn(forward, task)(params, batch)
        for row in range(BATCH):
            alone = {name: value[row : row + 1] for name, value in batch.items()}
            if task == "vqa":
                alone = facts_of(forward).flatten_images(alone)
            own = module(**alone).loss
            found = max(found, float((together[row] - own).abs() / own.abs().clamp(min=1e-3)))
    return found


def measure(case: Case) -> dict[str, Any] | None:
    """A row of the result; None where the batch has no labels, or the model cannot be built."""
    torch.manual_seed(0)
    try:
        subject = case.subject()
    except Exception:  # noqa: BLE001  (what fails is left out, as in the survey)
        return None
    module, batch = subject.module.eval(), subject.batch
    if "labels" not in batch:
        return None
    if type(module).__name__.endswith("ForCTC"):  # the survey fills labels with the blank, Transformers with -100
        batch = {**batch, "labels": torch.where(batch["labels"] == 0, IGNORED, batch["labels"])}
    row: dict[str, Any] = {"field": case.field, "family": case.family, "model": type(module).__name__}
    try:
        row["task"] = infer_task(module)
        row["difference"] = differences(module, row["task"], batch)
        row["result"] = "same" if row["difference"] <= SAME else "differs"
    except DPFuncError as error:
        row.update(result="refused", reason=str(error)[:160])
    except Exception as error:  # noqa: BLE001  (the survey lists it)
        row.update(result="fails", reason=f"{type(error).__name__}: {str(error)[:140]}")
    return row


@click.command(help=__doc__)
@click.option("--out", default=OUT, type=click.Path(path_type=Path, dir_okay=False))
def main(out: Path) -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    rows = [row for case in track(chosen()) if (row := measure(case)) is not None]
    counts = dict(Counter(row["result"] for row in rows))
    write(out, {"counts": counts, "rows": rows})
    print(counts)


if __name__ == "__main__":
    main()
