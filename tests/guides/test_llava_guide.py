"""docs/guides/llava.md: every command and every block runs, in order, and the numbers beside them are theirs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpfunc.cli.main import main as cli
from dpfunc.hf.vision_language import tiny_llava as tiny

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "llava.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each block printed: runs the whole page once, in an empty folder."""
    folder = tmp_path_factory.mktemp("guide")
    before = Path.cwd()
    os.chdir(folder)
    try:
        names = {"__name__": "guide"}
        return [run_block(kind, text, names) for kind, text in BLOCKS]
    finally:
        os.chdir(before)


def run_block(kind, text, names):
    if kind == "yaml":
        Path(re.match(r"# (\S+)\n", text).group(1)).write_text(text)
        return text
    if kind == "bash":
        return "\n".join(run_command(line) for line in text.replace("\\\n", "").splitlines() if line.strip())
    assert kind == "python", f"a block of kind {kind} that nobody runs"
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(text, "llava.md", "exec"), names)
    return printed.getvalue()


def run_command(line):
    """A command of the page, in this process where it can be: it must succeed, or be refused where the page says so."""
    command, _, comment = line.partition("#")
    words = shlex.split(command)
    refused = "refused" in comment
    if words[0] == "pip":
        return check_extras(words)
    if words[0] == "torchrun":
        return torchrun(words[1:])
    if "--resume" in words:  # leave of the run what a kill after its fourth step leaves
        Path("runs/shapes/privacy_accounting.json").unlink()
        for part in ("model", "checkpoint-6"):
            shutil.rmtree(Path("runs/shapes", part))
    if words[:3] == ["python", "-m", "dpfunc.hf.vision_language.tiny_llava"]:
        result = CliRunner().invoke(tiny.main, words[3:])
    else:
        assert words[0] == "dpfunc", line
        result = CliRunner().invoke(cli, words[1:])
    assert (result.exit_code != 0) == refused, f"{line}: {result.output} {result.exception!r}"
    if "steps:" in comment:
        assert f"\n{comment.strip()}\n" in result.output
    expected = re.search(r"(epsilon|noise_multiplier) ([\d.]+)", comment)
    if expected:
        check_number(result.output, *expected.groups())
    return result.output


def check_number(output, name, said):
    """The table of the command has this value, rounded as the page has it."""
    value = float(re.search(rf"^\W*{name.replace('_', ' ')}\W+([\d.]+)", output, re.MULTILINE).group(1))
    decimals = len(said.partition(".")[2])
    assert f"{value:.{decimals}f}" == said


def check_extras(words):
    """Nothing is installed here; what is named exists."""
    assert words[:2] == ["pip", "install"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert re.fullmatch(r"dpfunc\[(\w+)\]", words[2]).group(1) in extras
    return ""


def torchrun(words):
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    scripts = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(command, capture_output=True, text=True, env=scripts, timeout=500)
    assert result.returncode == 0, result.stderr
    return result.stdout


def block_with(outputs, text):
    found = [output for (_, block), output in zip(BLOCKS, outputs, strict=True) if text in block]
    assert len(found) == 1
    return found[0]


@pytest.mark.slow
def test_the_whole_guide_runs(outputs):
    """And prints what the page says: the table, dry run and training, metrics, what was spent, and how a run goes on."""
    assert len(outputs) == len(BLOCKS) >= 18
    for line in block_with(outputs, "print(table)").splitlines():
        assert f"\n{line}\n" in GUIDE
    trained = block_with(outputs, "dpfunc train llava.yaml --dry-run\ndpfunc train llava.yaml\n")
    assert "Nothing was trained" in trained
    spent = re.compile(r"Spent: epsilon=([\d.]+)")
    assert spent.search(block_with(outputs, "--resume")).group(1) == spent.search(trained).group(1)
    printed = dict(line.split() for line in block_with(outputs, 'names = ["epsilon", "delta"').splitlines())
    assert 0 < float(printed["epsilon"]) <= float(printed["target_epsilon"]) == 8.0
    assert (printed["global_step"], float(printed["max_grad_norm"])) == ("6", 0.1)
    logged = block_with(outputs, "trainer.train()")
    for name in ("epsilon", "delta", "max_grad_norm", "remaining_epsilon"):
        assert f"'privacy/{name}'" in logged
    assert "train_sampling_strategy" in block_with(outputs, "group_by_length")
    assert block_with(outputs, "dp_step.decision.engine").startswith("one pass ")
