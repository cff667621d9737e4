"""The site: its navigation has each page of docs/ once, and links and anchors lead somewhere. `make docs` builds it."""

from __future__ import annotations

import json
import re
import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
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


LINKS = [(path, *link) for path in PAGES for link in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", path.read_text())]


def test_links_with_anchors_lead_somewhere():
    assert len(LINKS) > 20
    for path, target, anchor in LINKS:
        page = path.parent / target if target else path
        assert page.exists(), f"{path} links to {target}"
        assert anchor in anchors(page), f"{path} links to {target}#{anchor}"


def test_links_out_of_the_site_become_names():
    page = "See [contributing](../CONTRIBUTING.md), [trust](trust.md#what) and ![a](../b.png)."
    assert without_outer_links(page, "index.md") == (
        "See contributing (`CONTRIBUTING.md`), [trust](trust.md#what) and ![a](../b.png)."
    )
    assert without_outer_links("[`examples/x.md`](../../examples/x.md)", "guides/a.md") == "`examples/x.md`"
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


def test_the_quick_start_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "quick_start.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(code.replace("num_steps=100", "num_steps=3"), "quick_start.md", "exec"), names)
    assert names["state"].step == 3
    assert "epsilon=" in capsys.readouterr().out


def test_what_privacy_officers_read_is_what_runs_write():
    """The page names fields of `privacy_accounting.json`; and it has no code."""
    from dpfunc import clipping, insecure_key
    from dpfunc.accounting.record import RECORD_FILE, SIZES
    from dpfunc.checkpoint import make_record
    from dpfunc.hf.trainer._files import JOURNAL
    from dpfunc.plan import Plan
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
