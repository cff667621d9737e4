"""A step on several processes against the plain step of DistributedDataParallel: `python -m benchmarks.distributed`.

Each process takes its share of one batch. In each round both steps run once, in turn, between barriers; the ratio is
that of the slowest process; the ratio of CPU seconds, all threads together, depends less on what else the machine does.
One torch thread a process. `plain` is forward, mean loss, backward with DDP's overlapped all-reduce; `dp_step` is all
of a private step: checks, handshake, clipped sum, noise, one all-reduce. Its parts are timed alone. What a step
communicates, and how much noise the first process draws, is counted in one more step. On a GPU (`--device cuda`) the
backend is nccl.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from torch import Tensor, nn

import dpfunc
from benchmarks.engines.cases import CASES
from benchmarks.engines.contestants import plain
from benchmarks.engines.problem import Problem
from benchmarks.measure import in_turn, statistics_of, timed
from benchmarks.results import DOCS, FOLDER, fill, markdown, show, write
from dpfunc import clipping, distributed, sampling
from dpfunc._utils.digests import checksum
from dpfunc.batches import batch_size
from dpfunc.distributed._agreement import Rows, agree, summarize
from dpfunc.distributed._reduce import noise_windows, sum_over
from dpfunc.noise import Turn, gaussian
from dpfunc.noise import _streams as streams
from dpfunc.types import ClippedSum

RESULT, GUIDE = FOLDER / "distributed.json", DOCS / "guides" / "distributed.md"
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "reduce")
PARTS = ("clipped sum", "handshake", "all-reduce", "noise", "checksum")
HEADS = (
    "case", "processes", "plain ms", "dp_step ms", "ratio", "CPU ratio", *(f"{part} ms" for part in PARTS),
    "collectives", "million normals",
)  # fmt: skip


def steps_of(problem: Problem, rounds: int) -> dict[str, Callable[[], object]]:
    """The plain step, in which DDP adds the gradients of several processes; the whole private step; its parts alone."""
    whole = problem.copy()
    if dist.get_world_size() > 1:
        whole = replace(whole, module=nn.parallel.DistributedDataParallel(whole.module))
    loss_fn, params = problem.functional()
    ranks = distributed.data_parallel()
    batch = (problem.inputs, problem.targets)
    sampler = sampling.Poisson(100 * problem.batch_size * ranks.size, 0.01)
    plan = dpfunc.Plan(sampler, clipping.Flat(problem.clip_norm), 1.0, 10 * rounds + 10, delta=1e-7)
    dp_step = dpfunc.make_dp_step(loss_fn, plan, engine="auto", ranks=ranks, verify_batch=False)
    states = [dp_step.init(params, distributed.shared_key(ranks))]
    sums = {name: torch.zeros_like(p) for name, p in params.items()}
    clipped = ClippedSum(sums, dict.fromkeys(sums, "all"), {"all": 1.0})
    share = noise_windows({name: value.shape for name, value in sums.items()}, ranks.rank, ranks.size)
    add_share = gaussian(1.0).add_share or (lambda *args: None)

    def step() -> None:
        states.append(dp_step(params, batch, states[-1]).state)

    rows = Rows(batch, None, batch_size(batch))
    return {
        "plain": plain(whole).step,
        "dp_step": step,
        "clipped sum": lambda: dp_step.clipped_grad(params, batch),
        "handshake": lambda: agree(
            summarize(step=0, rows=rows, params=params, run="", prepared="", ranks=ranks), ranks
        ),
        "all-reduce": lambda: sum_over(ranks, sums, params),
        "noise": lambda: add_share(clipped, share, Turn(0, dpfunc.rng.insecure_key(0), dpfunc.rng.insecure_key)),
        "checksum": lambda: checksum(sums.items()),
    }


def timed_together(step: Callable[[], object], device: str) -> dict[str, float]:
    """What the slowest process takes, and the most CPU seconds that one needs."""
    dist.barrier()
    found = timed(step, device)
    most = torch.tensor(list(found.values()), dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return dict(zip(found, most.tolist(), strict=True))


def counted(step: Callable[[], object]) -> dict[str, int]:
    """Collectives of one step, the bytes that this process gives to them, and the normal numbers that it draws."""
    with ExitStack() as stack:
        drawn = stack.enter_context(mock.patch.object(streams, "secure_normal", wraps=streams.secure_normal))
        calls = [stack.enter_context(mock.patch.object(dist, n, wraps=getattr(dist, n))) for n in COLLECTIVES]
        step()
    sent = [next(a for a in call.args if isinstance(a, Tensor)) for each in calls for call in each.call_args_list]
    return {
        "collectives": len(sent),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in sent),
        "normals": sum(math.prod(leaf.shape) for call in drawn.call_args_list for leaf in call.args[1].values()),
    }


def work(rank: int, size: int, folder: str, case: str, rounds: int, device: str, quick: bool) -> None:
    """One process of the measurement; the first writes what was found."""
    torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(minutes=5)
    )
    problem = CASES[case].problem(quick=quick)
    share = replace(problem, inputs=problem.inputs[rank::size], targets=problem.targets[rank::size]).to(device)
    steps = steps_of(share, rounds)
    found = in_turn({name: partial(timed_together, step, device) for name, step in steps.items()}, rounds)
    counts = counted(steps["dp_step"])
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps([found, counts]))
    steps.clear()  # the plain one holds the group
    distributed.shutdown()


def measure(case: str, size: int, rounds: int, device: str, quick: bool) -> dict[str, Any]:
    """Steps of so many processes, with ratios to the plain step of the same round."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (size, folder, case, rounds, device, quick), nprocs=size)
        found, counts = json.loads(Path(folder, "found.json").read_text())
    contestants = {name: {"status": "ok", **each} for name, each in statistics_of(found, "plain").items()}
    sizes = CASES[case].problem(quick=quick).sizes()
    return {"case": case, "processes": size, **sizes, "counts": counts, "contestants": contestants}


def rows(cases: Mapping[str, Any]) -> list[list[str]]:
    """A line for each measurement: milliseconds, ratios to the plain step, CPU milliseconds of the parts, counts."""
    lines = []
    for record in cases.values():
        who, counts = record["contestants"], record["counts"]
        lines.append([
            record["case"], str(record["processes"]),
            *(f"{1e3 * who[name]['time']['median_seconds']:.0f}" for name in ("plain", "dp_step")),
            *(f"{who['dp_step'][number]['ratio']:.2f}" for number in ("time", "cpu")),
            *(f"{1e3 * who[part]['cpu']['median_seconds']:.1f}" for part in PARTS),
            str(counts["collectives"]), f"{counts['normals'] / 1e6:.2f}",
        ])  # fmt: skip
    return lines


def tables(cases: Mapping[str, Any]) -> dict[str, str]:
    return {"processes": markdown(HEADS, rows(cases))}


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--cases", default="w1,w2n", help="Names of benchmarks.engines.cases, with commas.")
@click.option("--processes", default="1,2", help="Numbers of processes, with commas.")
@click.option("--rounds", default=8, help="Rounds that count; one more warms up.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]))
@click.option("--quick", is_flag=True, help="Tiny sizes, to see that it works.")
@click.option("--out", default=RESULT, type=click.Path(path_type=Path), help="Result file.")
@click.option("--document", default=GUIDE, type=click.Path(path_type=Path), help="Where the table goes.")
def main(cases: str, processes: str, rounds: int, device: str, quick: bool, out: Path, document: Path) -> None:
    found, console = {}, Console()
    for case in cases.split(","):
        for size in map(int, processes.split(",")):
            with console.status(f"{case}, {size} processes"):
                found[f"{case} x {size}"] = measure(case, size, rounds, device, quick)
            console.print(show(f"{case} x {size}", found[f"{case} x {size}"]))
    write(out, {"rounds": rounds, "device": device, "quick": quick, "cases": found}, device=device)
    fill(document, tables(found))


if __name__ == "__main__":
    main()
