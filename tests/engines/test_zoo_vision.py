"""Engines against the loop over single samples, on torchvision and timm models (in a process of their own)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from zoo import vision_run
from zoo.vision_run import CASES, COMPARED

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".cache" / "vision"
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def results():
    """(model, choice, engine, dtype) -> what the run said about it."""
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
    return {tuple(line["case"]): line for line in lines}


@pytest.mark.parametrize(("model", "choice"), CASES, ids=[f"{name}, {choice}" for name, choice in CASES])
def test_vision_models_equal_the_loop(results, model, choice):
    """Every trained parameter has a gradient: otherwise the comparison says nothing about it."""
    for engine, dtype in COMPARED:
        line = results[model, choice, engine, dtype]
        assert not line["unused"]
        assert "error" not in line, line["error"]
        # A norm that is wrong by r makes its square wrong by 2 r.
        limits = {name: TOLERANCE[dtype] * (2 if name == "squared norms" else 1) for name in line["differences"]}
        assert all(value < limits[name] for name, value in line["differences"].items()), (engine, dtype, line)
