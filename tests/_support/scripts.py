"""Scripts that are click commands, run in this process: a process of its own imports for longer than most of them run."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path

from click.testing import CliRunner, Result

_command = functools.cache(lambda path: runpy.run_path(str(path))["main"])


def ran(path: Path, *arguments: object) -> Result:
    """Exit code and output of a script; an exception that a user would see as a traceback is raised."""
    result = CliRunner().invoke(_command(path), [*map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
