"""Lines that hold each other by digests: what was lost, changed or half written is found, and no kill loses a line."""

from __future__ import annotations

import pytest
from journal_cases import line, written
from run_cases import PLAN, Run, start, steps

from dpfunc import Journal
from dpfunc.checkpoint import chain as chain
from dpfunc.checkpoint.chain import Head, follow, head_path, read_head, write_head
from dpfunc.checkpoint.journal import journal_ledger, read_steps
from dpfunc.errors import CheckpointError
from dpfunc.state import allow_repeat


def another(path):
    """The journal of another run, of 6 steps too."""
    return written(path.with_name("other.jsonl"), *(line(step, run="b") for step in range(6)))


def lines_as(change):
    """Write the lines of a journal again, changed."""
    return lambda path, lines: path.write_bytes(b"".join(change(lines)))


def changed(number, old, new):
    return lambda lines: [line.replace(old, new) if place == number else line for place, line in enumerate(lines)]


DAMAGE = {
    "first line lost": (lines_as(lambda ls: ls[1:]), "Expected line 1 .* written as line 2"),
    "line in the middle lost": (lines_as(lambda ls: ls[:2] + ls[3:]), "Expected line 3 .* as line 4"),
    "last line lost": (lines_as(lambda ls: ls[:5]), "Expected 6 lines .* got 5: line 6"),
    "last lines lost": (lines_as(lambda ls: ls[:3]), "Expected 6 lines .* got 3: line 4"),
    "end of the last line lost": (lines_as(lambda ls: [*ls[:5], ls[5][:-4]]), "Expected 6 lines"),
    "all lines lost": (lines_as(lambda ls: []), "Expected 6 lines .* got 0: line 1"),
    "file lost": (lambda path, ls: path.unlink(), "Expected 6 lines .* got 0: line 1"),
    "line twice": (lines_as(lambda ls: [*ls[:3], *ls[2:]]), "Expected line 4 .* written as line 3"),
    "last line twice": (lines_as(lambda ls: [*ls, ls[-1]]), "Expected line 7 .* written as line 6"),
    "lines swapped": (lines_as(lambda ls: [ls[0], ls[2], ls[1], *ls[3:]]), "Expected line 2 .* line 3"),
    "line changed": (lines_as(changed(2, b"5.0", b"9.0")), "Line 4 .* does not follow .* line 3 was changed"),
    "last line changed": (lines_as(changed(5, b"5.0", b"9.0")), "Line 6 .* is not the one that"),
    "line without its number": (lines_as(changed(0, b'"line": 1, ', b"")), "Line 1 .* it lacks 'line'"),
    "name twice": (
        lines_as(changed(0, b'"step": 0', b'"step": 0, "step": 7')), "Line 1 .* the name 'step' occurs twice",
    ),
    "head lost": (lambda path, ls: head_path(path).unlink(), "no such file: nobody can tell"),
    "head unreadable": (lambda path, ls: head_path(path).write_text("{"), r"jsonl.head cannot be read"),
    "head of before": (lambda path, ls: write_head(path, Head(3, "?")), "has 6 lines, .* records 3"),
    "head of another journal": (
        lambda path, ls: head_path(path).write_bytes(head_path(another(path)).read_bytes()), "Line 6 .* is not the one",
    ),
    "another journal": (lambda path, ls: path.write_bytes(another(path).read_bytes()), "Line 6 .* is not the one"),
    "lines of another journal": (
        lambda path, ls: path.write_bytes(b"".join([*ls[:3], *another(path).read_bytes().splitlines(True)[3:]])),
        "Line 4 .* does not follow",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_lost_or_changed_line_is_detected(tmp_path, damage):
    """By who counts what was spent, and by who would append; then nothing is released."""
    path = written(tmp_path / "journal.jsonl", *(line(step) for step in range(6)))
    assert journal_ledger(path).num_steps == 6
    harm, message = DAMAGE[damage]
    harm(path, path.read_bytes().splitlines(keepends=True))
    before = path.read_bytes() if path.exists() else b""
    with pytest.raises(CheckpointError, match=message):
        journal_ledger(path)
    with pytest.raises(CheckpointError, match=message):
        read_steps(path, missing="empty")
    state, values, optimizer = start()
    with pytest.raises(CheckpointError, match=message):
        steps(state, values, optimizer, 1, Journal(path, PLAN))
    assert path.read_bytes() == before


def test_an_incomplete_line_is_removed(tmp_path):
    run = Run(tmp_path).step(2)
    with open(run.path, "a") as file:
        file.write('{"run": "x", "ste')
    assert run.counted.num_steps == 2
    assert run.step().counted.num_steps == len(run.path.read_text().splitlines()) == 3


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_crash_between_a_line_and_its_head_loses_nothing(tmp_path, after):
    """Nobody saw the gradients of that step; it counts, and the file can be appended to."""
    path = written(tmp_path / "journal.jsonl", *(line(step) for step in range(after)))
    kept = read_head(path) or Head()
    written(path, line(after))
    write_head(path, kept)
    assert journal_ledger(path).num_steps == after + 1
    Run(tmp_path, counts=True).step(2)
    assert journal_ledger(path).num_steps == read_head(path).lines == after + 3


@pytest.mark.parametrize("begun", [0, 1])
def test_kills_between_a_line_and_its_note(tmp_path, monkeypatch, begun):
    """Each leaves one line that the head does not know, which must not look lost; the next process notes it first."""
    run, real = Run(tmp_path).step(begun), chain.write_head
    before = run.state

    def killed(path, head):
        if head.lines == lines:
            raise KeyboardInterrupt
        real(path, head)

    monkeypatch.setattr(chain, "write_head", killed)
    for lines in range(begun + 1, begun + 4):  # noqa: B007  (read by `killed`)
        with pytest.raises(KeyboardInterrupt):
            run.step(state=allow_repeat(before))
        assert run.counted.num_steps == begun + 1
    monkeypatch.undo()
    assert run.step(state=allow_repeat(before)).ledger == run.counted


def test_only_new_lines_are_read(tmp_path, monkeypatch):
    """The cost of a step does not grow with the journal."""
    counts = []

    def counted(*arguments):
        position, lines = follow(*arguments)
        counts.append(len(lines))
        return position, lines

    written(tmp_path / "journal.jsonl", *(line(step) for step in range(20)))
    run = Run(tmp_path, counts=True)
    monkeypatch.setattr(chain, "follow", counted)
    run.step(4)
    assert counts == [20, 1, 1, 1]
