"""The command `dpfunc doctor`: what is installed, and whether what a run stands on works here.

May import: its folder, train and below. Privacy depends on it: no.
"""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import click

from dpfunc.cli._output import json_option, print_json, print_rows

_NEEDED = ("dpfunc", "torch", "numpy", "scipy", "opacus", "randomgen")
_EXTRAS = {
    "hf": ("transformers", "peft", "accelerate", "pydantic", "pyyaml"),
    "sign": ("cryptography",),
    "budget": ("sqlalchemy",),
    "postgresql": ("psycopg",),
}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _noise() -> tuple[bool, str]:
    """True if a secure key gives noise that the same key gives again and another one does not, and words."""
    import torch

    from dpfunc.noise import add_gaussian
    from dpfunc.rng import secure_key
    from dpfunc.types import ClippedSum

    key, other = secure_key(), secure_key()
    none = ClippedSum({"w": torch.zeros(64, device="cpu")}, {"w": "all"}, {"all": 1.0})
    first, again, third = (add_gaussian(none, 1.0, each)["w"] for each in (key, key, other))
    if not torch.equal(first, again) or torch.equal(first, third) or not torch.isfinite(first).all():
        return False, "numbers do not follow their key"
    return True, "secure: keys from the operating system, numbers by randomgen"


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Tell versions and device, and check the engines and the source of noise. No data are read.

    The exit code is 1 if something that every run needs is missing or broken.

    Example: dpfunc doctor
    """
    names = ("python", *_NEEDED, *(name for parts in _EXTRAS.values() for name in parts))
    versions = {name: platform.python_version() if name == "python" else _version(name) for name in names}
    absent = {extra: [part for part in parts if versions[part] is None] for extra, parts in _EXTRAS.items()}
    missing = {extra: parts for extra, parts in absent.items() if parts}
    device, checks = "unknown", dict[str, tuple[bool, str]]()
    try:
        import torch

        from dpfunc.engines import self_check

        device = "cuda" if torch.cuda.is_available() else "cpu"
        engine = self_check(device)
        words = "rules work" if engine.rules else f"rules cannot be used: {engine.reason}"
        checks = {"engine": (engine.rules, words), "noise": _noise()}
    except (ImportError, RuntimeError, AttributeError) as error:  # of another version of what is needed
        checks["import"] = (False, f"{type(error).__name__}: {error}")
    if lacking := [name for name in _NEEDED[1:] if versions[name] is None]:
        checks["packages"] = (False, f"missing: {', '.join(lacking)}")
    works = all(fine for fine, _ in checks.values())
    if as_json:
        outcomes = {name: {"works": fine, "found": words} for name, (fine, words) in checks.items()}
        print_json({"works": works, "versions": versions, "device": device, "checks": outcomes, "missing": missing})
    else:
        rows = [(name, value or "not installed") for name, value in versions.items()]
        extras = [(f"extra {name}", f"missing: {', '.join(parts)}") for name, parts in missing.items()]
        results = [(name, words if fine else f"WRONG: {words}") for name, (fine, words) in checks.items()]
        print_rows("What is here", ("", ""), [*rows, ("device", device), *extras, *results])
        click.echo("All that a run needs works." if works else "Something that a run needs does not work: see WRONG.")
    if not works:
        sys.exit(1)
