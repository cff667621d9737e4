"""Tables of the documents, which scripts write between two markers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

END = "<!-- end -->"


def row(cells: Iterable[object]) -> str:
    """A row of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def markdown(heads: Sequence[str], rows: Iterable[Iterable[object]], side: str = "---") -> str:
    """A table; `side` aligns all columns but the first."""
    return "\n".join(map(row, [heads, ["---"] + [side] * (len(heads) - 1), *rows]))


def filled(text: str, tables: Mapping[str, str]) -> str:
    """A document with each table in its place: `<!-- name -->`, the table, `<!-- end -->`.

    Raises:
        ValueError: a table has no place in the document.
    """
    for name, table in tables.items():
        begin = f"<!-- {name} -->"
        place = re.compile(re.escape(begin) + r"\n.*?" + re.escape(END), re.DOTALL)
        if not place.search(text):
            raise ValueError(f"Expected {begin} in the document.")
        block = f"{begin}\n{table}\n{END}"
        text = place.sub(block.replace("\\", r"\\"), text)  # a backslash would name a group
    return text
