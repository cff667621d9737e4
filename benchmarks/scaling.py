"""What a private step needs on many GPUs: `python -m benchmarks.scaling`. A model, from published shapes, not measured.

Bytes on a GPU, and bytes that it sends. It follows what the engines and the step do (`dpfunc/engines/vmap_grad.py`,
`dpfunc/clipped.py`, `dpfunc/distributed/`); the rule by which book-keeping forms gradients is the engine's own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from benchmarks.results import DOCS, fill, markdown
from dpfunc.distributed._agreement import RankSummary
from dpfunc.engines._numerics import BUDGET, matrix_cost

DOCUMENT = DOCS / "scaling.md"
EngineName = Literal["vmap", "auto", "ghost"]
ENGINES: tuple[EngineName, ...] = ("vmap", "auto", "ghost")
HALF, SINGLE = 2, 4
OPTIMIZER = 3 * SINGLE  # AdamW: a float32 copy of the parameter and two moments
LOSS = HALF + SINGLE + HALF  # a logit, its float32 copy for the softmax, and its gradient
SUMMARY = 8 * len(RankSummary._fields)  # bytes of what a rank says about itself before a step
RANK = 16
GPUS = (8, 64, 512)
CAPACITIES = (80, 141)  # GB of an H100 and of an H200
RESERVE = 0.1  # of a GPU's memory, for what the model leaves out: workspaces, fragmentation, message buffers
TUNINGS = {"LoRA": RANK, "full": None}


class Matrix(NamedTuple):
    """A linear layer: its size, what tensor parallelism divides, and who shares its input.

    Args:
        name: of the layer. inputs, outputs: sizes. split: `column` divides the outputs, `row` the inputs.
        source: name of the activation it reads; layers with the same one keep it once.
    """

    name: str
    inputs: int
    outputs: int
    split: Literal["column", "row"]
    source: str

    @property
    def numbers(self) -> int:
        """Of the weight."""
        return self.inputs * self.outputs

    def part(self, tensor: int) -> Matrix:
        """What one of `tensor` ranks holds."""
        cut = "outputs" if self.split == "column" else "inputs"
        return self._replace(**{cut: getattr(self, cut) // tensor})

    def lora(self, rank: int, tensor: int) -> tuple[Matrix, Matrix]:
        """A and B of its adapter on one rank: the side that the layer divides is divided, the other is whole."""
        mine, between = self.part(tensor), f"{self.name}.A"
        down = Matrix(between, mine.inputs, rank, "row", self.source)
        return down, Matrix(f"{self.name}.B", rank, mine.outputs, "column", between)


@dataclass(frozen=True)
class Shape:
    """A decoder.

    Args:
        title: for tables. layers, width, hidden: depth, model width, width inside of the MLP.
        heads, kv_heads: of queries, and of keys and values. vocabulary: of the embedding and of the head, not tied.
        gated: whether the MLP has a gate (SwiGLU), hence three matrices.
    """

    title: str
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    gated: bool = True

    @property
    def kv_width(self) -> int:
        """Of keys, and of values."""
        return self.width // self.heads * self.kv_heads

    @property
    def layer(self) -> tuple[Matrix, ...]:
        """The linear layers of one block, in the order of the forward pass."""
        column = lambda name, outputs, source: Matrix(name, self.width, outputs, "column", source)
        return (
            column("q", self.width, "norm1"), column("k", self.kv_width, "norm1"), column("v", self.kv_width, "norm1"),
            Matrix("o", self.width, self.width, "row", "mixed"),
            *((column("gate", self.hidden, "norm2"),) if self.gated else ()), column("up", self.hidden, "norm2"),
            Matrix("down", self.hidden, self.width, "row", "activated"),
        )  # fmt: skip

    @property
    def head(self) -> Matrix:
        """From the last activation to the vocabulary; the embedding has as many numbers."""
        return Matrix("head", self.width, self.vocabulary, "column", "last")

    @property
    def layer_parameters(self) -> int:
        """Of one block, with the scales of its two norms."""
        return sum(matrix.numbers for matrix in self.layer) + 2 * self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + 2 * self.head.numbers + self.width

    def lora_parameters(self, rank: int, tensor: int = 1) -> int:
        """Of adapters on all linear layers of all blocks, on one of `tensor` ranks."""
        return self.layers * sum(part.numbers for matrix in self.layer for part in matrix.lora(rank, tensor))


MODELS = {
    "7B": Shape("7B (Llama 2)", 32, 4096, 11008, 32, 32, 32000),
    "70B": Shape("70B (Llama 3)", 80, 8192, 28672, 64, 8, 128256),
    "405B": Shape("405B (Llama 3.1)", 126, 16384, 53248, 128, 8, 128256),
    "100B": Shape("100B (GPT style)", 80, 10240, 40960, 80, 80, 50304, gated=False),
}


@dataclass(frozen=True)
class Layout:
    """Where parameters are.

    Args:
        title: for tables. tensor: ranks that divide each matrix (TP). cut_frozen, cut_trained: whether frozen and
            trained parameters are also divided over the ranks with different records (FSDP2).
        streamed: whether trained parameters are gathered, and their sums scattered, block by block
            (`distributed.functionalize_managed`).
    """

    title: str
    tensor: int = 1
    cut_frozen: bool = False
    cut_trained: bool = False
    streamed: bool = False


LAYOUTS = {
    "replicated": Layout("replicated"),
    "frozen cut": Layout("FSDP2 base, LoRA replicated", cut_frozen=True),
    "all cut": Layout("FSDP2", cut_frozen=True, cut_trained=True),
    "tensor": Layout("TP 8 x FSDP2", tensor=8, cut_frozen=True, cut_trained=True),
    "streamed": Layout("FSDP2, managed", cut_frozen=True, cut_trained=True, streamed=True),
}


@dataclass(frozen=True)
class Job:
    """What is trained, and how.

    Args:
        shape: of the model. lora_rank: adapters of this rank on all linear layers; None trains all parameters.
        layout, gpus: where. engine: name. length: tokens of a record. microbatch: records at once on a rank.
        expected_batch: records of a step, on all ranks together.
    """

    shape: Shape
    lora_rank: int | None
    layout: Layout
    gpus: int
    engine: EngineName
    length: int = 2048
    microbatch: int = 2
    expected_batch: int = 4096

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of ranks, with different records."""
        return self.gpus // self.layout.tensor

    @property
    def microbatches(self) -> int:
        """Of a rank in a step of the expected size."""
        return math.ceil(self.expected_batch / self.data_ranks / self.microbatch)

    @property
    def trained(self) -> int:
        """Trained numbers that one data rank works on: all, but for the matrices that tensor parallelism divides.

        The embedding is not among them: a table that is divided has no rule yet.
        """
        if self.lora_rank is None:
            table = self.shape.head.numbers
            return table + (self.shape.parameters - table) // self.layout.tensor
        return self.shape.lora_parameters(self.lora_rank, self.layout.tensor)

    @property
    def trained_held(self) -> int:
        """Trained numbers that a GPU is responsible for."""
        return self.trained // self.data_ranks if self.layout.cut_trained else self.trained

    @property
    def possible(self) -> bool:
        """Whether there is such a job: vmap does not run tensor parallel layers, and some layouts need more than LoRA.

        Sums that are scattered block by block need all norms before: the second backward pass of ghost.
        """
        if self.layout.streamed and (self.lora_rank is not None or self.engine != "ghost"):
            return False
        if self.layout.cut_frozen and not self.layout.cut_trained and self.lora_rank is None:
            return False
        return not (self.engine == "vmap" and self.layout.tensor > 1)

    @property
    def tokens(self) -> int:
        return self.microbatch * self.length

    @property
    def passes(self) -> int:
        """How often a microbatch needs the parameters: forward, and backward (with its repetition) once or twice."""
        return 3 if self.engine == "ghost" else 2


def trained_matrices(job: Job) -> Iterator[Matrix]:
    """The matrices that get per-sample gradients, as one rank sees them, in the order of the forward pass."""
    tensor = job.layout.tensor
    for _ in range(job.shape.layers):
        for matrix in job.shape.layer:
            yield from (matrix.part(tensor),) if job.lora_rank is None else matrix.lora(job.lora_rank, tensor)
    if job.lora_rank is None:
        yield job.shape.head.part(tensor)


def layer_activations(job: Job) -> int:
    """Bytes that autograd keeps of one block, with fused norms and attention: 4 + 2/tp widths, and what TP divides.

    Inputs of both norms and their results; queries, keys, values and their mixture; gate, up, silu(gate), product.
    """
    shape, tensor = job.shape, job.layout.tensor
    wide = 4 * shape.width + (2 * shape.width + 2 * shape.kv_width) // tensor
    return HALF * job.tokens * (wide + (4 if shape.gated else 2) * shape.hidden // tensor)


def formed(job: Job) -> list[bool]:
    """Of each trained matrix: whether per-sample gradients are formed, or both sides of the products kept.

    vmap forms all and ghost none. Book-keeping decides by time, within its budget.
    """
    if job.engine != "auto":
        return [job.engine == "vmap" for _ in trained_matrices(job)]
    budget, decided = BUDGET, []
    for matrix in trained_matrices(job):
        whole = SINGLE * job.microbatch * matrix.numbers
        sides = HALF * job.tokens * (matrix.inputs + matrix.outputs)
        choice = matrix_cost(job.length, matrix.outputs, matrix.inputs).choose(job.microbatch)
        decided.append(choice.representation == "formed" and (whole <= budget or sides >= whole))
        budget -= whole if decided[-1] else 0
    return decided


def auto_bytes(job: Job) -> int:
    """What book-keeping keeps until the factors are known. An input counts once for all layers that read it."""
    # without adapters the embedding keeps the gradients of its rows
    total = HALF * job.tokens * job.shape.width if job.lora_rank is None else 0
    seen: set[tuple[int, str]] = set()
    in_a_block = len(job.shape.layer) * (1 if job.lora_rank is None else 2)
    for number, (matrix, dense) in enumerate(zip(trained_matrices(job), formed(job), strict=True)):
        source = (number // in_a_block, matrix.source)
        if dense:
            total += SINGLE * job.microbatch * matrix.numbers
        else:
            total += HALF * job.tokens * (matrix.outputs + (0 if source in seen else matrix.inputs))
            seen.add(source)
    return total


def engine_bytes(job: Job) -> int:
    """What the engine needs on top of activations and sums."""
    if job.engine == "vmap":
        most = max(matrix.numbers for matrix in trained_matrices(job))
        return job.microbatch * (HALF * job.trained + SINGLE * most)
    widest = max(matrix.inputs + matrix.outputs for matrix in trained_matrices(job))
    scratch = SINGLE * job.tokens * widest  # both sides in float32, one matrix at a time
    return scratch + (auto_bytes(job) if job.engine == "auto" else 0)


def computing(job: Job) -> dict[str, int]:
    """Bytes while gradients are computed.

    - gathered: of frozen parameters two blocks, the embedding and the head, as FSDP2 has them; all trained ones.
    - activations: with checkpoints (not for vmap) inputs of all blocks and one block; or all blocks; and the loss.
    - sums in float32: of all trained parameters, twice with several microbatches; or the own part, and one unit more.
    """
    shape, layout, layers = job.shape, job.layout, job.shape.layers
    at_a_time = HALF * (2 * shape.layer_parameters + 2 * shape.head.numbers) // layout.tensor
    gathered = at_a_time if layout.streamed or (job.lora_rank is not None and layout.cut_frozen) else 0
    sums = SINGLE * job.trained * (2 if job.microbatches > 1 else 1)
    if layout.streamed:
        sums = SINGLE * (job.trained_held + max(shape.layer_parameters, shape.head.numbers))
    elif layout.cut_trained:
        gathered += HALF * job.trained
    block = layer_activations(job)
    blocks = layers * block if job.engine == "vmap" else layers * HALF * job.tokens * shape.width + block
    activations = blocks + LOSS * job.tokens * shape.vocabulary
    return {"gathered": gathered, "activations": activations, "engine": engine_bytes(job), "sums": sums}


def parts(job: Job) -> dict[str, int]:
    """Bytes on one GPU, by what they are for. `computing` and `releasing` are never there together.

    Frozen and trained parameters are in bfloat16, AdamW has a float32 copy. Releasing: sums and the message; then the
    sum, the noise and the released gradient.
    """
    frozen = job.shape.parameters // (job.gpus if job.layout.cut_frozen else job.layout.tensor)
    found, whole, mine = computing(job), SINGLE * job.trained, SINGLE * job.trained_held
    cut = job.layout.cut_trained and not job.layout.streamed
    return {
        "frozen": 0 if job.lora_rank is None else HALF * frozen,
        "trained": HALF * job.trained_held * (2 if job.layout.streamed else 1),  # the module's parts, and the caller's
        "optimizer": OPTIMIZER * job.trained_held, **found, "computing": sum(found.values()),
        "releasing": max(whole + mine, 3 * mine) if cut else 3 * mine,
    }  # fmt: skip


def peak(job: Job) -> int:
    found = parts(job)
    return found["frozen"] + found["trained"] + found["optimizer"] + max(found["computing"], found["releasing"])


def all_reduce(num_bytes: float, ranks: int) -> float:
    """Bytes that each rank of a ring sends to add up a message."""
    return 2 * num_bytes * (ranks - 1) / ranks


def all_gather(num_bytes: float, ranks: int) -> float:
    """Bytes that each rank sends so that all have the whole; a reduce-scatter sends as many."""
    return num_bytes * (ranks - 1) / ranks


def sent(job: Job) -> dict[str, float]:
    """Bytes that one GPU sends in a step, by what they are for."""
    ranks, tensor = job.data_ranks, job.layout.tensor
    frozen = norms = activations = 0.0
    if job.lora_rank is not None and job.layout.cut_frozen:
        frozen = all_gather(HALF * job.shape.parameters / tensor, ranks) * job.passes * job.microbatches
    # Block by block, parameters and sums travel in each microbatch and not once a step.
    times = job.microbatches if job.layout.streamed else 1
    gathers = times * job.passes if job.layout.streamed else 1
    gather = gathers * all_gather(HALF * job.trained, ranks) if job.layout.cut_trained else 0.0
    whole = SINGLE * job.trained
    sums = times * all_gather(whole, ranks) if job.layout.cut_trained else all_reduce(whole, ranks)
    if tensor > 1:
        # of a layer's adapter, one side is divided
        matrices = job.shape.layers * len(job.shape.layer) + (job.lora_rank is None)
        norms = job.microbatches * all_reduce(8 * matrices * job.microbatch, tensor)
        # two all-reduces of activations in each forward and each backward pass of a block, and in its repetition
        once = 2 * all_reduce(HALF * job.tokens * job.shape.width, tensor)
        activations = job.microbatches * job.shape.layers * (2 * job.passes - 1) * once
    return {
        "frozen parameters": frozen, "trained parameters": gather, "sums": sums, "activations": activations,
        "norms": norms, "handshake": float(SUMMARY * (ranks - 1) + (SUMMARY * (tensor - 1))),
    }  # fmt: skip


def jobs() -> Iterator[Job]:
    """All combinations that exist."""
    for shape, rank, layout, gpus, engine in itertools.product(
        MODELS.values(), TUNINGS.values(), LAYOUTS.values(), GPUS, ENGINES
    ):
        if (job := Job(shape, rank, layout, gpus, engine)).possible:
            yield job


# The tables of the document. Jobs that are shown in full: model, tuning, layout, GPUs, engine.
SHOWN: tuple[tuple[str, str, str, int, EngineName], ...] = (
    ("7B", "LoRA", "frozen cut", 8, "auto"), ("70B", "LoRA", "frozen cut", 64, "auto"),
    ("405B", "LoRA", "frozen cut", 512, "auto"), ("405B", "LoRA", "tensor", 512, "auto"),
    ("7B", "full", "all cut", 8, "ghost"), ("70B", "full", "tensor", 512, "ghost"),
    ("100B", "full", "tensor", 512, "ghost"), ("100B", "full", "streamed", 512, "ghost"),
)  # fmt: skip
PARTS = ("frozen", "trained", "optimizer", "gathered", "activations", "engine", "sums", "releasing", "peak")
SENT = ("frozen parameters", "trained parameters", "sums", "activations", "norms", "handshake")


def amount(value: float) -> str:
    """Two significant digits, or three above 100."""
    rounded = float(f"{value:.3g}" if abs(value) >= 100 else f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded == 0 or abs(rounded) >= 10 else f"{rounded:g}"


def in_bytes(value: float) -> str:
    """In the largest unit that is not larger than the value, decimal as in data sheets of memory and networks."""
    units = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "KB": 1e3, "B": 1}
    name = next((name for name, size in units.items() if value >= size), "B")
    return f"{amount(value / units[name])} {name}"


def models() -> str:
    rows = [
        [s.title, s.layers, s.width, s.hidden, f"{s.heads} / {s.kv_heads}", s.vocabulary,
         f"{s.parameters / 1e9:.2f}e9", f"{s.lora_parameters(RANK) / 1e6:.0f}e6"]
        for s in MODELS.values()
    ]  # fmt: skip
    heads = ("model", "layers", "width", "MLP", "heads / kv", "vocabulary", "parameters", f"LoRA, rank {RANK}")
    return markdown(heads, rows)


def cell(job: Job) -> str:
    """GB: bold fits into the small GPU with a reserve, plain into the large one, in brackets into none."""
    needed = peak(job)
    fits = next((size for size in CAPACITIES if needed <= (1 - RESERVE) * size * 1e9), None)
    return {None: "({})", CAPACITIES[0]: "**{}**", CAPACITIES[1]: "{}"}[fits].format(amount(needed / 1e9))


def memory(tuning: str) -> str:
    """A cell with each engine."""
    rows = []
    for model, layout in itertools.product(MODELS, LAYOUTS.values()):
        found = [[Job(MODELS[model], TUNINGS[tuning], layout, count, engine) for engine in ENGINES] for count in GPUS]
        if any(job.possible for job in found[0]):
            cells = [" / ".join(cell(job) if job.possible else "-" for job in each) for each in found]
            rows.append([model, layout.title, *cells])
    return markdown(["model", "layout", *(f"{count} GPUs" for count in GPUS)], rows)


def columns(of: Callable[[Job], Mapping[str, float]], names: Sequence[str], zero: str) -> str:
    """One row a job that is shown in full, one column a part."""
    rows = []
    for model, tuning, layout, gpus, engine in SHOWN:
        found = of(Job(MODELS[model], TUNINGS[tuning], LAYOUTS[layout], gpus, engine))
        where = LAYOUTS[layout].title.replace(", LoRA replicated", "")
        values = [in_bytes(found[name]) if found[name] else zero for name in names]
        rows.append([f"{model} {tuning}, {where}, {gpus} GPUs, {engine}", *values])
    return markdown(["job", *names], rows)


def tables() -> dict[str, str]:
    """Of docs/scaling.md."""
    job = next(jobs())
    return {
        "workload": f"Records of {job.length} tokens, {job.microbatch} in a microbatch, {job.expected_batch} expected "
        f"in a step on all GPUs together; {RESERVE:.0%} of a GPU's memory is left free.",
        "models": models(),
        "memory LoRA": memory("LoRA"),
        "memory full": memory("full"),
        "breakdown": columns(lambda job: {**parts(job), "peak": peak(job)}, PARTS, "0 B"),
        "sent": columns(sent, SENT, "0"),
    }


if __name__ == "__main__":
    fill(DOCUMENT, tables())
