"""`python -m benchmarks.survey.proofs`: of each case of the survey, whether one step of the fast engine is proven, and
whether its norms are those of single samples. Without times, so that it takes minutes."""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from benchmarks.survey import tables
from benchmarks.survey.case import Case
from benchmarks.survey.measure import FILES, OutOfTime, adapted_layers, functions, limited, prepared, repeatable, seed
from benchmarks.survey.runner import ROOT
from dpfunc import engines
from dpfunc.errors import DPFuncError

OUT, PAGE = ROOT / "benchmarks/results/survey_proofs.json", ROOT / "docs/survey_proofs.md"
Row = dict[str, Any]


def proof(case: Case, limit: int = 60) -> Row:
    """One step of `bookkeeping`: doubts, or an error; in eval mode the largest difference of norms from the loop's."""
    row: Row = {"case": case.name, "field": case.field}
    loss_fn = None
    try:
        with limited(limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of models: the survey lists errors
            seed()
            subject = prepared(case)
            targets = adapted_layers(subject.module) if case.trained == "LoRA" else []
            forward, params = functions(case, subject, targets)
            loss_fn = subject.loss(forward)
            seed()
            result = engines.bookkeeping(unproven="audit")(loss_fn, params, subject.batch)
            row["doubts"] = list(dict.fromkeys(result.evidence.doubts))[:1]
            if result.evidence.doubts:
                row["cannot"] = impossible(loss_fn, params, subject.batch)
            if not subject.module.training and repeatable(loss_fn, params, subject.batch):
                row["parity"] = difference(result.sq_norms(), engines.loop()(loss_fn, params, subject.batch).sq_norms())
    except OutOfTime:
        row["error"] = f"took more than {limit} s"
    except Exception as error:  # noqa: BLE001  (any error of a model or of an engine is a finding)
        row["error"] = told(error)
        if loss_fn is None:  # refused for each engine
            row["cannot"] = row["error"]
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of models: the survey lists errors
                row["cannot"] = impossible(loss_fn, params, subject.batch)
    return row


def told(error: Exception) -> str:
    """The first line of an error, without paths."""
    return f"{type(error).__name__}: {FILES.sub('...', str(error)).splitlines()[0][:300]}"


def impossible(loss_fn: Any, params: Mapping[str, torch.Tensor], batch: Any) -> str:
    """Why no engine can prove a case: rows alone are refused, or have other losses than together; empty if it can."""
    try:
        alone_B = engines.loop()(loss_fn, params, batch).losses_B
        if not repeatable(loss_fn, params, batch):
            return ""
        together_B = loss_fn(params, batch).detach()
    except DPFuncError as error:
        return told(error)
    except Exception:  # noqa: BLE001  (of the model)
        return ""
    off_B = (alone_B - together_B).abs() / alone_B.abs().clamp(min=1e-6)
    return f"a row alone has another loss, by {float(off_B.max()):.1g}" if bool((off_B > 1e-3).any()) else ""


def difference(found: Mapping[str, torch.Tensor], single: Mapping[str, torch.Tensor]) -> float:
    """Largest difference of norms, relative to the norm of the sample's whole gradient."""
    total_B = torch.stack([sq_B.double() for sq_B in single.values()]).sum(0).sqrt() + 1e-12
    off = (found[name].double().sqrt() - sq_B.double().sqrt() for name, sq_B in single.items())
    return float(f"{max(float((off_B.abs() / total_B).max()) for off_B in off):.2g}")


def page(rows: Iterable[Row]) -> str:
    """Counts of each field, and what is not proven."""
    rows = list(rows)
    cases, proven = Counter(row["field"] for row in rows), Counter(row["field"] for row in rows if is_proven(row))
    cannot = Counter(row["field"] for row in rows if row.get("cannot"))
    counted = [counts(field, cases[field], proven[field], cannot[field]) for field in sorted(cases)]
    rest = [f"| {row['case']} | {'no' if row.get('cannot') else 'yes'} | "
            f"{(row.get('cannot') or row.get('error') or row['doubts'][0])[:160].replace('|', '/')} |"
            for row in rows if not is_proven(row)]  # fmt: skip
    largest = max(row.get("parity", 0.0) for row in rows if is_proven(row))
    return "\n".join((
        "# Proven steps", "",
        f"One step of `bookkeeping` for each of the {len(rows)} cases of [the survey](survey.md), without times.",
        "`python -m benchmarks.survey.proofs` writes this page. In all others `auto` computes rows alone, or refuses.",
        f"Largest relative difference of norms from single samples, in eval mode and where proven: {largest:.1g}.", "",
        "A case *cannot be* proven if each engine refuses it (BatchNorm in training mode), or if its rows have other",
        "losses alone than together (contrastive losses, means over the batch).", "",
        "| field | cases | proven | cannot be | share of those that can |", "| --- | --- | --- | --- | --- |", *counted,
        counts("all", len(rows), proven.total(), cannot.total()), "",
        "## Not proven", "", "| case | can be | reason |", "| --- | --- | --- |", *rest, "",
    ))  # fmt: skip


def counts(field: str, cases: int, proven: int, cannot: int) -> str:
    """A line of the table."""
    return f"| {field} | {cases} | {proven} | {cannot} | {100 * proven / max(1, cases - cannot):.1f} % |"


def is_proven(row: Row) -> bool:
    return row.get("doubts") == []


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.survey.proofs", description=__doc__)
    parser.add_argument("--only", default="", help="regular expression, searched in the names of cases")
    parser.add_argument("--append", action="store_true", help="keep what was found of other cases")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = tables.cases()
    rows = {row["case"]: row for row in json.loads(OUT.read_text())} if options.append and OUT.exists() else {}
    rows |= {name: proof(case) for name, case in cases.items() if re.search(options.only, name)}
    OUT.write_text(json.dumps([rows[name] for name in cases if name in rows], indent=1) + "\n")
    PAGE.write_text(page(rows[name] for name in cases if name in rows))


if __name__ == "__main__":
    main()
