"""The guide of audits and replays runs, and what it prints is what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from certified import plan_of, trained
from click.testing import CliRunner

from dpfunc import sampling
from dpfunc.cli.main import main

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "evidence.md").read_text()


BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def test_blocks_run_in_their_order(capsys):
    names = {}
    replayed, loop, audited, exposed = BLOCKS
    exec(compile(replayed, "evidence.md", "exec"), names)
    told = capsys.readouterr().out
    assert "DOES NOT HOLD" in told
    assert "rows of other records" in told
    exec(compile(replayed.replace(" - data.mean(0)", ""), "evidence.md", "exec"), names)
    assert "Replay(holds" in capsys.readouterr().out
    exec(compile(loop, "evidence.md", "exec"), names)
    exec(compile(audited, "evidence.md", "exec"), names)
    assert "claim" in capsys.readouterr().out
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(compile(exposed, "evidence.md", "exec"), names)
    bits = float(re.search(r"\[([\d.]+)\]", capsys.readouterr().out).group(1))
    assert 5 < bits <= 10


def test_the_commands_of_the_guide(tmp_path, monkeypatch):
    """On its loop, beside a run of the same plan; a loop with a fault ends in 1."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(BLOCKS[1])
    trained(tmp_path / "run", plan_of(sampling.Poisson(50, 0.2), adjacency="add_remove", noise_multiplier=1.0))
    (commands,) = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
    for command in commands.splitlines():
        done = CliRunner().invoke(main, command.split()[1:])
        assert done.exit_code == 0, (command, done.output)
    assert (tmp_path / "audit.png").stat().st_size > 1000
    evidence = json.loads((tmp_path / "run" / "certificate.json").read_text())["evidence"]
    assert [(each["kind"], each["holds"]) for each in evidence] == [("replay", True), ("audit", True)]
    (tmp_path / "loop.py").write_text(BLOCKS[1].replace("indices), state)", "indices) - data.mean(0), state)"))
    again = CliRunner().invoke(main, ["verify", "loop.py", "--json"])
    assert (again.exit_code, json.loads(again.stdout)["holds"]) == (1, False)
    refused = CliRunner().invoke(main, ["verify", "loop.py", "--out", "replay.json"])
    assert (refused.exit_code, "exists" in refused.output) == (1, True)
