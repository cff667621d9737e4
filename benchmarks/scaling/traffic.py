"""What a step sends, draws and computes, from shapes; and seconds, from figures that are named as assumptions."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.scaling.memory import HALF, SINGLE, Job, formed, norm_operations, trained_matrices
from dpfunc.distributed.agreement import RankSummary

SUMMARY = 8 * len(RankSummary._fields)  # bytes of what a rank says about itself before a step


@dataclass(frozen=True)
class Assumed:
    """Not measured here: data sheet and rule of thumb.

    Args:
        flops: dense bfloat16 peak of one H100 or H200 (data sheet). utilisation: share of it that training reaches.
        float32_flops: peak without tensor cores, in which norms and weighted sums are computed.
        inside, between: bytes a second that a GPU sends to others in its node (NVLink, 900 GB/s both ways) and in
            other nodes (one 400 Gb/s adapter). node: GPUs in a node. threads: CPU threads for noise on each GPU's rank.
    """

    flops: float = 989e12
    utilisation: float = 0.4
    float32_flops: float = 67e12
    inside: float = 450e9
    between: float = 50e9
    node: int = 8
    threads: int = 8


def all_reduce(num_bytes: float, ranks: int) -> float:
    """Bytes that each rank of a ring sends to add up a message."""
    return 2 * num_bytes * (ranks - 1) / ranks


def all_gather(num_bytes: float, ranks: int) -> float:
    """Bytes that each rank sends so that all have the whole; a reduce-scatter sends as many."""
    return num_bytes * (ranks - 1) / ranks


def model_passes(job: Job) -> int:
    """How often a microbatch needs the parameters: forward, and backward (with its repetition) once or twice."""
    return 3 if job.engine == "ghost" else 2


def sent(job: Job) -> dict[str, float]:
    """Bytes that one GPU sends in a step, by what they are for."""
    ranks, tensor = job.data_ranks, job.layout.tensor
    frozen = 0.0
    if job.lora_rank is not None and job.layout.cut_frozen:
        once = all_gather(HALF * job.shape.parameters / tensor, ranks)
        frozen = once * model_passes(job) * job.microbatches
    # Block by block, parameters and sums travel in each microbatch and not once a step.
    times = job.microbatches if job.layout.streamed else 1
    gathers = times * model_passes(job) if job.layout.streamed else 1
    gather = gathers * all_gather(HALF * job.trained, ranks) if job.layout.cut_trained else 0.0
    whole = SINGLE * job.trained
    sums = times * all_gather(whole, ranks) if job.layout.cut_trained else all_reduce(whole, ranks)
    norms = activations = 0.0
    if tensor > 1:
        # of a layer's adapter, one side is divided
        matrices = job.shape.layers * len(job.shape.layer) + (job.lora_rank is None)
        norms = job.microbatches * all_reduce(8 * matrices * job.microbatch, tensor)
        # two all-reduces of activations in each forward and each backward pass of a block, and in its repetition
        passes = 2 * model_passes(job) - 1
        once = 2 * all_reduce(HALF * job.tokens * job.shape.width, tensor)
        activations = job.microbatches * job.shape.layers * passes * once
    return {
        "frozen parameters": frozen,
        "trained parameters": gather,
        "sums": sums,
        "activations": activations,
        "norms": norms,
        "handshake": float(SUMMARY * (ranks - 1) + (SUMMARY * (tensor - 1))),
    }


def noise_numbers(job: Job) -> int:
    """Numbers of noise that one rank draws in a step: all of them, or its tiles."""
    return job.trained_held


def sample_flops(job: Job) -> dict[str, float]:
    """Operations for one record, over all ranks that work on it; attention itself, a few per cent, is left out.

    - model: forward 2P a token, its repetition by checkpointing 2P, and backward 2P to the activations; ghost runs
      repetition and backward twice, vmap repeats nothing and forms gradients in the precision of the model.
    - norms and sums: in float32. Of gradients that were formed, two operations a number; else from the factors, the
      norm as the engine's rule says and the sum with 2 a trained number and token.
    """
    per_token = 2.0 * job.shape.parameters
    passes = {"vmap": 2, "auto": 3, "ghost": 5}[job.engine]
    model, norms, sums = passes * per_token * job.length, 0.0, 0.0
    for matrix, dense in zip(trained_matrices(job), formed(job), strict=True):
        product = 2.0 * job.length * matrix.numbers * job.layout.tensor
        if job.engine == "vmap":
            model += product
        elif dense:
            norms += product
        else:
            norms += norm_operations(job.length, matrix.outputs, matrix.inputs) * job.layout.tensor
        sums += 2.0 * matrix.numbers * job.layout.tensor if dense else product
    return {"model": model, "norms": norms, "sums": sums}


def seconds(job: Job, noise_rate: float, assumed: Assumed | None = None) -> dict[str, float]:
    """Seconds of a step of the expected size, by what they are for; nothing overlaps.

    Args:
        noise_rate: numbers a second that one thread draws; measured. assumed: everything else.
    """
    given = Assumed() if assumed is None else assumed
    records = job.expected_batch / job.gpus
    flops = sample_flops(job)
    line = given.inside if job.gpus <= given.node else given.between
    bytes_sent = sent(job)
    in_node = bytes_sent["activations"] + bytes_sent["norms"]
    return {
        "model": records * flops["model"] / (given.flops * given.utilisation),
        "norms and sums": records * (flops["norms"] + flops["sums"]) / (given.float32_flops * given.utilisation),
        "frozen parameters": bytes_sent["frozen parameters"] / line,
        "activations (TP)": in_node / given.inside,
        "trained parameters and sums": (bytes_sent["trained parameters"] + bytes_sent["sums"]) / line,
        "noise": noise_numbers(job) / (noise_rate * given.threads),
    }
