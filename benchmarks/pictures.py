"""Figures of the pages: SVG whose labels are text, of at least 11 pixels on a phone; one message a figure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# 4.8 inches are 461 pixels; a phone shows 368 of them, so that 10.5 points (14 pixels) are 11 there.
WIDTH, POINTS = 4.8, 10.5
OURS, THEIRS, PLAIN = "C0", "C1", "0.35"
STYLE = {
    "font.size": POINTS, "axes.labelsize": POINTS, "axes.titlesize": POINTS + 1, "xtick.labelsize": POINTS,
    "ytick.labelsize": POINTS, "legend.fontsize": POINTS, "svg.fonttype": "none", "svg.hashsalt": "dpfunc",
    "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip


@contextmanager
def figure(path: Path, title: str, height: float = 3.2) -> Iterator[Any]:
    """The axes of a figure that is written to `path` afterwards; the title is its message."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = drawn.add_subplot()
        yield axes
        drawn.suptitle(title, fontsize=POINTS + 1, fontweight="bold", x=0.02, ha="left")
        drawn.savefig(path, metadata={"Date": None})
