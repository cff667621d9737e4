"""The programs are scripts: the test runs them, and pytest does not import them."""

from __future__ import annotations

from pathlib import Path

collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("*.py")
    if not path.name.startswith("test_")
]
