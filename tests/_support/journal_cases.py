"""Lines of journals, written and read."""

from __future__ import annotations

from dpfunc.checkpoint.chain import Position, append_chained, follow, locked


def written(path, *all_values):
    """A journal with these lines, as `Journal` would chain them."""
    for values in all_values:
        with locked(path) as file:
            append_chained(file, path, follow(file, path, Position())[0], values)
    return path


def line(step, **changes):
    values = {"run": "a", "step": step, "adjacency": "add_remove", "events": [[1.0, 5.0, 1]], "release": "r"}
    return {**values, **changes}
