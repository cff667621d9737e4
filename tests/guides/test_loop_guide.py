"""The scripts of the guide of data and optimizers run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from dpfunc.checkpoint.journal import journal_ledger

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "loop.md").read_text()


def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train, resume, stream, people, several, publish = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    names = {"__name__": "guide"}
    exec(compile(train, "loop.md", "exec"), names)
    assert "epsilon=2.9" in capsys.readouterr().out
    assert names["state"].step == 20
    assert dict(names["trained"].named_parameters()).keys() == names["params"].keys()
    newest = sorted(path for path in (tmp_path / "run").iterdir() if path.is_dir())[-1]
    for path in newest.iterdir():  # as after a crash between the checkpoints of step 15 and 20
        path.unlink()
    newest.rmdir()
    before, spent = dict(names["params"]), names["state"].ledger
    exec(compile(resume, "loop.md", "exec"), names)
    assert names["saved"].state.step == 15
    exec(compile(f"from pathlib import Path\n{publish}", "loop.md", "exec"), names)
    assert '"one patient"' in (tmp_path / "privacy_accounting.json").read_text()
    assert names["state"].ledger == spent == journal_ledger(tmp_path / "run" / "journal.jsonl")
    assert all(torch.equal(p, before[name]) for name, p in names["params"].items())
    exec(compile(stream, "loop.md", "exec"), names)
    assert names["state"].step == 20
    assert [event.num_steps for event in names["state"].ledger.events] == [2]
    assert names["state"].ledger.epsilon(1e-5).epsilon <= 3.0
    before = names["model"][0].weight.clone()
    exec(compile(people, "loop.md", "exec"), names)
    assert names["state"].step == 10
    assert torch.equal(names["model"][0].weight, before)
    assert not torch.equal(names["model_of_people"][0].weight, before)
    exec(compile(several, "loop.md", "exec"), names)
    assert "torch.Size([60])" in capsys.readouterr().out
