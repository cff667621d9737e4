"""What a clipped sum launches: no more than the limit of each case, and the same in each step; and how it is counted."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from local_process import settings_stay_as_they_were  # noqa: F401  (a fixture)

from benchmarks.launches import __main__ as launches
from benchmarks.launches.__main__ import step_of
from benchmarks.launches.cases import CASES
from benchmarks.launches.counts import READING, calls_of, launches_of, no_rows_alone
from benchmarks.results import DOCS, filled, read

REPORT = read(launches.RESULT)
same_torch = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != REPORT["versions"]["torch"].partition("+")[0],
    reason="the limits are those of the torch that was counted with",
)
LONG = "decoder ghost"
READS_OF_THE_MODEL = {"llava": 2}  # Transformers compares the numbers of image tokens and of features


@same_torch
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == LONG else name for name in CASES]
)
def test_a_step_launches_no_more_than_its_limit(name):
    """And the same operations on the same shapes as the step before it, without a read in between: as a CUDA graph wants."""
    step = step_of(name)
    with no_rows_alone():
        found, one, other = launches_of(step), *(launches_of(partial(step, checked=True)) for _ in range(2))
    limits = REPORT["cases"][name]["limits"]
    assert len(found.trace) <= limits["operations"], "see docs/performance.md, Launches"
    assert found.reads <= limits["reads"]
    assert one.trace == other.trace
    if CASES[name].engine == "auto":  # `ghost` reads each mark where it is needed
        names = [operation for operation, _ in one.trace]
        places = [place for place, operation in enumerate(names) if operation in READING]
        assert one.reads == len(places) == 1 + READS_OF_THE_MODEL.get(name, 0)
        assert set(names[places[-1] + 1 :]) <= {"cat"}, "after the read, results are only put together"


@pytest.mark.slow
@same_torch
@pytest.mark.parametrize("name", CASES)
def test_more_rows_launch_no_more_than_their_limit(name):
    assert launches.further(name) <= REPORT["cases"][name]["limits"]["further"]


def test_what_is_counted():
    matrix, ids = torch.ones(4, 8), torch.tensor([1, 1])
    found = launches_of(lambda: (matrix.t() @ matrix).view(-1))
    assert found.trace == [("mm", ((8, 4), (4, 8)))]  # views are left out
    assert (found.read, found.written, found.flops, found.reads) == (2 * 4 * 32, 4 * 64, 2 * 8 * 4 * 8, 0)
    assert launches_of(lambda: torch.nn.functional.embedding(ids, matrix)).read == 2 * 4 * 8 + 2 * 8  # two rows
    assert launches_of(lambda: torch.ones(1, 1).expand(9, 9) + 1).read == 4 + 0 * 81  # one number is read
    assert launches_of(lambda: torch.empty(9)).written == 0


WAYS_TO_READ = {
    "item": lambda x: x.sum().item(), "float": lambda x: float(x.sum()), "bool": lambda x: bool(x.any()),
    "tolist": lambda x: x.tolist(), "cpu": lambda x: x.cpu(), "numpy": lambda x: x.numpy(), "nonzero": torch.nonzero,
    "mask": lambda x: x[x > 1], "equal": lambda x: torch.equal(x, x), "unique": torch.unique,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS_TO_READ)
def test_each_way_to_read_is_counted(way):
    assert launches_of(lambda: WAYS_TO_READ[way](torch.arange(3.0))).reads == 1
    assert launches_of(lambda: torch.arange(3.0)[torch.tensor([0, 2])].sum()).reads == 0


def test_calls_of_python_are_counted():
    def twice():
        return len([abs(-1), abs(2)])

    few, many = (calls_of(lambda count=count: [twice() for _ in range(count)]) for count in (1, 11))
    assert many - few == 10 * 4


@pytest.mark.usefixtures("settings_stay_as_they_were")
@pytest.mark.parametrize(("before", "code", "after"), [(None, 0, 97), (10**6, 0, 97), (3, 1, 3)])
def test_the_command_lowers_limits_and_never_raises_one(tmp_path, monkeypatch, before, code, after):
    """Counts are written, with the tables; a count over its limit is an exit code."""
    counted = {"contestants": {"dpfunc": {"operations": 97, "reads": 2, "further": 0}}}
    monkeypatch.setattr(launches, "measure", lambda name: merged(REPORT["cases"][name], counted))
    out = tmp_path / "launches.json"
    (tmp_path / "results").mkdir()
    shutil.copy(DOCS / launches.PAGE, tmp_path)
    if before is not None:
        limits = dict.fromkeys(launches.LIMITED, before)
        out.write_text(json.dumps({"cases": {"perceptron": {"limits": limits}}}))
    run = CliRunner().invoke(launches.main, ["--cases", "perceptron", "--out", str(out), "--docs", str(tmp_path)])
    assert run.exit_code == code, run.output
    assert read(out)["cases"]["perceptron"]["limits"] == {"operations": after, "further": 0, "reads": min(2, after)}
    assert ("perceptron, operations: 97 > 3" in run.output) == bool(code)
    assert f"| {after} |" in (tmp_path / "performance.md").read_text()
    assert "## Calls by Python" in (tmp_path / launches.ALL_COUNTS).read_text()


def merged(old, new):
    return {**old, **{key: merged(old[key], each) if isinstance(each, dict) else each for key, each in new.items()}}


def test_all_contestants_are_counted():
    """Their sums are compared with the truth first."""
    found = launches.measure("perceptron")["contestants"]
    assert {who: each["status"] for who, each in found.items()} == dict.fromkeys(launches.WHO, "ok")
    plain, ours = found["plain"], found["dpfunc"]
    assert ours["ratio"] == ours["operations"] / plain["operations"] > 1
    assert all(0 < plain[count] < ours[count] for count in ("calls", "read_mib", "written_mib", "mflop"))
    assert ours["further"] == 0


def test_a_contestant_that_takes_no_step_has_its_reason_in_the_cell():
    found = REPORT["cases"]["gpt2"]["contestants"]
    assert launches.cell("operations", found["opacus-ghost"], found["plain"]) == "x: a parameter is used twice"
    assert launches.cell("operations", {"status": "wrong: 0.5"}, found["plain"]) == "x: its sums are wrong"
    assert launches.cell("operations", {"status": "x: OSError: no"}, found["plain"]) == "x: OSError: no"


def test_pages_have_the_committed_counts():
    text = (DOCS / launches.PAGE).read_text("utf-8")
    assert filled(text, launches.tables(REPORT["cases"])) == text
    assert launches.page(REPORT) == (DOCS / launches.ALL_COUNTS).read_text("utf-8")
    assert list(REPORT["cases"]) == list(CASES)
