"""docs/architecture.md: each file of the package is named there, or lies in a folder that is; each named file exists."""

from __future__ import annotations

import re
from pathlib import Path

import dpfunc

ROOT = Path(dpfunc.__file__).parent
PAGE = (ROOT.parent / "docs" / "architecture.md").read_text()
NAMES = set(re.findall(r"`([a-z_*/.]+)`", PAGE)) - {"params", "batch", "state", "engines"}


def exists(name: str) -> bool:
    places = [ROOT, ROOT / "engines"]
    if "." in name or name.endswith("/"):
        return any(list(place.glob(name)) for place in places)
    return any((place / f"{name}.py").exists() for place in places) or name in dpfunc.__all__


def test_what_the_page_names_is_there():
    assert not [name for name in sorted(NAMES) if not exists(name)]


def test_every_file_has_its_place():
    folders = {name.rstrip("/") for name in NAMES if name.endswith("/")}
    found = {path for name in NAMES if "." in name for place in (ROOT, ROOT / "engines") for path in place.glob(name)}
    found |= {ROOT / "engines" / f"{name}.py" for name in NAMES if "." not in name}
    missing = []
    for path in ROOT.rglob("*.py"):
        relative = path.relative_to(ROOT)
        inner = relative.parent.as_posix().removeprefix("engines/")
        if (
            path.name != "__init__.py"
            and path not in found
            and not any(inner.split("/")[0] == f for f in folders - {"engines"})
        ):
            missing.append(relative.as_posix())
    assert not missing
