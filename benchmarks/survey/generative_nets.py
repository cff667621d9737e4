"""Nets that make things: autoencoders, diffusion, flows, and nets of sounds and of equations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.survey.case import BATCH, Subject, images, mean_square, plain_net, randn

Loss = Callable[..., Tensor]


class UNet(nn.Module):
    """Two levels, optionally with a time."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, stride=2)
        self.norm, self.time = nn.GroupNorm(2, 8), nn.Linear(1, 8)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, t_B: Tensor | None = None) -> Tensor:
        skip = F.silu(self.down(x))
        hidden = self.norm(self.middle(skip))
        if t_B is not None:
            hidden = hidden + self.time(t_B[:, None])[..., None, None]
        return self.out(torch.cat((skip, F.silu(self.up(F.silu(hidden)))), 1))


class Autoencoder(nn.Module):
    """Variational; `noisy` draws the code."""

    def __init__(self, noisy: bool = True) -> None:
        super().__init__()
        self.encoder, self.decoder, self.noisy = nn.Linear(12, 8), nn.Linear(4, 12), noisy

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        mean, log_var = self.encoder(x).chunk(2, 1)
        noise = torch.randn_like(mean) if noise is None else noise
        rebuilt = self.decoder(mean + noise * (0.5 * log_var).exp())
        return (rebuilt - x).square().sum(1) - 0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1)


class Quantised(nn.Module):
    """The nearest of eight codes, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = nn.Linear(12, 4), nn.Embedding(8, 4), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        nearest = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        through = z + (nearest - z).detach()
        return (self.decoder(through) - x).square().mean(1) + (nearest - z.detach()).square().mean(1)


class Flow(nn.Module):
    """Affine couplings; the loss is minus the log likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 12)) for _ in range(2))
        self.log_scale = nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        total = self.log_scale.sum().expand(len(x))
        x = x * self.log_scale.exp()
        for part in self.parts:
            left, right = x.chunk(2, 1)
            shift, scale = part(left).chunk(2, 1)
            scale = torch.tanh(scale)
            x, total = torch.cat((right * scale.exp() + shift, left), 1), total + scale.sum(1)
        return 0.5 * x.square().sum(1) - total


class Masked(nn.Module):
    """An autoregressive net: a mask on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.register_buffer("mask", torch.tril(torch.ones(12, 12), -1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(F.linear(x, self.first.weight * self.mask, self.first.bias))
        return F.linear(hidden, self.second.weight * self.mask, self.second.bias)


class Ode(nn.Module):
    """Runge-Kutta with fixed steps."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 12))

    def forward(self, x: Tensor) -> Tensor:
        step = 0.25
        for _ in range(4):
            a = self.field(x)
            b = self.field(x + 0.5 * step * a)
            c = self.field(x + 0.5 * step * b)
            x = x + step / 6 * (a + 2 * b + 2 * c + self.field(x + step * c))
        return x


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, 8, 1)
        self.gates = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))
        self.outs = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
        self.end = nn.Conv1d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden, skips = self.start(x), torch.zeros(())
        for i, (gate, out) in enumerate(zip(self.gates, self.outs, strict=True)):
            signal, door = gate(F.pad(hidden, (2**i, 0))).chunk(2, 1)
            part = out(torch.tanh(signal) * torch.sigmoid(door))
            hidden, skips = hidden + part, skips + part
        return self.end(F.relu(skips))


class Pinn(nn.Module):
    """A net of coordinates with sines."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(torch.sin(3 * x))


class Mixer(nn.Module):
    """Tokens and channels in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.tokens, self.channels = nn.Conv2d(3, 8, 4, 4), nn.Linear(4, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.patch(x).flatten(2)
        hidden = hidden + F.gelu(self.tokens(hidden))
        return self.channels(hidden.transpose(1, 2)).mean(1)


class Fourier(nn.Module):
    """A layer in the frequencies, complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(4, 5, 2))
        self.line = nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x) * torch.view_as_complex(self.weight)
        return torch.fft.irfft(waves, n=x.shape[-1]) + self.line(x)


class Gaussian(nn.Module):
    """A kernel machine: distances to learned centres."""

    def __init__(self) -> None:
        super().__init__()
        self.centres, self.widths = nn.Parameter(torch.randn(5, 12)), nn.Parameter(torch.zeros(5))
        self.out = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((-torch.cdist(x, self.centres).square() * self.widths.exp()).exp())


class Tuned(nn.Module):
    """Features of an image scaled and shifted by another input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.film = nn.Conv2d(3, 8, 3), nn.Linear(12, 16)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        scale, shift = self.film(z)[..., None, None].chunk(2, 1)
        return (1 + scale) * self.conv(x) + shift


def diffusion(call: Loss, b: Mapping[str, Tensor]) -> Tensor:
    """Times and noise are drawn inside of the loss."""
    t_B = torch.rand(len(b["x"]))
    noise = torch.randn_like(b["x"])
    noisy = (1 - t_B)[:, None, None, None] * b["x"] + t_B[:, None, None, None] * noise
    return mean_square(call(noisy, t_B) - noise)


def given_diffusion(call: Loss, b: Mapping[str, Tensor]) -> Tensor:
    """Times and noise are part of the batch."""
    t_B111 = b["t"][:, None, None, None]
    return mean_square(call((1 - t_B111) * b["x"] + t_B111 * b["noise"], b["t"]) - b["noise"])


def own(call: Loss, b: Mapping[str, Tensor]) -> Tensor:
    return call(b["x"])


def square(call: Loss, b: Mapping[str, Tensor]) -> Tensor:
    return mean_square(call(b["x"]) - 0.1)


def net(make: Callable[[], nn.Module], loss: Any, **batch: Tensor) -> Callable[[], Subject]:
    return plain_net(make, loss, **batch)


X = randn(BATCH, 12)
NETS: dict[str, Callable[[], Subject]] = {
    "U-Net": net(UNet, square, x=images(8)),
    "diffusion": net(UNet, diffusion, x=images(8)),
    "diffusion, draws in the batch": net(
        UNet, given_diffusion, x=images(8), noise=randn(BATCH, 3, 8, 8, seed=7), t=randn(BATCH, seed=8).sigmoid()
    ),
    "VAE": net(Autoencoder, own, x=X),
    "VAE, draws in the batch": net(
        Autoencoder, lambda call, b: call(b["x"], b["noise"]), x=X, noise=randn(BATCH, 4, seed=9)
    ),
    "VQ-VAE": net(Quantised, own, x=X),
    "flow": net(Flow, own, x=X),
    "masked autoregressive": net(Masked, square, x=X),
    "neural ODE": net(Ode, square, x=X),
    "WaveNet": net(WaveNet, square, x=randn(BATCH, 1, 16)),
    "coordinates": net(Pinn, square, x=randn(BATCH, 9, 2)),
    "MLP-Mixer": net(Mixer, square, x=images(8)),
    "Fourier layer": net(Fourier, square, x=randn(BATCH, 4, 8)),
    "radial basis": net(Gaussian, square, x=X),
    "FiLM": net(Tuned, lambda call, b: mean_square(call(b["x"], b["z"])), x=images(8), z=X),
}
