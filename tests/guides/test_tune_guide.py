"""docs/guides/tune.md: its options are those of the command, and its numbers those of the committed result."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dpfunc.cli._tune import tune

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "tune.md").read_text("utf-8")
RESULT = json.loads((ROOT / "benchmarks" / "results" / "tune.json").read_text("utf-8"))


def test_every_option_is_there():
    listed = set(re.findall(r"^\| `(--[a-z-]+)", GUIDE, re.MULTILINE))
    options = {name for option in tune.params for name in option.opts if name.startswith("--") and "_" not in name}
    assert listed == options


def test_numbers_are_those_of_the_result():
    found = [RESULT["private_search"], RESULT["public_search"], *RESULT["without_search"].values()]
    for each in found:
        assert f"| {each['mean']:.3f} ({each['low']:.3f} - {each['high']:.3f}) |" in GUIDE
    for kind in ("private_search", "public_search"):
        assert f"| {', '.join(f'{factor:g}' for factor in RESULT[kind]['chosen'])} |" in GUIDE
    for text in (
        f"{RESULT['n']} private texts", f"{RESULT['test']} to test on", f"noise multiplier {RESULT['noise_in_search']:.2f}",
        f"instead of {RESULT['noise_alone']:.2f}", f"epsilon {RESULT['epsilon_of_one_run_in_search']:.2f}",
        f"at most {RESULT['most_runs_99']} runs",
    ):  # fmt: skip
        assert text in GUIDE, text
