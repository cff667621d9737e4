"""The command `dpfunc certify`: the certificate of a run, made or checked. A check needs neither data nor torch."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dpfunc.cli._output import json_option, print_json, print_rows

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path), required=False)
@click.option("--check", "checked", type=_PATH, help="Check this certificate instead.")
@click.option("--out", type=_PATH, help="File to write, by default certificate.json in RUN; a page (.html) beside it.")
@click.option("--sign", "private_key", type=_PATH, help="Ed25519 private key (PEM) to sign with.")
@click.option("--public-key", type=_PATH, help="With --check: key (PEM) of who should have signed it.")
@json_option
def certify(
    run: Path | None, checked: Path | None, out: Path | None, private_key: Path | None, public_key: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Write a certificate of the privacy of a run, or check one.

    RUN is the folder of a run, with its journal and its record (privacy_accounting.json). What the certificate says is
    computed again from the journal; what cannot be is refused, or stands among its assumptions. To check it needs the
    file alone. The exit code of a check is 0 if all agrees, else 1.

    Example: dpfunc certify runs/mails
    """
    if (run is None) == (checked is None):
        raise click.UsageError("Expected either RUN, to make a certificate, or --check FILE.")
    if checked is None and public_key is not None:
        raise click.UsageError("Expected --public-key together with --check.")
    if checked is not None and not (out is None and private_key is None):
        raise click.UsageError("Expected --out and --sign without --check.")
    if run is not None:
        _make(run, out, private_key, as_json)
    elif checked is not None:
        _check(checked, public_key, as_json)


def _make(run: Path, out: Path | None, private_key: Path | None, as_json: bool) -> None:
    from dpfunc.evidence.certificate import certify as made
    from dpfunc.evidence.certificate import read

    path = made(run, out=out, private_key=private_key)
    values = read(path.read_bytes())
    unmet = [each["says"] for each in values["assumptions"] if each["met"] is False]
    if as_json:
        print_json({"certificate": str(path), "epsilon": values["claim"]["epsilon"], "not_met": unmet})
        return
    for says in unmet:
        click.echo(f"Assumption NOT MET: {says}", err=True)
    click.echo(f"{path}, and to print {path.with_suffix('.html')}")


def _check(path: Path, public_key: Path | None, as_json: bool) -> None:
    from dpfunc.evidence.certificate import check

    findings = check(path, public_key)
    agrees = all(finding.agrees for finding in findings)
    if as_json:
        print_json({"agrees": agrees, "checks": [finding._asdict() for finding in findings]})
    else:
        print_rows("Checks", ("", "", "found"), [(f.name, "ok" if f.agrees else "WRONG", f.found) for f in findings])
        click.echo("All agrees." if agrees else "Do not rely on it: see WRONG.")
    if not agrees:
        sys.exit(1)
