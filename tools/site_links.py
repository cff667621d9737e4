"""The site has the pages of docs/ only: links from there to other files of the repository become their names."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Protocol


class File(Protocol):
    """A file of the site: its path below docs/."""

    src_uri: str


class Page(Protocol):
    """A page of the site, as mkdocs has it."""

    file: File


LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def without_outer_links(text: str, path: str) -> str:
    """A page of docs/ (at `path`, relative to docs/) with `text (CONTRIBUTING.md)` for links that lead out of docs/."""

    def replaced(link: re.Match[str]) -> str:
        words, target = link.group(1), normpath(str(PurePosixPath("docs", path).parent / link.group(2)))
        if PurePosixPath(target).parts[0] == "docs":
            return link.group()
        return f"`{target}`" if target.endswith(words.strip("`")) else f"{words} (`{target}`)"

    return LINK.sub(replaced, text)


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Called by mkdocs for each page, before it is rendered."""
    return without_outer_links(markdown, Path(page.file.src_uri).as_posix())
