"""The site: its navigation has each page once, links lead somewhere, the reference has every name. `make docs` builds it."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import runpy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import yaml
from click.testing import CliRunner
from pages import DOCS, ROOT, text_of

import dpfunc
from dpfunc.cli.main import main

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
PAGES = sorted(DOCS.rglob("*.md"))
without_outer_links = runpy.run_path(str(ROOT / "tools" / "site_links.py"))["without_outer_links"]


def leaves(entry):
    if isinstance(entry, str):
        return [entry]
    return [leaf for child in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(child)]


def test_the_navigation_has_each_page_once():
    named = Counter(leaves(SITE["nav"]))
    there = {path.relative_to(DOCS).as_posix() for path in PAGES}
    there |= {
        path.relative_to(DOCS).with_suffix(".md").as_posix() for path in DOCS.rglob("*.ipynb")
    }  # site_notebooks.py
    assert set(named) - there == set(), "pages in the navigation of mkdocs.yml that do not exist"
    assert there - set(named) == set(), "pages that belong into the navigation of mkdocs.yml"
    assert max(named.values()) == 1


def anchors(path):
    """The anchors of a page: headings as markdown makes them, and names of the reference."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = [re.sub(r"[^\w\s-]", "", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[-\s]+", "-", line.strip().lower()) for line in headings} | set(
        re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    )


def test_links_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *PAGES, *(ROOT / "examples").glob("*.md")]
    links = [(path, *link) for path in pages for link in re.findall(r"\]\(([^)#:\s]*)#?([^)\s:]*)\)", path.read_text())]
    assert len(links) > 120
    for path, target, anchor in links:
        page = path.parent / target if target else path
        assert page.exists(), f"{path} links to {target}"
        assert not anchor or anchor in anchors(page), f"{path} links to {target}#{anchor}"


def test_commands_of_the_readme_work():
    found = re.findall(r"^dpfunc ((?:epsilon|sigma|requirements)[^#\n]*)", text_of("../README.md"), re.MULTILINE)
    assert len(found) >= 2
    for command in found:
        result = CliRunner().invoke(main, command.split())
        assert result.exit_code == 0, result.output


def test_the_table_of_the_main_job_is_the_committed_result():
    results, readme = json.loads(text_of("results/demo.json"))["results"], text_of("../examples/README.md")
    for row in results:
        assert "{:.3f} ({:.3f} - {:.3f})".format(row["accuracy"], *row["interval"]) in readme
    private = results[-1]
    assert private["accuracy"] >= 0.92
    assert f"{private['epsilon_prv']:.2f} | {private['epsilon_rdp']:.2f}" in readme


def test_links_out_of_the_site_become_names():
    page = "See [contributing](../CONTRIBUTING.md), [trust](trust.md#what) and ![a](../b.png)."
    assert without_outer_links(page, "index.md") == (
        "See contributing (`CONTRIBUTING.md`), [trust](trust.md#what) and ![a](../b.png)."
    )
    assert without_outer_links("[`examples/x.md`](../../examples/x.md)", "guides/a.md") == "`examples/x.md`"
    assert without_outer_links("[x.md](../../examples/x.md)", "guides/a.md") == "`examples/x.md`"
    assert without_outer_links("[a](../trust.md)", "guides/a.md") == "[a](../trust.md)"
    assert without_outer_links("[a](https://example.org/b)", "index.md") == "[a](https://example.org/b)"


def test_search_finds_guides_first_and_works_without_a_server():
    """Pages have weights, decisions none; the plugin asks no other server for what lets a folder be searched."""
    hook = runpy.run_path(str(ROOT / "tools" / "site_search.py"))["on_page_markdown"]

    def found(path):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=path), meta={})
        assert hook("text", page=page) == "text"
        return page.meta["search"]

    assert found("decisions/0001-noise-tiles.md") == {"exclude": True}
    assert found("guides/loop.md")["boost"] > found("trust.md")["boost"] > found("reference/core.md")["boost"]
    assert {"search", "offline"} <= {plugin for plugin in SITE["plugins"] if isinstance(plugin, str)}
    assert SITE["use_directory_urls"] is False
    (script,) = SITE["extra"]["polyfills"]
    assert "IFrameWorker" in (DOCS / script).read_text()


def test_labels_of_figures_are_measured(tmp_path):
    """In pixels on the screen, for a picture that is scaled; letters that are paths are no labels."""
    smallest_text = runpy.run_path(str(ROOT / "tools" / "site.py"))["smallest_text"]
    text = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300 200"><text style="font: 10.5px Sans">a</text></svg>'
    )
    path = tmp_path / "a.svg"
    path.write_text(text)
    assert smallest_text(path, 600) == pytest.approx(21.0)
    assert smallest_text(path, 300) == pytest.approx(10.5)
    path.write_text(text.replace("text", "path"))
    assert smallest_text(path, 300) == 0.0
    for figure in (DOCS / "results").glob("*.svg"):
        assert smallest_text(figure, 368) >= 11.0, figure.name  # the width of a page on a phone
    assert not list(DOCS.rglob("*.png"))


def test_what_privacy_officers_read_is_what_runs_write():
    """The page names fields of `privacy_accounting.json`; and it has no code."""
    from dpfunc import clipping
    from dpfunc.accounting.record import RECORD_FILE, SIZES
    from dpfunc.checkpoint import make_record
    from dpfunc.hf.trainer._files import JOURNAL
    from dpfunc.plan import Plan
    from dpfunc.rng import insecure_key
    from dpfunc.sampling import Poisson
    from dpfunc.step import make_dp_step

    page = (DOCS / "privacy_officers.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| `{RECORD_FILE}`"))
    plan = Plan(Poisson(100, 0.1), clipping.Flat(1.0), noise_multiplier=1.0, num_steps=2, delta=1e-5)
    dp_step = make_dp_step(lambda params, batch: (params["w"] * batch).sum(1), plan)
    with pytest.warns(UserWarning, match="known to everybody"):
        state = dp_step.init({"w": torch.zeros(2)}, insecure_key(10_119))
    values = json.loads(make_record(dp_step, state, unit="one row").to_json())
    named = set(re.findall(r"`(\w+)`", row.split("|")[2]))
    assert named - {"secret", "guessable"} == set(values) - {"schema"}  # all of them, and no other
    assert set(SIZES) <= set(re.findall(r"`([\w ]+)`", page))
    assert f"| `{JOURNAL}`" in page
    assert "```" not in page
    assert len(page.split()) < 1500  # two pages


def test_without_a_browser_the_check_of_the_site_fails_and_names_it(monkeypatch, capsys):
    main = runpy.run_path(str(ROOT / "tools" / "site.py"))["main"]
    monkeypatch.setattr("shutil.which", lambda program: None if program == "chromedriver" else program)
    assert main([]) == 1
    assert "chromium-driver" in capsys.readouterr().out


def test_pages_that_the_site_fills_say_where_to_read():
    """Docstrings and programs are in the pages of the site alone: in the repository a line names their folder."""
    filled = [path for path in PAGES if re.search(r"^(::: |--8<-- )", path.read_text(), re.MULTILINE)]
    assert len(filled) > 15
    for path in filled:
        (folder,) = re.findall(r"in the repository they are in \[`([\w/.]+)`\]", path.read_text())
        assert (ROOT / folder).exists()


REFERENCE = DOCS / "reference"
SHOWN = {
    name: path.stem
    for path in REFERENCE.glob("*.md")
    for name in re.findall(r"^::: (\S+)$", path.read_text(), re.MULTILINE)
}


def test_the_reference_has_every_public_name():
    """Of each folder for users all names, all errors; and in the table each public name, with its place."""
    folders = {
        path.parent.name for path in (ROOT / "dpfunc").glob("*/__init__.py") if "__all__ = [" in path.read_text()
    }
    errors = {name for name, value in vars(dpfunc.errors).items() if inspect.isclass(value)}
    expected = {f"dpfunc.errors.{name}": "errors" for name in errors}
    for folder in folders - {"cli", "train", "_utils"}:
        names = importlib.import_module(f"dpfunc.{folder}").__all__
        expected |= {f"dpfunc.{folder}.{name}": folder for name in names}
    assert {name: page for name, page in SHOWN.items() if page in expected.values()} == expected
    rows = re.findall(r"^\| `dpfunc\.(\w+)` \| \[\w+\]\(([^)]+)\) \|$", text_of("reference/README.md"), re.M)
    assert sorted(name for name, _ in rows) == (ROOT / "tests" / "public_api.txt").read_text().split()
    for name, target in rows:
        page, _, anchor = target.partition("#")
        whole = inspect.ismodule(getattr(dpfunc, name))
        assert target == f"{name}.md" if whole else f"{SHOWN[anchor]}.md" == page
        assert whole or named(anchor) is getattr(dpfunc, name)


def names_used(text):
    """The dotted names of dpfunc in a page, and those that its blocks import."""
    imported = {
        f"{module}.{name.split(' as ')[0].strip()}"
        for module, names in re.findall(r"from (dpfunc[\w.]*) import ([\w, ]+)", text)
        for name in names.split(",")
    }
    return imported | set(re.findall(r"(?<![\w./-])dpfunc(?:\.\w+)+\b(?!/)", text))


def is_module(name):
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def test_names_that_guides_use_are_public():
    """Those of no page of the reference stand in a list of their own, with all others that a guide uses."""
    pages = [
        DOCS.parent / "README.md",
        *DOCS.glob("*.md"),
        *(DOCS / "guides").glob("*.md"),
        *(DOCS / "moving").glob("*.md"),
    ]
    used = set[str]().union(*(names_used(page.read_text()) for page in pages))
    known = {*SHOWN, *(f"dpfunc.{name}" for name in dpfunc.__all__)}
    others = {
        name for name in used if not is_module(name) and not any(f"{name}.".startswith(f"{each}.") for each in known)
    }
    listed = re.findall(r"^- `(dpfunc\.[\w.]+)`", text_of("reference/README.md"), re.M)
    assert listed == sorted(others)
    assert all(named(name) is not None for name in listed)


def named(name):
    """The object of a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_names_of_the_reference_exist():
    values = [named(name) for name in SHOWN]
    assert all(inspect.getdoc(value) for value in values if inspect.isfunction(value) or inspect.isclass(value))
