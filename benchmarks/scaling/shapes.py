"""Sizes of decoders, from their published shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Split = Literal["column", "row"]


class Matrix(NamedTuple):
    """A linear layer: its size, what tensor parallelism divides, and who shares its input.

    Args:
        name: of the layer. inputs, outputs: sizes. split: `column` divides the outputs, `row` the inputs.
        source: name of the activation it reads; layers with the same one keep it once.
    """

    name: str
    inputs: int
    outputs: int
    split: Split
    source: str

    @property
    def numbers(self) -> int:
        """Of the weight."""
        return self.inputs * self.outputs

    def part(self, tensor: int) -> Matrix:
        """What one of `tensor` ranks holds."""
        if self.split == "column":
            return self._replace(outputs=self.outputs // tensor)
        return self._replace(inputs=self.inputs // tensor)

    def lora(self, rank: int, tensor: int) -> tuple[Matrix, Matrix]:
        """A and B of its adapter on one rank: the side that the layer divides is divided, the other is whole."""
        mine = self.part(tensor)
        return (
            Matrix(f"{self.name}.A", mine.inputs, rank, "row", self.source),
            Matrix(f"{self.name}.B", rank, mine.outputs, "column", f"{self.name}.A"),
        )


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
        attention = (
            Matrix("q", self.width, self.width, "column", "norm1"),
            Matrix("k", self.width, self.kv_width, "column", "norm1"),
            Matrix("v", self.width, self.kv_width, "column", "norm1"),
            Matrix("o", self.width, self.width, "row", "mixed"),
        )
        gate = (Matrix("gate", self.width, self.hidden, "column", "norm2"),) if self.gated else ()
        up = Matrix("up", self.width, self.hidden, "column", "norm2")
        return (*attention, *gate, up, Matrix("down", self.hidden, self.width, "row", "activated"))

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
        """All."""
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
