"""Nets written in plain torch: what people have in their own projects."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.survey.case import BATCH, CLASSES, Batch, Case, Subject, cases_of, classes, images, mean_square, randn

Loss = Callable[..., Tensor]
Make = Callable[[], Any]
X, X12, SEQUENCE, Y = randn(BATCH, 6), randn(BATCH, 12), randn(BATCH, 7, 6), classes()
TOKENS, LENGTHS = randn(BATCH, 7, 16), torch.tensor([7, 3, 5, 2])
PADDING = torch.arange(7)[None] >= LENGTHS[:, None]
ADJACENCY = (randn(BATCH, 7, 7) > 0).float() + torch.eye(7)
head = lambda width: nn.Linear(width, CLASSES)


def plain_net(make: Make, loss: Loss, **batch: Tensor) -> Callable[[], Subject]:
    """A net in plain torch; `loss(call, batch)` gives the losses, `call` is the module."""

    def build() -> Subject:
        def loss_of(forward: Callable[..., Any]) -> Callable[[Any, Batch], Tensor]:
            return lambda params, rows: loss(lambda *args, **options: forward(params, *args, **options), rows)

        return Subject(make(), batch, loss_of)

    return build


def net_of(parts: Make, run: Callable[..., Any]) -> Callable[[], nn.Module]:
    """Make a module of named parts; `run(parts, *inputs)` is its forward pass."""

    class Net(nn.ModuleDict):
        def forward(self, *inputs: Tensor, **options: Any) -> Any:
            return run(self, *inputs, **options)

    return lambda: Net(dict(parts()))


def on(make: Make, x: Tensor = X, run: Callable[..., Any] | None = None, **more: Tensor) -> Callable[[], Subject]:
    """A classifier of x and more inputs; with `run`, `make` gives its parts."""
    names = ("x", *more)
    loss = lambda call, b: F.cross_entropy(call(*(b[name] for name in names)), b["y"], reduction="none")
    return plain_net(make if run is None else net_of(make, run), loss, x=x, **more, y=Y)


# Classifiers: what is made, and how it runs.


def linear(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), act()]
    return nn.Sequential(*layers[:-1])


def mlp(*after: Callable[[], nn.Module]) -> Callable[[], Subject]:
    """A layer, what comes after it, and the head."""
    return on(lambda: nn.Sequential(nn.Linear(6, 16), *(make() for make in after), head(16)))


def recurrent(kind: str, **options: Any) -> Callable[[], Subject]:
    width = 8 * (2 if options.get("bidirectional") else 1)
    parts = lambda: {"rnn": getattr(nn, kind)(6, 8, batch_first=True, **options), "head": head(width)}
    return on(parts, SEQUENCE, lambda net, x: net["head"](net["rnn"](x)[0].mean(1)))


def packed(kind: str) -> Callable[[], Subject]:
    def run(net: Any, x: Tensor, lengths_B: Tensor) -> Tensor:
        rows = pack_padded_sequence(x, lengths_B.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(net["rnn"](rows)[0], batch_first=True, total_length=x.shape[1])
        return net["head"](out.sum(1) / lengths_B[:, None])

    return on(lambda: {"rnn": getattr(nn, kind)(6, 8, batch_first=True), "head": head(8)}, SEQUENCE, run, n=LENGTHS)


def cells(kind: str) -> Callable[[], Subject]:
    def run(net: Any, x: Tensor) -> Tensor:
        state: Any = None
        for step in range(x.shape[1]):
            state = net["cell"](x[:, step], state)
        return net["head"](state[0] if isinstance(state, tuple) else state)

    return on(lambda: {"cell": getattr(nn, kind)(6, 8), "head": head(8)}, SEQUENCE, run)


def encoder(first: bool = True, inputs: Mapping[str, Tensor] | None = None, **options: Any) -> Callable[[], Subject]:
    def parts() -> dict[str, nn.Module]:
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=first, **options)
        return {"stack": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), "head": head(16)}

    def run(net: Any, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        if not first:
            return net["head"](net["stack"](x.transpose(0, 1)).mean(0))
        return net["head"](net["stack"](x, src_key_padding_mask=hidden)[:, 0])

    return on(parts, TOKENS, run, **(inputs or {}))


def convolutional(norm: Callable[[int], nn.Module]) -> Callable[[], Subject]:
    make = lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=2), norm(8),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head(8),
    )  # fmt: skip
    return on(make, images(8))


def wrapped(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], Subject]:
    return on(lambda: nn.Sequential(wrap(nn.Linear(6, 8)), nn.Tanh(), wrap(nn.Linear(8, 8)), nn.Tanh(), head(8)))


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is deprecated, and used
        return torch.nn.utils.weight_norm(layer)


class Symmetric(nn.Module):
    """A parametrization: w + w^T."""

    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


def symmetric() -> nn.Module:
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Tanh(), head(6))


def blocks(*names: str) -> Callable[[], dict[str, nn.Module]]:
    return lambda: {**{name: nn.Linear(6, 6) for name in names}, "head": head(6)}


def graph(net: Any, x_BND: Tensor, adjacency_BNN: Tensor) -> Tensor:
    hidden = F.relu(adjacency_BNN @ net["first"](x_BND))
    return net["head"](F.relu(adjacency_BNN @ net["second"](hidden)).mean(1))


def perceiver(net: Any, x_BTD: Tensor) -> Tensor:
    latents = net["latents"].weight.expand(len(x_BTD), -1, -1)
    latents = latents + net["cross"](latents, x_BTD, x_BTD)[0]
    return net["head"]((latents + net["own"](latents, latents, latents)[0]).mean(1))


def experts(dense: bool) -> Callable[[], Subject]:
    """Mixture of experts: all of them weighted, or each token sent to its best by index."""

    def run(net: Any, x_BTD: Tensor) -> Tensor:
        weights = net["gate"](x_BTD).softmax(-1)
        parts = [net[f"expert{i}"] for i in range(3)]
        if dense:
            return net["head"](sum(weights[..., i : i + 1] * part(x_BTD) for i, part in enumerate(parts)).mean(1))
        best, out = weights.argmax(-1), torch.zeros_like(x_BTD)
        for i, part in enumerate(parts):
            chosen = best == i
            out[chosen] = part(x_BTD[chosen]) * weights[chosen][:, i : i + 1]
        return net["head"](out.mean(1))

    parts = lambda: {"gate": nn.Linear(6, 3), **{f"expert{i}": linear(6, 8, 6) for i in range(3)}, "head": head(6)}
    return on(parts, SEQUENCE, run)


def layer_drop(net: Any, x: Tensor) -> Tensor:
    for name in ("a", "b", "c"):
        if not (net.training and torch.rand(()) < 0.3):
            x = x + torch.tanh(net[name](x))
    return net["head"](x)


def drop_path(net: Any, x: Tensor) -> Tensor:
    for name in ("a", "b", "c"):
        keep = torch.rand(len(x), 1).lt(0.8).float() / 0.8 if net.training else 1.0
        x = x + keep * torch.tanh(net[name](x))
    return net["head"](x)


def spec_augment(net: Any, x_BTD: Tensor) -> Tensor:
    if net.training:
        start_B1 = torch.randint(0, 4, (len(x_BTD), 1))
        steps = torch.arange(x_BTD.shape[1])[None]
        x_BTD = x_BTD.masked_fill(((steps >= start_B1) & (steps < start_B1 + 2))[..., None], 0.0)
    return net["head"](net["rnn"](x_BTD)[0].mean(1))


def early_exit(net: Any, x: Tensor) -> Tensor:
    hidden = net["a"](x)
    return net["head"](net["b"](hidden) if bool(hidden.sum() > 0) else hidden)


# Losses of their own.


def factorised(net: Any, user_B: Tensor, items_BK: Tensor) -> Tensor:
    """Bags of items as one row of indices with offsets, as recommenders write it."""
    offsets = torch.arange(len(items_BK)) * items_BK.shape[1]
    return (net["user"](user_B) * net["bag"](items_BK.flatten(), offsets)).sum(1) + net["bias"](user_B)[:, 0]


def ctc(call: Loss, b: Mapping[str, Tensor]) -> Tensor:
    scores = call(b["x"]).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, b["labels"], b["frames"], b["lengths"], reduction="none")


def penalised(call: Loss, b: Mapping[str, Tensor]) -> Tensor:
    """The gradient with respect to the input is in the loss."""
    x = b["x"].detach().requires_grad_()
    out = call(x)
    slope = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
    return F.cross_entropy(out, b["y"], reduction="none") + slope.square().sum(1)


# Nets that make things: autoencoders, diffusion, flows, and nets of sounds and of equations.


def u_net(net: Any, x: Tensor, t_B: Tensor | None = None) -> Tensor:
    """Two levels, optionally with a time."""
    skip = F.silu(net["down"](x))
    hidden = net["norm"](net["middle"](skip))
    if t_B is not None:
        hidden = hidden + net["time"](t_B[:, None])[..., None, None]
    return net["out"](torch.cat((skip, F.silu(net["up"](F.silu(hidden)))), 1))


U_NET = net_of(lambda: {
    "down": nn.Conv2d(3, 8, 3, padding=1), "middle": nn.Conv2d(8, 8, 3, padding=1, stride=2),
    "norm": nn.GroupNorm(2, 8), "time": nn.Linear(1, 8), "up": nn.ConvTranspose2d(8, 8, 2, stride=2),
    "out": nn.Conv2d(16, 3, 3, padding=1),
}, u_net)  # fmt: skip


def autoencoder(net: Any, x: Tensor, noise: Tensor | None = None) -> Tensor:
    """Variational; it draws the code if it is given no noise."""
    mean, log_var = net["encoder"](x).chunk(2, 1)
    noise = torch.randn_like(mean) if noise is None else noise
    rebuilt = net["decoder"](mean + noise * (0.5 * log_var).exp())
    return (rebuilt - x).square().sum(1) - 0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1)


VAE = net_of(lambda: {"encoder": nn.Linear(12, 8), "decoder": nn.Linear(4, 12)}, autoencoder)


class Fourier(nn.Module):
    """A layer in the frequencies, complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(4, 5, 2))
        self.line = nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x) * torch.view_as_complex(self.weight)
        return torch.fft.irfft(waves, n=x.shape[-1]) + self.line(x)


def diffusion(call: Loss, b: Mapping[str, Tensor]) -> Tensor:
    """Times and noise are drawn inside of the loss, or are part of the batch."""
    t_B = b["t"] if "t" in b else torch.rand(len(b["x"]))
    noise = b["noise"] if "t" in b else torch.randn_like(b["x"])
    t_B111 = t_B[:, None, None, None]
    return mean_square(call((1 - t_B111) * b["x"] + t_B111 * noise, t_B) - noise)


def made(make: Make, run: Callable[..., Any] | None = None, x: Tensor = X12) -> Callable[[], Subject]:
    """The output is pulled to 0.1."""
    return plain_net(make if run is None else net_of(make, run), lambda call, b: mean_square(call(b["x"]) - 0.1), x=x)


own = lambda call, b: call(b["x"])
NETS: dict[str, Callable[[], Subject]] = {
    "MLP": on(lambda: linear(6, 16, 16, CLASSES)),
    "MLP dropout": mlp(nn.ReLU, lambda: nn.Dropout(0.2)),
    "MLP BatchNorm": mlp(lambda: nn.BatchNorm1d(16), nn.ReLU),
    "MLP LayerNorm": mlp(lambda: nn.LayerNorm(16), nn.GELU),
    "MLP RMSNorm PReLU": mlp(lambda: nn.RMSNorm(16), lambda: nn.PReLU(16)),
    "logistic regression": on(lambda: head(6)),
    "bilinear": on(lambda: {"b": nn.Bilinear(6, 6, CLASSES)}, X, lambda net, x, z: net["b"](x, z),
                   z=randn(BATCH, 6, seed=9)),
    "CNN": convolutional(lambda width: nn.Identity()),
    "CNN GroupNorm": convolutional(lambda width: nn.GroupNorm(2, width)),
    "CNN BatchNorm": convolutional(nn.BatchNorm2d),
    "CNN InstanceNorm": convolutional(lambda width: nn.InstanceNorm2d(width, affine=True)),
    "CNN Dropout2d": convolutional(lambda width: nn.Dropout2d(0.2)),
    "conv 3d": on(lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.ConvTranspose3d(4, 2, 2), nn.Flatten(),
                                        head(128)), randn(BATCH, 1, 5, 5, 5)),
    "LSTM": recurrent("LSTM"),
    "LSTM two layers dropout": recurrent("LSTM", num_layers=2, dropout=0.1),
    "GRU": recurrent("GRU"),
    "RNN": recurrent("RNN"),
    "BiLSTM": recurrent("LSTM", bidirectional=True),
    "BiGRU two layers": recurrent("GRU", bidirectional=True, num_layers=2),
    "LSTM packed": packed("LSTM"),
    "GRU packed": packed("GRU"),
    "LSTM cells": cells("LSTMCell"),
    "GRU cells": cells("GRUCell"),
    "transformer encoder": encoder(),
    "transformer encoder pre-norm": encoder(norm_first=True, activation="gelu"),
    "transformer encoder (T, B)": encoder(first=False),
    "transformer encoder padded": encoder(inputs={"hidden": PADDING}),
    "transformer": plain_net(lambda: nn.Transformer(16, 2, 1, 1, 24, batch_first=True), lambda call,
        b: mean_square(call(b["x"], b["z"]) - b["z"]), x=TOKENS, z=randn(BATCH, 3, 16, seed=7)),
    "graph convolution": on(lambda: {"first": nn.Linear(6, 8), "second": nn.Linear(8, 8), "head": head(8)}, SEQUENCE,
                            graph, a=ADJACENCY),
    "DeepSets": on(lambda: {"inner": linear(6, 8, 8), "outer": linear(8, 8, CLASSES)}, SEQUENCE,
                   lambda net, x: net["outer"](net["inner"](x).sum(1))),
    "Perceiver": on(lambda: {"latents": nn.Embedding(3, 16), "cross": nn.MultiheadAttention(16, 2, batch_first=True),
        "own": nn.MultiheadAttention(16, 2, batch_first=True), "head": head(16)}, TOKENS, perceiver),
    "experts, dense": experts(True),
    "experts, selected": experts(False),
    "hypernetwork": on(lambda: {"hyper": linear(4, 8, 6 * CLASSES)}, X, lambda net, x, code: torch.einsum(
        "bcd,bd->bc", net["hyper"](code).view(-1, CLASSES, 6), x), code=randn(BATCH, 4, seed=8)),
    "LayerDrop": on(blocks("a", "b", "c"), X, layer_drop),
    "drop path": on(blocks("a", "b", "c"), X, drop_path),
    "SpecAugment": on(lambda: {"rnn": nn.GRU(6, 8, batch_first=True), "head": head(8)}, SEQUENCE, spec_augment),
    "early exit by value": on(blocks("a", "b"), X, early_exit),
    "spectral norm": wrapped(parametrizations.spectral_norm),
    "weight norm": wrapped(parametrizations.weight_norm),
    "weight norm, old": wrapped(old_weight_norm),
    "orthogonal": wrapped(parametrizations.orthogonal),
    "parametrized symmetric": on(symmetric),
    "Siamese": plain_net(lambda: linear(6, 16, 8), lambda call, b: (
        F.cosine_similarity(call(b["x"]), call(b["other"])) - b["same"]).square(), x=X, other=randn(BATCH, 6, seed=9),
        same=torch.tensor([1.0, 0.0, 1.0, 0.0])),
    "matrix factorisation": plain_net(net_of(lambda: {"user": nn.Embedding(9, 4),
        "bag": nn.EmbeddingBag(9, 4, mode="mean"), "bias": nn.Embedding(9, 1)}, factorised), lambda call,
        b: (call(b["user"], b["items"]) - b["rating"]).square(), user=classes(9), items=torch.randint(9, (BATCH, 3),
        generator=torch.Generator().manual_seed(2)), rating=randn(BATCH)),
    "CTC": plain_net(net_of(lambda: {"rnn": nn.GRU(6, 8, batch_first=True), "head": nn.Linear(8, 5)}, lambda net,
        x: net["head"](net["rnn"](x)[0])), ctc, x=SEQUENCE, labels=torch.tensor([[1, 2], [3, 3], [4, 1], [2, 0]]),
        frames=torch.tensor([7, 6, 7, 5]), lengths=torch.tensor([2, 2, 2, 1])),
    # mixes the samples of a batch; a row alone is mixed with itself
    "mixup in the batch": plain_net(lambda: linear(6, 16, CLASSES), lambda call, b: F.cross_entropy(
        call(0.7 * b["x"] + 0.3 * b["x"].flip(0)), b["y"], reduction="none"), x=X, y=Y),
    "gradient penalty": plain_net(lambda: linear(6, 16, CLASSES, act=nn.Tanh), penalised, x=X, y=Y),
    "U-Net": made(U_NET, x=images(8)),
    "diffusion": plain_net(U_NET, diffusion, x=images(8)),
    "diffusion, draws in the batch": plain_net(
        U_NET, diffusion, x=images(8), noise=randn(BATCH, 3, 8, 8, seed=7), t=randn(BATCH, seed=8).sigmoid()),
    "VAE": plain_net(VAE, own, x=X12),
    "VAE, draws in the batch": plain_net(VAE, lambda call, b: call(b["x"], b["noise"]), x=X12,
                                         noise=randn(BATCH, 4, seed=9)),
    "coordinates": made(lambda: {"net": nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))},
                        lambda net, x: net["net"](torch.sin(3 * x)), randn(BATCH, 9, 2)),
    "Fourier layer": made(Fourier, x=randn(BATCH, 4, 8)),
}  # fmt: skip
TRAINED_TOO = (
    "MLP dropout", "MLP BatchNorm", "CNN BatchNorm", "CNN InstanceNorm", "CNN Dropout2d", "LSTM two layers dropout",
    "LayerDrop", "drop path", "SpecAugment", "spectral norm", "transformer encoder", "transformer encoder padded",
    "LSTM packed",
)  # fmt: skip
WITH_LORA = ("MLP", "transformer encoder", "graph convolution", "U-Net", "Siamese", "experts, selected", "Perceiver")


def cases() -> list[Case]:
    found = []
    for name, subject in NETS.items():
        more = {"full train": TRAINED_TOO, "LoRA train": WITH_LORA}
        variants = ["full eval", *(variant for variant, names in more.items() if name in names)]
        found += cases_of("other", name, subject, variants)
    for name in ("MLP BatchNorm", "CNN BatchNorm"):
        found += cases_of("other", name, NETS[name], ["GroupNorm train"])
    return found
