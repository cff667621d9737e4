"""Thirty fixed runs release what they released when they were recorded: a change of the code changes no release.

`python -m tests.test_released_runs` compares bit for bit, on the machine where the values were recorded;
`python -m tests.test_released_runs --record` writes them anew, which is right only where a release is meant to change.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from pathlib import Path

import pytest
import torch

import dpfunc
from dpfunc.errors import InsecureKeyWarning
from dpfunc.sampling import Poisson
from tests._support.cases import GROUPINGS, RULES
from tests._support.models import build

RECORD = Path(__file__).with_name("released_runs.json")
ENGINES, MICROBATCHES = ("auto", "ghost", "vmap"), (None, 2, 5)
MODELS = (
    "mlp", "cnn", "transformer full", "transformer bias-only", "transformer LoRA", "tied weights", "BERT top layer",
    "GPT-2 full, tied", "GPT-2 LoRA", "PEFT LoRA",
)  # fmt: skip
RUNS = {
    f"{case}, {engine}": (case, engine, list(RULES)[(i + j) % 6], list(GROUPINGS)[(i + 2 * j) % 5], MICROBATCHES[j])
    for i, case in enumerate(MODELS)
    for j, engine in enumerate(ENGINES)
}
NUM_RECORDS, STEPS = 12, 3


def released(case, engine, rule, grouping, microbatch_size):
    """Released gradients of each step, as one float64 vector."""
    groups = dpfunc.clipping.PerLayer() if grouping == "mapping" else GROUPINGS[grouping]
    plan = dpfunc.Plan(Poisson(NUM_RECORDS, 0.5), RULES[rule][0](1.0, groups), 0.3, STEPS, 1e-2)
    made = build(case, NUM_RECORDS)
    params = {name: param.detach().clone() for name, param in made.params.items()}
    step = dpfunc.make_dp_step(made.loss_fn, plan, engine=engine, microbatch_size=microbatch_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InsecureKeyWarning)  # the same draws and noise in each run
        state = step.init(params, key=dpfunc.rng.insecure_key(2026))
    for indices in plan.batches(dpfunc.state.allow_repeat(state)):
        grads, state, _ = step(params, dpfunc.take(made.batch, indices), state)
        params = {name: param - 0.1 * grads[name] for name, param in params.items()}
        yield torch.cat([grads[name].double().flatten() for name in sorted(grads)])


def described(steps):
    """Bits of all steps as a digest; norm, and product with a fixed vector, of each step."""
    digest = hashlib.blake2b(digest_size=16)
    numbers = []
    for values in steps:
        digest.update(values.numpy().tobytes())
        fixed = torch.arange(len(values), dtype=torch.float64).cos()
        numbers.append([float(values.norm()), float(values @ fixed)])
    return {"bits": digest.hexdigest(), "steps": numbers}


@pytest.mark.parametrize("name", RUNS)
def test_released_values(name):
    expected, found = json.loads(RECORD.read_text())[name]["steps"], described(released(*RUNS[name]))["steps"]
    assert len(found) == STEPS
    for (norm, product), (known_norm, known_product) in zip(found, expected, strict=True):
        assert abs(norm - known_norm) <= 1e-6 * known_norm
        assert abs(product - known_product) <= 1e-6 * known_norm


def main():
    found = {name: described(released(*run)) for name, run in RUNS.items()}
    if "--record" in sys.argv:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
        return
    known = json.loads(RECORD.read_text())
    changed = [name for name in RUNS if known[name]["bits"] != found[name]["bits"]]
    print(f"{len(RUNS) - len(changed)} of {len(RUNS)} runs released the same bits", *changed, sep="\n")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
