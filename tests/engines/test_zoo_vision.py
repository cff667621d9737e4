"""Every engine against the loop over single samples, on torchvision and timm models (in a process of their own)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from zoo import vision_run
from zoo.parity import ENGINES
from zoo.vision_run import CASES, DTYPES, MODELS

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".cache" / "vision"
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}

cases = pytest.mark.parametrize(("model", "choice"), CASES, ids=[f"{name}, {choice}" for name, choice in CASES])
dtypes = pytest.mark.parametrize("dtype", DTYPES)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def results():
    """(model, choice, dtype, engine) -> what the run said about it; engine None is the loop itself."""
    if not (INSTALLED / "torchvision").is_dir() or not (INSTALLED / "timm").is_dir():
        pytest.fail(
            f"Expected torchvision and timm in {INSTALLED.relative_to(ROOT)}: `make test-slow` installs them there."
        )
    path = os.pathsep.join(str(folder) for folder in (INSTALLED, ROOT / "tests" / "_support", ROOT / "tests", ROOT))
    run = subprocess.run(
        [sys.executable, "-W", "error", vision_run.__file__],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {(line["model"], line["choice"], line["dtype"], line["engine"]): line for line in lines}


@dtypes
@cases
@pytest.mark.parametrize("engine", ENGINES)
def test_vision_models_equal_the_loop(results, engine, model, choice, dtype):
    line = results[model, choice, dtype, engine]
    assert "error" not in line, line["error"]
    found = line["differences"]
    assert "gradients" in found or engine != "loop"  # groups of rows, and ghosts, have none
    # A norm that is wrong by r makes its square wrong by 2 r.
    limits = {name: TOLERANCE[dtype] * (2 if name == "squared norms" else 1) for name in found}
    assert all(value < limits[name] for name, value in found.items()), found


@dtypes
@cases
def test_every_trained_parameter_of_a_vision_model_has_a_gradient(results, model, choice, dtype):
    """Otherwise the comparison above says nothing about it."""
    unused = results[model, choice, dtype, None]["unused"]
    assert all(re.search(MODELS[model].unused, name) for name in unused), unused
