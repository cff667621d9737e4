"""`python -m benchmarks.scaling`: measure the pieces, compute the model, write the result file and the document."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from benchmarks.engines.report import machine, rounded, versions, write
from benchmarks.scaling.page import filled
from benchmarks.scaling.pieces import ROUNDS, measure
from benchmarks.scaling.table import modelled

RESULT = Path(__file__).parents[1] / "results" / "scaling.json"
DOCUMENT = Path(__file__).parents[2] / "docs" / "scaling.md"


@click.command()
@click.option("--measure/--no-measure", "measuring", default=True, help="Or keep what was measured, and compute anew.")
@click.option("--threads", default=1, help="Of torch.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULT, help="The result file.")
@click.option("--document", type=click.Path(path_type=Path), default=DOCUMENT, help="Where the tables go.")
def main(measuring: bool, threads: int, out: Path, document: Path) -> None:
    """Memory, traffic and time of a private step on many GPUs: a model, and pieces that are measured here."""
    console = Console()
    report: dict[str, Any]
    if measuring:
        torch.set_num_threads(threads)
        report = {
            "machine": machine(threads, "cpu"),
            "versions": {**versions(), "randomgen": version("randomgen")},
            "rounds": ROUNDS,
            "pieces": rounded(measure(console.print)),
        }
    else:
        kept = json.loads(out.read_text())
        report = {key: kept[key] for key in ("machine", "versions", "rounds", "pieces")}
    report |= rounded(modelled(report["pieces"]["noise"]["1"]["per_second"]))
    write(report, out)
    document.write_text(filled(document.read_text(), json.loads(out.read_text())))
    console.print(f"{out}, {document}")


if __name__ == "__main__":
    main()
