"""An extension of griffe, for the site: docstrings that are written for Python's help become Markdown."""

from __future__ import annotations

import re

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
COMPARISON = re.compile(r"(?<=: )>(?==? )")


class Doctests(griffe.Extension):
    """`>>> f(x)` and what follows, up to an empty line, in a block of its own; `steps: >= 1` is no quotation."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            text = COMPARISON.sub(r"\\>", obj.docstring.value)
            obj.docstring.value = DOCTEST.sub(lambda found: f"```pycon\n{found.group()}\n```", text)
