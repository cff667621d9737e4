"""The tables of cases: name -> what it is, how large, how to build it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engines import nets
from benchmarks.engines.problem import Problem, squared_error

SEED = 20


@dataclass(frozen=True)
class Case:
    """A problem in two sizes.

    Args:
        title: one line for tables. build: makes the problem. batch_size, sizes: its full size. quick: its tiny size.
    """

    title: str
    build: Callable[..., Problem]
    batch_size: int
    sizes: Mapping[str, Any]
    quick: Mapping[str, Any]

    def problem(self, *, quick: bool = False, batch_size: int | None = None) -> Problem:
        """Build it: the same weights and data whenever the arguments are the same."""
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(SEED)
            size = batch_size or (min(4, self.batch_size) if quick else self.batch_size)
            problem = self.build(size, **(self.quick if quick else self.sizes))
        problem.module.train()
        return problem


LLAMA = {"layers": 6, "width": 384, "hidden": 1024, "length": 128, "vocabulary": 8000, "norm": "rms"}
TINY_LLAMA = {"layers": 2, "width": 16, "hidden": 32, "length": 8, "vocabulary": 50, "norm": "rms"}
VIT = {"image": 224, "patch": 16, "width": 192, "layers": 6}
TINY_VIT = {"image": 16, "patch": 8, "width": 16, "layers": 2}
HF = {"layers": 6, "width": 384, "length": 128, "vocabulary": 8000}
TINY_HF = {"layers": 2, "width": 16, "length": 8, "vocabulary": 50}

CASES: dict[str, Case] = {
    "w1": Case(
        "Llama-style decoder, LoRA on all linear layers", nets.decoder, 16, {**LLAMA, "lora": True},
        {**TINY_LLAMA, "lora": True},
    ),
    "w2n": Case(
        "The decoder with LayerNorm, all parameters", nets.decoder, 16, {**LLAMA, "norm": "layer", "lora": False},
        {**TINY_LLAMA, "norm": "layer", "lora": False},
    ),
    "w2": Case(
        "The decoder with RMSNorm, all parameters", nets.decoder, 16, {**LLAMA, "lora": False},
        {**TINY_LLAMA, "lora": False},
    ),
    "w3": Case(
        "Convolutional network, 32x32, all parameters", nets.plain_convnet, 64,
        {"widths": (64, 128, 256, 256), "image": 32}, {"widths": (8, 16), "image": 8},
    ),
    "mnist": Case(
        "DP-MNIST network, 28x28, all parameters", nets.mnist_net, 256, {"widths": (16, 32, 32)}, {"widths": (4, 4, 4)}
    ),
    "w4": Case("ViT-tiny, 224x224, LoRA", nets.vit, 16, {**VIT, "lora": True}, {**TINY_VIT, "lora": True}),
    "w4f": Case("ViT-tiny, 224x224, all parameters", nets.vit, 16, {**VIT, "lora": False}, {**TINY_VIT, "lora": False}),
    "gpt2": Case("GPT-2 of Hugging Face, tied head, all parameters", nets.gpt2, 8, HF, TINY_HF),
    "bert": Case("BERT of Hugging Face, LoRA, classification", nets.bert, 16, HF, TINY_HF),
    "t1024": Case(
        "Llama-style decoder, LoRA, 1024 tokens", nets.decoder, 2, {**LLAMA, "length": 1024, "lora": True},
        {**TINY_LLAMA, "length": 32, "lora": True},
    ),
    "embed": Case(
        "Classifier on a table of 50000 embeddings, all parameters", nets.bag_of_words, 32,
        {"vocabulary": 50000, "width": 256, "length": 64}, {"vocabulary": 100, "width": 8, "length": 6},
    ),
    "perceptron": Case("Perceptron, 3 layers, all parameters", nets.perceptron, 64, {"width": 256}, {"width": 8}),
    "small": Case(
        "Llama-style decoder, 2 layers, 32 tokens, LoRA", nets.decoder, 8,
        {"layers": 2, "width": 64, "hidden": 128, "length": 32, "vocabulary": 128, "norm": "rms", "lora": True},
        {**TINY_LLAMA, "lora": True},
    ),
    "resnet18": Case(
        "ResNet18, 32x32, all parameters", nets.residual_net, 32,
        {"kind": "basic", "widths": (64, 128, 256, 512), "blocks": 2, "image": 32},
        {"kind": "basic", "widths": (8, 16), "blocks": 1, "image": 8},
    ),
    "vgg11": Case(
        "VGG11, 32x32, all parameters", nets.vgg, 32, {"depth": 11, "image": 32, "divide": 1},
        {"depth": 11, "image": 32, "divide": 16},
    ),
    "vgg19": Case(
        "VGG19, 32x32, all parameters", nets.vgg, 32, {"depth": 19, "image": 32, "divide": 1},
        {"depth": 19, "image": 32, "divide": 16},
    ),
    "resnext": Case(
        "ResNeXt with 8 groups, 32x32, all parameters", nets.residual_net, 32,
        {"kind": "grouped", "widths": (64, 128, 256), "blocks": 2, "image": 32},
        {"kind": "grouped", "widths": (64, 128), "blocks": 1, "image": 8},
    ),
}  # fmt: skip


class Alone(nn.Module):
    """An attention layer that is called with one tensor, or a recurrent layer without its states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.attends = layer, "Attention" in type(layer).__name__

    def forward(self, x_BTd: Tensor) -> Tensor:
        return self.layer(x_BTd, x_BTd, x_BTd, need_weights=False)[0] if self.attends else self.layer(x_BTd)[0]


def of_opacus(module: nn.Module) -> nn.Module:
    """The same layer in the form that Opacus needs."""
    from opacus.layers import DPLSTM, DPMultiheadAttention

    own = module.get_submodule("layer")
    sizes = (own.embed_dim, own.num_heads) if module.attends else (own.input_size, own.hidden_size)
    other = (DPMultiheadAttention if module.attends else DPLSTM)(*sizes, batch_first=True)
    other.load_state_dict({name: value.clone() for name, value in own.state_dict().items()})
    return Alone(other)


# name -> (layer, shape of one sample's input); k divides channels and lengths, 8 in the quick size
LAYERS: Mapping[str, tuple[Callable[[int], nn.Module], Callable[[int], tuple[int, ...]]]] = {
    "linear": (lambda k: nn.Linear(512 // k, 512 // k), lambda k: (512 // k,)),
    "linear-sequence": (lambda k: nn.Linear(512 // k, 512 // k), lambda k: (128 // k, 512 // k)),
    "conv1d": (lambda k: nn.Conv1d(128 // k, 128 // k, 3, padding=1), lambda k: (128 // k, 128 // k)),
    "conv2d": (lambda k: nn.Conv2d(64 // k, 64 // k, 3, padding=1), lambda k: (64 // k, 32 // k, 32 // k)),
    "conv3d": (lambda k: nn.Conv3d(32 // k, 32 // k, 3, padding=1), lambda k: (32 // k, 8, 16 // k, 16 // k)),
    "conv2d-groups": (lambda k: nn.Conv2d(128 // k, 128 // k, 3, padding=1, groups=8), lambda k: (128 // k, 16, 16)),
    "embedding": (lambda k: nn.Embedding(10000 // k, 256 // k), lambda k: (128 // k,)),
    "layer-norm": (lambda k: nn.LayerNorm(512 // k), lambda k: (128 // k, 512 // k)),
    "group-norm": (lambda k: nn.GroupNorm(4, 64 // k), lambda k: (64 // k, 32 // k, 32 // k)),
    "instance-norm": (lambda k: nn.InstanceNorm2d(64 // k, affine=True), lambda k: (64 // k, 32 // k, 32 // k)),
    "rms-norm": (lambda k: nn.RMSNorm(512 // k, eps=1e-6), lambda k: (128 // k, 512 // k)),
    "attention": (
        lambda k: Alone(nn.MultiheadAttention(256 // k, 4, batch_first=True)), lambda k: (128 // k, 256 // k),
    ),
    "lstm": (lambda k: Alone(nn.LSTM(128 // k, 128 // k, batch_first=True)), lambda k: (32 // k, 128 // k)),
}  # fmt: skip


def layer_problem(batch_size: int, *, layer: str, divide: int) -> Problem:
    """One layer with a squared error on its output, all parameters trained."""
    make, shape_of = LAYERS[layer]
    module, shape = make(divide), shape_of(divide)
    if layer == "embedding":
        inputs = torch.randint(10000 // divide, (batch_size, *shape))
    else:
        inputs = torch.randn(batch_size, *shape)
    if layer.endswith("norm"):  # at the start scale is 1 and shift 0, which hides mistakes
        for param in module.parameters():
            nn.init.normal_(param, mean=0.5, std=0.2)
    with torch.no_grad():
        targets = 3.0 * torch.randn_like(module(inputs))
    stand_in, why = of_opacus if isinstance(module, Alone) else None, "a single layer; whole models are compared"
    return Problem(module, inputs, targets, squared_error, stand_in, no_jax_model=why)


LAYER_CASES: dict[str, Case] = {
    f"layer:{name}": Case(
        f"{name}, alone", layer_problem, 32, {"layer": name, "divide": 1}, {"layer": name, "divide": 8}
    )
    for name in LAYERS
}
ALL_CASES = {**CASES, **LAYER_CASES}
