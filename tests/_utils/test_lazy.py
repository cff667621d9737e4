"""Names of the package come when they are used, and are what they are at home; of others the error says where they are."""

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


def modules_of_the_pages():
    """Not those of the commands (`python -m dpfunc.cli.main`)."""
    pages = [*(ROOT.parent / "docs").rglob("*.md"), *(ROOT.parent / "examples").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"\bdpfunc((?:\.[a-z_]+){2,})\b", page.read_text())}
    there = sorted(name for name in named if (ROOT / f"{name[1:].replace('.', '/')}.py").exists())
    return [f"dpfunc{name}" for name in there if not name.startswith((".cli.", ".train."))]


def test_names_come_when_they_are_used():
    """Nothing heavy is imported before; an unknown name is looked up in the texts of the files, and imports nothing."""
    modules = modules_of_the_pages()
    assert "dpfunc.sampling.users" in modules
    code = f"""
import sys, dpfunc, dpfunc.accounting, dpfunc.cli.main, dpfunc.checkpoint.journal, dpfunc.errors
def heavy():
    return [name for name in ("torch", "opacus", "transformers", "peft", "accelerate", "scipy") if name in sys.modules]
print(heavy(), hasattr(dpfunc, "Flat"), hasattr(dpfunc, "DPTrainer"), heavy())
dpfunc.epsilon, dpfunc.Ledger
print("torch" in sys.modules)
dpfunc.Plan
print("torch" in sys.modules, dpfunc.state.allow_repeat.__name__, dpfunc.checkpoint.save.__name__)
from dpfunc import *
print(all(name in globals() for name in dpfunc.__all__))
for name in {modules}:  # without an import of their own
    eval(name)
"""
    assert python(code).splitlines() == ["[] False False []", "False", "True allow_repeat save", "True"]


def test_the_lists_of_public_names_agree():
    """Also the imports for type checkers: name -> module, and none for `from dpfunc import x`; each name is its own."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    typed = {
        alias.name: node.module.removeprefix("dpfunc").removeprefix(".") for node in block.body for alias in node.names
    }
    homes = {name: home for home, names in dpfunc._HOMES.items() for name in names.split()}
    assert {name: home for name, home in typed.items() if home} == homes
    assert sorted(homes) == sorted(dpfunc.__all__)
    # importing a module of that name would replace the function
    assert not {info.name for info in pkgutil.iter_modules([str(ROOT)])} & set(homes)
    for name, home in homes.items():
        assert getattr(dpfunc, name) is getattr(importlib.import_module(f"dpfunc.{home}"), name), name
        assert name in dir(dpfunc)
    for name in set(typed) - set(homes):  # folders and files
        assert getattr(dpfunc, name) is sys.modules[f"dpfunc.{name}"], name


ELSEWHERE = {
    **dict.fromkeys(("nothing", "_nothing", "a.b", "", "__wrapped__"), "$"),
    "insecure_key": r"\. Here: dpfunc.rng.insecure_key\.$",
    "clipped_grad": r"\. Here: dpfunc.clipped.clipped_grad\.$",
    "StepState": r"\. Here: dpfunc.state.StepState\.$",
    "Schedule": r"\. Here: dpfunc.types.Schedule\.$",
    "replace_batchnorm": r"\. Here: dpfunc.functional.replace_batchnorm\.$",
    "DPTrainer": r"\. Here: dpfunc.hf.DPTrainer\.",
    "recipe": r"\. Here: dpfunc.recipes.recipe\.",
    "InvalidArgument": r"\. Here: dpfunc.errors.InvalidArgument\.",
    "PrivacyEngine": r"\. Here: dpfunc.make_dp_step\(loss_fn, plan\), which wraps nothing; docs/moving/opacus.md has more names\.",
    "get_noise_multiplier": r"\. Here: dpfunc.Plan.for_budget\(",
    **{
        name: rf"\. Here: .*dpfunc\.{folder}\.{name}\b"
        for folder in ("accounting", "clipping", "distributed", "engines", "functional", "lora", "sampling", "checkpoint")
        for name in sorted({*getattr(dpfunc, folder, dpfunc).__all__} - {*dir(dpfunc)})
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_that_is_not_here(name):
    with pytest.raises(AttributeError, match=f"^module 'dpfunc' has no attribute {name!r}{ELSEWHERE[name]}"):
        getattr(dpfunc, name)
    assert not hasattr(dpfunc, name)
