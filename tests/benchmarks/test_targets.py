"""The table of targets: each number is in the committed results, the verdicts are right, the page is that of today."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import targets
from benchmarks.pages import filled
from benchmarks.targets import MS, PAGE, RATIO, REASONS, SHARE, TARGETS, Target, judged, reports, tables, verdict

TOY = Target("toy", 1.5, RATIO, "file", ("case", "private"), ("case", "plain"))


def test_every_target_is_measured():
    assert not [target.title for target, value in judged(reports()) if value is None]


def test_every_reason_is_known():
    assert {target.why for target in TARGETS} - {""} | {"small"} == set(REASONS)
    missed = [target for target, value in judged(reports()) if value is not None and value > target.limit]
    assert all(target.why for target in missed)


@pytest.mark.parametrize(
    ("private", "expected"), [(3.0, "met"), (2.0, "met"), (3.3, "missed by 10 %"), (None, "not measured")]
)
def test_verdicts(private, expected):
    case = {"plain": 2.0} | ({} if private is None else {"private": private})
    assert verdict(TOY, TOY.measured({"file": {"case": case}})) == expected
    assert verdict(TOY, TOY.measured({})) == "not measured"


def test_shares_are_missed_by_points():
    target = Target("toy", 2.0, SHARE, "file", ("typing",))
    assert verdict(target, target.measured({"file": {"typing": 0.045}})) == "missed by 2.5 points"


def test_small_steps_have_their_own_limit():
    """1.5 x plain + 3 ms, for steps of at most 5 ms."""
    cases = {name: {"plain": plain, "private": 0.01} for name, plain in (("a", 0.004), ("b", 0.006))}
    small = [(target, value) for target, value in judged({"small_steps": {"cases": cases}}) if target.unit == MS]
    small = [(target.title, target.limit, value) for target, value in small if "step of" in target.title]
    assert small == [("a: a step of 4.0 ms", pytest.approx(9.0), pytest.approx(10.0))]


def test_the_page_has_the_table_of_the_committed_results():
    """After a change of a result file: `python -m benchmarks.targets`."""
    assert filled(PAGE.read_text(), tables(reports())) == PAGE.read_text()


def test_the_command_writes_the_page(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "".join(
            f"<!-- {place} -->\n<!-- end -->\n" for place in ("engines", "jax", "overhead", "freed memory", "loaders")
        )
        + "before\n<!-- targets -->\nold\n<!-- end -->\nafter\n"
    )
    monkeypatch.setattr(targets, "RESULTS", tmp_path)
    times = {"plain": (1.0, 0.2), "auto": (1.5, 0.3), "opacus-hooks": (3.0, 0.6), "opacus-ghost": (2.0, 0.4)}
    contestants = {who: {"time": {"ratio": ratio, "median_seconds": sec}} for who, (ratio, sec) in times.items()}
    report = {"cases": {"w1": {"title": "LoRA", "contestants": contestants}}}
    (tmp_path / "engines.json").write_text(json.dumps(report))
    result = CliRunner().invoke(targets.main, ["--page", str(page)])
    assert result.exit_code == 0, result.output
    assert "missed by 50 %" in result.output
    written = page.read_text()
    assert "before\n" in written
    assert "old" not in written
    assert "| w1: decoder, LoRA | 1 | 1.5 | missed by 50 % |" in written
    assert "| LoRA (w1) | 200 | 1.50 |  |  |  | 2.00 (ghost) |  | not measured |  |" in written
