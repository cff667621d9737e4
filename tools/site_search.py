"""Search finds guides first: pages of the site have a weight by their folder, and decisions are not searched."""

from __future__ import annotations

from typing import Any, Protocol


class File(Protocol):
    """A file of the site: its path below docs/."""

    src_uri: str


class Page(Protocol):
    """A page of the site, as mkdocs has it."""

    file: File
    meta: dict[str, Any]


# The first that a page's path begins with counts; others have 1.
WEIGHTS = {
    "index.md": 0.5, "guides/": 6.0, "quick_start.md": 6.0, "gallery.md": 3.0, "notebooks/": 3.0,
    "troubleshooting.md": 3.0, "reference/": 0.5, "survey.md": 0.5, "results/": 0.3,
}  # fmt: skip


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Called by mkdocs for each page: writes what the search plugin reads."""
    path = page.file.src_uri
    weight = next((found for beginning, found in WEIGHTS.items() if path.startswith(beginning)), 1.0)
    page.meta["search"] = {"exclude": True} if path.startswith("decisions/") else {"boost": weight}
    return markdown
