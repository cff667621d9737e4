"""The tables of docs/scaling.md, from the result file; each replaces what stands between its two markers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import pages
from benchmarks.pages import markdown
from benchmarks.scaling.memory import ENGINES, LAYOUTS

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


def in_seconds(value: float) -> str:
    """Seconds, or parts of them."""
    return unit(value, {"s": 1, "ms": 1e-3, "us": 1e-6}) if value else "0"


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


def seconds(report: Report) -> str:
    """Time by what it is for."""
    names = tuple(report["jobs"][0]["seconds"])
    return columns(report, "seconds", names, in_seconds)


def pieces(report: Report) -> str:
    """Everything that was measured but the draws."""
    found = report["pieces"]
    rows = [
        [
            f"noise, {threads} thread{'s' if threads != '1' else ''}",
            in_seconds(1e6 / entry["per_second"]) + " for 1e6 numbers",
            f"{in_bytes(4 * entry['per_second'])}/s",
        ]
        for threads, entry in found["noise"].items()
    ]
    for matrix in found["products"]:
        size = f"{matrix['positions']} positions, {matrix['outputs']} x {matrix['inputs']}"
        for name in ("norms", "weighted sum", "plain product"):
            speed = f"{amount(matrix[name]['per_second'] / 1e9)} GFLOP/s"
            rows.append([f"{name}, {size}", in_seconds(matrix[name]["median_seconds"]), speed])
    for name, title in (("all-reduce", "all-reduce, gloo, 2 processes"), ("checksum", "checksum of parameters")):
        entry = found[name]
        time = f"{in_seconds(entry['median_seconds'])} for {in_bytes(entry['bytes'])}"
        rows.append([title, time, f"{in_bytes(entry['per_second'])}/s"])
    return markdown(("piece", "time", "rate"), rows)


def draws(report: Report) -> str:
    """Poisson batches by the size of the data set."""
    rows = [
        [
            f"{entry['records']:.0e}".replace("e+0", "e"),
            in_seconds(entry["median_seconds"]),
            in_bytes(entry["peak_bytes"]),
        ]
        for entry in report["pieces"]["draws"]
    ]
    return markdown(("records", "time of a draw", "memory"), rows)


def measured_on(report: Report) -> str:
    """One sentence on the machine."""
    machine, versions = report["machine"], report["versions"]
    return (
        f"Measured on {machine['cores']} cores of {machine['cpu']}, torch {versions['torch']} with "
        f"{machine['torch_threads']} threads, numpy {versions['numpy']}, Python {versions['python']}; medians of "
        f"{report['rounds']} rounds."
    )


def assumptions(report: Report) -> str:
    """What the seconds take for granted."""
    given = report["assumed"]
    tera, giga = 1e12, 1e9
    return (
        f"Assumed, not measured: {given['flops'] / tera:.0f} TFLOP/s in bfloat16 and "
        f"{given['float32_flops'] / tera:.0f} in float32 (data sheet of the H100), of which {given['utilisation']:.0%} "
        f"is reached; a GPU sends {given['inside'] / giga:.0f} GB/s inside of a node of {given['node']} and "
        f"{given['between'] / giga:.0f} GB/s to other nodes; {given['threads']} CPU threads of noise for each GPU, "
        "each as fast as the one measured below; nothing overlaps."
    )


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
    "assumptions": assumptions,
    "seconds": seconds,
    "measured on": measured_on,
    "pieces": pieces,
    "draws": draws,
}


def filled(text: str, report: Report) -> str:
    """A document with all its tables from the report.

    Raises:
        ValueError: a table has no place in the document.
    """
    return pages.filled(text, {name: table(report) for name, table in TABLES.items()})
