"""An all-reduce between processes of this machine, over gloo."""

from __future__ import annotations

import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

PATIENCE = timedelta(seconds=60)


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
