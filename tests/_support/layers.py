"""One table of small layers, each a way to use parameters: name -> Layer. A new layer is a new line.

Axis letters: B samples, T positions, d features, V rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from models import Case
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D
from zoo.parity import roughen

from dpfunc.functional import functionalize

D, OUT, VOCAB, LONGEST = 4, 3, 7, 8


@dataclass(frozen=True)
class Draw:
    """Random tensors of one dtype."""

    generator: torch.Generator
    dtype: torch.dtype

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def ints(self, high, *shape):
        return torch.randint(high, shape, generator=self.generator)


@dataclass(frozen=True)
class Layer:
    """How parameters are used.

    Args:
        build: draw -> (forward, params), with `forward(params, *batch)` of shape (B, ...).
        batch: (draw, B, T) -> the tensors of a batch. unused: parameters that get no gradient.
    """

    build: Callable[[Draw], tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]]
    batch: Callable[[Draw, int, int], tuple[torch.Tensor, ...]]
    unused: tuple[str, ...] = ()


def build(name, dtype, seed):
    """A function of the size and length of a batch that gives a case, all with one loss function."""
    layer = LAYERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        forward, params = layer.build(Draw(torch.Generator().manual_seed(seed), dtype))
    loss_fn = lambda params, batch: projected(forward(params, *batch))

    def case(size, length):
        draw = Draw(torch.Generator().manual_seed(1000 * seed + 10 * size + length), dtype)
        return Case(loss_fn, params, layer.batch(draw, size, length))

    return case


def projected(out):
    """Squares and a projection of each sample's output: no symmetry makes a gradient vanish."""
    rows_BP = out.reshape(len(out), -1)
    direction_P = torch.sin(1.0 + torch.arange(rows_BP.shape[1], dtype=rows_BP.dtype))
    return (0.5 * rows_BP.square() + rows_BP * direction_P).sum(1)


# Batches


def vectors(width=D):
    return lambda draw, B, T: (draw.normal(B, width),)


def tokens(width=D):
    return lambda draw, B, T: (draw.normal(B, T, width),)


def pairs(draw, B, T, other=D):
    """Two sequences of different length."""
    return draw.normal(B, T, D), draw.normal(B, T + 1, other)


def signals(channels, axes):
    """(B, C, ...), the first axis of which depends on T."""
    return lambda draw, B, T: (draw.normal(B, channels, T + 4, *(5, 4)[: axes - 1]),)


def videos(draw, B, T):
    return (draw.normal(B, T, 2, 4, 4),)


def ids(*shape):
    return lambda draw, B, T: (draw.ints(VOCAB, B, T, *shape),)


def weighted_ids(draw, B, T):
    return draw.ints(VOCAB, B, T), draw.normal(B, T)


def repeated_ids(draw, B, T):
    return (draw.ints(2, B, T + 3),)


def masked(draw, B, T):
    """Sequences and which positions are to be left out, never the first."""
    hidden_BT = draw.ints(2, B, T).bool()
    hidden_BT[:, 0] = False
    return draw.normal(B, T, D), hidden_BT


# Builders


def module(make, batch, forward=None, unused=()):
    """A torch module; `forward(run, *batch)` where it is not simply `run(*batch)`."""

    def build(draw):
        run, params = functionalize(roughen(make().to(draw.dtype).eval()))
        if forward is None:
            return run, params
        return lambda p, *batch: forward(lambda *args, **options: run(p, *args, **options), *batch), params

    return Layer(build, batch, unused)


def op(function, batch, unused=(), **shapes):
    """`function(params, *batch)` with parameters of these shapes."""

    def build(draw):
        return function, {name: 1.0 + 0.5 * draw.normal(*shape) for name, shape in shapes.items()}

    return Layer(build, batch, unused)


def conv(kind, channels, *args, **options):
    return module(lambda: kind(channels, *args, **options), signals(channels, int(kind.__name__[-2])))


class Times(nn.Module):
    """One layer several times."""

    def __init__(self, layer, times):
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.head = nn.Linear(D, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids_BT):
        return self.head(torch.tanh(self.embed(ids_BT)))


class Standardised(nn.Conv2d):
    """Weight standardisation."""

    def forward(self, x):
        spread, mean = torch.std_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) / (spread + 1e-5), self.bias, padding=1)


def activated(make, batch):
    """A layer whose output is overwritten by its activation."""
    return module(lambda: nn.Sequential(make(), nn.ReLU(inplace=True)), batch)


class Celled(nn.Module):
    """A cell in a loop of Python; all its outputs."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x_BTd):
        state, outputs = None, []
        for x_Bd in x_BTd.unbind(1):
            state = self.cell(x_Bd, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)


def celled(cell, **options):
    return module(lambda: Celled(cell(D, OUT, **options)), tokens())


def bagged(bags, last, **options):
    """Ids one behind the other, `bags` bags a sample whose sizes depend on the ids: some are empty."""

    def forward(run, ids_BT, *weights_BT):
        count, length = ids_BT.shape
        cuts = [ids_BT[:, 0] % (length + 1)] if bags == 2 else []
        starts_Bm = torch.stack([torch.zeros_like(ids_BT[:, 0]), *cuts], 1) + length * torch.arange(count)[:, None]
        offsets = torch.cat([starts_Bm.flatten(), torch.tensor([ids_BT.numel()])]) if last else starts_Bm.flatten()
        weights = {"per_sample_weights": weights_BT[0].flatten()} if weights_BT else {}
        return run(ids_BT.flatten(), offsets, **weights).unflatten(0, (count, bags)).flatten(1)

    weighted = options.pop("weighted", False)
    make = lambda: nn.EmbeddingBag(VOCAB, D, include_last_offset=last, **options)
    return module(make, weighted_ids if weighted else ids(), forward)


def routed(product):
    """The same tokens through two experts: (E, B * T, d)."""

    def forward(p, x_BTd):
        y_ENo = product(x_BTd.flatten(0, 1).repeat(2, 1).unflatten(0, (2, -1)), p)
        return y_ENo.tanh().sum(0).unflatten(0, x_BTd.shape[:2])

    return forward


def flipped(run, *batch):
    """Sequences first inside of the layer."""
    return run(*(x.transpose(0, 1).contiguous() for x in batch)).transpose(0, 1)


def flat(run, x_BT):
    """One axis of samples and positions."""
    return run(x_BT.flatten(0, 1)).unflatten(0, x_BT.shape[:2])


def flat_minor(run, x_BT):
    """The sample is the faster index."""
    return flat(run, x_BT.transpose(0, 1)).transpose(0, 1)


def attended(weights=False, first=True, **options):
    """Self-attention by nn.MultiheadAttention; its weights are part of the output."""

    def forward(run, x_BTd):
        x = x_BTd if first else x_BTd.transpose(0, 1)
        out, attention_BTT = run(x, x, x, need_weights=weights)
        out = out if first else out.transpose(0, 1)
        return torch.cat([out, attention_BTT], dim=2) if weights else out

    return module(lambda: nn.MultiheadAttention(D, 2, batch_first=first, **options), tokens(), forward)


def crossed(first=True, kdim=D, vdim=D):
    def forward(run, x_BTd, y_BSd):
        args = (x_BTd, y_BSd, torch.cat([y_BSd, y_BSd], 2)[:, :, :vdim])
        return run(*args)[0] if first else flipped(lambda *args: run(*args)[0], *args)

    make = lambda: nn.MultiheadAttention(D, 2, batch_first=first, kdim=kdim, vdim=vdim)
    return module(make, lambda draw, B, T: pairs(draw, B, T, kdim), forward)


LAYERS: dict[str, Layer] = {
    # matrices
    "linear, vectors": module(lambda: nn.Linear(D, OUT), vectors()),
    "linear, tokens": module(lambda: nn.Linear(D, OUT), tokens()),
    "linear, no bias": module(lambda: nn.Linear(D, OUT, bias=False), tokens()),
    "linear, wide": module(lambda: nn.Linear(40, 50), tokens(40)),
    "linear, B * T": module(lambda: nn.Linear(D, OUT), tokens(), flat),
    "linear, T * B": module(lambda: nn.Linear(D, OUT), tokens(), flat_minor),
    "linear, (T, B, d)": module(lambda: nn.Linear(D, OUT), tokens(), flipped),
    "linear, wide, T * B": module(lambda: nn.Linear(40, 50), tokens(40), flat_minor),
    "Conv1D of transformers": module(lambda: Conv1D(OUT, D), tokens()),
    "addmm": op(lambda p, x: torch.addmm(p["b"], x, p["w"]), vectors(), b=(OUT,), w=(D, OUT)),
    "addmm, B * T": op(lambda p, x: torch.addmm(p["b"], x.flatten(0, 1), p["w"]).unflatten(0, x.shape[:2]), tokens(), b=(OUT,), w=(D, OUT)),
    "addmm, method": op(lambda p, x: p["b"].addmm(x, p["w"]), vectors(), b=(OUT,), w=(D, OUT)),
    "addmm, beta, alpha": op(lambda p, x: torch.addmm(p["b"], x, p["w"], beta=0.5, alpha=-2.0), vectors(), b=(OUT,), w=(D, OUT)),
    "mv": op(lambda p, x: torch.mv(x, p["v"]), vectors(), v=(D,)),
    "mv, B * T": op(lambda p, x: x.flatten(0, 1).mv(p["v"]).unflatten(0, x.shape[:2]), tokens(), v=(D,)),
    "x @ W": op(lambda p, x: x @ p["w"], tokens(), w=(D, OUT)),
    "x @ W.T": op(lambda p, x: x @ p["w"].T, tokens(), w=(OUT, D)),
    "x @ W.mT": op(lambda p, x: x @ p["w"].mT, tokens(), w=(OUT, D)),
    "x @ W, B * T": op(lambda p, x: flat(lambda x: x @ p["w"], x), tokens(), w=(D, OUT)),
    "x @ W, T * B": op(lambda p, x: flat_minor(lambda x: x @ p["w"], x), tokens(), w=(D, OUT)),
    "W.T @ x": op(lambda p, x: p["w"].T @ x.mT, tokens(), w=(D, OUT)),
    "x @ v": op(lambda p, x: x @ p["v"], tokens(), v=(D,)),
    "bilinear": module(lambda: nn.Bilinear(D, D, OUT), vectors(), lambda run, x: run(x, x.tanh())),
    "bilinear, tokens": module(lambda: nn.Bilinear(D, D, OUT), tokens(), lambda run, x: run(x, x.tanh())),
    "einsum bti,io->bto": op(lambda p, x: torch.einsum("bti,io->bto", x, p["w"]), tokens(), w=(D, OUT)),
    "einsum btd,hde->bhte": op(lambda p, x: torch.einsum("btd,hde->bhte", x, p["w"]), tokens(), w=(2, D, OUT)),
    "bmm of experts": op(routed(lambda x, p: torch.bmm(x, p["w"])), tokens(), w=(2, D, OUT)),
    "bmm, method, transposed experts": op(routed(lambda x, p: x.bmm(p["w"].transpose(1, 2))), tokens(), w=(2, OUT, D)),
    "baddbmm, method, beta, alpha": op(routed(lambda x, p: p["b"].baddbmm(x, p["w"], beta=0.5, alpha=2.0)), tokens(), b=(2, 1, OUT), w=(2, D, OUT)),
    "x @ W, 3 axes, heads": op(lambda p, x: torch.matmul(x[:, None], p["w"]), tokens(), w=(2, D, OUT)),
    "x @ W, 3 axes, frames B * T": op(lambda p, x: (x.flatten(0, 1) @ p["w"]).unflatten(0, x.shape[:2]), videos, w=(2, 4, OUT)),
    "W @ x, 3 axes": op(lambda p, x: p["w"] @ x.mT[:, None], tokens(), w=(2, OUT, D)),
    # convolutions
    "conv3d": conv(nn.Conv3d, 2, 3, 3),
    "conv1d, stride, padding": conv(nn.Conv1d, 2, 3, 3, stride=2, padding=1),
    "conv2d, stride, padding": conv(nn.Conv2d, 2, 3, 3, stride=(2, 1), padding=(1, 2)),
    "conv3d, stride, padding": conv(nn.Conv3d, 2, 3, 2, stride=2, padding=1),
    "conv2d, stride that leaves a rest": conv(nn.Conv2d, 2, 3, 2, stride=3),
    "conv1d, same": conv(nn.Conv1d, 2, 3, 3, padding="same"),
    "conv1d, same, even": conv(nn.Conv1d, 2, 3, 4, padding="same"),
    "conv2d, same, even and odd": conv(nn.Conv2d, 2, 3, (2, 3), padding="same"),
    "conv2d, same, dilation": conv(nn.Conv2d, 2, 3, 2, padding="same", dilation=3),
    "conv2d, dilation": conv(nn.Conv2d, 2, 3, 2, dilation=(2, 3), padding=2),
    "conv1d, depthwise, multiplier": conv(nn.Conv1d, 3, 6, 3, groups=3, padding=2),
    "conv3d, groups": conv(nn.Conv3d, 2, 4, 2, groups=2),
    "conv2d, 1 x 1": conv(nn.Conv2d, 3, 5, 1),
    "conv2d, 1 x 1, stride": conv(nn.Conv2d, 3, 5, 1, stride=2),
    "conv2d, no bias": conv(nn.Conv2d, 2, 3, 3, bias=False),
    "conv2d, reflect": conv(nn.Conv2d, 2, 3, 3, padding=1, padding_mode="reflect"),
    "conv2d, frames B * T": module(lambda: nn.Conv2d(2, 3, 3, padding=1), videos, flat),
    "conv2d, frames T * B": module(lambda: nn.Conv2d(2, 3, 3, padding=1), videos, flat_minor),
    "conv2d, 1 x 1, frames T * B": module(lambda: nn.Conv2d(2, 3, 1), videos, flat_minor),
    "transposed 1d, output_padding": conv(nn.ConvTranspose1d, 2, 3, 3, stride=2, output_padding=1),
    "transposed 2d, output_padding, groups": conv(nn.ConvTranspose2d, 4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
    "transposed 2d, dilation": conv(nn.ConvTranspose2d, 2, 3, 2, dilation=2),
    "transposed 2d, frames T * B": module(lambda: nn.ConvTranspose2d(2, 3, 2), videos, flat_minor),
    "conv1d, few positions": conv(nn.Conv1d, 32, 48, 3, stride=2),
    "conv2d, few positions": conv(nn.Conv2d, 32, 48, 3, stride=2, padding=1),
    "conv2d, few positions, dilation": conv(nn.Conv2d, 32, 48, (3, 2), stride=3, padding=2, dilation=(2, 1)),
    "conv2d, few positions, circular": conv(nn.Conv2d, 32, 48, 3, 3, padding=1, padding_mode="circular"),
    "conv2d, large patches": conv(nn.Conv2d, 8, 48, (5, 4), stride=4, padding=2),
    "conv2d, 1 x 1, stride, padding": conv(nn.Conv2d, 3, 5, 1, stride=2, padding=1),
    "conv2d, few positions, frames T * B": module(lambda: nn.Conv2d(2, 64, 4), videos, flat_minor),
    "transposed 1d, few positions": conv(nn.ConvTranspose1d, 64, 48, 3, stride=1, padding=2),
    "transposed 2d, few positions, groups": conv(nn.ConvTranspose2d, 128, 128, 3, stride=1, padding=(3, 2), groups=2, dilation=2),
    "transposed 2d, output_padding over the stride": conv(nn.ConvTranspose2d, 3, 4, 2, stride=1, dilation=3, output_padding=2),
    "transposed 3d": conv(nn.ConvTranspose3d, 2, 4, 2, stride=2, output_padding=1, groups=2),
    # tables
    "embedding": module(lambda: nn.Embedding(VOCAB, D), ids()),
    "embedding, large": module(lambda: nn.Embedding(VOCAB + 50, D), ids()),
    "embedding, padding_idx": module(lambda: nn.Embedding(VOCAB, D, padding_idx=2), ids()),
    "embedding, repeated ids": module(lambda: nn.Embedding(VOCAB + 50, D), repeated_ids),
    "embedding, (T, B)": module(lambda: nn.Embedding(VOCAB + 50, D), ids(), flipped),
    "embedding, T * B": module(lambda: nn.Embedding(VOCAB + 50, D), ids(), lambda run,
        x: run(x.T.flatten()).unflatten(0, x.shape[::-1]).transpose(0, 1)),
    "embedding bag, mean": module(lambda: nn.EmbeddingBag(VOCAB, D, mode="mean"), ids()),
    "embedding bag, weights": module(lambda: nn.EmbeddingBag(VOCAB, D, mode="sum"), weighted_ids, lambda run, x, w: run(x, per_sample_weights=w)),
    "embedding bag, mean, padding_idx -1": module(lambda: nn.EmbeddingBag(VOCAB, D, mode="mean", padding_idx=-1), ids()),
    "embedding bag, max, padding_idx": module(lambda: nn.EmbeddingBag(VOCAB, D, mode="max", padding_idx=1), ids()),
    "embedding bag, offsets, two bags, mean": bagged(2, False, mode="mean"),
    "embedding bag, last offset, max, padding_idx": bagged(2, True, mode="max", padding_idx=2),
    "embedding bag, offsets, weights, sparse": bagged(2, False, mode="sum", weighted=True, sparse=True),
    "table[ids]": op(lambda p, x: p["w"][x], ids(), w=(VOCAB, D)),
    "table[ids], negative ids": op(lambda p, x: p["w"][x - VOCAB], ids(), w=(VOCAB, D)),
    "table[(ids,)]": op(lambda p, x: p["w"][(x,)], ids(), w=(VOCAB, D)),
    "index_select": op(lambda p, x: torch.index_select(p["w"], 0, x.flatten()).unflatten(0, x.shape), ids(), w=(VOCAB, D)),
    "index_select, method, T * B": op(lambda p,
        x: p["w"].index_select(0, x.T.flatten()).unflatten(0, x.T.shape).transpose(0, 1), ids(), w=(VOCAB, D)),
    "embedding twice": op(lambda p, x: F.embedding(x, p["w"]) * F.embedding((x + 1) % VOCAB, p["w"]), ids(), w=(VOCAB, D)),
    "tied embedding and head": module(Tied, ids()),
    "tied embedding and head, large": op(lambda p, x: F.linear(torch.tanh(F.embedding(x, p["w"])), p["w"]), ids(), w=(VOCAB + 50, D)),
    # norms
    "layer norm": module(lambda: nn.LayerNorm(D), tokens()),
    "layer norm, 2 axes": module(lambda: nn.LayerNorm((2, D)), lambda draw, B, T: (draw.normal(B, T, 2, D),)),
    "layer norm, no bias": module(lambda: nn.LayerNorm(D, bias=False), tokens()),
    "layer norm, no affine": module(lambda: nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D, elementwise_affine=False)), tokens()),
    "layer norm, (T, B, d)": module(lambda: nn.LayerNorm(D), tokens(), flipped),
    "layer norm, T * B": module(lambda: nn.LayerNorm(D), tokens(), flat_minor),
    "group norm": module(lambda: nn.GroupNorm(2, 4), signals(4, 2)),
    "group norm, bias alone": op(lambda p, x: F.group_norm(x, 2, x.new_ones(4), p["b"]), signals(4, 2), b=(4,)),
    "group norm, weight alone": op(lambda p, x: F.group_norm(x, 2, p["w"]), signals(4, 2), w=(4,)),
    "group norm, frames T * B": module(lambda: nn.GroupNorm(1, 2), videos, flat_minor),
    "rms norm": module(lambda: nn.RMSNorm(D), tokens()),
    "rms norm, eps, 2 axes": module(lambda: nn.RMSNorm((2, D), eps=1e-3), lambda draw, B, T: (draw.normal(B, T, 2, D),)),
    "rms norm by hand, 1 + w": op(lambda p, x: (1 + p["w"]) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), tokens(), w=(D,)),
    "batch norm, eval": module(lambda: nn.BatchNorm2d(3), signals(3, 2)),
    "PReLU": module(lambda: nn.PReLU(), tokens()),
    # pointwise
    "x + b": op(lambda p, x: torch.tanh(x + p["b"]), tokens(), b=(D,)),
    "x += b": op(lambda p, x: (x * 1.0).add_(p["b"]), tokens(), b=(D,)),
    "x *= w": op(lambda p, x: (x * 1.0).mul_(p["w"]), tokens(), w=(D,)),
    "x * w, T * B": op(lambda p, x: flat_minor(lambda x: x * p["w"], x), tokens(), w=(D,)),
    "x * w, shape (1, C, 1, 1)": op(lambda p, x: x * p["w"], signals(3, 2), w=(1, 3, 1, 1)),
    "where(mask, token, x)": op(lambda p, x, hidden: torch.where(~hidden[..., None], p["token"], x).tanh(), masked, token=(1, 1, D)),
    "unused": op(lambda p, x: x * p["w"], tokens(), unused=("u",), w=(D,), u=(D, 2)),
    # tokens and positions
    "class token, expand": op(lambda p, x: torch.cat([p["cls"].expand(len(x), -1, -1), x], 1).tanh(), tokens(), cls=(1, 1, D)),
    "class token, (T, B, d)": op(lambda p, x: flipped(
        lambda x: torch.cat([p["cls"].expand(1, x.shape[1], -1), x]).tanh(), x), tokens(), cls=(1, 1, D)),
    "position embedding": op(lambda p, x: torch.tanh(x + F.embedding(torch.arange(x.shape[1]), p["w"])), tokens(), w=(LONGEST, D)),
    "position embedding, (T, B, d)": op(lambda p, x: flipped(lambda x: torch.tanh(
        x + F.embedding(torch.arange(len(x)), p["w"])[:, None]), x), tokens(), w=(LONGEST, D)),
    "joined matrices": op(lambda p, x: F.linear(x, torch.cat([p["v"], p["w"]])), tokens(), v=(2, D), w=(OUT, D)),
    # attention
    "attention": attended(),
    "attention, weights": attended(weights=True),
    "attention, (T, B, d), weights": attended(weights=True, first=False),
    "attention, kdim, vdim, (T, B, d)": crossed(first=False, kdim=5, vdim=6),
    "decoder layer, (T, B, d)": module(lambda: nn.TransformerDecoderLayer(D, 2, 6, dropout=0.1), pairs, flipped),
    # cells
    "LSTM cell": celled(nn.LSTMCell),
    "GRU cell, no bias": celled(nn.GRUCell, bias=False),
    "tanh cell": celled(nn.RNNCell),
    "relu cell, no bias": celled(nn.RNNCell, nonlinearity="relu", bias=False),
    # parameters that are computed
    "normalised prototypes": op(lambda p, x: F.linear(x, F.normalize(p["w"], dim=1)), tokens(), w=(OUT, D)),
    "weight standardisation": module(lambda: Standardised(2, 3, 3), signals(2, 2)),
    "merged LoRA": op(lambda p, x: F.linear(x, p["w"] + 2.0 * p["B"] @ p["A"], p["b"]), tokens(), w=(OUT, D), A=(2, D), B=(OUT, 2), b=(OUT,)),
    "LoRA": op(lambda p, x: F.linear(x, p["w"]) + 2.0 * F.linear(F.linear(x, p["A"]), p["B"]), tokens(), w=(OUT, D), A=(2, D), B=(OUT, 2)),
    "reshaped matrix": op(lambda p, x: F.linear(x, p["w"].view(OUT, D)), tokens(), w=(OUT * D,)),
    # used more than once
    "shared three times": module(lambda: Times(nn.Linear(D, D), 3), vectors()),
    "shared convolution": module(lambda: Times(nn.Conv2d(2, 2, 3, padding=1), 2), signals(2, 2)),
    "matrix and its transpose": op(lambda p, x: torch.tanh(x @ p["w"]) @ p["w"].T, tokens(), w=(D, OUT)),
    "matrix and scale": op(lambda p, x: torch.tanh(F.linear(x, p["w"])) * p["w"].sum(1) + x * p["w"][0], tokens(), w=(D, D)),
    "matrix on two lengths": op(lambda p,
        x: torch.cat([x, x.mean(1, keepdim=True)], 1) @ p["w"] + (x.mean(1) @ p["w"])[:, None], tokens(), w=(D, OUT)),
    # activations in place, dropout off
    "conv2d, in-place ReLU": activated(lambda: nn.Conv2d(2, 3, 3), signals(2, 2)),
    "x @ W, in-place ReLU": op(lambda p, x: torch.relu_(x @ p["w"]), tokens(), w=(D, OUT)),
    "dropout off": module(lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, OUT)), tokens()),
}  # fmt: skip
