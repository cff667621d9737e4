"""What a private step needs on many GPUs: `python -m benchmarks.scaling`.

Measures pieces of a step on this machine (noise, norms, an all-reduce, the checksum, the draw of a batch), computes the
model (model.py), and writes the result file and the tables of the document.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from torch.multiprocessing.spawn import start_processes

from benchmarks.measure import timed_in_turn
from benchmarks.results import DOCS, FOLDER, fill, markdown, read, rounded, write
from benchmarks.scaling.model import ENGINES, LAYOUTS, modelled, norm_operations
from dpfunc._utils.digests import checksum
from dpfunc.engines.per_sample import Outer
from dpfunc.noise.streams import secure_normal
from dpfunc.rng import fold_in, insecure_key
from dpfunc.sampling import Poisson

RESULT, DOCUMENT = FOLDER / "scaling.json", DOCS / "scaling.md"
PATIENCE = timedelta(seconds=60)
KEY = insecure_key(0)
ROUNDS = 11
DATA_SETS = (10**6, 10**7, 10**8, 10**9)
EXPECTED_BATCH = 4096
# positions, outputs, inputs of one sample's matrix; the first has its norm from the factors, the second formed
MATRICES = ((128, 2048, 2048), (1024, 1024, 1024))
SAMPLES = 4


def work(rank: int, processes: int, folder: str, numbers: int, rounds: int) -> None:
    """One process: rank 0 writes its seconds into the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes, timeout=PATIENCE
    )
    message = torch.ones(numbers)
    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(message)
        seconds.append(time.perf_counter() - start)
    dist.destroy_process_group()
    if rank == 0:
        Path(folder, "seconds").write_text("\n".join(map(repr, seconds[1:])))


def all_reduce_seconds(numbers: int, rounds: int, processes: int = 2) -> list[float]:
    """Seconds of each round of an all-reduce of float32 numbers; the first one, which connects, is left out."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (processes, folder, numbers, rounds)
        start_processes(work, arguments, nprocs=processes, start_method="spawn")
        return [float(line) for line in Path(folder, "seconds").read_text().splitlines()]


def rate(step: Callable[[], object], rounds: int, amount: float) -> dict[str, float]:
    """Median and best seconds, and what is done in a second at the median."""
    found = timed_in_turn({"": step}, rounds)[""]["time"]
    return rate_of(found["median_seconds"], found["best_seconds"], amount)


def rate_of(median: float, best: float, amount: float) -> dict[str, float]:
    """As the result file holds it."""
    return {"median_seconds": median, "best_seconds": best, "per_second": amount / median}


def noise(numbers: int, rounds: int, threads: Sequence[int] = (1, 2)) -> dict[str, dict[str, float]]:
    """Float32 numbers from the keyed stream, by threads; a second's numbers."""
    like, keys = {"w": torch.zeros(numbers)}, (fold_in(KEY, number) for number in count())
    draws = {each: partial(lambda each: secure_normal(next(keys), like, threads=each), each) for each in threads}
    return {str(each): rate(draw, rounds, numbers) for each, draw in draws.items()}


def products(rounds: int, matrices: Sequence[tuple[int, int, int]] = MATRICES) -> list[dict[str, Any]]:
    """Norms and weighted sums of a matrix's per-sample gradients, and a plain product of that size; operations."""
    return [_product(*matrix, rounds) for matrix in matrices]


def _product(positions: int, outputs: int, inputs: int, rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    a_BTp = torch.randn(SAMPLES, positions, outputs, generator=generator)
    b_BTd = torch.randn(SAMPLES, positions, inputs, generator=generator)
    flat_p, flat_d = a_BTp.flatten(0, 1).T.contiguous(), b_BTd.flatten(0, 1)
    factors_B = torch.rand(SAMPLES, generator=generator)
    grads = Outer(a_BTp, b_BTd, (outputs, inputs))
    product = 2 * SAMPLES * positions * outputs * inputs
    norms = SAMPLES * norm_operations(positions, outputs, inputs)
    return {
        "positions": positions,
        "outputs": outputs,
        "inputs": inputs,
        "norms": rate(grads.sq_norms, rounds, norms),
        "weighted sum": rate(lambda: grads.weighted_sum(factors_B), rounds, product),
        "plain product": rate(lambda: flat_p @ flat_d, rounds, product),
    }


def draws(rounds: int, sizes: Sequence[int] = DATA_SETS, expected: float = EXPECTED_BATCH) -> list[dict[str, Any]]:
    """The draw of one step: seconds, and the most bytes that are allocated for it."""
    return [_draw(Poisson.of_batch_size(size, expected), rounds) for size in sizes]


def _draw(sampler: Poisson, rounds: int) -> dict[str, Any]:
    numbers = count()
    found = rate(lambda: sampler.indices(KEY, next(numbers)), rounds, 1)
    tracemalloc.start()
    sampler.indices(KEY, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    expected = sampler.expected_batch_size(0)
    return {"records": sampler.dataset_size, "expected_batch": expected, "peak_bytes": peak, **found}


def measure(say: Callable[[str], object] = lambda text: None, *, shrink: int = 1, rounds: int = ROUNDS) -> Any:
    """All pieces, as the result file holds them.

    Args:
        say: told what comes next. shrink: divides sizes, for tests. rounds: of each measurement.
    """
    say("noise")
    found: dict[str, Any] = {"noise": noise(10**7 // shrink, rounds)}
    say("norms and sums")
    found["products"] = products(rounds, [(t // shrink, p // shrink, d // shrink) for t, p, d in MATRICES])
    say("all-reduce")
    message = 2**24 // shrink
    seconds = all_reduce_seconds(message, rounds)
    found["all-reduce"] = {"bytes": 4 * message, **rate_of(statistics.median(seconds), min(seconds), 4 * message)}
    say("checksum")
    params = {"w": torch.ones(2**26 // shrink)}
    size = 4 * params["w"].numel()
    found["checksum"] = {"bytes": size, **rate(lambda: checksum(params.items()), rounds, size)}
    say("Poisson draws")
    found["draws"] = draws(rounds)
    return found


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


def drawn(report: Report) -> str:
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
    "draws": drawn,
}


def filled_in(report: Report) -> dict[str, str]:
    """All tables of the document."""
    return {name: table(report) for name, table in TABLES.items()}


@click.command()
@click.option("--measure/--no-measure", "measuring", default=True, help="Or keep what was measured, and compute anew.")
@click.option("--threads", default=1, help="Of torch.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULT, help="The result file.")
@click.option("--document", type=click.Path(path_type=Path), default=DOCUMENT, help="Where the tables go.")
def main(measuring: bool, threads: int, out: Path, document: Path) -> None:
    """Memory, traffic and time of a private step on many GPUs: a model, and pieces that are measured here."""
    console = Console()
    report: dict[str, Any]
    if measuring:
        torch.set_num_threads(threads)
        report = {"rounds": ROUNDS, "pieces": rounded(measure(console.print))}
    else:
        kept = read(out)
        report = {key: kept[key] for key in ("machine", "versions", "rounds", "pieces")}
    report |= rounded(modelled(report["pieces"]["noise"]["1"]["per_second"]))
    write(out, report, threads=threads)
    fill(document, filled_in(read(out)))
    console.print(f"{out}, {document}")


if __name__ == "__main__":
    main()
