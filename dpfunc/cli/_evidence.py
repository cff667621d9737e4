"""The commands `dpfunc certify`, `verify` and `audit`. To check a certificate needs neither data nor torch.

May import: its folder, train and below. Privacy depends on it: no.
"""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import click

from dpfunc._utils.validation import refuse
from dpfunc.cli._output import json_option, print_checks, print_line
from dpfunc.cli._train import check_new, importing, seed_option

_PATH, _COUNT = click.Path(path_type=Path), click.IntRange(min=1)
_SOURCE = click.argument("source", type=click.Path(exists=True, path_type=Path))
_OUT = click.option("--out", type=_PATH, help="New file for the result, which dpfunc certify --evidence takes.")


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path), required=False)
@click.option("--check", "checked", type=_PATH, help="Check this certificate instead.")
@click.option("--out", type=_PATH, help="File to write, by default certificate.json in RUN; a page (.html) beside it.")
@click.option("--sign", "private_key", type=_PATH, help="Ed25519 private key (PEM) to sign with.")
@click.option("--public-key", type=_PATH, help="With --check: key (PEM) of who should have signed it.")
@click.option("--model", type=_PATH, help="With --check: weights (.safetensors) that it should be about.")
@click.option("--evidence", type=_PATH, multiple=True, help="Result of dpfunc verify or audit, to be told in it.")
@click.option("--beside", type=_PATH, multiple=True, help="Another run on the same records, which RUN did not count.")
@json_option
def certify(
    run: Path | None, checked: Path | None, out: Path | None, private_key: Path | None, public_key: Path | None,
    model: Path | None, evidence: tuple[Path, ...], beside: tuple[Path, ...], as_json: bool,
) -> None:  # fmt: skip
    """Write a certificate of the privacy of a run, or check one.

    RUN is the folder of a run, with its journal and its record (privacy_accounting.json). What the certificate says is
    computed again from the journal; what cannot be is refused, or stands among its assumptions. To check it needs the
    file alone. The exit code of a check is 0 if all agrees, else 1.

    Example: dpfunc certify runs/mails
    """
    if any((public_key, model, run is None) if checked is None else (run, out, private_key, evidence, beside)):
        raise click.UsageError(
            "Expected either RUN, to make a certificate, perhaps with --out, --sign, --evidence and --beside; or "
            "--check FILE, perhaps with --public-key and --model."
        )
    from dpfunc.evidence import certificate

    if checked is not None:
        findings = certificate.check(checked, public_key, model)
        checks = {"checks": [finding._asdict() for finding in findings]}
        vouched = all(finding.found != certificate.NOBODY for finding in findings)
        good = "All agrees." if vouched else "It fits together. It is not signed: nobody vouches for it."
        print_checks(findings, {**checks, "signed": vouched}, as_json, "Do not rely on it", good)
    elif run is not None:
        path = certificate.certify(run, out=out, private_key=private_key, evidence=evidence, beside=beside)
        values = json.loads(path.read_bytes())
        unmet = [each["says"] for each in values["assumptions"] if each["met"] is False]
        for says in unmet:
            click.echo(f"Assumption NOT MET: {says}", err=True)
        facts = {"certificate": str(path), "epsilon": values["claim"]["epsilon"], "not_met": unmet}
        print_line(f"{path}, and to print {path.with_suffix('.html')}", facts, as_json)


@click.command()
@_SOURCE
@click.option("--steps", default=50, show_default=True, type=_COUNT, help="At most so many.")
@click.option("--candidates", default=8, show_default=True, type=_COUNT, help="Records to try.")
@_OUT
@json_option
def verify(source: Path, steps: int, candidates: int, out: Path | None, as_json: bool) -> None:
    """Run a loop on neighbouring data, and say what moves beside the clipped sum.

    SOURCE is a Python file with dp_step, data, init and step (or train, which yields), or the folder of a run of
    dpfunc train, whose first steps are run again with its key: their releases must be those of its journal. What is
    written is as private as the data. The exit code is 0 if nothing moves that may not, else 1.

    Example: dpfunc verify loop.py --steps 20
    """
    check_new(out)
    result, values = _run("verify", source, steps=steps, candidates=candidates)
    verdict, same = "Holds" if values["holds"] else "DOES NOT HOLD", values["reproduced"]
    line = f"{verdict}: {repr(result).partition(': ')[2][:-1]}."
    if same is not None:
        line += f" {same} of {result.steps} releases are those of the journal, bit for bit."
    if values["same_model"] is not None:
        line += f" The model is {'the one' if values['same_model'] else 'NOT the one'} that these steps give."
    _report(values, out, as_json, line)


@click.command()
@_SOURCE
@click.option("--canaries", type=_COUNT, help="Canaries in gradients, by default 1000.")
@click.option("--steps", default=10_000, type=_COUNT, help="At most so many; by default all of the loop.")
@click.option(
    "--score", default="sum", show_default=True, type=click.Choice(["sum", "spread"]),
    help="Of a canary's reads over the steps: spread (largest less smallest) finds noise that is used again.",
)  # fmt: skip
@click.option("--plot", "picture", type=_PATH, help="Picture of claim against lower bound.")
@seed_option
@_OUT
@json_option
def audit(
    source: Path, canaries: int | None, steps: int, score: Literal["sum", "spread"], picture: Path | None,
    insecure_seed: int | None, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Train once with canaries, and bound epsilon from below by guesses which of them were in.

    SOURCE is as for dpfunc verify. Canaries are in gradients; a Python file that has `canaries`, records as the loss
    takes them, gets these among its records instead. The audit is one more run: what is published of it costs what its
    steps cost, unless its records are public. The exit code is 0 if the claim is not refuted, else 1.

    Example: dpfunc audit loop.py --canaries 1000 --plot audit.png
    """
    from dpfunc.rng import insecure_key, secure_key

    check_new(out)
    check_new(picture, "--plot")
    refuse(
        (picture is not None and find_spec("matplotlib") is None,
         'Expected matplotlib for --plot. Run: pip install "dpfunc[demo]". Nothing was trained.'),
        (picture is not None and picture == out,
         f"Expected two files for --out and --plot, got {picture} for both. Nothing was trained."),
    )  # fmt: skip
    key = secure_key() if insecure_seed is None else insecure_key(insecure_seed)
    result, values = _run("audit", source, key=key, count=canaries, steps=steps, score=score)
    line = f"{values['steps']} steps, canaries in {values['space']} space: {result!r}"
    _report(values, out, as_json, line, partial(_draw, result, picture))


def _draw(result: Any, picture: Path | None) -> None:
    """Draw an audit, if that is asked for."""
    if picture is not None:
        from dpfunc.evidence import plot

        with ExitStack() as undo:
            picture.touch(0o600, exist_ok=False)  # as private as the data, and it keeps its mode
            undo.callback(picture.unlink)
            plot([result], picture)
            undo.pop_all()


def _run(what: Literal["verify", "audit"], source: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The result of a script, or of the job of a run folder; and its values."""
    if not source.is_dir():
        from dpfunc.evidence import script

        return cast(tuple[Any, dict[str, Any]], getattr(script, what)(source, **options))
    with importing():
        from dpfunc.train import _evidence

        return cast(tuple[Any, dict[str, Any]], getattr(_evidence, what)(source, **options))


def _report(
    values: dict[str, Any], out: Path | None, as_json: bool, line: str, draw: Callable[[], None] = lambda: None
) -> None:
    """Write and print a result, then draw it, which may fail; the exit code is 1 if it does not hold."""
    if out is not None:
        from dpfunc._utils.files import replace_file

        replace_file(out, json.dumps(values, indent=1) + "\n", 0o600)  # as private as the data
    print_line(line, values, as_json)
    draw()
    if not values["holds"]:
        sys.exit(1)
