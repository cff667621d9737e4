"""Scripts that are click commands, run in this process: a process of its own imports for longer than most of them run."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path
from types import SimpleNamespace

from click.testing import CliRunner, Result


@functools.cache
def names(path: Path) -> SimpleNamespace:
    """The names of a script, of which the functions can be tested."""
    return SimpleNamespace(**runpy.run_path(str(path)))


def ran(path: Path, *arguments: object) -> Result:
    """Exit code and output of a script; an exception that a user would see as a traceback is raised."""
    result = CliRunner().invoke(names(path).main, [*map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
