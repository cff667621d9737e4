"""The page about errors: it has every class, and its messages are those of the source."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from pathlib import Path

from dpfunc import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text().split("\n## ")
(CLASSES,) = (part for part in PAGE if part.startswith("Classes of errors"))
(MESSAGES,) = (part for part in PAGE if part.startswith("Errors\n"))
HOLE = "\0"  # a value in an f-string


def test_every_class_of_errors_has_a_row():
    there = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|", CLASSES, re.MULTILINE))
    assert set(rows) == there
    for name, row in rows.items():
        for base in (ValueError, RuntimeError):
            assert (f"also a `{base.__name__}`" in row) == issubclass(getattr(errors, name), base)


def test_classes_behind_messages_exist():
    named = re.findall(r"`[^`]*` \((\w+)\)", MESSAGES)
    assert len(named) > 20
    assert all(hasattr(errors, name) for name in named)


@functools.cache
def texts():
    """All strings of the source but docstrings, with a hole for each value of an f-string, as lists of words."""
    found = []
    for path in (ROOT / "dpfunc").rglob("*.py"):
        tree = ast.parse(path.read_text())
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in statements:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else HOLE for part in node.values]
                found.append("".join(map(str, parts)).split())
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value.split())
    return found


def same_words(words, text):
    """How many `words` of the page are those that `text` begins with, -1 if it cannot begin so.

    `...` stands for any words, and a hole in the text for up to four.
    """
    if not words:
        return 0
    if words[0] == "...":
        return max(same_words(words[1:], text[skipped:]) for skipped in range(len(text) + 1))
    if not text:
        return -1
    if HOLE in text[0]:
        return max(same_words(words[taken:], text[1:]) for taken in range(5))
    if words[0].strip(".,:") != text[0].strip(".,:"):
        return -1
    rest = same_words(words[1:], text[1:])
    return rest if rest < 0 else rest + 1


def in_the_source(message):
    """Whether a string of the source has this message, at least half of it word for word."""
    words = message.split()
    needed = (len(words) - words.count("...")) / 2
    known = {word.strip(".,:") for word in words}
    near = [text for text in texts() if sum(word.strip(".,:") in known for word in text) >= needed]
    return any(same_words(words, text[start:]) >= needed for text in near for start in range(len(text)))


MESSAGE = [
    message
    for line in MESSAGES.splitlines()
    if line.startswith("| `")
    for message in re.findall(r"`([^`]+)`", line.split(" | ")[0])
]


def test_messages_are_those_of_the_source():
    assert len(MESSAGE) > 50
    assert [message for message in MESSAGE if not in_the_source(message)] == []


def test_a_message_that_nobody_writes_is_found():
    assert not in_the_source("No noise meets epsilon")
    assert not in_the_source("Expected a state of this planet")
    assert in_the_source("Expected a state of this plan")
