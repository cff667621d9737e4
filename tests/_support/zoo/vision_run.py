"""torchvision and timm models against the loop over single samples: one line of JSON for each comparison.

Run in a process of its own, with the folder of torchvision and timm first on PYTHONPATH: the compiled part of torchvision
is made for another build of torch. Without it torchvision is whole but for its box operations.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module

import torch
from models import Case
from torch import nn
from torch.nn import functional as F

import dpfunc
from dpfunc.functional import BIASES, functionalize
from dpfunc.lora import attach
from dpfunc.rng import insecure_key
from zoo.parity import ENGINES, differences, nonzero_b, roughen, truth_of, without_gradient

CLASSES, BATCH = 3, 3


@dataclass(frozen=True)
class Model:
    """How to make a model, the layers with adapters as a regular expression, and the height and width of images."""

    build: Callable[[], nn.Module]
    lora: str
    size: int = 32


def of_torchvision(name, *args, **options):
    """A class of torchvision.models."""
    return getattr(import_module("torchvision.models"), name)(*args, num_classes=CLASSES, **options)


def of_timm(name, **changes):
    return import_module("timm").create_model(name, num_classes=CLASSES, **changes)


def resnet18():
    """Without its last stage, three quarters of its parameters."""
    model = of_torchvision("resnet18")
    model.layer4, model.fc = nn.Identity(), nn.Linear(256, CLASSES)
    return model


def resnext():
    bottleneck = import_module("torchvision.models.resnet").Bottleneck
    return of_torchvision("ResNet", bottleneck, [1, 1, 1, 1], groups=8, width_per_group=4)


def vgg11():
    """A quarter as wide, and with a small classifier in place of 120 million parameters."""
    vgg = import_module("torchvision.models.vgg")
    with torch.device("meta"):
        model = vgg.VGG(nn.Identity())
    model.features = vgg.make_layers([width if width == "M" else width // 4 for width in vgg.cfgs["A"]])
    model.classifier = nn.Sequential(nn.Linear(128 * 49, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    return model


def convnext():
    block = import_module("torchvision.models.convnext").CNBlockConfig
    widths = ((16, 24), (24, 32), (32, 48), (48, None))
    return of_torchvision("ConvNeXt", [block(before, after, 1) for before, after in widths])


def efficientnet():
    """The first five stages of efficientnet_b0, with one block in each: all of it amplifies the rounding of float32."""
    block = import_module("torchvision.models.efficientnet").MBConvConfig
    stages = ((1, 3, 1, 32, 16), (6, 3, 2, 16, 24), (6, 5, 2, 24, 40), (6, 3, 2, 40, 80), (6, 5, 1, 80, 112))
    return of_torchvision("EfficientNet", [block(*stage, 1) for stage in stages], 0.2, last_channel=320)


def crossvit():
    """Two scales, a block of cross attention, and one more of its own for the larger."""
    return import_module("timm.models.crossvit").CrossVit(
        img_size=60, img_scale=(1.0, 0.8), patch_size=(12, 16), embed_dim=(24, 48), depth=((1, 2, 0),),
        num_heads=(3, 3), mlp_ratio=(4.0, 4.0, 1.0), num_classes=CLASSES,
    )  # fmt: skip


SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3}
IN_TIMM = r"qkv|\.proj$|fc[12]"
DENSE = {"growth_rate": 8, "block_config": (2, 2, 2, 2), "num_init_features": 16}
SWIN = {"depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
VIT = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
MODELS = {
    "torchvision resnet18": Model(resnet18, r"conv[12]$|downsample\.0|fc"),
    "torchvision resnext": Model(resnext, r"conv[13]$|fc"),
    "torchvision vgg11": Model(vgg11, r"features|classifier"),
    "torchvision densenet": Model(partial(of_torchvision, "DenseNet", **DENSE), r"conv|classifier"),
    "torchvision convnext": Model(convnext, r"block\.[35]$|features\.\d\.1$|classifier"),
    "torchvision efficientnet": Model(efficientnet, r"fc[12]$|classifier|features\.[06]\.0$"),
    "torchvision swin": Model(
        partial(of_torchvision, "SwinTransformer", [4, 4], 16, **SWIN), r"qkv|proj|mlp\.[03]|reduction"
    ),
    # with nn.MultiheadAttention
    "torchvision vit": Model(
        partial(of_torchvision, "VisionTransformer", 32, 8, **VIT), r"conv_proj|out_proj|mlp\.[03]|head"
    ),
    "timm vit_tiny": Model(partial(of_timm, "vit_tiny_patch16_224", **SMALL), IN_TIMM),
    "timm deit_tiny": Model(partial(of_timm, "deit_tiny_distilled_patch16_224", **SMALL), IN_TIMM),
    "timm beit": Model(partial(of_timm, "beit_base_patch16_224", **SMALL), IN_TIMM),
    "timm crossvit": Model(crossvit, IN_TIMM, size=60),
    "timm xcit_nano": Model(partial(of_timm, "xcit_nano_12_p16_224", img_size=32, depth=2), IN_TIMM),
}
CASES = [(name, choice) for name in MODELS for choice in ("full", "LoRA", "biases")]
# The loop is compared elsewhere; in float32 the default engine alone.
COMPARED = [("auto", "float32"), *((engine, "float64") for engine in ("auto", "vmap", "ghost"))]


@cache
def module_of(name):
    """A group of the GroupNorms has several channels: with one channel and one pixel it would be a constant."""
    torch.manual_seed(0)
    return roughen(dpfunc.functional.replace_batchnorm(MODELS[name].build(), max_groups=4), 0.02).eval()


def make(name, choice, dtype):
    model, module = MODELS[name], copy.deepcopy(module_of(name)).to(dtype)
    if choice == "LoRA":
        adapter = attach(module, insecure_key(0), targets=model.lora, rank=2, alpha=4)
        forward, params = adapter.forward, nonzero_b(adapter.params)
    else:
        forward, params = functionalize(module, BIASES if choice == "biases" else None)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 3, model.size, model.size, generator=generator, dtype=torch.float64).to(dtype)
    batch = {"x": x, "y": torch.randint(CLASSES, (BATCH,), generator=generator)}
    return Case(lambda p, b: F.cross_entropy(forward(p, b["x"]), b["y"], reduction="none"), params, batch)


def main():
    # torchvision registers abstract versions of operations that its compiled part defines: here only their schemas
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name, choice in CASES:
        made = {dtype: make(name, choice, getattr(torch, dtype)) for dtype in ("float32", "float64")}
        truths = {dtype: truth_of(case) for dtype, case in made.items()}
        for engine, dtype in COMPARED:
            case, truth = made[dtype], truths[dtype]
            try:
                found = {"differences": differences(ENGINES[engine](), case, truth)}
            except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            said = {"case": [name, choice, engine, dtype], "unused": without_gradient(truth)}
            print(json.dumps({**said, **found}), flush=True)
    del library  # the schemas live as long as it does


if __name__ == "__main__":
    main()
