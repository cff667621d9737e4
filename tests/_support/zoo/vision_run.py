"""torchvision and timm models against the loop over single samples: one line of JSON for each comparison.

Run in a process of its own, with the folder of torchvision and timm first on PYTHONPATH: the compiled part of torchvision
is made for another build of torch. Without it torchvision is whole but for its box operations.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

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
    """A model and what of it is trained.

    Args:
        build: makes the module. lora: regular expression for the layers with adapters.
        size: height and width of the images.
        unused: regular expression for the parameters that may have no gradient.
    """

    build: Callable[[], nn.Module]
    lora: str
    size: int = 32
    unused: str = "$^"


def import_torchvision():
    """torchvision registers abstract versions of operations that its compiled part defines: here only their schemas."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm
    import torchvision

    return library, timm, torchvision


def resnet18():
    """Without its last stage, three quarters of its parameters."""
    from torchvision.models import resnet18

    model = resnet18()
    model.layer4, model.fc = nn.Identity(), nn.Linear(256, CLASSES)
    return model


def resnext():
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1], groups=8, width_per_group=4, num_classes=CLASSES)


def vgg11():
    """A quarter as wide, and with a small classifier in place of 120 million parameters."""
    from torchvision.models.vgg import VGG, cfgs, make_layers

    with torch.device("meta"):
        model = VGG(nn.Identity())
    model.features = make_layers([width if width == "M" else width // 4 for width in cfgs["A"]])
    model.classifier = nn.Sequential(nn.Linear(128 * 49, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    return model


def densenet():
    from torchvision.models import DenseNet

    return DenseNet(growth_rate=8, block_config=(2, 2, 2, 2), num_init_features=16, num_classes=CLASSES)


def convnext():
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    widths = ((16, 24), (24, 32), (32, 48), (48, None))
    return ConvNeXt([CNBlockConfig(before, after, 1) for before, after in widths], num_classes=CLASSES)


def efficientnet():
    """The first five stages of efficientnet_b0, with one block in each: all of it amplifies the rounding of float32."""
    from torchvision.models import EfficientNet
    from torchvision.models.efficientnet import MBConvConfig

    stages = ((1, 3, 1, 32, 16), (6, 3, 2, 16, 24), (6, 5, 2, 24, 40), (6, 3, 2, 40, 80), (6, 5, 1, 80, 112))
    return EfficientNet([MBConvConfig(*stage, 1) for stage in stages], 0.2, num_classes=CLASSES, last_channel=320)


def swin():
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=CLASSES)


def vision_transformer():
    """torchvision's, with nn.MultiheadAttention."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=CLASSES)


def crossvit():
    """Two scales, a block of cross attention, and one more of its own for the larger."""
    from timm.models.crossvit import CrossVit

    return CrossVit(
        img_size=60, img_scale=(1.0, 0.8), patch_size=(12, 16), embed_dim=(24, 48), depth=((1, 2, 0),), num_heads=(3, 3),
        mlp_ratio=(4.0, 4.0, 1.0), num_classes=CLASSES,
    )  # fmt: skip


def timm_model(name, **changes):
    def build():
        import timm

        return timm.create_model(name, num_classes=CLASSES, **changes)

    return build


SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3}
IN_TIMM = r"qkv|\.proj$|fc[12]"
MODELS = {
    "torchvision resnet18": Model(resnet18, r"conv[12]$|downsample\.0|fc"),
    "torchvision resnext": Model(resnext, r"conv[13]$|fc"),
    "torchvision vgg11": Model(vgg11, r"features|classifier"),
    "torchvision densenet": Model(densenet, r"conv|classifier"),
    "torchvision convnext": Model(convnext, r"block\.[35]$|features\.\d\.1$|classifier"),
    "torchvision efficientnet": Model(efficientnet, r"fc[12]$|classifier|features\.[06]\.0$"),
    "torchvision swin": Model(swin, r"qkv|proj|mlp\.[03]|reduction"),
    "torchvision vit": Model(vision_transformer, r"conv_proj|out_proj|mlp\.[03]|head"),
    "timm vit_tiny": Model(timm_model("vit_tiny_patch16_224", **SMALL), IN_TIMM),
    "timm deit_tiny": Model(timm_model("deit_tiny_distilled_patch16_224", **SMALL), IN_TIMM),
    "timm beit": Model(timm_model("beit_base_patch16_224", **SMALL), IN_TIMM),
    "timm crossvit": Model(crossvit, IN_TIMM, size=60),
    "timm xcit_nano": Model(timm_model("xcit_nano_12_p16_224", img_size=32, depth=2), IN_TIMM),
}
CHOICES = ("full", "LoRA", "biases")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
CASES = [(name, choice) for name in MODELS for choice in CHOICES]


def images(size, dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 3, size, size, generator=generator, dtype=torch.float64).to(dtype)
    return {"x": x, "y": torch.randint(CLASSES, (BATCH,), generator=generator)}


@cache
def module_of(name):
    """A group of the GroupNorms has several channels: with one channel and one pixel it would be a constant."""
    torch.manual_seed(0)
    return roughen(dpfunc.replace_batchnorm(MODELS[name].build(), max_groups=4), 0.02).eval()


def make(name, choice, dtype):
    model, module = MODELS[name], copy.deepcopy(module_of(name)).to(dtype)
    if choice == "LoRA":
        adapter = attach(module, insecure_key(0), targets=model.lora, rank=2, alpha=4)
        forward, params = adapter.forward, nonzero_b(adapter.params)
    else:
        forward, params = functionalize(module, BIASES if choice == "biases" else None)
    loss_fn = lambda p, b: F.cross_entropy(forward(p, b["x"]), b["y"], reduction="none")
    return Case(loss_fn, params, images(model.size, dtype))


def compare(name, choice, dtype):
    case = make(name, choice, DTYPES[dtype])
    start = time.perf_counter()
    truth = truth_of(case)
    said = {"model": name, "choice": choice, "dtype": dtype}
    yield {**said, "engine": None, "seconds": time.perf_counter() - start, "unused": without_gradient(truth)}
    for engine in ENGINES:
        start = time.perf_counter()
        try:
            found = {"differences": differences(ENGINES[engine](), case, truth)}
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        yield {**said, "engine": engine, "seconds": time.perf_counter() - start, **found}


def main(wanted):
    library = import_torchvision()
    for name, choice in CASES:
        for dtype in DTYPES:
            if not wanted or name in wanted:
                for line in compare(name, choice, dtype):
                    print(json.dumps(line), flush=True)
    del library  # the schemas live as long as it does


if __name__ == "__main__":
    main(sys.argv[1:])
