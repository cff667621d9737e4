"""Notebooks as pages of the site: each is run when the site is built, and shown with what it printed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from jinja2 import DictLoader
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

CACHE = Path(__file__).parents[1] / ".cache"
# What a cell printed, in a block with a title; the rest is that of nbconvert.
TEMPLATE = """{% extends 'markdown/index.md.j2' %}
{% macro shown(text) %}
``` { .text title="output" }
{{ text.rstrip() }}
```
{% endmacro %}
{% block stream %}{{ shown(output.text) }}{% endblock stream %}
{% block data_text scoped %}{{ shown(output.data['text/plain']) }}{% endblock data_text %}
"""


def page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Run a notebook in an empty folder of the repository: its page as Markdown, and its pictures by name."""
    notebook = nbformat.read(path, as_version=4)
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
    exporter = MarkdownExporter(extra_loaders=[DictLoader({"site.md.j2": TEMPLATE})], template_file="site.md.j2")
    resources = {"unique_key": path.stem, "output_files_dir": path.stem}
    text, found = exporter.from_notebook_node(notebook, resources)
    return f'<a href="{path.name}" download>The notebook</a>\n\n{text}', found.get("outputs", {})


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Called by mkdocs with all files of the site: each notebook gets a page beside it."""
    notebooks = [file for file in files if file.src_uri.endswith(".ipynb")]
    with ThreadPoolExecutor(len(notebooks) or 1) as pool:
        pages = list(pool.map(lambda file: page(Path(file.abs_src_path or "")), notebooks))
    for file, (text, pictures) in zip(notebooks, pages, strict=True):
        files.append(File.generated(config, file.src_uri.removesuffix(".ipynb") + ".md", content=text))
        folder = file.src_uri.rpartition("/")[0]
        for name, content in _named(pictures, folder):
            files.append(File.generated(config, name, content=content))
    return files


def _named(pictures: dict[str, bytes], folder: str) -> Iterable[tuple[str, bytes]]:
    return ((f"{folder}/{name}", content) for name, content in pictures.items())


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs for each page: links to a notebook lead to its page."""
    return markdown.replace(".ipynb)", ".md)")
