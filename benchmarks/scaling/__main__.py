"""What a private step needs on many GPUs: `python -m benchmarks.scaling`. Nothing is measured; see model.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.results import DOCS, FOLDER, fill, markdown, read, write
from benchmarks.scaling.model import ENGINES, LAYOUTS, modelled

RESULT, DOCUMENT = FOLDER / "scaling.json", DOCS / "scaling.md"
Report = Mapping[str, Any]
# Jobs that are shown in full: model, tuning, layout, GPUs, engine.
SHOWN = (
    ("7B", "LoRA", "frozen cut", 8, "auto"),
    ("70B", "LoRA", "frozen cut", 64, "auto"),
    ("405B", "LoRA", "frozen cut", 512, "auto"),
    ("405B", "LoRA", "tensor", 512, "auto"),
    ("7B", "full", "all cut", 8, "ghost"),
    ("70B", "full", "tensor", 512, "ghost"),
    ("100B", "full", "tensor", 512, "ghost"),
    ("100B", "full", "streamed", 512, "ghost"),
)


def amount(value: float) -> str:
    """Two significant digits, or three above 100.

    >>> amount(0.0123), amount(1.23), amount(12.3), amount(12345.0), amount(0)
    ('0.012', '1.2', '12', '12,300', '0')
    """
    rounded = float(f"{value:.3g}" if abs(value) >= 100 else f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded == 0 or abs(rounded) >= 10 else f"{rounded:g}"


def unit(value: float, units: Mapping[str, float]) -> str:
    """In the largest unit that is not larger than the value."""
    name, size = next(((n, s) for n, s in units.items() if value >= s), list(units.items())[-1])
    return f"{amount(value / size)} {name}"


def in_bytes(value: float) -> str:
    """Decimal units, as those of memory and networks in data sheets."""
    return unit(value, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "KB": 1e3, "B": 1})


def jobs_of(report: Report, **wanted: Any) -> list[Any]:
    """The records with these entries."""
    return [job for job in report["jobs"] if all(job[key] == value for key, value in wanted.items())]


def models(report: Report) -> str:
    """Shapes."""
    rows = [
        [
            shape["title"],
            *(str(shape[key]) for key in ("layers", "width", "hidden")),
            f"{shape['heads']} / {shape['kv_heads']}",
            str(shape["vocabulary"]),
            f"{shape['parameters'] / 1e9:.2f}e9",
            f"{shape['lora'] / 1e6:.0f}e6",
        ]
        for shape in report["models"].values()
    ]
    rank = report["work"]["lora_rank"]
    heads = ("model", "layers", "width", "MLP", "heads / kv", "vocabulary", "parameters", f"LoRA, rank {rank}")
    return markdown(heads, rows)


def cell(report: Report, model: str, tuning: str, layout: str, gpus: int) -> str:
    """GB with each engine: bold fits into the small GPU, plain into the large one, in brackets into none."""
    small = min(job["fits"] for job in report["jobs"] if job["fits"])
    shown = []
    for engine in ENGINES:
        found = jobs_of(report, model=model, tuning=tuning, layout=layout, gpus=gpus, engine=engine)
        if not found:
            shown.append("-")
            continue
        size, text = found[0]["fits"], amount(found[0]["bytes"]["peak"] / 1e9)
        shown.append(f"({text})" if size is None else f"**{text}**" if size == small else text)
    return " / ".join(shown)


def memory(tuning: str) -> Callable[[Report], str]:
    """A table of one kind of training."""

    def table(report: Report) -> str:
        gpus = sorted({job["gpus"] for job in report["jobs"]})
        rows = []
        for model in report["models"]:
            for layout, where in LAYOUTS.items():
                if jobs_of(report, model=model, tuning=tuning, layout=layout):
                    cells = [cell(report, model, tuning, layout, count) for count in gpus]
                    rows.append([model, where.title, *cells])
        return markdown(["model", "layout", *(f"{count} GPUs" for count in gpus)], rows)

    return table


def shown_jobs(report: Report) -> list[tuple[str, Any]]:
    """Title and record of the jobs that are shown in full."""
    found = []
    for model, tuning, layout, gpus, engine in SHOWN:
        job = jobs_of(report, model=model, tuning=tuning, layout=layout, gpus=gpus, engine=engine)[0]
        where = LAYOUTS[layout].title.replace(", LoRA replicated", "")
        found.append((f"{model} {tuning}, {where}, {gpus} GPUs, {engine}", job))
    return found


def columns(report: Report, entry: str, names: Sequence[str], show: Callable[[float], str]) -> str:
    """One row a job, one column a part."""
    rows = [[title, *(show(job[entry][name]) for name in names)] for title, job in shown_jobs(report)]
    return markdown(["job", *names], rows)


def breakdown(report: Report) -> str:
    """Memory by what it is for."""
    names = ("frozen", "trained", "optimizer", "gathered", "activations", "engine", "sums", "releasing", "peak")
    return columns(report, "bytes", names, in_bytes)


def sent(report: Report) -> str:
    """Traffic by what it is for."""
    names = ("frozen parameters", "trained parameters", "sums", "activations", "norms", "handshake")
    return columns(report, "sent", names, lambda value: in_bytes(value) if value else "0")


def workload(report: Report) -> str:
    """What a step is."""
    work = report["work"]
    return (
        f"Records of {work['length']} tokens, {work['microbatch']} in a microbatch, {work['expected_batch']} expected "
        f"in a step on all GPUs together; {work['reserve']:.0%} of a GPU's memory is left free."
    )


TABLES: Mapping[str, Callable[[Report], str]] = {
    "workload": workload,
    "models": models,
    "memory LoRA": memory("LoRA"),
    "memory full": memory("full"),
    "breakdown": breakdown,
    "sent": sent,
}


def filled_in(report: Report) -> dict[str, str]:
    """All tables of the document."""
    return {name: table(report) for name, table in TABLES.items()}


@click.command(help=__doc__.splitlines()[0])
@click.option("--out", type=click.Path(path_type=Path), default=RESULT, help="The result file.")
@click.option("--document", type=click.Path(path_type=Path), default=DOCUMENT, help="Where the tables go.")
def main(out: Path, document: Path) -> None:
    """Compute, and write the result file and the tables of the document."""
    write(out, modelled())
    fill(document, filled_in(read(out)))
    click.echo(f"{out}, {document}")


if __name__ == "__main__":
    main()
