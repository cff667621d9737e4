"""Text of the package page: relative links of the README lead nowhere there; all else is in pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
NOTE = "Names of files below are those of the source archive."


def package_page(readme: str, source: str | None) -> str:
    """The README with absolute links, or, where no public address is known, with the names of the files.

    Args:
        readme: text in Markdown. source: address of the folder of this version, without a slash at its end; or None.
    """

    def absolute(link: re.Match[str]) -> str:
        image, words, target = link.groups()
        if source is not None:
            return f"{image}[{words}]({source}/{target})"
        return f"{words} (`{target.split('#')[0]}`)"

    title, text = readme.split("\n", 1)
    note = "" if source is not None else f"\n{NOTE}\n"
    return f"{title}\n{note}{LINK.sub(absolute, text)}"


def build() -> None:
    """Build what is asked for on the command line."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    page = package_page((ROOT / "README.md").read_text("utf-8"), urls.get("Source"))
    setup(long_description=page, long_description_content_type="text/markdown")


if __name__ == "__main__":
    build()
