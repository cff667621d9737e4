"""Tables of the documents, which scripts write between two markers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

END = "<!-- end -->"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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
        text = place.sub(lambda match, block=block: block, text)  # type: ignore[misc]
    return text
