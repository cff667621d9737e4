"""An extension of griffe, for the site: doctests in docstrings are blocks of code."""

from __future__ import annotations

import re

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """`>>> f(x)` and what follows, up to an empty line, in a block of its own."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(lambda found: f"```pycon\n{found.group()}\n```", obj.docstring.value)
