"""Texts with labels: read, without exact duplicates, split into train, validation and test."""

from __future__ import annotations

import email
import email.policy
import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fetch import fetch_mails, fetch_news

from dpfunc.errors import InvalidArgument
from dpfunc.train.tables import read_table

SPLIT = (0.72, 0.08, 0.20)  # train, validation, test


class DataError(Exception):
    """A data file cannot be used."""


@dataclass(frozen=True)
class Split:
    """Texts and labels of one part."""

    texts: list[str]
    labels: list[int]


@dataclass(frozen=True)
class TextData:
    """A classification data set in three parts."""

    name: str
    classes: list[str]
    train: Split
    validation: Split
    test: Split
    duplicates: int

    @property
    def majority_accuracy(self) -> float:
        """Accuracy on the test part of always saying the class that is most frequent in training."""
        majority = Counter(self.train.labels).most_common(1)[0][0]
        return self.test.labels.count(majority) / len(self.test.labels)


def load(name: str, seed: int, limit: int | None = None) -> TextData:
    """A data set by name (`bbc`, `mail`) or from a CSV or JSONL file with the fields text and label.

    Raises:
        DataError: the file is missing or not of that form.
    """
    if name == "bbc":
        pairs = read_news(fetch_news())
    elif name == "mail":
        pairs = read_mails(fetch_mails())
    else:
        pairs = read_file(Path(name))
    unique = list(dict.fromkeys(pairs))
    random.Random(seed).shuffle(unique)
    classes = sorted({label for _, label in unique})
    if len(classes) < 2:
        raise DataError(f"Expected at least two classes in {name}, got {classes}.")
    kept = unique[:limit]
    first, second = (round(len(kept) * share) for share in (SPLIT[0], SPLIT[0] + SPLIT[1]))
    parts = [
        Split([text for text, _ in part], [classes.index(label) for _, label in part])
        for part in (kept[:first], kept[first:second], kept[second:])
    ]
    if not all(part.texts for part in parts):
        raise DataError(f"Expected enough texts for three parts, got {len(kept)} in {name}.")
    return TextData(name, classes, *parts, len(pairs) - len(unique))


def read_news(folder: Path) -> list[tuple[str, str]]:
    """(text, class) of each document."""
    return [(path.read_text("utf-8", errors="replace"), path.parent.name) for path in sorted(folder.glob("*/*.txt"))]


def read_mails(folder: Path) -> list[tuple[str, str]]:
    """(subject and body, spam or ham) of each mail. Other headers are left out: they give the source away."""
    return [
        (mail_text(json.loads(path.read_text("utf-8"))["text"]), "spam" if "spam" in path.parent.name else "ham")
        for path in sorted(folder.glob("*/*.json"))
    ]


def mail_text(raw: str) -> str:
    """Subject and body, without markup. A mail that cannot be parsed is taken as it is, without its first block."""
    try:
        message = email.message_from_string(raw, policy=email.policy.default)
        part = message.get_body(("plain", "html"))
        body = part.get_content() if part else ""
        subject = str(message["subject"] or "")
    except (LookupError, ValueError, AttributeError, TypeError, UnicodeError):
        subject, body = "", raw.partition("\n\n")[2]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", f"{subject}. {body}"))[:4000].strip()


def read_file(path: Path) -> list[tuple[str, str]]:
    """(text, label) of each row of a CSV file with a header, or of each line of a JSONL file."""
    try:
        rows = [*read_table(path, ["text", "label"], deduplicate=False).values()]
    except InvalidArgument as error:
        raise DataError(f"Expected bbc, mail or a file with the fields text and label. {error}") from error
    return [(row["text"], row["label"]) for row in rows]
