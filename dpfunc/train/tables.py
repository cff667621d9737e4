"""Tables of private records: read, without exact duplicates, split record by record.

May import: its folder, features and below. Privacy depends on it: yes.
"""

import codecs
import csv
import datetime
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from numbers import Number
from pathlib import Path
from typing import Any

from dpfunc._utils.validation import refuse
from dpfunc.errors import InvalidArgument
from dpfunc.hf import pairs
from dpfunc.hf.chats import written_turns
from dpfunc.hf.vision_language._images import is_image
from dpfunc.sampling.users import LOOK_THE_SAME, spelling

Row = dict[str, str]
"""Column -> text. Private."""
Table = dict[int, Row]
"""Where a row was in the file, from 1 -> the row. Private, numbers included."""
_TEXTS = (str, Number, datetime.date, datetime.time, datetime.timedelta)  # kinds of values that are written as a text
_NO_RECORDS = ("thumbs.db", "desktop.ini")  # files that systems put into folders of images; others begin with a dot
# Names of columns by which a format of texts is known -> what to write in the section data.
_FORMATS = {
    frozenset(("prompt", "completion", "label")): (
        "single answers with a label (KTO). The task preference takes two answers to a prompt in a row, chosen and "
        "rejected; task causal_lm learns the good ones: write prompt_column: prompt and response_column: completion."
    ),
    frozenset(("prompt", "completion")): "write prompt_column: prompt and response_column: completion.",
    frozenset(("instruction", "output")): (
        "the format of Alpaca. Write prompt_template: '{instruction} {input} ' and text_column: output; or, in the "
        "chat template of the tokenizer, chat: [instruction, input, output]."
    ),
    frozenset(("chosen", "rejected")): (
        "preferences. Write task: preference, and prompt_column: prompt where the prompt has a column of its own; or, "
        "in the chat template of the tokenizer, chat: [prompt, chosen, rejected]."
    ),
    **{
        frozenset((name,)): f"chats. Write chat: [{name}] in the section data, with task causal_lm, or vqa where there "
        "are images."
        for name in ("messages", "conversations")
    },
}  # fmt: skip
TURNS = (
    "Write chat: [COLUMN] in the section data; of a pair chat: [CHOSEN, REJECTED], or chat: [PROMPT, CHOSEN, REJECTED] "
    "where the prompt has a column of its own."
)
"""Advice where a text should be and turns of a chat are."""
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")


def read_table(
    path: Path | str, columns: Sequence[str], *, deduplicate: bool = True, unit: str | None = None,
    lists: Sequence[str] = (), values: Sequence[str] = (), optional: Sequence[str] = (),
) -> Table:  # fmt: skip
    """The columns that a job needs, of a .jsonl with an object a line, a .json, a .csv with a header, or a .txt; UTF-8.

    Args:
        path: of a .txt the column is `text`; a .json is a list of objects, or as a .jsonl; each may end in .gz. Empty
            lines of a .jsonl or .txt are no records.
        columns: what each row must have; other columns are not read.
        deduplicate: leave out rows that equal an earlier one in all these columns. A row more or less changes the
            result by at most one row (tests/train/test_tables.py::test_one_row_more_changes_at_most_one_row).
        unit: one of the columns, which says whose record a row is. Equal rows of two people are no duplicates then.
        lists: those of the columns that may hold a list of texts; given back as JSON, a text as well.
        values: those of the columns that may hold any value of JSON; given back as JSON, a text as well.
        optional: those of the columns in which a value may be missing: an empty text is given back. In the others a
            missing value is an error. `null` and `NaN` of JSON and empty cells are missing, whatever the file; one of
            `values` also where the row lacks the column.

    Raises:
        InvalidArgument: what cannot be read, is missing or is there twice; rows are named by their number, never shown.
    """
    file = Path(path)
    table = {
        number: _row(row, columns, unit, lists, values, optional, f"in row {number} of {file.name}")
        for number, row in numbered_rows(file, columns)
    }
    refuse((not table, f"Expected records in {str(file)!r}, got none."))
    people = {row[unit] for row in table.values()} if unit is not None else set()
    refuse(
        (len({*map(spelling, people)}) < len(people),
         f"Expected each person in one spelling in the column {unit!r} of {file.name}, got two whose values look the "
         f"same: {LOOK_THE_SAME} would make two people of one. Write each of them in one way."),
    )  # fmt: skip
    return _table(table, columns, deduplicate)


def _table(table: Table, columns: Sequence[str], deduplicate: bool) -> Table:
    """Numbered rows; of those that are equal in these columns the first."""
    first = {tuple(row[column] for column in columns): number for number, row in reversed(table.items())}
    kept = sorted(first.values()) if deduplicate else [*table]
    return {number: table[number] for number in kept}


def numbered_rows(path: Path, columns: Sequence[str]) -> list[tuple[int, Any]]:
    """The rows of a file with their numbers, not yet checked."""
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if path.suffix == ".parquet" or path.is_dir():
        return _rows_of_arrow(path)
    refuse(
        (kind not in (".jsonl", ".json", ".csv", ".txt"),
         "Expected a .jsonl, .json, .csv or .txt file, or one of them with .gz, a .parquet file or the folder of a "
         f"data set of Hugging Face, got {str(path)!r}. Write a line for each object, row or text."),
    )  # fmt: skip
    text = _decoded(path)
    if kind == ".csv":
        return _rows_of_csv(text, columns, path)
    if kind == ".json" and text.lstrip().startswith("["):
        return list(enumerate(_parsed(text, columns, f"a list of JSON objects in {str(path)!r}"), start=1))
    lines = [(number, line) for number, line in enumerate(io.StringIO(text, newline=""), start=1) if line.strip()]
    if kind == ".txt":
        return [(number, {"text": line.rstrip("\r\n")}) for number, line in lines]
    where = f"one JSON object a line in {str(path)!r}, got line"
    return [(number, _parsed(line, columns, f"{where} {number}")) for number, line in lines]


def _rows_of_arrow(path: Path) -> list[tuple[int, Any]]:
    """The rows of a .parquet file, or of a data set that save_to_disk has written; neither reader is a dependency."""
    package = "datasets" if path.is_dir() else "pyarrow"
    refuse(
        (find_spec(package) is None,
         f"Expected {package} to be installed, to read {str(path)!r}: pip install {package}. Or write the table as a "
         ".jsonl where it is: datasets.load_from_disk(OLD).to_json(NEW), or pandas.read_parquet(OLD).to_json(NEW, "
         "orient='records', lines=True)."),
        ((path / "dataset_dict.json").exists(),
         f"Expected a data set, got several of them in {str(path)!r}. Name one: {path}/train, e.g."),
    )  # fmt: skip
    try:
        if path.is_dir():
            rows = list(import_module("datasets").load_from_disk(str(path)))
        else:
            rows = import_module("pyarrow.parquet").read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        kind = type(error).__name__
    else:
        return list(enumerate(({name: _without_nulls(row[name]) for name in row} for row in rows), start=1))
    raise InvalidArgument(f"Expected a table that can be read, got {str(path)!r}: {package} raised {kind}.")


def _without_nulls(value: Any) -> Any:
    """A value of Arrow, without the names that other objects alone have: there they are null."""
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    is_object = isinstance(value, dict)
    return {n: _without_nulls(each) for n, each in value.items() if each is not None} if is_object else value


def _decoded(path: Path) -> str:
    """The text of a file in UTF-8; an error names the line, and shows no byte of it."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(
            f"Expected a table that can be read, got {str(path)!r}: {reason}. Paths are those of the folder in "
            "which the command runs."
        ) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
    likely = "UTF-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "WINDOWS-1252"
    raise InvalidArgument(
        f"Expected a table in UTF-8, got {str(path)!r}, which is not in line {line}. Convert it from the encoding that "
        f"it has; from that of many spreadsheets: iconv -f {likely} -t UTF-8 OLD > NEW."
    )


def _rows_of_csv(text: str, columns: Sequence[str], path: Path) -> list[tuple[int, Any]]:
    """Numbered rows, if each has as many values as there are names, and no name is there twice."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows: list[tuple[int, Any]] = []
    begins = 1
    try:
        names = list(reader.fieldnames or ())
        refuse(*(
            (names.count(column) > 1,
             f"Expected one column {column!r} in the first line of {path.name}, got {names.count(column)}. Rename "
             "or remove the others.") for column in columns
        ))  # fmt: skip
        begins = reader.line_num + 1
        for number, row in enumerate(reader, start=1):
            _check_width(row, names, columns, f"row {number} (line {begins}) of {path.name}")
            rows.append((number, row))
            begins = reader.line_num + 1
    except csv.Error as error:
        open_quote = "unexpected end of data" in str(error)
        reason = "a quote there, or in a row before it, opens a text that nothing closes" if open_quote else error
        raise InvalidArgument(
            f"Expected a readable table, got {str(path)!r}: in the row that begins in line {begins}, {reason}. A text "
            'of a .csv that has commas, quotes or line ends needs quotes around it, a quote inside of it is "", and '
            "one of over 131072 characters needs a .jsonl."
        ) from error
    return rows


def _check_width(row: Mapping[Any, Any], names: Sequence[str], columns: Sequence[str], where: str) -> None:
    """Check that no value of a row of a .csv is beyond the last name, and none is lacking in these columns."""
    refuse(
        (any(row.get(None) or ()),  # where DictReader keeps values beyond the last name
         f"Expected at most {len(names)} values in {where}, as its first line has names, "
         "got more: texts with commas need quotes around them, or the row would be cut off."),
    )  # fmt: skip
    for column in columns:
        if column in row and row[column] is None:
            raise InvalidArgument(
                f"Expected a text in the column {column!r} in {where}, got a row that ends before it. Write a comma "
                "for each empty cell, or leave the row out."
            )


def _parsed(text: str, columns: Sequence[str], expected: str) -> Any:
    """The values in a text of JSON. It is private, and messages do not show it."""
    twice: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(column for column in columns if sum(name == column for name, _ in pairs) > 1)
        return dict(pairs)

    try:
        values = json.loads(text, object_pairs_hook=once)
        if not twice:
            return values
        reason = f"it has {twice[0]!r} twice"
    except json.JSONDecodeError as error:
        reason = error.msg
    except (RecursionError, ValueError) as error:
        reason = (
            "its values are nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
        )
    raise InvalidArgument(f"Expected {expected}, which is none: {reason}.")


def _row(
    row: object, columns: Sequence[str], unit: str | None, lists: Sequence[str], any_value: Sequence[str],
    optional: Sequence[str], where: str,
) -> Row:  # fmt: skip
    """The texts of a row in the columns; lists, other values and their texts as JSON."""
    if not isinstance(row, dict):
        raise InvalidArgument(f"Expected an object with names {where}.")
    person = row.get(unit)
    refuse(
        (unit is not None and unit not in row,
         f"Expected a person in the column {unit!r} {where}, got a row without that column. Name in data.unit_column "
         "the one that says whose record a row is; or leave the row out, or give it a name of its own."),
        (unit is not None and (isinstance(person, bool) or not isinstance(person, str | int) or not spelling(person)),
         f"Expected a person in the column {unit!r} {where}: a text that is not empty, or a whole number. "
         "Leave the row out, or give it a name of its own if it is nobody else's."),
    )  # fmt: skip
    may_lack = {*any_value, *row}
    empty = {column for column in optional if column in may_lack and _is_missing(row.get(column))}
    values = {
        column: "" if column in empty else _text(row, column, column in lists, column in any_value, where)
        for column in columns
    }
    for column, text in values.items():
        if _HALF_A_PAIR.search(text):
            raise InvalidArgument(
                f"Expected a text in the column {column!r} {where}, got half of a surrogate pair, which no text has. "
                "Write the table as UTF-8 again, or leave the row out."
            )
    return values


def _text(row: Mapping[str, Any], column: str, may_be_list: bool, may_be_any: bool, where: str) -> str:
    """The text of a row in a column; where it may be a list, or any value, as JSON."""
    value: Any = row.get(column)
    if may_be_any and not _is_missing(value):
        return json.dumps(value, ensure_ascii=False, default=str)
    several = may_be_list and isinstance(value, list)
    each: list[Any] = value if several else [value]
    if any(not isinstance(one, _TEXTS) or _is_missing(one) for one in each):
        raise InvalidArgument(f"Expected a text in the column {column!r} {where}, got none. {_hint(row, column)}")
    texts = [json.dumps(one) if isinstance(one, bool) else str(one) for one in each]
    return json.dumps(texts if several else texts[0], ensure_ascii=False) if may_be_list else texts[0]


def _is_missing(value: object) -> bool:
    """True for null and NaN of JSON, and for an empty or blank text."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def _hint(row: Mapping[Any, Any], column: str) -> str:
    """Advice about a column. The names in the row are not shown: without a header they are a record."""
    if columns := _columns_of_pair(row):
        line = f"chat: [{', '.join(columns)}]"
        return f"The rows have pairs of chats. Write task: preference, and {line} in the section data."
    if column in row and written_turns(json.dumps(row[column], default=str)):
        return f"It is a list of turns: a chat. {TURNS}"
    if column in row:
        return (
            "It is empty, null or NaN, or a list, an object, bytes or a picture: leave the row out, or write its text, "
            "of a picture the path of its file."
        )
    for names, advice in _FORMATS.items():
        if names <= row.keys():
            return f"The rows have {' and '.join(sorted(names))}: {advice}"
    for name in row:
        if isinstance(name, str) and name.strip().lower() == column.lower():
            return f"There is {name!r}: name it in the section data, e.g. text_column."
    return (
        f"None of its {len(row)} columns has this name. Name yours in the section data, e.g. text_column; a .csv needs "
        "a first line with the names of its columns, and commas between them. (They are not shown: without such a line "
        "they are a record.)"
    )


def _columns_of_pair(row: Mapping[Any, Any]) -> Sequence[str]:
    """The columns of a pair whose answers are chats; none of any other row."""
    for names in pairs.FORMATS:
        for columns in (names, names[-2:]):
            with suppress(InvalidArgument):
                pairs.pair_messages(row, columns)
                texts = all(isinstance(row[column], str) for column in columns)
                return () if texts and len(columns) > 2 else columns
    return ()


def is_held_out(row: Row, fraction: float, seed: int, unit: str | None = None) -> bool:
    """True for this share of the rows; each row's side is decided by the row alone, or, with `unit`, by whose it is."""
    # tests/train/test_tables.py::test_a_row_is_on_the_same_side_whatever_else_is_there
    text = json.dumps([seed, sorted(row.items() if unit is None else [(unit, row[unit])])])
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64 < fraction


def json_values(path: Path) -> dict[str, Any]:
    """The values of a JSON file with one object; none where it cannot be read, or has several lines."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def same_file(one: Path, other: Path) -> bool:
    """True if both are one file, or copies of one; False if either cannot be read."""
    try:
        return one.samefile(other) or (
            one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()
        )
    except OSError:
        return False


def visible_files(folder: Path) -> list[Path]:
    """The files and links below a folder, in the order of their names, without those of the system."""
    return sorted(
        path for path in folder.rglob("*")
        if (path.is_file() or path.is_symlink())
        and path.name.lower() not in _NO_RECORDS and not path.name.startswith(".")
    )  # fmt: skip


def read_images(folder: Path, labels: Sequence[str], label_column: str, *, deduplicate: bool) -> Table:
    """The images of `folder/class/*`, class by class: path beside the folder, digest of the file, class, and its place.

    A file that is no image is an error: it would be left out without a word.
    """
    there = {path.name for path in folder.glob("*/")}
    lacking, others = sorted({*labels} - there), there - {*labels}
    refuse(
        (lacking or others,
         f"Expected a folder with a folder for each of data.labels ({', '.join(labels)}), and no other, got "
         f"data.train={str(folder)!r} without {', '.join(lacking) or 'none of them'}, with {len(others)} others. "
         "Classes are public; one that has no image has an empty folder."),
    )  # fmt: skip
    rows: Table = {}
    for label in labels:
        for number, path in enumerate(visible_files(folder / label), start=1):
            place = f"file {number} of the class {label!r}, in the order of names,"
            refuse(
                (not is_image(path) or not path.is_file(),
                 f"Expected images alone in the folders of {str(folder)!r}, whose names end as those of images do, "
                 f"got another in {place} which would be left out. Rename it, or move it elsewhere; of a link that "
                 "leads nowhere, or to a folder, bring what it stands for."),
            )  # fmt: skip
            digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
            rows[len(rows) + 1] = {
                "image": path.relative_to(folder.parent).as_posix(), "digest": digest, "place": place,
                label_column: label,
            }  # fmt: skip
    refuse((not rows, f"Expected images in the folders of {str(folder)!r}, got none."))
    return _table(rows, ("digest", label_column), deduplicate)
