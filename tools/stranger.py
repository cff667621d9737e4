"""The first hour of a new user, in an empty environment: `python tools/stranger.py`.

Builds the source archive and the wheel, installs the wheel into a new virtual environment, and does what the pages say:
the quick start, a job of one's own with `dpfunc train`, the loop of the README, its report, two processes. The code of
the pages is run as it stands there. What dpfunc needs is taken from the environment that runs this script; nothing is
downloaded. Prints the seconds of each part, and ends with an error at the first that fails.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCAL = (".git", ".venv", ".cache", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist", "runs")
JOB = """
task: text_classification
output_dir: runs/mine
model: {path: tiny, init: random}
data: {train: mine.csv, max_length: 16, labels: [sport, money], eval_fraction: 0.2}
privacy: {dp_epsilon: 8, dp_delta: 1e-3, dp_max_grad_norm: 1.0}
training: {learning_rate: 1e-2, batch_size: 32, steps: 4, physical_batch_size: 16, save_steps: 2}
"""
DIGITS = """
import numpy as np


def load_digits(return_X_y):
    table = np.loadtxt({!r}, delimiter=",")
    return table[:, :-1], table[:, -1].astype(int)
"""
REPORT = """
from pathlib import Path

record = dpfunc.checkpoint.make_record(dp_step, state, unit="one person")
Path("privacy_accounting.json").write_text(record.to_json())
"""


def run(*command: str | Path, cwd: Path, expected: int = 0) -> str:
    """Run a command as a user would, without the settings of this process; what it prints.

    Raises:
        SystemExit: it ended with another exit code.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    if result.returncode != expected:
        sys.exit(f"{' '.join(map(str, command))} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}")
    return result.stdout


def block(page: str, beginning: str) -> str:
    """The Python code on a page of the repository that begins so."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (found,) = (code for code in blocks if code.startswith(beginning))
    return str(found)


def install(place: Path) -> Path:
    """Build the package, and install it into a new environment; the folder of its commands."""
    copy = place / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LOCAL))
    code = "from setuptools.build_meta import build_sdist, build_wheel; build_sdist({0!r}); build_wheel({0!r})"
    run(sys.executable, "-c", code.format(str(place)), cwd=copy)
    shutil.rmtree(copy)
    (wheel,) = place.glob("*.whl")
    venv.create(place / "env")
    commands = place / "env" / ("Scripts" if os.name == "nt" else "bin")
    words = ("install", "--quiet", "--no-index", "--no-deps", wheel)
    run(sys.executable, "-m", "pip", "--python", commands / "python", *words, cwd=place)
    inside = run(commands / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip()
    Path(inside, "present.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if not run(commands / "python", "-c", "import dpfunc; print(dpfunc.__file__)", cwd=place).startswith(inside):
        sys.exit("Expected the installed package to be imported, got another one.")
    return commands


def own_table(place: Path) -> None:
    """A table of one's own, a job over it, and a folder with a model, as save_pretrained writes it."""
    sys.path.insert(0, str(ROOT / "tests" / "_support"))
    from text_job import rows, write_model

    with open(place / "mine.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, ["text", "label"])
        table.writeheader()
        table.writerows(rows(200))
    write_model(place / "tiny")
    (place / "job.yaml").write_text(JOB)


def main() -> None:
    """Do all of it in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        commands: list[Path] = []

        def script(name: str, *parts: str) -> Callable[[], str]:
            (place / name).write_text("\n".join(parts))
            return lambda: run(commands[0] / "python", name, cwd=place)

        def command(words: str) -> Callable[[], str]:
            return lambda: run(commands[0] / "dpfunc", *shlex.split(words), cwd=place)

        own_table(place)
        loop = block("README.md", "import dpfunc, torch")
        (place / "sklearn").mkdir()
        (place / "sklearn" / "__init__.py").touch()
        (place / "sklearn" / "datasets.py").write_text(
            DIGITS.format(str(ROOT / "tests" / "_support" / "digits.csv.gz"))
        )
        (place / "several.py").write_text(block("docs/guides/distributed.md", "import torch"))
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "several.py")
        parts: dict[str, Callable[[], object]] = {
            "build, and install into an empty environment": lambda: commands.append(install(place)),
            "dpfunc --help": command("--help"),
            "dpfunc requirements": command("requirements -n 2000 -b 200 --epochs 10 --epsilon 3"),
            "the quick start": script("quick_start.py", block("docs/quick_start.md", "import torch")),
            "own table: dry run": command("train job.yaml --dry-run"),
            "own table: dpfunc train": command("train job.yaml"),
            "its report": command("ledger show runs/mine"),
            "its check": command("ledger check runs/mine"),
            "the loop of the README, with a record": script("loop.py", loop, REPORT),
            "the report of the loop": command("ledger show privacy_accounting.json"),
            "two processes": lambda: run(commands[0] / "python", *torchrun, cwd=place),
        }
        for name, part in parts.items():
            since = time.perf_counter()
            part()
            print(f"{time.perf_counter() - since:7.1f} s  {name}", flush=True)


if __name__ == "__main__":
    main()
