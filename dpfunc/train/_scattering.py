"""Scattering transform of an image: moduli of Morlet wavelets at two scales, averaged; nothing in it is learnt.

The filters are those of Kymatio 0.3, J = 2 and L = 8, to which a test compares it. Kymatio itself cannot be imported
by its documented path beside SciPy 1.17. Bruna and Mallat 2013; private heads on it: Tramer and Boneh 2021.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

_SCALES, _ANGLES = 2, 8
STRIDE = 1 << _SCALES  # pixels between positions of the result
CHANNELS = 1 + _ANGLES * _SCALES + _ANGLES * _ANGLES * _SCALES * (_SCALES - 1) // 2  # 81 of each colour


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
    spectrum: Tensor = torch.fft.fft2(values).real.float()  # the imaginary part is zero
    return spectrum


@cache
def _low_pass(side: int) -> Tensor:
    """Matrix (side / 4, side) of a Gaussian average around every fourth position; the image goes round."""
    spread = 0.8 * 2 ** (_SCALES - 1)
    gap = torch.arange(side, dtype=torch.float64) - STRIDE * torch.arange(side // STRIDE)[:, None]
    periods = side * torch.arange(-2, 3)[:, None, None]
    gauss = torch.exp(-(gap + periods).square() / (2 * spread**2)).sum(0)
    average: Tensor = (gauss / (math.sqrt(2 * math.pi) * spread)).float()
    return average
