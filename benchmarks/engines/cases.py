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


def case(title: str, build: Callable[..., Problem], batch_size: int, full: Any, quick: Any, **both: Any) -> Case:
    """A case, and what both sizes have."""
    return Case(title, build, batch_size, {**full, **both}, {**quick, **both})


LLAMA = {"layers": 6, "width": 384, "hidden": 1024, "length": 128, "vocabulary": 8000, "norm": "rms", "lora": True}
TINY_LLAMA = {"layers": 2, "width": 16, "hidden": 32, "length": 8, "vocabulary": 50, "norm": "rms", "lora": True}
SMALL_LLAMA = {**LLAMA, "layers": 2, "width": 64, "hidden": 128, "length": 32, "vocabulary": 128}
VIT = {"image": 224, "patch": 16, "width": 192, "layers": 6}
TINY_VIT = {"image": 16, "patch": 8, "width": 16, "layers": 2}
HF = {"layers": 6, "width": 384, "length": 128, "vocabulary": 8000}
TINY_HF = {"layers": 2, "width": 16, "length": 8, "vocabulary": 50}
BAG, TINY_BAG = {"vocabulary": 50000, "width": 256, "length": 64}, {"vocabulary": 100, "width": 8, "length": 6}
RESNET = {"widths": (64, 128, 256, 512), "blocks": 2, "image": 32}
RESNEXT = {"widths": (64, 128, 256), "blocks": 2, "image": 32}

CASES: dict[str, Case] = {
    "w1": case("Llama-style decoder, LoRA on all linear layers", nets.decoder, 16, LLAMA, TINY_LLAMA),
    "w2n": case("The decoder with LayerNorm, all parameters", nets.decoder, 16, LLAMA, TINY_LLAMA, norm="layer",
        lora=False),
    "w2": case("The decoder with RMSNorm, all parameters", nets.decoder, 16, LLAMA, TINY_LLAMA, lora=False),
    "w3": case("Convolutional network, 32x32, all parameters", nets.plain_convnet, 64,
        {"widths": (64, 128, 256, 256), "image": 32}, {"widths": (8, 16), "image": 8}),
    "mnist": case("DP-MNIST network, 28x28, all parameters", nets.mnist_net, 256, {"widths": (16, 32, 32)},
        {"widths": (4, 4, 4)}),
    "w4": case("ViT-tiny, 224x224, LoRA", nets.vit, 16, VIT, TINY_VIT, lora=True),
    "w4f": case("ViT-tiny, 224x224, all parameters", nets.vit, 16, VIT, TINY_VIT, lora=False),
    "gpt2": case("GPT-2 of Hugging Face, tied head, all parameters", nets.gpt2, 8, HF, TINY_HF),
    "bert": case("BERT of Hugging Face, LoRA, classification", nets.bert, 16, HF, TINY_HF),
    "t1024": case("Llama-style decoder, LoRA, 1024 tokens", nets.decoder, 2, {**LLAMA, "length": 1024},
        {**TINY_LLAMA, "length": 32}),
    "embed": case("Classifier on a table of 50000 embeddings, all parameters", nets.bag_of_words, 32, BAG, TINY_BAG),
    "perceptron": case("Perceptron, 3 layers, all parameters", nets.perceptron, 64, {"width": 256}, {"width": 8}),
    "small": case("Llama-style decoder, 2 layers, 32 tokens, LoRA", nets.decoder, 8, SMALL_LLAMA, TINY_LLAMA),
    "resnet18": case("ResNet18, 32x32, all parameters", nets.residual_net, 32, RESNET,
        {"widths": (8, 16), "blocks": 1, "image": 8}, kind="basic"),
    "vgg11": case("VGG11, 32x32, all parameters", nets.vgg, 32, {"divide": 1}, {"divide": 16}, depth=11, image=32),
    "vgg19": case("VGG19, 32x32, all parameters", nets.vgg, 32, {"divide": 1}, {"divide": 16}, depth=19, image=32),
    "resnext": case("ResNeXt with 8 groups, 32x32, all parameters", nets.residual_net, 32, RESNEXT,
        {"widths": (64, 128), "blocks": 1, "image": 8}, kind="grouped"),
}  # fmt: skip


BILLION = {**LLAMA, "layers": 16, "width": 2048, "hidden": 5632, "length": 512, "vocabulary": 32000}
# Sizes for one GPU: `python -m benchmarks.gpu`.
GPU_CASES: dict[str, Case] = {
    "llama-1b": case("Llama-style decoder of 950 M parameters, 512 tokens, LoRA", nets.decoder, 8, BILLION, TINY_LLAMA),
    "gpt2-124m": case("GPT-2 of Hugging Face, 124 M parameters, 256 tokens, all trained", nets.gpt2, 8,
        {"layers": 12, "width": 768, "length": 256, "vocabulary": 50257}, TINY_HF),
    "vit-b": case("ViT-B/16, 224x224, all parameters", nets.vit, 16, {**VIT, "width": 768, "layers": 12}, TINY_VIT,
        lora=False),
    "resnet18-256": case("ResNet18, 32x32, 256 samples, all parameters", nets.residual_net, 256, RESNET,
        {"widths": (8, 16), "blocks": 1, "image": 8}, kind="basic"),
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
    "attention": (lambda k: Alone(nn.MultiheadAttention(256 // k, 4, batch_first=True)),
        lambda k: (128 // k, 256 // k)),
    "lstm": (lambda k: Alone(nn.LSTM(128 // k, 128 // k, batch_first=True)), lambda k: (32 // k, 128 // k)),
}  # fmt: skip


def layer_problem(batch_size: int, *, layer: str, divide: int) -> Problem:
    """One layer with a squared error on its output, all parameters trained."""
    make, shape_of = LAYERS[layer]
    module, shape = make(divide), (batch_size, *shape_of(divide))
    inputs = torch.randint(10000 // divide, shape) if layer == "embedding" else torch.randn(*shape)
    if layer.endswith("norm"):  # at the start scale is 1 and shift 0, which hides mistakes
        for param in module.parameters():
            nn.init.normal_(param, mean=0.5, std=0.2)
    with torch.no_grad():
        targets = 3.0 * torch.randn_like(module(inputs))
    stand_in, why = of_opacus if isinstance(module, Alone) else None, "a single layer; whole models are compared"
    return Problem(module, inputs, targets, squared_error, stand_in, no_jax_model=why)


LAYER_CASES = {
    f"layer:{name}": case(f"{name}, alone", layer_problem, 32, {"divide": 1}, {"divide": 8}, layer=name)
    for name in LAYERS
}
ALL_CASES = {**CASES, **LAYER_CASES, **GPU_CASES}
