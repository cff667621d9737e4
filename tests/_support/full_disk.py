"""A disk that is full: no file of this process may become longer than so many bytes."""

from __future__ import annotations

import resource
from contextlib import contextmanager


def allow(size=-1):
    """Let the system refuse longer files, as it refuses all of them on a full disk; without a size, none."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size < 0 else size, hard))


@contextmanager
def at_most(size):
    """Inside, the disk is full; how it was before does not matter to tests."""
    allow(size)
    try:
        yield
    finally:
        allow()
