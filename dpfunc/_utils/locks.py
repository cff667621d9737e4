"""Exclusive use of files and folders. A lock ends with its process, however that ends: nothing stale is left.

May import: its folder, errors. Privacy depends on it: yes.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

from dpfunc.errors import InvalidArgument

LOCK_FILE = ".dpfunc.lock"
_FAR = 2**40  # Windows locks bytes, and others may not read them: one that no file has
_PAUSE = 0.05
_ATTEMPTS = 100
_held: set[Path] = set()  # lock files of this process


def lock(handle: int, *, shared: bool = False, wait: bool = True) -> bool:
    """Lock an open file until it is closed; False if another process has it. OSError: the file system has no locks."""
    if sys.platform == "win32":
        return _lock_byte(handle, wait)
    import fcntl

    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_byte(handle: int, wait: bool) -> bool:
    import msvcrt

    calls = vars(msvcrt)  # of Windows only, so unknown to a type checker elsewhere
    at = os.lseek(handle, 0, os.SEEK_CUR)
    os.lseek(handle, _FAR, os.SEEK_SET)
    try:
        while True:
            try:
                calls["locking"](handle, calls["LK_NBLCK"], 1)
            except OSError:
                if not wait:
                    return False
                time.sleep(_PAUSE)
            else:
                return True
    finally:
        os.lseek(handle, at, os.SEEK_SET)


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Context in which no other process uses the folder. It is made if it is missing, and removed if it stays empty.

    The lock is a file in it, which is there only while it is held, or after a kill. Blocks of one process may be inside
    of each other (tests/_utils/test_locks.py::test_one_process_has_a_folder, ::test_a_killed_process_has_nothing).
    """
    path = folder.resolve() / LOCK_FILE
    if path in _held:
        yield
        return
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    handle = _taken(path, folder)
    _held.add(path)
    try:
        yield
    finally:
        _held.remove(path)
        if sys.platform == "win32":  # where an open file cannot be removed
            os.close(handle)
            with suppress(OSError):
                path.unlink()
        else:
            path.unlink(missing_ok=True)  # before the lock ends: `_taken` sees that it has a file without a name
            os.close(handle)
        for each in made:
            with suppress(OSError):
                each.rmdir()


def _taken(path: Path, folder: Path) -> int:
    for attempt in count():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            if isinstance(error, (FileNotFoundError, FileExistsError)) and attempt < _ATTEMPTS:
                continue  # the process before us may have removed the folder in between
            raise InvalidArgument(
                f"Expected a folder that can be written, got {str(folder)!r}: {error.strerror}. Nothing was spent."
            ) from error
        if not lock(handle, wait=False):
            owner = os.read(handle, 20).decode("ascii", "replace").strip()
            os.close(handle)
            raise InvalidArgument(
                f"Expected no other process in {str(folder)!r}, got {f'process {owner}' if owner else 'one'}, which "
                "trains there now. Two runs in one folder would publish one ledger for the steps of both. Wait until "
                "it ends, or name another folder. Nothing was written."
            )
        with suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == path.stat().st_ino:
                break
        os.close(handle)  # the one before us removed it: what others lock has another name now
    os.ftruncate(handle, 0)
    os.write(handle, f"{os.getpid()}\n".encode())
    return handle


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Context in which `abandoned(folder)` is False, also after a rename; without locks of folders it has no effect."""
    with ExitStack() as stack:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            lock(handle, wait=False)
        yield


def abandoned(folder: Path) -> bool:
    """True if the process that was `in_use` of a folder has ended; False if it is at work, or that cannot be known."""
    with suppress(OSError), ExitStack() as stack:
        handle = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, handle)
        return lock(handle, wait=False)
    return False
