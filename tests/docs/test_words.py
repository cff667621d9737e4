"""Plain words: the glossary is short, and words that only this house has used do not come back."""

from __future__ import annotations

import ast
import re

from pages import DOCS, ROOT, blocks, text_of

# What is no plain technical English, and what to write in its place.
HOUSE = {
    r"\bislands?\b": "native operations",
    r'"""Inside,? ': "Context in which ...",
    r"\bin the midst of\b": "halfway",
    r"\bnobody's\b": "no record's, or made-up",
    r"\bis no matter of\b": "does not depend on",
}
# Of the source alone: a reader of a docstring asks who that is.
PEOPLE = r"\b([Ww]hoever|[Ss]omebody)\b"
VARIABLES = {"told"}
OUTSIDE: set[str] = set()  # folders of dpfunc that are not yet read for words


def sources():
    """Files of dpfunc that were read for words."""
    return [
        path for path in (ROOT / "dpfunc").rglob("*.py") if path.relative_to(ROOT / "dpfunc").parts[0] not in OUTSIDE
    ]


def uses(text, words):
    """The lines of a text with one of these words."""
    return [line for line in text.splitlines() if re.search(words, line)]


def test_house_words_do_not_come_back():
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    words = "|".join(HOUSE)
    assert {str(path): found for path in [*pages, *sources()] if (found := uses(path.read_text(), words))} == {}
    assert {str(path): found for path in sources() if (found := uses(path.read_text(), PEOPLE))} == {}
    assert uses('    """Inside, a step runs."""\nSmall islands.', words) == [
        '    """Inside, a step runs."""',
        "Small islands.",
    ]


def test_variables_have_names_that_say_what_they_hold():
    found = [
        (path.name, node.lineno)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VARIABLES
    ]
    assert found == []


def test_alone_has_one_meaning_in_the_engines():
    """A row, or some rows, computed as a batch of one; see the glossary. "Only" and "by itself" are other words."""
    of_rows = r"\b[Rr]ows?\b|computed alone|row_alone|rows_alone|RowAlone"
    lines = [
        line for path in (ROOT / "dpfunc" / "engines").rglob("*.py") for line in uses(path.read_text(), r"\balone\b")
    ]
    assert [line for line in lines if not re.search(of_rows, line)] == []


def test_the_glossary_is_short():
    rows = re.findall(r"^\| (.+?) \| .+ \|$", text_of("concepts.md").split("## Glossary")[1], re.MULTILINE)
    assert 20 < len(rows) - 2 <= 40  # a header, and its line
    assert len(rows) == len(set(rows))


def test_examples_of_the_first_pages_fit_into_a_window():
    """84 columns are what the site shows beside its navigation at 1280 pixels."""
    pages = ["../README.md", "index.md", "quick_start.md", "recipes.md"]
    pages += [f"moving/{path.name}" for path in (DOCS / "moving").glob("*.md")]
    wide = {
        page: [line for code in blocks(page, r"\w*") for line in code.splitlines() if len(line) > 84] for page in pages
    }
    assert {page: lines for page, lines in wide.items() if lines} == {}
