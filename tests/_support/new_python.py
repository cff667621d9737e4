"""A new Python process."""

from __future__ import annotations

import subprocess
import sys


def python(code, *arguments):
    """What a new process prints, which must end well."""
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout
