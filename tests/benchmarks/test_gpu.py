"""`make gpu`: it says that there is no GPU; with one it runs each part, within its time, and writes what it found."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import gpu

ROW = {"numbers": 10**7, "source": "secure", "best_ns": 8.0}


def test_without_a_gpu_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(gpu.main, ["--results", str(tmp_path), "--pages", str(tmp_path)])
    assert result.exit_code == gpu.NO_GPU
    assert "No GPU was found" in result.output
    assert not list(tmp_path.iterdir())


@pytest.fixture
def with_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "noise", lambda device: [ROW])
    monkeypatch.setattr(gpu, "machine", lambda threads, device: {"gpu": "a GPU"})


@pytest.mark.parametrize(("failing", "code"), [(None, 0), ("tests", 1), ("engines", 1)])
def test_every_part_is_run_and_noted(with_gpu, tmp_path, failing, code):
    names = list(gpu.commands(tmp_path, tmp_path))
    left = []

    def runner(command, seconds):
        left.append(seconds)
        return {"status": "exit code 3" if names[len(left) - 1] == failing else "ok", "seconds": 1.0}

    assert gpu.everything(tmp_path, tmp_path, runner) == code
    assert all(0 < seconds <= gpu.LIMIT_SECONDS for seconds in left)
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert list(report["parts"]) == names
    page = (tmp_path / "gpu.md").read_text()
    assert "| 10,000,000 | secure | 8.00 |" in page
    assert page.count("| exit code 3 |") == code


@pytest.mark.parametrize(
    ("program", "seconds", "status"),
    [("pass", 60, "ok"), ("import sys; sys.exit(3)", 60, "exit code 3"), ("input()", 1, "stopped: the time was over")],
)
def test_a_part_is_stopped_when_the_time_is_over(monkeypatch, program, seconds, status):
    if status.startswith("stopped"):
        program = "import time; time.sleep(600)"
    assert gpu.run([sys.executable, "-c", program], seconds)["status"] == status


def test_the_commands_exist(tmp_path):
    """Their options are those of the programs; the marker is known to pytest."""
    from benchmarks.engines.__main__ import main
    from benchmarks.engines.cases import CASES

    command = gpu.commands(tmp_path, tmp_path)["engines"]
    known = {option for each in main.params for option in each.opts}
    assert {word for word in command if word.startswith("--")} <= known
    assert set(gpu.CASES.split(",")) <= set(CASES)
    assert "cuda:" in (ROOT / "pyproject.toml").read_text()


def test_noise_is_measured_on_the_cpu_too():
    (row,) = gpu.noise("cpu", (1000,), 2)
    assert row["best_ns"] > 0
