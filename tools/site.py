"""Look at the built site in a real browser: `python tools/site.py [FOLDER] [--shots FOLDER]`; `make docs` does it.

Pages are opened from the folder, without a web server: no error in the console, nothing wider than a phone (400 px), no
code and no table cut without a bar to scroll it, a search that works and finds guides first, labels of figures of at
least 11 px. Without Chromium and its driver (Debian: `apt-get install chromium chromium-driver`) it names what is
missing, and fails.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:  # tests read this file where selenium is not installed
    from selenium.webdriver import Chrome

ROOT = Path(__file__).parents[1]
WIDTHS = (1280, 400)
SMALLEST = 11.0
# What people open first, and what has figures and outputs.
SHOWN = (
    "index.html", "quick_start.html", "guides/loop.html", "guides/trainer.html", "comparison.html", "performance.html",
    "notebooks/first_loop.html",
)  # fmt: skip
# What is searched, and the folder of what must come first.
SEARCHES = {
    "resume": "guides/", "optimizer": "guides/", "LoRA": ("guides/", "notebooks/"), "sharded": "guides/",
    "noise": "guides/noise.html", "chat": "guides/train.html", "epsilon too large": "troubleshooting.html",
    "BatchNorm": ("troubleshooting.html", "guides/models.html"),
}  # fmt: skip
FLAGS = (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "allow-file-access-from-files",
)  # fmt: skip
# What is wider than the window, and does not stand in something that scrolls by itself.
WIDER = """
const wide = [...document.querySelectorAll("article *")].filter(e => {
  if (e.getBoundingClientRect().right <= window.innerWidth + 1 || !e.offsetParent) return false;
  for (let p = e.parentElement; p && p.tagName != "ARTICLE"; p = p.parentElement)
    if (["auto", "scroll", "hidden"].includes(getComputedStyle(p).overflowX)) return false;
  return getComputedStyle(e).overflowX == "visible";
});
return wide.map(e => e.tagName + ": " + e.textContent.trim().slice(0, 60));
"""
# Code and tables that hold more than they show, and have no bar that takes room.
CUT = """
const boxes = [...document.querySelectorAll("article pre > code, article .md-typeset__scrollwrap")];
const cut = boxes.filter(
  e => e.offsetParent && e.scrollWidth > e.clientWidth + 1 && e.offsetHeight <= e.clientHeight);
return cut.map(e => e.tagName + ": " + e.textContent.trim().slice(0, 60));
"""
FIGURES = "return [...document.querySelectorAll('article img')].map(e => [e.src, e.clientWidth, e.naturalWidth]);"


@contextmanager
def browser() -> Iterator[Chrome]:
    """A browser without a window, with a profile of its own that is deleted."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"user-data-dir={profile}"):
            options.add_argument(f"--{flag}")
        driver = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def width(driver: Chrome, pixels: int, height: int = 900) -> None:
    """What the page has to its disposal, also below the least width of a window."""
    size = {"width": pixels, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def smallest_text(path: Path, shown: float) -> float:
    """Pixels of the smallest text of an SVG file that is `shown` pixels wide; 0 if its text is no text."""
    root = ElementTree.parse(path).getroot()
    units = float(root.get("viewBox", "0 0 1 1").split()[2])
    texts = [e for e in root.iter() if e.tag.endswith("}text")]
    sizes = [float(found) for e in texts for found in re.findall(r"([\d.]+)px", e.get("style", ""))]
    return min(sizes, default=0.0) * shown / units


def figures(driver: Chrome, page: str) -> list[str]:
    """What is wrong with the pictures of the page that is open."""
    wrong = []
    for source, shown, natural in driver.execute_script(FIGURES):
        path = Path(source.removeprefix("file://"))
        if not natural:
            wrong.append(f"{page}: {path.name} is not shown")
        elif path.suffix != ".svg":
            wrong.append(f"{page}: {path.name} is no SVG, so its labels cannot be measured")
        elif (found := smallest_text(path, shown)) < SMALLEST:
            wrong.append(f"{page}: {path.name} has labels of {found:.1f} px at a width of {shown}")
    return wrong


def look(driver: Chrome, site: Path, page: str) -> list[str]:
    """What is wrong with one page at all widths."""
    wrong = []
    for pixels in WIDTHS:
        width(driver, pixels)
        driver.get((site / page).as_uri())
        wrong += [f"{page} at {pixels} px is too wide: {found}" for found in driver.execute_script(WIDER)[:3]]
        wrong += [f"{page} at {pixels} px cuts, without a bar: {found}" for found in driver.execute_script(CUT)[:3]]
        wrong += figures(driver, page)
        entries = driver.get_log("browser")
        wrong += [f"{page}: {entry['message']}" for entry in entries if entry["level"] in ("SEVERE", "WARNING")]
    return wrong


def results(driver: Chrome, site: Path, words: str) -> list[str]:
    """The pages that a search finds, best first; empty after a minute without an answer."""
    width(driver, WIDTHS[0])
    driver.get((site / "index.html").as_uri() + f"?q={words}")
    until = time.monotonic() + 60
    while time.monotonic() < until:
        links = driver.find_elements("css selector", ".md-search-result__item > a.md-search-result__link")
        if links:
            return [str(link.get_attribute("href")) for link in links]
        time.sleep(0.2)
    return []


def searches(driver: Chrome, site: Path) -> list[str]:
    """What is wrong with the search."""
    wrong = []
    for words, first in SEARCHES.items():
        found = [link.removeprefix(f"{site.as_uri()}/") for link in results(driver, site, words)]
        if not found or not found[0].startswith(first):
            wrong.append(f"Expected a search for {words!r} to find a page of {first} first, got {found[:3]}.")
        wrong += [f"{link} is found by {words!r}: decisions are not searched" for link in found if "decisions/" in link]
    return wrong


def shots(driver: Chrome, site: Path, folder: Path) -> None:
    """Pictures of some pages at each width, light and dark, for people to look at."""
    folder.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        for page in SHOWN:
            for pixels in WIDTHS:
                width(driver, pixels, height=2400)
                driver.get((site / page).as_uri())
                name = f"{page.replace('/', '_').removesuffix('.html')}_{pixels}_{scheme}.png"
                driver.save_screenshot(str(folder / name))


def main(arguments: list[str]) -> int:
    """Look at every page; the exit code."""
    packages = {"chromium": "chromium", "chromedriver": "chromium-driver"}
    if missing := [package for program, package in packages.items() if not shutil.which(program)]:
        names = " ".join(missing)
        print(f"Expected {names} to look at the site, which was only built: apt-get install {names}")
        return 1
    names = [word for word in arguments if word != "--shots"]
    site = Path(names[0] if names and arguments[0] != "--shots" else ROOT / "build" / "site").resolve()
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")
    with browser() as driver:
        wrong = [found for page in pages for found in look(driver, site, page)] + searches(driver, site)
        if "--shots" in arguments:
            shots(driver, site, Path(names[-1]))
    print("\n".join(wrong) or f"{len(pages)} pages and {len(SEARCHES)} searches, seen in a browser: nothing is wrong.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
