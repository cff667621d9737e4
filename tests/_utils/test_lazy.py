"""Names of the package come when they are used, and are what they are at home."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import sys
from pathlib import Path

import pytest
from new_python import python

import dpfunc

ROOT = Path(dpfunc.__file__).parent
HEAVY = ("torch", "opacus", "transformers", "peft", "accelerate")


def test_names_come_when_they_are_used():
    """Nothing heavy is imported before; an unknown name is looked up in the texts of the files, and imports nothing."""
    modules = "dpfunc, dpfunc.accounting, dpfunc.cli.main, dpfunc.checkpoint.journal, dpfunc.errors"
    code = f"""
import sys, {modules}
def heavy(): return [name for name in {(*HEAVY, "scipy")} if name in sys.modules]
print(heavy(), hasattr(dpfunc, "Flat"), hasattr(dpfunc, "DPTrainer"), heavy())
dpfunc.epsilon, dpfunc.Ledger
print("torch" in sys.modules)
dpfunc.Plan
print("torch" in sys.modules, dpfunc.state.replay.__name__, dpfunc.checkpoint.save.__name__)
from dpfunc import *
print(all(name in globals() for name in dpfunc.__all__))
"""
    assert python(code).splitlines() == ["[] False False []", "False", "True replay save", "True"]


def homes():
    """Name -> module of dpfunc, as the package itself says it."""
    return {name: home for home, names in dpfunc._HOMES.items() for name in names.split()}


def test_the_lists_of_public_names_agree():
    """Also the imports for type checkers: name -> module, and none for `from dpfunc import x`."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    typed = {
        alias.name: node.module.removeprefix("dpfunc").removeprefix(".") for node in block.body for alias in node.names
    }
    assert sorted(typed) == sorted(dpfunc.__all__)
    assert {name: home for name, home in typed.items() if home} == homes()
    # importing a module of that name would replace the function
    assert not {info.name for info in pkgutil.iter_modules([str(ROOT)])} & set(homes())


def test_public_names_are_what_they_are_at_home():
    for name in dpfunc.__all__:
        home, found = homes().get(name), getattr(dpfunc, name)
        value = getattr(importlib.import_module(f"dpfunc.{home}"), name) if home else sys.modules[f"dpfunc.{name}"]
        assert found is value, name
        assert name in dir(dpfunc)


def test_modules_that_the_pages_name_are_attributes():
    """Without an import of their own: `dpfunc.sampling.users`. Not those of the commands (`python -m dpfunc.cli.main`)."""
    pages = [*(ROOT.parent / "docs").rglob("*.md"), *(ROOT.parent / "examples").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"\bdpfunc((?:\.[a-z_]+){2,})\b", page.read_text())}
    modules = sorted(name for name in named if (ROOT / f"{name[1:].replace('.', '/')}.py").exists())
    assert ".sampling.users" in modules
    needed = [f"dpfunc{name}" for name in modules if not name.startswith((".cli.", ".train."))]
    assert python(f"import dpfunc; print([eval(name) and name for name in {needed}])").strip() == str(needed)


@pytest.mark.parametrize("name", ["nothing", "_nothing", "a.b", "", "__wrapped__"])
def test_other_names_are_no_attributes(name):
    with pytest.raises(AttributeError, match=f"module 'dpfunc' has no attribute {name!r}$"):
        getattr(dpfunc, name)
    assert not hasattr(dpfunc, name)
