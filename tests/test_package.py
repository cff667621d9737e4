"""The package: what the source archive and the wheel contain, and what they say about themselves."""

from __future__ import annotations

import ast
import email
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCAL = {".git", ".venv", ".cache", ".hypothesis", ".pytest_cache", ".mypy_cache", ".ruff_cache", "runs", "dist", "build",
         "__pycache__"}  # fmt: skip
NOT_SHIPPED = {".ci", ".github", ".gitignore"}  # for the repository, not for its copies
LINKS = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
WRITTEN = {"PKG-INFO", "setup.cfg"}  # by setuptools


def sources():
    """Paths of the files of the repository, without what is made locally; an unpacked source archive has no git."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    found = set()
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if path.is_file() and not LOCAL & set(parts) and not any(part.endswith(".egg-info") for part in parts):
            found.add("/".join(parts))
    return found


def build(kind, source, out):
    """Build with the setuptools of this environment, as pip and build do; the name of the file."""
    code = f"from setuptools import build_meta; print('made ' + build_meta.build_{kind}({str(out)!r}))"
    result = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return out / re.search(r"^made (.+)$", result.stdout, re.MULTILINE).group(1)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(source archive, wheel that was built from it), from a copy of the repository with things that do not belong."""
    place = tmp_path_factory.mktemp("package")
    copy = place / "copy"
    for name in sources():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    for name in ("examples/main_job/runs/one/model.safetensors", "tests/.hypothesis/x", ".cache/mails/spam.csv",
                 "examples/vqa/.cache/picture.png", "dpfunc/__pycache__/step.pyc", "notes.txt"):  # fmt: skip
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("private")
    archive = build("sdist", copy, place)
    with tarfile.open(archive) as file:
        file.extractall(place / "unpacked", filter="data")
    (unpacked,) = (place / "unpacked").iterdir()
    return archive, build("wheel", unpacked, place)


def test_the_source_archive_is_the_repository(built):
    with tarfile.open(built[0]) as file:
        names = {name.split("/", 1)[1] for name in file.getnames() if "/" in name and file.getmember(name).isfile()}
    there = {name for name in names if not name.startswith("dpfunc.egg-info/")} - WRITTEN
    assert there == {name for name in sources() if name.split("/")[0] not in NOT_SHIPPED}


def test_the_wheel_has_all_modules_and_its_types(built):
    with zipfile.ZipFile(built[1]) as file:
        names = set(file.namelist())
    code = {name for name in names if ".dist-info/" not in name}
    assert code == {name for name in sources() if name.startswith("dpfunc/")}
    assert "dpfunc/py.typed" in code
    assert "dpfunc/engines/_rules/table.py" in code


def test_the_wheel_says_what_it_is(built):
    """The page has no relative links, which lead nowhere elsewhere: names of files, or links where the address is known."""
    with zipfile.ZipFile(built[1]) as file:
        names = file.namelist()
        about, entries = (
            next(file.read(name) for name in names if name.endswith(end))
            for end in (".dist-info/METADATA", "entry_points.txt")
        )
    metadata = email.message_from_bytes(about)
    assert b"dpfunc = dpfunc.cli.main:main" in entries
    assert (metadata["Name"], metadata["Version"]) == ("dpfunc", PROJECT["version"])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    page, readme = metadata.get_payload(), (ROOT / "README.md").read_text()
    assert page.startswith("# dpfunc")
    assert [link for link in LINKS.findall(page) if not re.match(r"https?://|#", link)] == []
    assert "quick start (`docs/quick_start.md`)" in page
    package_page = runpy.run_path(str(ROOT / "setup.py"))["package_page"]
    links = LINKS.findall(package_page(readme, "https://example.org/dpfunc/v1"))
    assert len(links) == len(LINKS.findall(readme)) > 20
    assert all(link.startswith("https://example.org/dpfunc/v1/") for link in links)


def test_the_first_screen_says_how_to_install(built):
    """From a clone or the wheel that was built here, for which versions; each extra that a page names is one of the package."""
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:25])
    assert re.search(r'^    pip install "\.\[hf\]"', first, re.MULTILINE)
    assert f'pip install "{built[1].name}[hf]"' in first
    versions = [line.replace(">=", " ") for line in PROJECT["dependencies"] if line.startswith("torch>=")]
    versions += [
        PROJECT["requires-python"].replace(">=", "Python "),
        *re.findall(r"3\.\d+", str(PROJECT["classifiers"])),
    ]
    assert len(versions) > 3
    assert [version for version in versions if version not in first] == []
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    extras = re.findall(r"(?:dpfunc|\.|\.whl)\[(\w+)\]['\"`]", "".join(page.read_text() for page in pages))
    assert len(extras) >= 7
    assert {*extras} <= PROJECT["optional-dependencies"].keys()


def test_the_oldest_versions_are_those_that_were_tried():
    page = (ROOT / "docs" / "quick_start.md").read_text()
    transformers, peft, accelerate = (line.split(">=")[1] for line in PROJECT["optional-dependencies"]["hf"][:3])
    assert f"Transformers {transformers}, PEFT {peft} and Accelerate {accelerate}, the oldest that pip takes" in page


def test_the_wheel_runs_alone(built, tmp_path):
    """Unpacked somewhere else, it is what is imported, and its command answers."""
    with zipfile.ZipFile(built[1]) as file:
        file.extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import dpfunc.cli.main; print(dpfunc.__file__); "
        "dpfunc.cli.main.main(['epsilon', '-q', '1', '--steps', '10', '--sigma', '5', '--delta', '1e-5', '--json'])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.startswith(str(tmp_path))
    assert "2.594" in result.stdout


def test_what_is_required_is_what_is_imported():
    """Each package that dpfunc imports is required, and nothing else is."""
    required = {re.match(r"[\w-]+", line).group() for line in PROJECT["dependencies"]}
    extras = [line for name in ("hf", "sign", "budget") for line in PROJECT["optional-dependencies"][name]]
    extra = {re.match(r"[\w-]+", line).group() for line in extras}
    imported = set()
    for path in (ROOT / "dpfunc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            imported.update(name.split(".")[0] for name in names)
    outer = {"yaml": "pyyaml", "PIL": "pillow"}
    packages = {outer.get(name, name) for name in imported} - set(sys.stdlib_module_names) - {"dpfunc"}
    assert required <= packages
    # tokenizers comes with transformers, jinja2 with torch; the others are for pictures only
    assert packages - required - extra == {"jinja2", "matplotlib", "pillow", "tokenizers"}


def test_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


@pytest.mark.slow
def test_a_new_user_gets_through():
    """Install, quick start, an own table, the loop of the README, reports, two processes; from the pages, word by word."""
    result = subprocess.run([sys.executable, str(ROOT / "tools" / "stranger.py")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    parts = [line.split(" s  ")[1] for line in result.stdout.splitlines()]
    assert len(parts) == 11
    assert parts[0] == "build, and install into an empty environment"
    assert parts[-1] == "two processes"
