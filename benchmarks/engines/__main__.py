"""`python -m benchmarks.engines`: cases x contestants in one run, into a table and a result file."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.engines.cases import ALL_CASES, CASES, LAYER_CASES
from benchmarks.engines.contestants import NAMES, known
from benchmarks.engines.runner import Settings, measure_cases, measures
from benchmarks.results import FOLDER, listed, read, versions

RESULT = FOLDER / "engines.json"


def check_engines(context: click.Context, option: click.Parameter, text: str) -> list[str]:
    """Names of contestants."""
    names = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [name for name in names if not known(name)]:
        raise click.BadParameter(
            f"no contestant {', '.join(unknown)}. There are {', '.join(NAMES)}; an engine may carry its microbatch, "
            "as in auto/4."
        )
    return names


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option(
    "--cases", default="all", callback=lambda _, option, text: listed(text, ALL_CASES, CASES),
    help="Names with commas; all; or none with an empty text.",
)  # fmt: skip
@click.option("--layers", is_flag=True, help="The single layers too.")
@click.option("--engines", default=",".join(NAMES), callback=check_engines, help="Contestants, with commas.")
@click.option("--append", is_flag=True, help="Keep the other cases that the result file holds.")
@measures(RESULT)
def main(cases: list[str], layers: bool, engines: list[str], append: bool, settings: Settings, out: Path) -> None:
    """Measure, print tables, and write the result file after each case."""
    old = read(out) if append else {}
    for fact, now in {"versions": versions(), "quick": settings.quick}.items() if old else ():
        if old[fact] != now:
            raise click.UsageError(f"{out} was measured with {fact} {old[fact]}, now {now}: leave out --append.")
    measure_cases([*cases, *(LAYER_CASES if layers else [])], engines, settings, out, kept=old.get("cases"))


if __name__ == "__main__":
    main()
