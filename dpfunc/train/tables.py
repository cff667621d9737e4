"""Tables of private records: read, without exact duplicates, split record by record."""

import csv
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfunc._utils.validation import refuse
from dpfunc.errors import InvalidArgument

Row = dict[str, str]
_IMAGES = (".png", ".jpg", ".jpeg")
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Table:
    """Rows of a table, column -> text, and where each was in the file, from 1. Private, numbers included."""

    rows: tuple[Row, ...]
    numbers: tuple[int, ...]


def read_table(
    path: Path | str, columns: Sequence[str], *, deduplicate: bool = True, unit: str | None = None,
    lists: Sequence[str] = (),
) -> Table:  # fmt: skip
    """The columns that a job needs, of a .jsonl with an object a line, a .csv with a header, or a .txt; UTF-8.

    Args:
        path: of a .txt the column is `text`. Empty lines of a .jsonl or .txt are no records.
        columns: what each row must have; other columns are not read.
        deduplicate: leave out rows that equal an earlier one in all these columns. A row more or less changes the
            result by at most one row (tests/train/test_tables.py::test_one_row_more_changes_at_most_one_row).
        unit: one of the columns, which says whose record a row is. Equal rows of two people are no duplicates then.
        lists: those of the columns that may hold a list of texts; given back as JSON, a text as well.

    Raises:
        InvalidArgument: what cannot be read, is missing or is there twice; rows are named by their number, never shown.
    """
    file = Path(path)
    found = {
        number: _row(row, columns, unit, lists, f"in row {number} of {file.name}")
        for number, row in _rows(file, columns)
    }
    if not found:
        raise InvalidArgument(f"Expected records in {str(file)!r}, got none.")
    return _table(found, columns, deduplicate)


def _table(found: dict[int, Row], columns: Sequence[str], deduplicate: bool) -> Table:
    """Numbered rows; of those that are equal in these columns the first."""
    first = {tuple(row[column] for column in columns): number for number, row in reversed(found.items())}
    kept = sorted(first.values()) if deduplicate else [*found]
    return Table(tuple(found[number] for number in kept), tuple(kept))


def _rows(path: Path, columns: Sequence[str]) -> list[tuple[int, Any]]:
    """The rows of a file with their numbers, not yet checked."""
    if path.suffix not in (".jsonl", ".csv", ".txt"):
        raise InvalidArgument(
            f"Expected a .jsonl, .csv or .txt file, got {str(path)!r}. Write a line for each object, row or text."
        )
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                return _rows_of_csv(csv.DictReader(file, strict=True), columns, path)
            lines = [(number, line) for number, line in enumerate(file, start=1) if line.strip()]
    except OSError as error:
        raise InvalidArgument(
            f"Expected a table that can be read, got {str(path)!r}: {error.strerror}. Paths are those of the folder in "
            "which the command runs."
        ) from error
    except UnicodeDecodeError:  # whose message shows a byte of the table
        raise InvalidArgument(f"Expected a table in UTF-8, got {str(path)!r}, which is not. Convert it.") from None
    except csv.Error as error:
        raise InvalidArgument(
            f"Expected a readable table, got {str(path)!r}: {error}. A text of a .csv that has commas, quotes or line "
            "ends needs quotes around it, and one of over 131072 characters a .jsonl."
        ) from error
    return [(number, _object(line, number, columns, path)) for number, line in lines]


def _rows_of_csv(reader: "csv.DictReader[str]", columns: Sequence[str], path: Path) -> list[tuple[int, Any]]:
    """Numbered rows, if each has at most as many values as there are names, and no name is there twice."""
    names = list(reader.fieldnames or ())
    for column in (each for each in columns if names.count(each) > 1):
        raise InvalidArgument(
            f"Expected one column {column!r} in the first line of {path.name}, got {names.count(column)}. Rename "
            "or remove the others."
        )
    found = list(enumerate(reader, start=1))
    for number, row in found:
        if any(row.get(None) or ()):  # values beyond the last name, which DictReader keeps under None
            raise InvalidArgument(
                f"Expected at most {len(names)} values in row {number} of {path.name}, as its first line has names, "
                "got more: texts with commas need quotes around them, or the row would be cut off."
            )
    return found


def _object(line: str, number: int, columns: Sequence[str], path: Path) -> Any:
    """The values in a line of JSON, or of a .txt the line. It is private, and messages do not show it."""
    if path.suffix == ".txt":
        return {"text": line.rstrip("\r\n")}
    twice: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(column for column in columns if sum(name == column for name, _ in pairs) > 1)
        return dict(pairs)

    try:
        found = json.loads(line, object_pairs_hook=once)
        if not twice:
            return found
        reason = f"it has {twice[0]!r} twice"
    except json.JSONDecodeError as error:
        reason = error.msg
    except (RecursionError, ValueError) as error:
        deep = isinstance(error, RecursionError)
        reason = "its values are nested too deeply" if deep else "a number has too many digits"
    raise InvalidArgument(
        f"Expected one JSON object a line in {str(path)!r}, got line {number}, which is none: {reason}."
    )


def _row(row: object, columns: Sequence[str], unit: str | None, lists: Sequence[str], where: str) -> Row:
    """The texts of a row in the columns; lists and their texts as JSON."""
    if not isinstance(row, dict):
        raise InvalidArgument(f"Expected an object with names {where}.")
    values = {column: _text(row, column, column in lists, where) for column in columns}
    for column, text in values.items():
        if _HALF_A_PAIR.search(text):
            raise InvalidArgument(
                f"Expected a text in the column {column!r} {where}, got half of a surrogate pair, which no text has. "
                "Write the table as UTF-8 again, or leave the row out."
            )
    if unit is None:
        return values
    plain = values[unit].strip()
    refuse(
        (isinstance(row[unit], bool) or not isinstance(row[unit], str | int) or not plain,
         f"Expected a person in the column {unit!r} {where}: a text that is not empty, or a whole number. "
         "Leave the row out, or give it a name of its own if it is nobody else's."),
        (values[unit] != plain,
         f"Expected a person without spaces around in the column {unit!r} {where}: with and "
         "without them a name would be two people."),
    )  # fmt: skip
    return values


def _text(row: Mapping[str, Any], column: str, may_be_list: bool, where: str) -> str:
    """The text of a row in a column; where it may be a list, as JSON."""
    value: Any = row.get(column)
    several = may_be_list and isinstance(value, list)
    each: list[Any] = value if several else [value]
    if any(one is None or isinstance(one, list | dict) for one in each):
        raise InvalidArgument(f"Expected a text in the column {column!r} {where}, got none. {_hint(row, column)}")
    texts = [json.dumps(one) if isinstance(one, bool) else str(one) for one in each]
    return json.dumps(texts if several else texts[0], ensure_ascii=False) if may_be_list else texts[0]


def _hint(row: Mapping[Any, Any], column: str) -> str:
    """Advice about a column. The names in the row are not shown: without a header they are a record."""
    if column in row:
        return "It is empty, or a list or an object: leave the row out, or write its text."
    for name in row:
        if isinstance(name, str) and name.strip().lower() == column.lower():
            return f"There is {name!r}: name it in the section data, e.g. text_column."
    return (
        f"None of its {len(row)} columns has this name. Name yours in the section data, e.g. text_column; a .csv needs "
        "a first line with the names of its columns, and commas between them. (They are not shown: without such a line "
        "they are a record.)"
    )


def split(
    rows: Sequence[Row], fraction: float, seed: int, unit: str | None = None
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Training and held-out rows; each row's side is decided by the row alone, or, with `unit`, by whose it is."""
    # tests/train/test_tables.py::test_a_row_is_on_the_same_side_whatever_else_is_there
    sides: tuple[list[Row], list[Row]] = [], []
    for row in rows:
        text = json.dumps([seed, sorted(row.items() if unit is None else [(unit, row[unit])])])
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        sides[int.from_bytes(digest) / 2**64 < fraction].append(row)
    return tuple(sides[0]), tuple(sides[1])


def number_of(text: str) -> float:
    """The number in a text; nan where there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def json_values(path: Path) -> dict[str, Any]:
    """The values of a JSON file with one object; none where it cannot be read, or has several lines."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def same_file(one: Path, other: Path) -> bool:
    """True if both are one file, or copies of one; False if either cannot be read."""
    try:
        alike = one.stat().st_size == other.stat().st_size
        return one.samefile(other) or (alike and one.read_bytes() == other.read_bytes())
    except OSError:
        return False


def image_files(folder: Path) -> list[Path]:
    """The images below a folder, in the order of their names."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in _IMAGES)


def read_images(folder: Path, labels: Sequence[str], label_column: str, *, deduplicate: bool) -> Table:
    """The images of `folder/class/*.png|jpg`, class by class: path in the folder, digest of the file, class."""
    there = {path.name for path in folder.glob("*/")}
    lacking, others = sorted({*labels} - there), there - {*labels}
    if lacking or others:
        raise InvalidArgument(
            f"Expected a folder with a folder for each of data.labels ({', '.join(labels)}), and no other, got "
            f"data.train={str(folder)!r} without {', '.join(lacking) or 'none of them'}, with {len(others)} others. "
            "Classes are public; one that has no image has an empty folder."
        )
    rows: dict[int, Row] = {}
    for label in labels:
        for path in image_files(folder / label):
            digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
            rows[len(rows) + 1] = {"image": path.relative_to(folder).as_posix(), "digest": digest, label_column: label}
    if not rows:
        raise InvalidArgument(f"Expected images (.png, .jpg) in the folders of {str(folder)!r}, got none.")
    return _table(rows, ("digest", label_column), deduplicate)
