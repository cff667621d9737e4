"""Features of an image, from it alone: by a scattering transform (Bruna and Mallat 2013; private heads on it: Tramer
and Boneh 2021) or by a frozen encoder.

May import: its folder, hf, metrics and below. Privacy depends on it: yes.

Morlet wavelets at two scales, averaged; nothing is learnt. The filters are those of Kymatio 0.3, J = 2 and L = 8, to
which a test compares them; Kymatio itself cannot be imported by its documented path beside SciPy 1.17.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from einops import rearrange, reduce
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModel

from dpfunc.hf.vision_language._images import opened

_PER_GROUP = 3  # channels that are normalised together in each image: 27 groups of 81, as Tramer and Boneh have it
_SCALES, _ANGLES = 2, 8
STRIDE = 1 << _SCALES  # pixels between positions of the result
CHANNELS = 1 + _ANGLES * _SCALES + _ANGLES * _ANGLES * _SCALES * (_SCALES - 1) // 2  # 81 of each colour


@dataclass(frozen=True)
class ScatteringFeatures:
    """Scattering coefficients of an image, each group of channels with mean 0, and variance 1 or less if faint."""

    # tests/train/test_features.py::test_an_image_is_encoded_alone

    height: int
    width: int
    grey: bool = False

    @property
    def size(self) -> int:
        """Number of features of an image: channels at each place of the reduced grid."""
        return (1 if self.grey else 3) * CHANNELS * (self.height // STRIDE) * (self.width // STRIDE)

    def encode(self, image: Any) -> Tensor:
        """Features (size,) of a file or a picture."""
        picture = opened(image, (self.height, self.width)).convert("L" if self.grey else "RGB")
        flat = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).float() / 255
        found_CSHW = scattering(rearrange(flat, "(h w c) -> c h w", h=self.height, w=self.width))
        x_BSHW = rearrange(found_CSHW, "c s h w -> 1 (c s) h w")
        return F.group_norm(x_BSHW, x_BSHW.shape[1] // _PER_GROUP).flatten()


@dataclass(frozen=True)
class EncoderFeatures:
    """Pooled features of a frozen image encoder of Transformers in evaluation mode, normalised within the image."""

    model: Any = field(repr=False)
    processor: Any = field(repr=False)

    @property
    def size(self) -> int:
        """Number of features, measured on a blank image."""
        from PIL import Image

        return len(self.encode(Image.new("RGB", (64, 64))))

    @torch.no_grad()
    def encode(self, image: Any) -> Tensor:
        """Features (size,) of a file or a picture: the pooled output; without one the mean over positions."""
        pixels = self.processor(images=[opened(image, None)], return_tensors="pt")["pixel_values"]
        output: Any = self.model(pixel_values=pixels)
        pooled = getattr(output, "pooler_output", None)
        if pooled is None:
            last = output.last_hidden_state
            pooled = reduce(last, "b t d -> b d" if last.dim() == 3 else "b d h w -> b d", "mean")
        return F.layer_norm(pooled.float().flatten(), (pooled.numel(),))


def load_encoder(path: str, options: Mapping[str, Any]) -> EncoderFeatures:
    """The encoder of single images in a folder, without a head, and its processor; nothing in it is trained."""
    return EncoderFeatures(
        AutoModel.from_pretrained(path, dtype=torch.float32, **options),
        AutoImageProcessor.from_pretrained(path, **options),
    )


def scattering(image_CHW: Tensor) -> Tensor:
    """Scattering coefficients (C, 81, H / 4, W / 4) of one image.

        x * phi,  |x * psi_i| * phi,  ||x * psi_i| * psi_j| * phi  with the scale of j above that of i

    Args:
        image_CHW: pixels, H and W multiples of 4, at least 8.

    >>> scattering(torch.ones(1, 8, 8)).shape
    torch.Size([1, 81, 2, 2])
    """
    x_CHW = F.pad(image_CHW, [STRIDE] * 4, mode="reflect")
    fine, coarse = _wavelets(*x_CHW.shape[1:])
    spectrum = torch.fft.fft2(x_CHW)[:, None]
    first, second = (torch.fft.ifft2(spectrum * psi).abs() for psi in (fine, coarse))
    higher = torch.fft.ifft2(torch.fft.fft2(first)[:, :, None] * coarse).abs().flatten(1, 2)
    rows, columns = (_low_pass(side) for side in x_CHW.shape[1:])
    moduli = torch.cat([x_CHW[:, None], first, second, higher], 1)
    return (rows @ moduli @ columns.mT)[..., 1:-1, 1:-1]


@cache
def _wavelets(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Spectra (8, H, W) of the wavelets of the fine and of the coarse scale, one for each angle."""
    made = []
    for scale in range(_SCALES):
        spread, frequency = 0.8 * 2**scale, 0.75 * math.pi / 2**scale
        angles = [(_ANGLES // 2 - 1 - number) * math.pi / _ANGLES for number in range(_ANGLES)]
        made.append(torch.stack([_morlet(height, width, spread, angle, frequency) for angle in angles]))
    return made[0], made[1]


def _morlet(height: int, width: int, spread: float, angle: float, frequency: float) -> Tensor:
    """Spectrum of `g(u) (exp(i xi u) - beta)`, with mean 0; g is a Gaussian that is 2 times as long as wide."""
    slant = 4.0 / _ANGLES
    wave = torch.zeros(height, width, dtype=torch.complex128)
    envelope = torch.zeros_like(wave)
    for shift in torch.cartesian_prod(torch.arange(-2, 3), torch.arange(-2, 3)).tolist():  # an image has no end
        y, x = torch.meshgrid(
            torch.arange(height, dtype=torch.float64) + shift[0] * height,
            torch.arange(width, dtype=torch.float64) + shift[1] * width, indexing="ij",
        )  # fmt: skip
        along, across = y * math.cos(angle) + x * math.sin(angle), x * math.cos(angle) - y * math.sin(angle)
        gauss = torch.exp(-(along.square() + (slant * across).square()) / (2 * spread**2))
        envelope += gauss
        wave += gauss * torch.exp(1j * frequency * along)
    values = (wave - wave.sum() / envelope.sum() * envelope) * slant / (2 * math.pi * spread**2)
    return cast(Tensor, torch.fft.fft2(values).real.float())  # the imaginary part is zero


@cache
def _low_pass(side: int) -> Tensor:
    """Matrix (side / 4, side) of a Gaussian average around every fourth position; the image goes round."""
    spread = 0.8 * 2 ** (_SCALES - 1)
    gap = torch.arange(side, dtype=torch.float64) - STRIDE * torch.arange(side // STRIDE)[:, None]
    periods = side * torch.arange(-2, 3)[:, None, None]
    gauss = torch.exp(-(gap + periods).square() / (2 * spread**2)).sum(0)
    return cast(Tensor, (gauss / (math.sqrt(2 * math.pi) * spread)).float())
