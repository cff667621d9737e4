"""Launches, bytes and operations of one step at sizes that do not fit here, and seconds that follow from them.

A small decoder runs on this machine, and each operation of its step is counted. Its sizes are distinct primes, so the
numbers of elements of each tensor say by which sizes they grow; other sizes are put in their place. What grows with the
number of layers is the difference between two and one of them. `error` compares such a prediction with a count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from rich.console import Console
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.engines.cases import SEED
from benchmarks.engines.contestants import ours, plain
from benchmarks.engines.problem import Problem
from benchmarks.engines.report import machine, rounded, versions, write
from benchmarks.engines.transformer_nets import decoder
from benchmarks.pages import filled, markdown
from benchmarks.scaling.page import amount, in_bytes, in_seconds
from dpfunc._utils.digests import checksum_and_marks
from dpfunc.engines import per_sample
from dpfunc.engines.guards.audit import Audits
from dpfunc.engines.guards.parameters import suspicious

RESULT = Path(__file__).parents[1] / "results" / "accelerator.json"
NOISE_COST = RESULT.with_name("noise_cost.json")
DOCUMENT = Path(__file__).parents[2] / "docs" / "scaling.md"
PIECE = 2**17  # numbers of float32 in a piece of a digest, on a CPU
NOISE_BYTES = 28  # that `noise_source="device"` moves for a number: drawn in float64, cast, copied into its place
HEAD = 64  # width of a head, which `decoder` fixes
NOT_LAUNCHED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "lift_fresh")
PHASES = ("plain", "private")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder and its batch.

    Args:
        samples, positions: of the batch. heads: of 64 numbers. hidden: width inside of the MLP. vocabulary: not tied.
        rank: of the adapters; None trains all parameters. layers: number of blocks.
    """

    samples: int
    positions: int
    heads: int
    hidden: int
    vocabulary: int
    rank: int | None
    layers: int

    @property
    def width(self) -> int:
        """Of the model."""
        return HEAD * self.heads

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        pairs = [*[(self.width, self.width)] * 4, *[(self.width, self.hidden)] * 3]
        if self.rank is not None:
            return self.layers * sum(self.rank * (p + d) for p, d in pairs)
        in_a_layer = sum(p * d for p, d in pairs) + 2 * self.width
        return self.layers * in_a_layer + 2 * self.width * self.vocabulary + self.width

    def factors(self) -> dict[str, int]:
        """Sizes that tensors are products of."""
        return {name: value for name, value in asdict(self).items() if name != "layers" and value is not None}

    def problem(self) -> Problem:
        """The decoder and a batch."""
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(SEED)
            rank = {} if self.rank is None else {"rank": self.rank}
            return decoder(
                self.samples, layers=self.layers, width=self.width, hidden=self.hidden, length=self.positions,
                vocabulary=self.vocabulary, norm="rms", lora=self.rank is not None, **rank,
            )  # fmt: skip


# With so many positions, gradients of adapters are formed, and with so few, factors of whole matrices are kept: as they
# are at the sizes of `JOBS`.
_COUNTED = {
    "LoRA": Sizes(samples=7, positions=241, heads=11, hidden=251, vocabulary=19, rank=17, layers=1),
    "full": Sizes(samples=13, positions=7, heads=11, hidden=211, vocabulary=19, rank=None, layers=1),
}
CHECKED = {
    "LoRA": Sizes(samples=4, positions=256, heads=8, hidden=600, vocabulary=60, rank=12, layers=4),
    "full": Sizes(samples=6, positions=9, heads=4, hidden=300, vocabulary=50, rank=None, layers=4),
}
_1B = {"samples": 8, "positions": 512, "heads": 32, "hidden": 8192, "vocabulary": 32000, "layers": 16}
_7B = {"samples": 8, "positions": 512, "heads": 64, "hidden": 11008, "vocabulary": 32000, "layers": 32}
JOBS = {
    f"{name} {tuning}": Sizes(**shape, rank=rank)
    for name, shape in (("1B", _1B), ("7B", _7B))
    for tuning, rank in (("LoRA", 16), ("full", None))
}


@dataclass
class Counts:
    """Amounts of a step."""

    launches: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0

    def plus(self, other: Counts, times: float = 1.0) -> Counts:
        """The sum with another, which counts so many times."""
        return Counts(*(a + times * b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class _Record:
    """Operations of a step that start a kernel.

    Args:
        launches: their number. elements: how many each tensor that they read or write has, and the bytes of one.
        flops: of each product and each attention.
    """

    launches: int = 0
    elements: list[tuple[int, int]] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)


class _Counter(TorchDispatchMode):
    """Mode that records operations."""

    def __init__(self, record: _Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        returned = func._schema.returns
        is_view = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
        if not is_view and func._schema.name.removeprefix("aten::") not in NOT_LAUNCHED:
            leaves = pytree.tree_leaves((args, kwargs, result))
            self.record.launches += 1
            self.record.elements += [(each.numel(), each.element_size()) for each in leaves if isinstance(each, Tensor)]
            if func.overloadpacket in flop_registry:
                self.record.flops.append(int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)))
            elif "attention" in func._schema.name:  # that of CPUs: two products, and five backward
                query = args["backward" in func._schema.name]
                products = 5 if "backward" in func._schema.name else 2
                self.record.flops.append(2 * products * query.numel() * query.shape[-2])
        return result


def _scaled(number: int, small: Sizes, large: Sizes) -> float:
    """A number that is a product of sizes, with other sizes in their place."""
    scaled, others = 1.0, large.factors()
    for name, size in small.factors().items():
        while number and number % size == 0:
            number //= size
            scaled *= others[name]
    return number * scaled


def counted(step: Callable[[], object], small: Sizes, large: Sizes) -> Counts:
    """Amounts of a step of a small model, as they would be with other sizes but its layers."""
    record = _Record()
    with (
        mock.patch.object(per_sample, "_SMALL", 0),  # gradients of large models are not stacked
        mock.patch.object(Audits, "due", return_value=0),  # rows alone, which are computed in some steps
        _Counter(record),
    ):
        step()
    return Counts(
        record.launches,
        sum(size * _scaled(number, small, large) for number, size in record.elements),
        sum(_scaled(number, small, large) for number in record.flops),
    )


def steps(sizes: Sizes) -> dict[str, Callable[[], object]]:
    """The step without privacy and the clipped sum, after a step in which each learnt what it learns once."""
    problem = sizes.problem()
    found: dict[str, Callable[[], object]] = {
        "plain": plain(problem.copy()).step,
        "private": ours(problem, "auto", "none").step,
    }
    for step in found.values():
        step()
    return found


def predicted(large: Sizes, tuning: str) -> dict[str, Counts]:
    """Amounts of both steps at other sizes: layers count as often as there are layers."""
    small = _COUNTED[tuning]
    one, two = (
        {name: counted(step, small, large) for name, step in steps(replace(small, layers=n)).items()} for n in (1, 2)
    )
    return {name: one[name].plus(two[name].plus(one[name], -1.0), large.layers - 1) for name in PHASES}


def error(tuning: str) -> dict[str, list[float]]:
    """Relative errors of launches, bytes and operations that are predicted for another small decoder."""
    sizes = CHECKED[tuning]
    expected = {name: counted(step, sizes, sizes) for name, step in steps(sizes).items()}
    return {
        name: [a / b - 1 for a, b in zip(vars(found).values(), vars(expected[name]).values(), strict=True)]
        for name, found in predicted(sizes, tuning).items()
    }


def _release(leaves: int, numbers: int) -> Counts:
    """Amounts of what follows the sum, for small leaves: noise is added, all is digested, divided and cast."""
    params = {str(leaf): torch.ones(numbers) for leaf in range(leaves)}
    record = _Record()
    with _Counter(record):
        noisy = {name: torch.add(value, value, alpha=2.0, out=value.clone()) for name, value in params.items()}
        checksum_and_marks(noisy.items(), [suspicious(params)])
        for value in noisy.values():
            (value / 3.0).to(torch.bfloat16)
    return Counts(record.launches, sum(size * number for number, size in record.elements))


def released(sizes: Sizes) -> Counts:
    """The same for all parameters: a digest goes through each leaf in pieces, which are 64 times as long on a GPU."""
    leaves = sizes.layers * (14 if sizes.rank else 9) + (0 if sizes.rank else 3)
    one, two, longer = _release(1, PIECE), _release(2, PIECE), _release(1, 3 * PIECE)
    a_leaf, a_piece = two.launches - one.launches, (longer.launches - one.launches) / 2
    launches = one.launches + (leaves - 1) * a_leaf + a_piece * sizes.trained / (64 * PIECE)
    return Counts(launches, sizes.trained * (longer.bytes - one.bytes) / (2 * PIECE))


def host_seconds(rounds: int = 7) -> dict[str, dict[str, list[float]]]:
    """CPU seconds of Python: of a step so small that nothing else takes time, without layers and for each layer."""
    found: dict[str, dict[str, list[float]]] = {}
    for tuning, counted_at in _COUNTED.items():
        tiny = replace(counted_at, samples=2, positions=8, heads=1, hidden=32)
        best = {
            layers: {
                name: min(_seconds(step) for _ in range(rounds))
                for name, step in steps(replace(tiny, layers=layers)).items()
            }
            for layers in (1, 5)
        }
        found[tuning] = {}
        for name in PHASES:
            a_layer = (best[5][name] - best[1][name]) / 4
            found[tuning][name] = [max(0.0, best[1][name] - a_layer), a_layer]
    return found


def _seconds(step: Callable[[], object]) -> float:
    start = time.process_time()  # leaves out what other processes of this machine take
    step()
    return time.process_time() - start


@dataclass(frozen=True)
class Assumptions:
    """Not measured: data sheet of the H100, and shares of it that are reached.

    Args:
        half, single: operations a second in bfloat16 and in float32 without tensor cores. memory: bytes a second.
            share: of these three. launch: seconds that a kernel takes at least. link: bytes a second from the host.
        threads: of the host that draw noise.
    """

    half: float = 989e12
    single: float = 67e12
    memory: float = 3.35e12
    share: float = 0.4
    launch: float = 3e-6
    link: float = 50e9
    threads: int = 8


def job(name: str, host: dict[str, dict[str, list[float]]], noise_ns: float, given: Assumptions) -> dict[str, Any]:
    """Amounts and seconds of one job.

    The model computes in bfloat16, which halves the bytes of the step without privacy; what privacy adds is float32.
    """
    tuning, sizes = name.split()[1], JOBS[name]
    amounts = {**predicted(sizes, tuning), "release": released(sizes)}
    plain, private, release = (amounts[phase] for phase in (*PHASES, "release"))
    tables = 0 if sizes.rank else sizes.width * (sizes.vocabulary + 2 * sizes.layers + 1)
    weight_gradients = 2.0 * sizes.samples * sizes.positions * (sizes.trained - tables)
    exact = private.flops - (plain.flops - weight_gradients)
    more_bytes = max(0.0, private.bytes - plain.bytes)

    def device(counts: Counts, half: float, single: float, num_bytes: float) -> float:
        reached = half / given.half + single / given.single
        return max(reached / given.share, num_bytes / given.memory / given.share, counts.launches * given.launch)

    python = {phase: host[tuning][phase][0] + sizes.layers * host[tuning][phase][1] for phase in PHASES}
    seconds = {
        "plain, GPU": device(plain, plain.flops, 0.0, plain.bytes / 2),
        "plain, Python": python["plain"],
        "sum, GPU": device(private, private.flops - exact, exact, plain.bytes / 2 + more_bytes),
        "sum, Python": python["private"],
        "release, GPU": device(release, 0.0, 0.0, release.bytes),
        "noise, host": sizes.trained * (noise_ns * 1e-9 / given.threads + 4 / given.link),
        "noise, GPU": sizes.trained * NOISE_BYTES / given.memory / given.share,
    }
    float32_seconds = exact / given.single / given.share
    parts = {
        "Python: the GPU waits": seconds["sum, Python"] if seconds["sum, Python"] > seconds["sum, GPU"] else 0.0,
        "norms and sums in float32": float32_seconds if seconds["sum, GPU"] >= seconds["sum, Python"] else 0.0,
        "noise of the host": seconds["noise, host"],
        "digest and release": seconds["release, GPU"],
    }
    return {
        "sizes": asdict(sizes),
        "trained": sizes.trained,
        "amounts": {phase: asdict(counts) for phase, counts in amounts.items()},
        "float32_flops": exact,
        "seconds": seconds,
        "slow": max(parts, key=lambda part: parts[part]),
    }


def amounts_table(found: dict[str, Any]) -> str:
    """Launches, bytes and operations of each job."""
    rows = []
    for name, record in found["jobs"].items():
        for phase, counts in record["amounts"].items():
            rows.append([
                name, {"plain": "without privacy", "private": "clipped sum", "release": "release"}[phase],
                amount(counts["launches"]), in_bytes(counts["bytes"]), amount(counts["flops"] / 1e12),
            ])  # fmt: skip
    return markdown(("job", "part", "launches", "bytes in float32", "10^12 operations"), rows)


def seconds_table(found: dict[str, Any]) -> str:
    """Seconds of each job, and the slowest part that privacy adds."""
    names = list(next(iter(found["jobs"].values()))["seconds"])
    rows = [
        [name, *(in_seconds(record["seconds"][part]) for part in names), record["slow"]]
        for name, record in found["jobs"].items()
    ]
    return markdown(("job", *names, "slowest of what privacy adds"), rows)


def check_table(found: dict[str, Any]) -> str:
    """How far predictions are off where they were counted."""
    rows = [
        [tuning, phase, *(f"{100 * value:+.1f} %" for value in values)]
        for tuning, phases in found["errors"].items()
        for phase, values in phases.items()
    ]
    return markdown(("trained", "step", "launches", "bytes", "operations"), rows)


def assumptions(found: dict[str, Any]) -> str:
    """A sentence with what was not measured, and the load of the machine on which Python was."""
    given, work = found["assumed"], next(iter(found["jobs"].values()))["sizes"]
    return (
        f"Assumed: {work['samples']} records of {work['positions']} tokens; {given['share']:.0%} of the data sheet of "
        f"the H100 ({given['half'] / 1e12:.0f} TFLOP/s in bfloat16, {given['single'] / 1e12:.0f} in float32, "
        f"{given['memory'] / 1e12:.2f} TB/s); {1e6 * given['launch']:.0f} us a launch; {given['threads']} threads of "
        f"the host, {given['link'] / 1e9:.0f} GB/s from it. Python was measured in CPU seconds, under a load of "
        f"{found['machine']['load_1min']:.1f} on {found['machine']['cores']} cores."
    )


def tables(found: dict[str, Any]) -> dict[str, str]:
    """Of the document, by name."""
    return {
        "accelerator assumptions": assumptions(found),
        "accelerator amounts": amounts_table(found),
        "accelerator seconds": seconds_table(found),
        "accelerator check": check_table(found),
    }


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=RESULT, help="The result file.")
@click.option("--document", type=click.Path(path_type=Path), default=DOCUMENT, help="Where the tables go.")
def main(out: Path, document: Path) -> None:
    """Count the steps of small decoders, and compute those of large ones on one GPU."""
    torch.set_num_threads(1)
    given = Assumptions()
    sources = json.loads(NOISE_COST.read_text())["layouts"]["flat, 1e7"]["sources"]
    noise_ns = sources["secure float32, 1 thread"]["best_cpu_ns_per_element"]
    host = host_seconds()
    found = rounded({
        "machine": machine(1, "cpu"),
        "versions": versions(),
        "assumed": asdict(given),
        "noise_ns": noise_ns,
        "host_seconds": host,
        "errors": {tuning: error(tuning) for tuning in _COUNTED},
        "jobs": {name: job(name, host, noise_ns, given) for name in JOBS},
    })  # fmt: skip
    write(found, out)
    document.write_text(filled(document.read_text(), tables(json.loads(out.read_text()))))
    Console().print(f"{out}, {document}")


if __name__ == "__main__":
    main()
