"""`python -m benchmarks.survey.compiled`: steps with `compile="auto"`, one model of each family that is named here.

Each case is a process of its own: the second call of a clipped sum in one microbatch, whatever it costs, beside the
eager sum of the same rows. A case is either compiled, with this difference, or eager, with a reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from benchmarks.survey import tables
from benchmarks.survey.case import Case
from benchmarks.survey.measure import adapted_layers, functions, prepared, seed
from benchmarks.survey.runner import ROOT
from dpfunc import clipping, engines
from dpfunc.clipped import make_clipped_grad

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "gpt2", "gpt_neox", "opt", "bloom",
    "falcon", "mixtral", "bert", "roberta", "distilbert", "deberta-v2", "albert", "electra", "mpnet", "t5", "bart",
    "marian", "vit", "swin", "deit", "convnext", "beit", "dinov2", "resnet", "wav2vec2 ctc", "whisper",
    "clip", "llava", "siglip",
)  # fmt: skip
TRAINED = ("full", "LoRA")
OUT = ROOT / "benchmarks/results/survey_compiled.json"


def chosen() -> dict[str, Case]:
    """The first case of each family that is named and of each way to train it, in eval mode, by name."""
    found: dict[tuple[str, str], Case] = {}
    for case in tables.cases().values():
        if case.family in FAMILIES and case.trained in TRAINED and case.mode == "eval":
            found.setdefault((case.family, case.trained), case)
    return {case.name: case for case in found.values()}


def measure(case: Case) -> dict[str, Any]:
    """A row of the result: compiled or not, why not, and the difference relative to the eager sum."""
    seed()
    subject = prepared(case)
    forward, params = functions(case, subject, adapted_layers(subject.module) if case.trained == "LoRA" else [])
    loss_fn, batch = subject.loss(forward), subject.batch
    size = len(next(iter(batch.values())))
    rule = clipping.Flat(1.0)
    eager, _ = make_clipped_grad(loss_fn, rule, engine=engines.auto())(params, batch)
    compiled = make_clipped_grad(loss_fn, rule, engine=engines.auto(), microbatch_size=size, compile="auto")
    start = time.perf_counter()
    compiled(params, batch)
    seconds = time.perf_counter() - start
    sums, _ = compiled(params, batch)
    off = torch.stack([(sums.sums[name] - value).norm() for name, value in eager.sums.items()]).norm()
    length = torch.stack([value.norm() for value in eager.sums.values()]).norm()
    record = compiled.compilation
    return {
        "case": case.name, "model": type(subject.module).__name__, "compiled": record.compiled,
        "reason": record.reason[:300], "difference": float(off / length), "first_seconds": round(seconds, 1),
    }  # fmt: skip


def alone(case: Case, limit: int) -> dict[str, Any]:
    """The row of a case, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.survey.compiled", "--case", case.name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        run = subprocess.run(command, cwd=ROOT, env=environment, timeout=limit, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return {"case": case.name, "left_out": f"took more than {limit} s"}
    if run.returncode:
        return {"case": case.name, "left_out": run.stderr.strip().splitlines()[-1][:300]}
    row: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.survey.compiled", description=__doc__)
    parser.add_argument("--case", help="print the row of this case")
    parser.add_argument("--limit", type=int, default=300, help="seconds for one case")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    cases = chosen()
    if options.case:
        return print(json.dumps(measure(cases[options.case])))
    rows = []
    for case in track(cases.values()):
        rows.append(alone(case, options.limit))
        ways = ("left out" if "left_out" in row else "compiled" if row["compiled"] else "eager" for row in rows)
        versions = {name: version(name) for name in ("torch", "transformers")}
        content = {"versions": versions, "counts": dict(Counter(ways)), "rows": rows}
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    print(content["counts"])


if __name__ == "__main__":
    main()
