"""docs/architecture.md: each file of the package is named there, or lies in a folder that is; each named file exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import dpfunc

ROOT = Path(dpfunc.__file__).parent
PAGE = (ROOT.parent / "docs" / "architecture.md").read_text()
NAMES = set(re.findall(r"`([a-z_*/.]+)`", PAGE)) - {"params", "batch", "state"}
BASES = [ROOT, ROOT / "engines", ROOT / "checkpoint", ROOT / "hf"]


def paths(name):
    """Files and folders of a name on the page, with or without its ending and the folder that a section is about."""
    whole = name if "." in name or name.endswith("/") else f"{name}.py"
    return [path for base in BASES for path in base.glob(whole)]


def test_what_the_page_names_is_there():
    assert not [name for name in sorted(NAMES) if not paths(name) and name not in dpfunc.__all__]


def test_the_page_about_rows_names_files_and_tests_that_are_there():
    """docs/isolation.md: code in dpfunc/engines/, tests in tests/engines/."""
    tests = Path(__file__).parent / "engines"
    lines = (ROOT.parent / "docs" / "isolation.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.count(" | ") == 2 and ".py" in line]
    assert len(rows) > 15
    code = {name for _, column, _ in rows for name in re.findall(r"`([\w/]+(?:\.py|/))`", column)}
    named = {name for *_, column in rows for name in re.findall(r"`([\w/]+\.py(?:::\w+)?)`", column)} - {
        "tests/reference.py"
    }
    assert not [name for name in code if not (ROOT / "engines" / name).exists()]
    for name in named:
        file, _, test = name.partition("::")
        assert f"def {test}" in (tests / file).read_text(), name


def test_every_file_has_its_place():
    named = {path for name in NAMES for path in paths(name)} - {ROOT / "engines", ROOT / "checkpoint"}
    missing = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if path.name != "__init__.py" and not named & {path, *path.parents}
    ]
    assert not missing


def test_the_picture_is_that_of_the_imports():
    """`make house` writes it."""
    assert runpy.run_path(str(ROOT.parent / "tools" / "house.py"))["with_picture"](PAGE) == PAGE
