"""EfficientNet-Lite0, frozen: what it sees in an image is a function of that image alone, so it is computed once."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# kernel, expansion, channels, stride, repeats: Tan and Le 2019, EfficientNet, table 1; "Lite" has ReLU6 and no squeeze.
STAGES = (
    (3, 1, 16, 1, 1), (3, 6, 24, 2, 2), (5, 6, 40, 2, 2), (3, 6, 80, 2, 3), (5, 6, 112, 1, 3), (5, 6, 192, 2, 4),
    (3, 6, 320, 1, 1),
)  # fmt: skip
BATCH_NORM_EPS = 1e-3
PIXEL_MEAN, PIXEL_STD = 127.0, 128.0


def same_padding(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Zeros such that the output has ceil(size / stride) positions; an odd one goes to the right and below."""
    pads: list[int] = []
    for size in (x.shape[-1], x.shape[-2]):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads)


class Conv(nn.Conv2d):
    """A convolution without bias that pads as the weights expect."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve."""
        return super().forward(same_padding(x, self.kernel_size[0], self.stride[0]))


class Block(nn.Module):
    """Expand, convolve each channel, project; a shortcut where the shape stays. The names are those of the file."""

    def __init__(self, inputs: int, outputs: int, kernel: int, expansion: int, stride: int) -> None:
        super().__init__()
        width = inputs * expansion
        if expansion != 1:
            self._expand_conv = Conv(inputs, width, 1)
            self._bn0 = nn.BatchNorm2d(width, eps=BATCH_NORM_EPS)
        self._depthwise_conv = Conv(width, width, kernel, stride, groups=width)
        self._bn1 = nn.BatchNorm2d(width, eps=BATCH_NORM_EPS)
        self._project_conv = Conv(width, outputs, 1)
        self._bn2 = nn.BatchNorm2d(outputs, eps=BATCH_NORM_EPS)
        self.expands, self.shortcut = expansion != 1, stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """One inverted bottleneck."""
        y = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.shortcut else y


class EfficientNetLite0(nn.Module):
    """The network of the downloaded weights, with its classifier, which only a test uses."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = Conv(3, 32, 3, 2)
        self._bn0 = nn.BatchNorm2d(32, eps=BATCH_NORM_EPS)
        blocks, inputs = [], 32
        for kernel, expansion, channels, stride, repeats in STAGES:
            for number in range(repeats):
                blocks.append(Block(inputs, channels, kernel, expansion, 1 if number else stride))
                inputs = channels
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = Conv(inputs, 1280, 1)
        self._bn1 = nn.BatchNorm2d(1280, eps=BATCH_NORM_EPS)
        self._fc = nn.Linear(1280, 1000)

    def stem(self, pixels: Tensor) -> Tensor:
        """The first convolution (B, 32, H / 2, W / 2) of pixels (B, 3, H, W) in 0..255."""
        return F.relu6(self._bn0(self._conv_stem((pixels - PIXEL_MEAN) / PIXEL_STD)))

    def maps(self, pixels: Tensor, blocks: tuple[int, ...]) -> list[Tensor]:
        """Feature maps (B, C, h, w) after some blocks."""
        x, found = self.stem(pixels), []
        for number, block in enumerate(self._blocks[: max(blocks) + 1]):
            x = block(x)
            if number in blocks:
                found.append(x)
        return found

    def forward(self, pixels: Tensor) -> Tensor:
        """ImageNet logits (B, 1000)."""
        (x,) = self.maps(pixels, (len(self._blocks) - 1,))
        return self._fc(F.relu6(self._bn1(self._conv_head(x))).mean((2, 3)))


def load_vision(path: Path) -> EfficientNetLite0:
    """The pretrained network in evaluation mode: BatchNorm uses its stored statistics. Every key of the file fits."""
    model = EfficientNetLite0()
    model.load_state_dict(torch.load(path, weights_only=True), strict=True)
    return model.eval().requires_grad_(False)


FEATURE_BLOCK = 5  # stride 16, 80 channels; its output is that of a BatchNorm, so ImageNet's statistics normalise it
INPUT_SIZE = 128  # images of 64 x 64 are enlarged
GRID = 2  # visual tokens are the means over the fields of a GRID x GRID grid


def image_features(model: EfficientNetLite0, pixels: Tensor) -> Tensor:
    """Features (n, GRID * GRID, 80), float16, of images (n, 3, H, W): each image alone, nothing of the others,
    but for rounding, which may depend on how many are computed at once.

    A channel is scaled by its BatchNorm, less its mean over plain light images, which we draw; then all features of an
    image get a common length, so that a small object counts as much as a large one. No private image has a part in it.
    """
    empty = _grid(model, plain_images()).mean(0)
    found = []
    for chunk in pixels.split(64):
        x_BVc = _grid(model, chunk) - empty
        found.append((x_BVc / x_BVc.mean(1).norm(dim=1).clamp(min=1e-3)[:, None, None]).half())
    return torch.cat(found)


def plain_images(count: int = 64) -> Tensor:
    """Images with nothing on them, in light colours."""
    colours = torch.randint(224, 256, (count, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return colours[:, :, None, None].expand(-1, -1, 64, 64)


@torch.no_grad()
def _grid(model: EfficientNetLite0, pixels: Tensor) -> Tensor:
    enlarged = F.interpolate(pixels.float(), size=(INPUT_SIZE, INPUT_SIZE), mode="bilinear", align_corners=False)
    (x_BChw,) = model.maps(enlarged, (FEATURE_BLOCK,))
    norm = model._blocks[FEATURE_BLOCK]._bn2
    x_BChw = (x_BChw - norm.bias[:, None, None]) / norm.weight[:, None, None]
    return F.adaptive_avg_pool2d(x_BChw, GRID).flatten(2).transpose(1, 2)
