"""The guide of PEFT runs from its first line to its last, with a tiny model in place of the one it downloads."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

from tiny_models import NAME, write_model

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "peft.md"


def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    """L7, K6: the own loop, saving, several adapters, prefix tuning, checkpointing."""
    text = GUIDE.read_text()
    write_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)).replace(NAME, str(tmp_path / "model"))
    names = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*gradient_checkpointing_enable. is deprecated")  # PEFT calls it
        exec(compile(code, str(GUIDE), "exec"), names)
    assert names["state"].step == 30
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert float(names["plan"].epsilon) == 8.0
    assert "causal_lm" in capsys.readouterr().out
