"""The table of cases: name -> what it is, how large, how to build it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.engines.conv_nets import mnist_net, plain_convnet, residual_net, vgg
from benchmarks.engines.layer_cases import LAYERS, layer_problem
from benchmarks.engines.problem import Problem
from benchmarks.engines.transformer_nets import bag_of_words, bert, decoder, gpt2, perceptron, vit

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
        "Llama-style decoder, LoRA on all linear layers", decoder, 16, {**LLAMA, "lora": True},
        {**TINY_LLAMA, "lora": True},
    ),
    "w2n": Case(
        "The decoder with LayerNorm, all parameters", decoder, 16, {**LLAMA, "norm": "layer", "lora": False},
        {**TINY_LLAMA, "norm": "layer", "lora": False},
    ),
    "w2": Case(
        "The decoder with RMSNorm, all parameters", decoder, 16, {**LLAMA, "lora": False},
        {**TINY_LLAMA, "lora": False},
    ),
    "w3": Case(
        "Convolutional network, 32x32, all parameters", plain_convnet, 64, {"widths": (64, 128, 256, 256), "image": 32},
        {"widths": (8, 16), "image": 8},
    ),
    "mnist": Case(
        "DP-MNIST network, 28x28, all parameters", mnist_net, 256, {"widths": (16, 32, 32)}, {"widths": (4, 4, 4)}
    ),
    "w4": Case("ViT-tiny, 224x224, LoRA", vit, 16, {**VIT, "lora": True}, {**TINY_VIT, "lora": True}),
    "w4f": Case("ViT-tiny, 224x224, all parameters", vit, 16, {**VIT, "lora": False}, {**TINY_VIT, "lora": False}),
    "gpt2": Case("GPT-2 of Hugging Face, tied head, all parameters", gpt2, 8, HF, TINY_HF),
    "bert": Case("BERT of Hugging Face, LoRA, classification", bert, 16, HF, TINY_HF),
    "t1024": Case(
        "Llama-style decoder, LoRA, 1024 tokens", decoder, 2, {**LLAMA, "length": 1024, "lora": True},
        {**TINY_LLAMA, "length": 32, "lora": True},
    ),
    "embed": Case(
        "Classifier on a table of 50000 embeddings, all parameters", bag_of_words, 32,
        {"vocabulary": 50000, "width": 256, "length": 64}, {"vocabulary": 100, "width": 8, "length": 6},
    ),
    "perceptron": Case("Perceptron, 3 layers, all parameters", perceptron, 64, {"width": 256}, {"width": 8}),
    "small": Case(
        "Llama-style decoder, 2 layers, 32 tokens, LoRA", decoder, 8,
        {"layers": 2, "width": 64, "hidden": 128, "length": 32, "vocabulary": 128, "norm": "rms", "lora": True},
        {**TINY_LLAMA, "lora": True},
    ),
    "resnet18": Case(
        "ResNet18, 32x32, all parameters", residual_net, 32,
        {"kind": "basic", "widths": (64, 128, 256, 512), "blocks": 2, "image": 32},
        {"kind": "basic", "widths": (8, 16), "blocks": 1, "image": 8},
    ),
    "vgg11": Case(
        "VGG11, 32x32, all parameters", vgg, 32, {"depth": 11, "image": 32, "divide": 1},
        {"depth": 11, "image": 32, "divide": 16},
    ),
    "vgg19": Case(
        "VGG19, 32x32, all parameters", vgg, 32, {"depth": 19, "image": 32, "divide": 1},
        {"depth": 19, "image": 32, "divide": 16},
    ),
    "resnext": Case(
        "ResNeXt with 8 groups, 32x32, all parameters", residual_net, 32,
        {"kind": "grouped", "widths": (64, 128, 256), "blocks": 2, "image": 32},
        {"kind": "grouped", "widths": (64, 128), "blocks": 1, "image": 8},
    ),
}  # fmt: skip

LAYER_CASES: dict[str, Case] = {
    f"layer:{name}": Case(
        f"{name}, alone", layer_problem, 32, {"layer": name, "divide": 1}, {"layer": name, "divide": 8}
    )
    for name in LAYERS
}
ALL_CASES = {**CASES, **LAYER_CASES}
