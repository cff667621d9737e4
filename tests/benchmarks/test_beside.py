"""One job by three ways: each gives a row on tiny data, and the table says how far two of them are from the command."""

from __future__ import annotations

import random

import pytest
import text_job

from benchmarks import beside
from benchmarks.results import rows_of

EASY = 200.0  # an epsilon at which noise hides little


def records(count):
    """Texts that hold the first word of their topic four times, among words that say nothing."""
    draw, topics = random.Random(0), list(text_job.TOPICS.items())
    drawn = [(words[0], label, draw.choices(text_job.COMMON, k=3)) for label, words in topics * (count // 2)]
    return [(" ".join([word] * 4 + others), label) for word, label, others in drawn]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = text_job.write_model(tmp_path_factory.mktemp("beside") / "tiny", "bert")
    pairs = records(140)
    return beside.Task(str(folder), pairs[:100], pairs[100:], tokens=8, epsilon=EASY, delta=1e-3)


@pytest.mark.parametrize("kind", [pytest.param("head", marks=pytest.mark.slow), "lora"])  # a head takes 400 steps
@pytest.mark.parametrize("way", beside.WAYS)
def test_each_way_gives_a_row(task, way, kind):
    """It learns what the texts say, and spends its budget."""
    row = beside.measure(way, kind, task, seed=0)
    assert (row["way"], row["kind"], row["records"], row["tested"]) == (way, kind, 100, 40)
    assert row["accuracy"] > 0.75
    assert 0.99 * EASY < row["epsilon"] <= EASY
    assert row["seconds"] > 0


def test_the_task_of_the_table_is_that_of_the_adapters(monkeypatch):
    monkeypatch.setattr(beside.adapters, "pairs_of", lambda name: [(f"{name} {i}", "ab"[i % 2]) for i in range(3000)])
    found = beside.titles()
    assert (len(found.train), len(found.test), found.labels) == (1200, 300, ["a", "b"])
    assert [*found.train, *found.test] == beside.adapters.chosen("titles")
    assert not {*found.train} & {*found.test}


def test_a_way_that_is_behind_is_seen():
    reached = {"command": [0.90, 0.91, 0.92], "trainer": [0.91, 0.90, 0.91], "loop": [0.70, 0.72, 0.71]}
    rows = [
        {"way": way, "kind": kind, "accuracy": value, "epsilon": 3.0, "seconds": 2.0}
        for kind in beside.KINDS for way, values in reached.items() for value in values
    ]  # fmt: skip
    lines = beside.tables(rows)["beside"].splitlines()
    assert len(lines) == 2 + 6
    assert lines[2] == "| a head alone | `dpfunc train` | .910 ± .025 |  | 3 | 3.0000 | 2 |"
    assert lines[4] == "| a head alone | the loop | .710 ± .025 | -.200 ± .023 | 3 | 3.0000 | 2 |"
    gap, wide = beside.against(reached["trainer"], reached["command"])
    assert abs(gap) < wide


def test_committed_runs_are_what_the_page_says_of_them():
    """Each way ran as often, within the budget, and every difference from the command is within its interval."""
    rows = rows_of(beside.RESULT)
    assert len(rows) == len({beside.place(row) for row in rows})
    assert all(row["epsilon"] <= beside.adapters.EPSILON for row in rows)
    for kind in beside.KINDS:
        reached = {
            way: [row["accuracy"] for row in rows if (row["way"], row["kind"]) == (way, kind)] for way in beside.WAYS
        }
        assert len({len(values) for values in reached.values()}) == 1
        gaps = [beside.against(reached[way], reached["command"]) for way in ("trainer", "loop")]
        assert all(abs(gap) < wide for gap, wide in gaps)


def test_a_page_without_the_loop_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(beside, "PAGE", tmp_path / "page.md")
    beside.PAGE.write_text("no block")
    with pytest.raises(ValueError, match="ENCODER"):
        beside.of_the_page()
