"""The guide of sharded models runs from its first line to its last, in two processes and with a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from tiny_models import NAME, write_model
from workers import run

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "sharded.md"


def test_the_guide_runs(tmp_path):
    write_model(tmp_path / "model")
    code = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL))
    assert NAME in code
    first, second = run(
        2,
        "fsdp_jobs:guide",
        code.replace(NAME, str(tmp_path / "model")).replace("num_steps=4", "num_steps=2"),
        tmp_path,
    )
    for step, held, trained in (first, second):
        assert step == 2
        for name, value in trained.items():
            assert torch.equal(value, first[2][name])
            assert held[name][0] == tuple(value.shape)
