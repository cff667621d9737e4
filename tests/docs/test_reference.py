"""The API reference has every public name, and no name that does not exist."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import dpfunc

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
FOLDERS = {path.parent.name for path in (ROOT / "dpfunc").glob("*/__init__.py") if "__all__ = [" in path.read_text()}
FOLDERS -= {"cli", "train", "_utils"}  # not for users
SHOWN = {
    name: path.name
    for path in sorted(REFERENCE.glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", path.read_text(), re.MULTILINE)
}


def found(name):
    """The object of a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_every_name_of_a_folder_stands_on_its_page(folder):
    names = importlib.import_module(f"dpfunc.{folder}").__all__
    shown = {name for name, page in SHOWN.items() if page == f"{folder}.md"}
    assert shown == {f"dpfunc.{folder}.{name}" for name in names}, f"docs/reference/{folder}.md"


def test_every_class_of_errors_stands_on_its_page():
    classes = {name for name, value in vars(dpfunc.errors).items() if inspect.isclass(value)}
    assert {f"dpfunc.errors.{name}" for name in classes} == {n for n, page in SHOWN.items() if page == "errors.md"}


def test_every_public_name_is_in_the_table():
    """tests/public_api.txt: each with a link to its docstring, or to the page of the module."""
    rows = dict(
        re.findall(r"^\| `dpfunc\.(\w+)` \| \[\w+\]\(([^)]+)\) \|$", (REFERENCE / "README.md").read_text(), re.M)
    )
    assert sorted(rows) == (ROOT / "tests" / "public_api.txt").read_text().split()
    for name, target in rows.items():
        page, _, anchor = target.partition("#")
        if inspect.ismodule(getattr(dpfunc, name)):
            assert target == f"{name}.md"
            assert (REFERENCE / target).exists()
        else:
            assert SHOWN[anchor] == page
            assert found(anchor) is getattr(dpfunc, name)


def test_names_of_the_reference_exist():
    for name in SHOWN:
        value = found(name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert inspect.getdoc(value), name
