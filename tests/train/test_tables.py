"""Tables: what is read, what is refused without showing it, and neighbours that stay neighbours."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_job import write_rows

from dpfunc.errors import InvalidArgument
from dpfunc.train.tables import is_held_out, read_table

rows_of_text = st.lists(st.sampled_from("abcdefgh").map(lambda letter: {"text": letter}), max_size=12)


def test_jsonl_and_csv_agree(tmp_path):
    rows = [{"text": "one, with a comma", "label": "a"}, {"text": 'two "quoted"\nlines', "label": "b"}]
    first = write_rows(tmp_path / "t.jsonl", rows)
    second = tmp_path / "t.csv"
    second.write_text('text,label,more\n"one, with a comma",a,x\n"two ""quoted""\nlines",b,y\n')
    assert read_table(first, ["text", "label"]) == read_table(second, ["text", "label"])
    assert [*read_table(first, ["text", "label"]).values()] == rows


def test_files_of_other_systems_are_the_same_table(tmp_path):
    rows = [{"text": "one", "label": "a"}, {"text": "two", "label": "b"}]
    lines = {"t.jsonl": [json.dumps(row) for row in rows], "t.csv": ["text,label", "one,a", "two,b"]}
    for name, each in lines.items():
        for end in ("\n", "\r\n"):
            for begin in (b"", b"\xef\xbb\xbf"):
                (tmp_path / name).write_bytes(begin + end.join(each).encode())
                assert [*read_table(tmp_path / name, ["text", "label"]).values()] == rows


def test_a_text_file_has_a_record_a_line(tmp_path):
    """As the readers of texts of other libraries take it: the column is `text`; an empty line is no record."""
    path = tmp_path / "t.txt"
    for end in ("\n", "\r\n", "\r"):
        for begin in (b"", b"\xef\xbb\xbf"):
            path.write_bytes(begin + end.join(["one, two ", "", "  ", '{"text": 1}', "one, two ", "\u2028x"]).encode())
            found = read_table(path, ["text"])
            assert [row["text"] for row in found.values()] == ["one, two ", '{"text": 1}', "\u2028x"]
            assert [*found] == [1, 4, 6]


def test_what_is_read_is_text_of_the_columns_that_are_asked_for(tmp_path):
    """Others may be there twice; numbers become text."""
    (tmp_path / "t.csv").write_text("more,text,more,\nb,a,c,,\n")
    (tmp_path / "t.jsonl").write_text('{"more": 1, "text": "a", "more": 2}')
    assert read_table(tmp_path / "t.csv", ["text"]) == read_table(tmp_path / "t.jsonl", ["text"])
    path = write_rows(tmp_path / "t.jsonl", [{"text": "a", "label": 1}, {"text": "b", "label": True}])
    assert [row["label"] for row in read_table(path, ["text", "label"]).values()] == ["1", "true"]


def test_exact_duplicates_are_left_out(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [{"text": "a"}, {"text": "b"}, {"text": "a"}, {"text": "a "}])
    assert [row["text"] for row in read_table(path, ["text"]).values()] == ["a", "b", "a "]
    assert len(read_table(path, ["text"], deduplicate=False)) == 4


@given(rows=rows_of_text, extra=st.sampled_from("abcdefghi"), position=st.integers(0, 12))
def test_one_row_more_changes_at_most_one_row(tmp_path_factory, rows, extra, position):
    folder = tmp_path_factory.mktemp("t")
    more = [*rows[:position], {"text": extra}, *rows[position:]]
    before = [*read_table(write_rows(folder / "a.jsonl", [{"text": "first"}, *rows]), ["text"]).values()]
    after = [*read_table(write_rows(folder / "b.jsonl", [{"text": "first"}, *more]), ["text"]).values()]
    assert len({row["text"] for row in after} ^ {row["text"] for row in before}) <= 1
    assert len(after) - len(before) in (0, 1)


@given(rows=rows_of_text, author=st.sampled_from("abcdefghi"), seed=st.integers(0, 5))
def test_a_row_is_on_the_same_side_whatever_else_is_there(rows, author, seed):
    """Other rows are not even given; the order of its columns does not matter, and with a unit nothing but this."""
    own = [{**row, "author": author} for row in rows]
    turned = [{"author": author, **row} for row in rows]
    assert [is_held_out(row, 0.4, seed) for row in own] == [is_held_out(row, 0.4, seed) for row in turned]
    assert len({is_held_out(row, 0.4, seed, "author") for row in own}) <= 1


def test_the_split_has_the_share_it_should():
    rows = [{"text": str(i)} for i in range(4000)]
    held_out = [is_held_out(row, 0.25, 0) for row in rows]
    assert 900 < sum(held_out) < 1100
    assert [is_held_out(row, 0.25, 1) for row in rows] != held_out
    assert not any(is_held_out(row, 0.0, 0) for row in rows)


BAD = {
    "another format": ("t.xlsx", "", "Expected a .jsonl, .json, .csv or .txt file"),
    "no text in a text file": ("t.txt", "\n \n", "Expected records in '.*t.txt', got none"),
    "a text file in another encoding": ("t.txt", b"my secret \xff\n", "Expected a table in UTF-8"),
    "broken JSON": ("t.jsonl", '{"text": "my secret"', "Expected one JSON object a line"),
    "a list": ("t.jsonl", '["my secret"]', "Expected an object with names in row 1"),
    "no column": ("t.jsonl", '{"text": "a"}\n{"txt": "my secret"}', r"column 'text' in row 2 of t.jsonl, got none. None of its 1 columns has this name"),
    "no header": ("t.csv", "my secret,spam\nanother secret,ham\n", "a .csv needs a first line with the names"),
    "a long row": ("t.csv", "label\nham,my secret,secret\n", r"at most 1 values in row 1 \(line 2\) of t.csv, as its first line has names"),
    "another case": ("t.csv", "secret, Text\nham,my secret\n", "There is ' Text': name it in the section data"),
    "an empty value": ("t.jsonl", '{"text": null, "secret": "a"}', "It is empty, null or NaN, or a list, an object, bytes or a picture"),
    "deep JSON": ("t.jsonl", '{"text": ' + "[" * 100_000, "got line 1, which is none: its values are nested too deeply"),
    "a long number": ("t.jsonl", '{"text": ' + "7" * 5000 + "}", "got line 1, which is none: a number has too many digits"),
    "half a pair": ("t.jsonl", '{"text": "my secret \\ud800"}', "in row 1 of t.jsonl, got half of a surrogate pair"),
    "a nested value": ("t.jsonl", '{"text": ["my secret"]}', "Expected a text in the column 'text' in row 1"),
    "an empty table": ("t.jsonl", "\n", "Expected records"),
    "a short row": ("t.csv", "label,text\nmy secret\n", "Expected a text in the column 'text'"),
    "no text at all": ("t.csv", b"text\n\xff\xfe\n", "Expected a table in UTF-8, got '.*t.csv', which is not in line 2. Convert it .*UTF-16|WINDOWS-1252 -t UTF-8 OLD > NEW.$"),
    "a very long text": ("t.csv", "text\n" + "secret " * 20_000, "in the row that begins in line 2, field larger .* over 131072 characters needs a .jsonl"),
    "a column twice": ("t.csv", "text,b,text\na,b,my secret\n", "one column 'text' in the first line of t.csv, got 2"),
    "a name twice": ("t.jsonl", '{"text": "my secret", "text": "another"}', "got line 1, which is none: it has 'text' twice"),
    "a comma without quotes": ("t.csv", "text,label\na,ham\nmy secret, of mine,ham\n", "at most 2 values in row 2"),
    "a text file without labels": ("t.txt", "my secret\n", "column 'label' in row 1 of t.txt, got none. None of its 1 columns"),
    "no file": ("nowhere.csv", None, "Expected a table that can be read, got '.*nowhere.csv': No such file or directory. Paths"),
    "semicolons": ("t.csv", "text;label\nmy secret;ham\n", "and commas between them"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_tables_are_refused_without_showing_them(tmp_path, name):
    file, text, message = BAD[name]
    if text is not None:
        (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidArgument, match=message) as caught:
        read_table(tmp_path / file, ["text", "label"] if "labels" in name else ["text"])
    assert "secret" not in str(caught.value)
