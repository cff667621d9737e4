"""Nets that make things: autoencoders, diffusion, flows, and nets of sounds and of equations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.survey.case import BATCH, Subject, images, lambda_net, mean_square, plain_net, randn

Loss = Callable[..., Tensor]
Parts = Mapping[str, Any]


def u_net(net: Parts, x: Tensor, t_B: Tensor | None = None) -> Tensor:
    """Two levels, optionally with a time."""
    skip = F.silu(net["down"](x))
    hidden = net["norm"](net["middle"](skip))
    if t_B is not None:
        hidden = hidden + net["time"](t_B[:, None])[..., None, None]
    return net["out"](torch.cat((skip, F.silu(net["up"](F.silu(hidden)))), 1))


def autoencoder(net: Parts, x: Tensor, noise: Tensor | None = None) -> Tensor:
    """Variational; it draws the code if it is given no noise."""
    mean, log_var = net["encoder"](x).chunk(2, 1)
    noise = torch.randn_like(mean) if noise is None else noise
    rebuilt = net["decoder"](mean + noise * (0.5 * log_var).exp())
    return (rebuilt - x).square().sum(1) - 0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1)


def quantised(net: Parts, x: Tensor) -> Tensor:
    """The nearest of eight codes, straight through."""
    z = net["encoder"](x)
    nearest = net["codes"](torch.cdist(z, net["codes"].weight).argmin(1))
    through = z + (nearest - z).detach()
    return (net["decoder"](through) - x).square().mean(1) + (nearest - z.detach()).square().mean(1)


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


def ode(net: Parts, x: Tensor) -> Tensor:
    """Runge-Kutta with fixed steps."""
    field, step = net["field"], 0.25
    for _ in range(4):
        a = field(x)
        b = field(x + 0.5 * step * a)
        c = field(x + 0.5 * step * b)
        x = x + step / 6 * (a + 2 * b + 2 * c + field(x + step * c))
    return x


def wave_net(net: Parts, x: Tensor) -> Tensor:
    """Dilated causal convolutions with gates."""
    hidden, skips = net["start"](x), torch.zeros(())
    for i, (gate, out) in enumerate(zip(net["gates"], net["outs"], strict=True)):
        signal, door = gate(F.pad(hidden, (2**i, 0))).chunk(2, 1)
        part = out(torch.tanh(signal) * torch.sigmoid(door))
        hidden, skips = hidden + part, skips + part
    return net["end"](F.relu(skips))


def mixer(net: Parts, x: Tensor) -> Tensor:
    """Tokens and channels in turn."""
    hidden = net["patch"](x).flatten(2)
    hidden = hidden + F.gelu(net["tokens"](hidden))
    return net["channels"](hidden.transpose(1, 2)).mean(1)


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


def tuned(net: Parts, x: Tensor, z: Tensor) -> Tensor:
    """Features of an image scaled and shifted by another input."""
    scale, shift = net["film"](z)[..., None, None].chunk(2, 1)
    return (1 + scale) * net["conv"](x) + shift


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


X = randn(BATCH, 12)


def parts_of_u_net() -> dict[str, nn.Module]:
    return {
        "down": nn.Conv2d(3, 8, 3, padding=1), "middle": nn.Conv2d(8, 8, 3, padding=1, stride=2),
        "norm": nn.GroupNorm(2, 8), "time": nn.Linear(1, 8), "up": nn.ConvTranspose2d(8, 8, 2, stride=2),
        "out": nn.Conv2d(16, 3, 3, padding=1),
    }  # fmt: skip


U_NET = lambda_net(parts_of_u_net, u_net)
VAE = lambda_net(lambda: {"encoder": nn.Linear(12, 8), "decoder": nn.Linear(4, 12)}, autoencoder)
VQ_VAE = lambda_net(
    lambda: {"encoder": nn.Linear(12, 4), "codes": nn.Embedding(8, 4), "decoder": nn.Linear(4, 12)}, quantised
)
ODE = lambda_net(lambda: {"field": nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 12))}, ode)
WAVE_NET = lambda_net(
    lambda: {
        "start": nn.Conv1d(1, 8, 1), "gates": nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3)),
        "outs": nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3)), "end": nn.Conv1d(8, 1, 1),
    }, wave_net,
)  # fmt: skip
PINN = lambda_net(
    lambda: {"net": nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))},
    lambda net, x: net["net"](torch.sin(3 * x)),
)
MIXER = lambda_net(
    lambda: {"patch": nn.Conv2d(3, 8, 4, 4), "tokens": nn.Linear(4, 4), "channels": nn.Linear(8, 8)}, mixer
)
FILM = lambda_net(lambda: {"conv": nn.Conv2d(3, 8, 3), "film": nn.Linear(12, 16)}, tuned)
NETS: dict[str, Callable[[], Subject]] = {
    "U-Net": plain_net(U_NET, square, x=images(8)),
    "diffusion": plain_net(U_NET, diffusion, x=images(8)),
    "diffusion, draws in the batch": plain_net(
        U_NET, given_diffusion, x=images(8), noise=randn(BATCH, 3, 8, 8, seed=7), t=randn(BATCH, seed=8).sigmoid()
    ),
    "VAE": plain_net(VAE, own, x=X),
    "VAE, draws in the batch": plain_net(
        VAE, lambda call, b: call(b["x"], b["noise"]), x=X, noise=randn(BATCH, 4, seed=9)
    ),
    "VQ-VAE": plain_net(VQ_VAE, own, x=X),
    "flow": plain_net(Flow, own, x=X),
    "masked autoregressive": plain_net(Masked, square, x=X),
    "neural ODE": plain_net(ODE, square, x=X),
    "WaveNet": plain_net(WAVE_NET, square, x=randn(BATCH, 1, 16)),
    "coordinates": plain_net(PINN, square, x=randn(BATCH, 9, 2)),
    "MLP-Mixer": plain_net(MIXER, square, x=images(8)),
    "Fourier layer": plain_net(Fourier, square, x=randn(BATCH, 4, 8)),
    "radial basis": plain_net(Gaussian, square, x=X),
    "FiLM": plain_net(FILM, lambda call, b: mean_square(call(b["x"], b["z"])), x=images(8), z=X),
}
