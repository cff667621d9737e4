"""Convolutional networks for 32x32 images in plain torch, with GroupNorm; each builder returns a `Problem`."""

from __future__ import annotations

from torch import Tensor, nn

from benchmarks.engines.problem import Problem, classification, images

CLASSES = 10
LIKE_W3 = "a larger network of the layers of w3, which is the one that takes part"
# Numbers are channels of 3x3 convolutions, "M" halves the image (Simonyan and Zisserman 2015, Table 1).
VGG = {
    11: (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
    19: (64, 64, "M", 128, 128, "M", *[256] * 4, "M", *[512] * 4, "M", *[512] * 4, "M"),
}


def conv(width_in: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution without bias, and GroupNorm."""
    norm = nn.GroupNorm(min(16, width // 4), width)
    return [nn.Conv2d(width_in, width, kernel, stride, kernel // 2, groups=groups, bias=False), norm]


def head(width: int) -> list[nn.Module]:
    """Mean over the image, and a linear layer."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]


def plain_convnet(batch_size: int, *, widths: tuple[int, ...], image: int) -> Problem:
    """Two convolutions a width, the second with stride 2."""
    layers: list[nn.Module] = []
    before = 3
    for width in widths:
        layers += [*conv(before, width, 3), nn.ReLU(), *conv(width, width, 3, stride=2), nn.ReLU()]
        before = width
    body = nn.Sequential(*layers, *head(before))
    return Problem(body, *images(batch_size, image, CLASSES), classification, jax_model="convnet")


def vgg(batch_size: int, *, depth: int, image: int, divide: int) -> Problem:
    """VGG with GroupNorm; `divide` makes it narrower."""
    layers: list[nn.Module] = []
    before = 3
    for entry in VGG[depth]:
        if isinstance(entry, str):
            layers.append(nn.MaxPool2d(2))
        else:
            width = entry // divide
            layers += [*conv(before, width, 3), nn.ReLU()]
            before = width
    body = nn.Sequential(*layers, *head(before))
    return Problem(body, *images(batch_size, image, CLASSES), classification, no_jax_model=LIKE_W3)


def mnist_net(batch_size: int, *, widths: tuple[int, int, int]) -> Problem:
    """The network for MNIST of Tramer and Boneh 2021, Table 9, with ReLU: two convolutions, pooled, and two layers."""
    first, second, hidden = widths
    body = nn.Sequential(
        *(nn.Conv2d(1, first, 8, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2, stride=1)),
        *(nn.Conv2d(first, second, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, stride=1)),
        *(nn.Flatten(), nn.Linear(16 * second, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)),
    )
    return Problem(body, *images(batch_size, 28, CLASSES, channels=1), classification, jax_model="mnist")


class Residual(nn.Module):
    """`relu(x + body(x))`, with a 1x1 convolution beside the body where the shape changes."""

    def __init__(self, body: list[nn.Module], shortcut: list[nn.Module]) -> None:
        super().__init__()
        self.body, self.shortcut, self.last = nn.Sequential(*body), nn.Sequential(*shortcut), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        return self.last(self.body(x) + self.shortcut(x))


def basic(before: int, width: int, stride: int) -> Residual:
    """Two 3x3 convolutions (He et al. 2016)."""
    body = [*conv(before, width, 3, stride), nn.ReLU(), *conv(width, width, 3)]
    return Residual(body, conv(before, width, 1, stride) if stride > 1 or before != width else [])


def grouped(before: int, width: int, stride: int) -> Residual:
    """1x1, 3x3 in 8 groups, 1x1 (Xie et al. 2017)."""
    inner = width // 2
    body = [
        *conv(before, inner, 1),
        nn.ReLU(),
        *conv(inner, inner, 3, stride, groups=8),
        nn.ReLU(),
        *conv(inner, width, 1),
    ]
    return Residual(body, conv(before, width, 1, stride) if stride > 1 or before != width else [])


def residual_net(batch_size: int, *, kind: str, widths: tuple[int, ...], blocks: int, image: int) -> Problem:
    """A first convolution, then `blocks` residual blocks a width; every width but the first halves the image."""
    make = {"basic": basic, "grouped": grouped}[kind]
    layers: list[nn.Module] = [*conv(3, widths[0], 3), nn.ReLU()]
    before = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(make(before, width, 2 if stage > 0 and block == 0 else 1))
            before = width
    body = nn.Sequential(*layers, *head(before))
    return Problem(body, *images(batch_size, image, CLASSES), classification, no_jax_model=LIKE_W3)
