"""The jobs that are looked at, as records of the result file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.scaling.memory import ENGINES, LAYOUTS, Job, parts, peak
from benchmarks.scaling.shapes import MODELS
from benchmarks.scaling.traffic import Assumed, noise_numbers, seconds, sent

RANK = 16
GPUS = (8, 64, 512)
CAPACITIES = (80, 141)  # GB of an H100 and of an H200
RESERVE = 0.1  # of a GPU's memory, for what the model leaves out: workspaces, fragmentation, message buffers
TUNINGS = {"LoRA": RANK, "full": None}


def jobs() -> Iterator[tuple[str, str, str, Job]]:
    """`(model, tuning, layout, job)` of each combination that exists."""
    for model, shape in MODELS.items():
        for tuning, rank in TUNINGS.items():
            for layout, where in LAYOUTS.items():
                for gpus in GPUS:
                    for engine in ENGINES:
                        job = Job(shape, rank, where, gpus, engine)
                        if job.possible:
                            yield model, tuning, layout, job


def fits(num_bytes: float) -> int | None:
    """The smallest GPU that holds them with a reserve, in GB; None if none does."""
    return next((size for size in CAPACITIES if num_bytes <= (1 - RESERVE) * size * 1e9), None)


def record(model: str, tuning: str, layout: str, job: Job, noise_rate: float) -> dict[str, Any]:
    """One job: bytes on a GPU, bytes that it sends, numbers that it draws, and seconds."""
    return {
        "model": model,
        "tuning": tuning,
        "layout": layout,
        "gpus": job.gpus,
        "engine": job.engine,
        "microbatches": job.microbatches,
        "bytes": {**parts(job), "peak": peak(job)},
        "fits": fits(peak(job)),
        "sent": sent(job),
        "noise_numbers": noise_numbers(job),
        "seconds": seconds(job, noise_rate),
    }


def modelled(noise_rate: float) -> dict[str, Any]:
    """The part of the result file that is computed and not measured.

    Args:
        noise_rate: measured numbers a second of one thread, from which the seconds of noise follow.
    """
    models = {
        name: {**asdict(shape), "parameters": shape.parameters, "lora": shape.lora_parameters(RANK)}
        for name, shape in MODELS.items()
    }
    example = next(jobs())[3]
    work = {"length": example.length, "microbatch": example.microbatch, "expected_batch": example.expected_batch}
    return {
        "work": {**work, "lora_rank": RANK, "reserve": RESERVE},
        "assumed": asdict(Assumed()),
        "models": models,
        "jobs": [record(*each, noise_rate) for each in jobs()],
    }
