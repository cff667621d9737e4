"""`dpfunc doctor`: what is installed, and what does not work."""

from __future__ import annotations

import json

import pytest
import torch
from text_job import run

from dpfunc.cli import _doctor
from dpfunc.engines import _book_keeping, _recurrent


def test_all_is_well_here():
    result = run("doctor", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["works"], found["missing"]) == (0, True, {})
    assert found["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["checks"]["engine"]["found"] == "rules work"
    assert "All that a run needs works." in run("doctor").stdout


def refused(*args, **options):
    raise RuntimeError("it must override the setup_context staticmethod")


BROKEN = {
    "rules": ([(_book_keeping, "apply_node"), (_recurrent, "apply_node")], "engine", "setup_context"),
    "noise": ([(_doctor, "_noise")], "import", "setup_context"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_told(monkeypatch, name):
    places, check, words = BROKEN[name]
    for module, attribute in places:
        monkeypatch.setattr(module, attribute, refused)
    result = run("doctor", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["works"], found["checks"][check]["works"]) == (1, False, False)
    assert words in found["checks"][check]["found"]
    text = run("doctor")
    assert text.exit_code == 1
    assert "WRONG" in text.stdout


@pytest.mark.parametrize(("package", "works", "extra"), [("randomgen", False, None), ("peft", True, "hf")])
def test_what_is_missing_is_told(monkeypatch, package, works, extra):
    """An extra that is missing is no fault; a package that every run needs is one."""
    known = _doctor._version
    monkeypatch.setattr(_doctor, "_version", lambda name: None if name == package else known(name))
    found = json.loads(run("doctor", "--json").stdout)
    assert found["works"] is works
    assert found["missing"] == ({extra: [package]} if extra else {})
