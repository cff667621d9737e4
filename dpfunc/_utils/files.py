"""Files that are replaced at once and are on disk then, and folders whose removal a kill may interrupt.

May import: its folder, errors. Privacy depends on it: yes.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpfunc._utils.locks import abandoned

SAVING = ".saving-"  # how names of folders begin that are being written
_REMOVING = ".removing-"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context with a new name beside a file; what has it in the end is on disk, and takes the place of the file.

    Of several at one moment the last one is whole; without an error nothing else is left, after a kill the new name.
    """
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    try:
        yield new
        sync_file(new)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    sync_directory(path.parent)


def replace_file(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file atomically and durably: a crash leaves all of the old content or of the new one."""
    with replacing(path) as new, open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(text.encode())


def sync_file(path: Path) -> None:
    """Wait until a file is on disk; it is made if it is missing."""
    with open(path, "ab") as file:  # Windows syncs what can be written
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make new and renamed entries of a directory durable; Windows cannot sync a directory."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_in(folder: Path) -> list[str]:
    """Digests of the files of the released model; checkpoints, which hold the key, are in folders of their own."""
    return [*map(sha256, sorted([*folder.glob("*.safetensors"), *(folder / "model").rglob("*.safetensors")]))]


def remove(path: Path) -> None:
    """Remove a folder, if it exists. It is renamed first, so that nothing reads it; `sweep` removes leftovers."""
    # tests/checkpoint/test_folder.py::test_a_kill_while_an_old_checkpoint_is_removed
    if path.exists():
        gone = path.with_name(f"{_REMOVING}{path.name}-{secrets.token_hex(4)}")
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove leftovers of killed saves and removals, which can hold the key of the run. Saves in progress stay."""
    # tests/checkpoint/test_folder.py::test_what_killed_saves_left_is_swept
    for path in (*parent.glob(f"{_REMOVING}*"), *filter(abandoned, parent.glob(f"{SAVING}*"))):
        shutil.rmtree(path, ignore_errors=True)
