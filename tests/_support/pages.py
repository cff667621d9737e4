"""Pages of the documents, whose blocks tests run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def text_of(page):
    """Of a page of docs/."""
    return (DOCS / page).read_text("utf-8")


def blocks(page, language="python"):
    """Its blocks in a language, in their order."""
    return re.findall(rf"```{language}\b[^\n]*\n(.*?)```", text_of(page), re.DOTALL)


def run(*codes, **names):
    """The names after the last line of the last block."""
    names = {"__name__": "page", **names}
    for number, code in enumerate(codes):
        exec(compile(code, f"block {number}", "exec"), names)
    return names
