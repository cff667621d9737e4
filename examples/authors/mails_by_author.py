"""A table of texts with authors, and word counts as features."""

from __future__ import annotations

import email
import email.utils
import hashlib
import json
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.errors import InvalidArgument
from dpfunc.train.tables import read_table

sys.path.append(str(Path(__file__).resolve().parents[1] / "main_job"))
from data import DataError, mail_text
from fetch import fetch_mails

WIDTH = 1024


@dataclass(frozen=True)
class Table:
    """One text a row, with its author and its label, 0 or 1."""

    authors: list[str]
    texts: list[str]
    labels: list[int]


def load_table(name: str) -> Table:
    """`mails`, or a CSV file with the columns author, text and label (0 or 1).

    Raises:
        DataError: the file is missing or not of that form.
    """
    rows = read_mails(fetch_mails()) if name == "mails" else read_csv(Path(name))
    return Table([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])


def read_mails(folder: Path) -> list[tuple[str, str, int]]:
    """(address of the sender, subject and body, spam) of each mail that has a sender, without exact duplicates."""
    rows = []
    for path in sorted(folder.glob("*/*.json")):
        raw = json.loads(path.read_text("utf-8"))["text"]
        rows.append((sender(raw), mail_text(raw), int("spam" in path.parent.name)))
    return [row for row in dict.fromkeys(rows) if row[0]]


def sender(raw: str) -> str:
    """The address in the header From, in lower case; empty where there is none."""
    return email.utils.parseaddr(str(email.message_from_string(raw)["From"] or ""))[1].lower()


def read_csv(path: Path) -> list[tuple[str, str, int]]:
    """(author, text, label) of each row."""
    try:
        rows = [*read_table(path, ["author", "text", "label"], deduplicate=False, unit="author").values()]
    except InvalidArgument as error:
        raise DataError(f"Expected mails, or a CSV file with author, text and label. {error}") from error
    for number, row in enumerate(rows, start=1):
        if row["label"] not in ("0", "1"):
            raise DataError(f"Expected a label 0 or 1 in row {number} of {path.name}.")
    return [(row["author"], row["text"], int(row["label"])) for row in rows]


@cache
def place(word: str) -> tuple[int, float]:
    """Where a word is counted, and with which sign: a hash, so that no vocabulary is learnt from the texts."""
    digest = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
    return digest % WIDTH, 1.0 if digest >> 63 else -1.0


def features(texts: list[str]) -> Tensor:
    """Hashed counts of words (N, WIDTH), square root, norm 1: a function of each text alone, so it costs no privacy."""
    x_NW = torch.zeros(len(texts), WIDTH)
    for number, text in enumerate(texts):
        words = re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", text.lower())
        for word in words:
            column, sign = place(word)
            x_NW[number, column] += sign
    return F.normalize(x_NW.sign() * x_NW.abs().sqrt())
