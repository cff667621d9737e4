"""Files of JSON lines in which a lost, changed, repeated or moved line is noticed.

May import: its folder, step and below. Privacy depends on it: yes.

Each line holds its own number and a digest of the line before it. The end of the file, about which no later line says
anything, is noted in a small file beside it (`.head`): the number of lines and the digest of the last one. Both guard
against accidents; an attacker who may write both files can write others that fit together.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dpfunc._utils.files import replace_file, sync_directory
from dpfunc._utils.locks import lock
from dpfunc._utils.validation import unique_json
from dpfunc.errors import CheckpointError

RESTORE = (
    "Restore the journal and its .head file together, as they were. If they are lost, count every step that the run "
    "can have released: plan.ledger()."
)


class Head(NamedTuple):
    """The end of a chained file: the number of its lines, and the digest of the last one ("" of none)."""

    lines: int = 0
    digest: str = ""

    def after(self, raw: bytes) -> "Head":
        """The end with one more line."""
        return Head(self.lines + 1, hashlib.blake2b(raw, digest_size=16).hexdigest())


class Position(NamedTuple):
    """Position up to which a chained file was read."""

    inode: int = 0
    offset: int = 0  # in bytes
    end: Head = Head()
    before: Head = Head()  # the end without the last line


Line = tuple[Head, dict[str, Any]]  # the end of the file up to a line, and the values in the line


def head_path(path: Path) -> Path:
    """The file that says where a chained file ends."""
    return path.with_name(f"{path.name}.head")


def read_head(path: Path) -> Head | None:
    """The end of a chained file by its `.head` file; None if there is none."""
    file = head_path(path)
    if not file.exists():
        return None
    try:
        values = unique_json(file.read_bytes())
        return Head(int(values["lines"]), str(values["digest"]))
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"The file {file} cannot be read: {error}. {RESTORE}") from error


def write_head(path: Path, head: Head) -> None:
    """Write the end of a chained file to its `.head` file."""
    replace_file(head_path(path), json.dumps(head._asdict()) + "\n")


def known_end(path: Path) -> Head:
    """End of a chained file, from its `.head` file alone. A file that does not exist gets one that says 0 lines."""
    with locked(path) as file:
        head = read_head(path)
        if head is None:
            follow(file, path, Position())
            head = Head()
            write_head(path, head)
        return head


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """Open a file to append to, with an exclusive lock; create it and its folders if they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        lock(file.fileno())  # until it is closed
        yield file


def read_chain(path: Path) -> list[Line]:
    """All complete lines of a chained file, verified; none if the file does not exist."""
    if not path.exists():
        _check_end(path, Position())
        return []
    with open(path, "rb") as file:
        lock(file.fileno(), shared=True)
        return follow(file, path, Position())[1]


def follow(file: BinaryIO, path: Path, since: Position) -> tuple[Position, list[Line]]:
    """The complete lines after a position, to the end of the file, verified; and the position there."""
    file.seek(since.offset)
    complete, newline, _ = file.read().rpartition(b"\n")
    lines: list[Line] = []
    end, before = since.end, since.before
    for raw in complete.split(b"\n") if newline else ():
        expected = end.lines + 1
        try:
            values = unique_json(raw)
            number, previous = values["line"], values["previous"]
        except (KeyError, ValueError, TypeError) as error:
            raise unreadable(expected, path, error) from error
        if number != expected:
            raise CheckpointError(
                f"Expected line {expected} of the journal {path}, got one that was written as line {number}: lines "
                f"were removed, repeated or moved. {RESTORE}"
            )
        if previous != end.digest:
            raise CheckpointError(
                f"Line {expected} of the journal {path} does not follow the line before it: line {end.lines} was "
                f"changed, or line {expected} belongs to another journal. {RESTORE}"
            )
        end, before = end.after(raw), end
        lines.append((end, values))
    position = Position(os.fstat(file.fileno()).st_ino, since.offset + len(complete) + len(newline), end, before)
    _check_end(path, position)
    return position, lines


def unreadable(number: int, path: Path, error: Exception) -> CheckpointError:
    """The error for a line whose values cannot be read."""
    reason = f"it lacks {error}" if isinstance(error, KeyError) else error
    return CheckpointError(f"Line {number} of the journal {path} cannot be read: {reason}.")


def _check_end(path: Path, at: Position) -> None:
    """Compare the end of a file with its `.head` file: a crash between a line and its note leaves one line more."""
    known, lines = read_head(path), at.end.lines
    if known in (at.end, at.before) or (known is None and not lines):
        return
    head, why = head_path(path), "one of the two files was changed, or belongs to another journal"
    if known is None:
        found = f"Expected {head} beside a journal of {lines} lines, got no such file"
        why = "nobody can tell whether lines at the end are missing"
    elif known.lines > lines:
        found = f"Expected {known.lines} lines in the journal {path}, as {head.name} says, got {lines}"
        why = f"line {lines + 1} and those after it are missing"
    elif known.lines < lines - 1:
        found = f"The journal {path} has {lines} lines, {head.name} records {known.lines}"
    else:
        found = f"Line {known.lines} of the journal {path} is not the one that {head.name} records"
    raise CheckpointError(f"{found}: {why}. {RESTORE}")


def append_chained(file: BinaryIO, path: Path, at: Position, values: Mapping[str, Any]) -> None:
    """Append a line to a `locked` file after its end, and note it as the last one; then both are on disk."""
    if read_head(path) != at.end:
        # At the first line: from now on a journal without its head has lost it. Later: a kill came between the last
        # line and its note, and a second one must not find two lines without.
        write_head(path, at.end)
    raw = json.dumps({"line": at.end.lines + 1, "previous": at.end.digest, **values}).encode()
    _append(file, at.offset, raw)
    write_head(path, at.end.after(raw))


def append_line(path: Path, line: str, count: int) -> None:
    """Append a line to a file of notes, which are not chained, if there are so many as before; then it is on disk."""
    with locked(path) as file:
        file.seek(0)
        known = file.read()
        if (found := known.count(b"\n")) != count:
            raise CheckpointError(
                f"Expected {path} with {count} notes, as a moment ago, got {found}: another process has resumed this "
                "run meanwhile, and nobody would add up what both spend. Go on in one place only. Nothing was loaded."
            )
        _append(file, known.rfind(b"\n") + 1, line.encode())
    sync_directory(path.parent)


def _append(file: BinaryIO, end: int, raw: bytes) -> None:
    """Append a line after the last complete one; half a line, which a crash has left, goes first."""
    file.truncate(end)
    file.write(raw + b"\n")
    file.flush()
    os.fsync(file.fileno())
