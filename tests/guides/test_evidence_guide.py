"""The guide of audits and replays runs, and what it prints is what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

from certified import plan_of, trained
from click.testing import CliRunner

from dpfunc import sampling
from dpfunc.cli.main import main

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "evidence.md").read_text()

BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
FAULTY = BLOCKS[0].replace("dpfunc.take(data, indices)", "dpfunc.take(data, indices) - data.mean(0)")


def test_blocks_run_in_their_order(capsys):
    names = {}
    loop, replayed, audited, exposed = BLOCKS
    for text, words in ((loop, ["Replay(holds"]), (FAULTY, ["DOES NOT HOLD", "rows of other records"])):
        exec(compile(text + replayed, "evidence.md", "exec"), names)
        told = capsys.readouterr().out
        assert [word for word in words if word not in told] == []
    exec(compile(audited, "evidence.md", "exec"), names)
    assert "claim" in capsys.readouterr().out
    exec(compile(exposed, "evidence.md", "exec"), names)
    assert "[10.]" in capsys.readouterr().out


def test_the_commands_of_the_guide(tmp_path, monkeypatch):
    """On its loop, beside a run of the same plan; a loop with a fault ends in 1."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(BLOCKS[0])
    trained(tmp_path / "run", plan_of(sampling.Poisson(50, 0.2), adjacency="add_remove", noise_multiplier=1.0))
    (commands,) = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
    for command in commands.splitlines():
        done = CliRunner().invoke(main, command.split()[1:])
        assert done.exit_code == 0, (command, done.output)
    assert (tmp_path / "audit.png").stat().st_size > 1000
    evidence = json.loads((tmp_path / "run" / "certificate.json").read_text())["evidence"]
    assert [(each["kind"], each["holds"]) for each in evidence] == [("replay", True), ("audit", True)]
    (tmp_path / "loop.py").write_text(FAULTY)
    again = CliRunner().invoke(main, ["verify", "loop.py", "--json"])
    assert (again.exit_code, json.loads(again.stdout)["holds"]) == (1, False)
    refused = CliRunner().invoke(main, ["verify", "loop.py", "--out", "replay.json"])
    assert (refused.exit_code, "exists" in refused.output) == (1, True)


def test_the_table_is_that_of_the_benchmark():
    found = json.loads((ROOT / "benchmarks" / "results" / "evidence.json").read_text())
    for part, faults in (("loops", 10), ("jobs", 8), ("runs", 5)):
        counts = [count for name, count in found[part].items() if not name.startswith("none")]
        assert counts == ["20 of 20"] * faults
        assert {count for name, count in found[part].items() if name.startswith("none")} == {"0 of 20"}
    for each in found["calibration"].values():
        shares = [100 * share for share in (each["refuted"], *each["interval"])]
        shown = [f"{share:.2f}" for share in shares]
        assert re.search(rf"{shown[0]} % of {each['audits']} audits.* \[{shown[1]}, {shown[2]}\]", GUIDE)
    for column in range(2):
        figures = [str(both[column]).removesuffix(".0") for both in found["figures"].values()]
        assert ", ".join(figures) in GUIDE
