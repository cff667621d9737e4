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
from torch.nn.utils import parametrizations, parametrize
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


Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Layer:
    """How parameters are used.

    Args:
        build: draw -> (forward, params), with `forward(params, *batch)` of shape (B, ...).
        batch: (draw, B, T) -> the tensors of a batch. unused: parameters that get no gradient.
    """

    build: Callable[[Draw], tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]]
    batch: Callable[[Draw, int, int], Batch]
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Built:
    """A layer with its parameters: one loss function for batches of every size."""

    layer: Layer
    loss_fn: Callable[..., torch.Tensor]
    params: dict[str, torch.Tensor]
    dtype: torch.dtype
    seed: int

    def case(self, size, length):
        draw = Draw(torch.Generator().manual_seed(1000 * self.seed + 10 * size + length), self.dtype)
        return Case(self.loss_fn, self.params, self.layer.batch(draw, size, length))


def build(name, dtype, seed):
    layer = LAYERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        forward, params = layer.build(Draw(torch.Generator().manual_seed(seed), dtype))
    return Built(layer, loss_of(forward), params, dtype, seed)


def loss_of(forward):
    """Squares and a projection of each sample's output: no symmetry makes a gradient vanish."""

    def loss_fn(params, batch):
        out = forward(params, *batch)
        rows_BP = out.reshape(len(out), -1)
        direction_P = torch.sin(1.0 + torch.arange(rows_BP.shape[1], dtype=rows_BP.dtype))
        return (0.5 * rows_BP.square() + rows_BP * direction_P).sum(1)

    return loss_fn


# Batches


def vectors(width=D):
    return lambda draw, B, T: (draw.normal(B, width),)


def tokens(width=D):
    return lambda draw, B, T: (draw.normal(B, T, width),)


def several(draw, B, T):
    """At least two positions, where attention over one would have no gradient."""
    return (draw.normal(B, T + 1, D),)


def grids(width=D):
    return lambda draw, B, T: (draw.normal(B, 2, T, width),)


def pairs(width=D, other=D):
    """Two sequences of different length."""
    return lambda draw, B, T: (draw.normal(B, T, width), draw.normal(B, T + 1, other))


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
    return module(lambda: kind(channels, *args, **options), signals(channels, _axes(kind)))


def _axes(kind):
    return int(kind.__name__[-2])


def norm(make, batch):
    return module(make, batch)


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


class Queries(nn.Module):
    """Learned queries that look at the sequence."""

    def __init__(self, batch_first):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, D))
        self.attend = nn.MultiheadAttention(D, 2, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x_BTd):
        if self.batch_first:
            queries = self.queries[None].expand(len(x_BTd), -1, -1)
            return self.attend(queries, x_BTd, x_BTd)[0]
        queries = self.queries[:, None].expand(-1, len(x_BTd), -1)
        x_TBd = x_BTd.transpose(0, 1)
        return self.attend(queries, x_TBd, x_TBd)[0].transpose(0, 1)


class Standardised(nn.Conv2d):
    """Weight standardisation."""

    def forward(self, x):
        spread, mean = torch.std_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) / (spread + 1e-5), self.bias, padding=1)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


class Activated(nn.Module):
    """A layer whose output is overwritten by its activation."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.relu = layer, nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.layer(x))


def symmetric_linear():
    layer = nn.Linear(D, D)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


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


def routed_minor(p, x_BTd):
    """(E, T * B, d)."""
    x_ENd = x_BTd.transpose(0, 1).flatten(0, 1)[None].expand(2, -1, -1)
    return torch.bmm(x_ENd, p["w"]).tanh().sum(0).unflatten(0, x_BTd.shape[1::-1]).transpose(0, 1)


def decoder(batch_first):
    return nn.TransformerDecoderLayer(D, 2, 6, dropout=0.1, batch_first=batch_first)


def flipped(run, *batch):
    """Sequences first inside of the layer."""
    return run(*(x.transpose(0, 1).contiguous() for x in batch)).transpose(0, 1)


def flat(run, x_BTd):
    return run(x_BTd.reshape(-1, x_BTd.shape[2])).reshape(*x_BTd.shape[:2], -1)


def flat_minor(run, x_BTd):
    """The sample is the faster index."""
    y_Np = run(x_BTd.transpose(0, 1).reshape(-1, x_BTd.shape[2]))
    return y_Np.reshape(x_BTd.shape[1], x_BTd.shape[0], -1).transpose(0, 1)


def frames(run, x_BTCHW):
    return run(x_BTCHW.flatten(0, 1)).unflatten(0, x_BTCHW.shape[:2])


def frames_minor(run, x_BTCHW):
    return run(x_BTCHW.transpose(0, 1).flatten(0, 1)).unflatten(0, x_BTCHW.shape[1::-1]).transpose(0, 1)


def attended(weights=False, first=True, **options):
    """Self-attention by nn.MultiheadAttention; its weights are part of the output."""

    def forward(run, x_BTd):
        x = x_BTd if first else x_BTd.transpose(0, 1)
        out, attention_BTT = run(x, x, x, need_weights=weights)
        out = out if first else out.transpose(0, 1)
        return torch.cat([out, attention_BTT], dim=2) if weights else out

    return module(lambda: nn.MultiheadAttention(D, 2, batch_first=first, **options), tokens(), forward)


def crossed(first, kdim=D, vdim=D):
    def forward(run, x_BTd, y_BSd):
        value = torch.cat([y_BSd, y_BSd], 2)[:, :, :vdim]
        args = (x_BTd, y_BSd, value)
        if first:
            return run(*args)[0]
        return run(*(arg.transpose(0, 1) for arg in args))[0].transpose(0, 1)

    make = lambda: nn.MultiheadAttention(D, 2, batch_first=first, kdim=kdim, vdim=vdim)
    return module(make, pairs(other=kdim), forward)


def masked_attention(first):
    def forward(run, x_BTd, hidden_BT):
        x = x_BTd if first else x_BTd.transpose(0, 1)
        out = run(x, x, x, key_padding_mask=hidden_BT)[0]
        return out if first else out.transpose(0, 1)

    return module(lambda: nn.MultiheadAttention(D, 2, batch_first=first), masked, forward)


def causal_attention(weights):
    def forward(run, x_BTd):
        length = x_BTd.shape[1]
        hidden_TT = torch.ones(length, length, dtype=torch.bool).triu(1)
        return run(x_BTd, x_BTd, x_BTd, attn_mask=hidden_TT, need_weights=weights)[0]

    return module(lambda: nn.MultiheadAttention(D, 2, batch_first=True), tokens(), forward)


def rms(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def distances(length):
    """Which entry of a table of relative positions: (T, T)."""
    at = torch.arange(length)
    return at[:, None] - at[None] + LONGEST


def biased_attention(p, x_BTd):
    bias_hTT = p["bias"][:, distances(x_BTd.shape[1])]
    return F.scaled_dot_product_attention(_heads(x_BTd), _heads(x_BTd), _heads(x_BTd), attn_mask=bias_hTT[None])


def biased_by_table(p, x_BTd):
    """The table of T5: (rows, heads)."""
    bias_hTT = F.embedding(distances(x_BTd.shape[1]), p["table"]).permute(2, 0, 1)
    scores_BhTT = _heads(x_BTd) @ _heads(x_BTd).mT + bias_hTT[None]
    return scores_BhTT.softmax(-1) @ _heads(x_BTd)


def biased_in_place(p, x_BTd):
    scores_BhTT = _heads(x_BTd) @ _heads(x_BTd).mT
    scores_BhTT += p["bias"][:, distances(x_BTd.shape[1])].unsqueeze(0)
    return scores_BhTT.softmax(-1) @ _heads(x_BTd)


def _heads(x_BTd):
    return x_BTd.unflatten(2, (2, -1)).transpose(1, 2)


def added(p, x):
    x = x * 1.0
    x += p["b"]
    return x


def scaled(p, x):
    x = x * 1.0
    x *= p["w"]
    return x


def class_token(expand):
    return lambda p, x_BTd: torch.cat([expand(p["cls"], len(x_BTd)), x_BTd], dim=1).tanh()


def positions_by_id(p, x_BTd):
    return torch.tanh(x_BTd + F.embedding(torch.arange(x_BTd.shape[1]), p["table"]))


def positions_by_expanded_id(p, x_BTd):
    ids_BT = torch.arange(x_BTd.shape[1])[None].expand(len(x_BTd), -1)
    return torch.tanh(x_BTd + F.embedding(ids_BT, p["table"]))


def merged_lora(p, x):
    return F.linear(x, p["w"] + 2.0 * p["B"] @ p["A"], p["b"])


def matrix_and_scale(p, x_BTd):
    return torch.tanh(F.linear(x_BTd, p["w"])) * p["w"].sum(1) + x_BTd * p["w"][0]


LAYERS: dict[str, Layer] = {
    # matrices
    "linear, vectors": module(lambda: nn.Linear(D, OUT), vectors()),
    "linear, tokens": module(lambda: nn.Linear(D, OUT), tokens()),
    "linear, grids": module(lambda: nn.Linear(D, OUT), grids()),
    "linear, no bias": module(lambda: nn.Linear(D, OUT, bias=False), tokens()),
    "linear, one output": module(lambda: nn.Linear(D, 1), vectors()),
    "linear, wide": module(lambda: nn.Linear(40, 50), tokens(40)),
    "linear, B * T": module(lambda: nn.Linear(D, OUT), tokens(), flat),
    "linear, T * B": module(lambda: nn.Linear(D, OUT), tokens(), flat_minor),
    "linear, (T, B, d)": module(lambda: nn.Linear(D, OUT), tokens(), flipped),
    "linear, wide, T * B": module(lambda: nn.Linear(40, 50), tokens(40), flat_minor),
    "Conv1D of transformers": module(lambda: Conv1D(OUT, D), tokens()),
    "Conv1D of transformers, (T, B, d)": module(lambda: Conv1D(OUT, D), tokens(), flipped),
    "addmm": op(lambda p, x: torch.addmm(p["b"], x, p["w"]), vectors(), b=(OUT,), w=(D, OUT)),
    "addmm, B * T": op(
        lambda p, x: torch.addmm(p["b"], x.flatten(0, 1), p["w"]).unflatten(0, x.shape[:2]),
        tokens(), b=(OUT,), w=(D, OUT),
    ),
    "addmm, method": op(lambda p, x: p["b"].addmm(x, p["w"]), vectors(), b=(OUT,), w=(D, OUT)),
    "addmm, beta, alpha": op(
        lambda p, x: torch.addmm(p["b"], x, p["w"], beta=0.5, alpha=-2.0), vectors(), b=(OUT,), w=(D, OUT)
    ),
    "mv": op(lambda p, x: torch.mv(x, p["v"]), vectors(), v=(D,)),
    "mv, B * T": op(lambda p, x: x.flatten(0, 1).mv(p["v"]).unflatten(0, x.shape[:2]), tokens(), v=(D,)),
    "x @ W": op(lambda p, x: x @ p["w"], tokens(), w=(D, OUT)),
    "x @ W.T": op(lambda p, x: x @ p["w"].T, tokens(), w=(OUT, D)),
    "x @ W.t()": op(lambda p, x: x @ p["w"].t(), vectors(), w=(OUT, D)),
    "x @ W.mT": op(lambda p, x: x @ p["w"].mT, tokens(), w=(OUT, D)),
    "x @ W.transpose": op(lambda p, x: x @ p["w"].transpose(0, 1), tokens(), w=(OUT, D)),
    "x @ W, B * T": op(lambda p, x: flat(lambda x: x @ p["w"], x), tokens(), w=(D, OUT)),
    "x @ W, T * B": op(lambda p, x: flat_minor(lambda x: x @ p["w"], x), tokens(), w=(D, OUT)),
    "mm": op(lambda p, x: torch.mm(x, p["w"]), vectors(), w=(D, OUT)),
    "matmul(W, x)": op(lambda p, x: torch.matmul(p["w"], x.mT), tokens(), w=(OUT, D)),
    "W.T @ x": op(lambda p, x: p["w"].T @ x.mT, tokens(), w=(D, OUT)),
    "inner(x, W)": op(lambda p, x: torch.inner(x, p["w"]), tokens(), w=(OUT, D)),
    "inner(x, v)": op(lambda p, x: torch.inner(x, p["v"]), tokens(), v=(D,)),
    "x @ v": op(lambda p, x: x @ p["v"], tokens(), v=(D,)),
    "x @ v, vectors": op(lambda p, x: x @ p["v"], vectors(), v=(D,)),
    "x @ v[:, None]": op(lambda p, x: x @ p["v"][:, None], tokens(), v=(D,)),
    "bilinear": module(lambda: nn.Bilinear(D, D, OUT), vectors(), lambda run, x: run(x, x.tanh())),
    "bilinear, tokens": module(lambda: nn.Bilinear(D, D, OUT), tokens(), lambda run, x: run(x, x.tanh())),
    "einsum bti,io->bto": op(lambda p, x: torch.einsum("bti,io->bto", x, p["w"]), tokens(), w=(D, OUT)),
    "einsum oi,bti->bot": op(lambda p, x: torch.einsum("oi,bti->bot", p["w"], x), tokens(), w=(OUT, D)),
    "einsum bti,oi->tbo": op(
        lambda p, x: torch.einsum("bti,oi->tbo", x, p["w"]).transpose(0, 1), tokens(), w=(OUT, D)
    ),
    "einsum btd,hde->bhte": op(lambda p, x: torch.einsum("btd,hde->bhte", x, p["w"]), tokens(), w=(2, D, OUT)),
    "einsum bi,i->b": op(lambda p, x: torch.einsum("bi,i->b", x, p["w"]), vectors(), w=(D,)),
    "einsum bi,i->bi": op(lambda p, x: torch.einsum("bi,i->bi", x, p["w"]), vectors(), w=(D,)),
    "tensordot, one axis": op(lambda p, x: torch.tensordot(x, p["w"], dims=1), tokens(), w=(D, OUT)),
    "tensordot, parameter first": op(
        lambda p, x: torch.tensordot(p["w"], x, dims=([1], [2])).movedim(0, -1), tokens(), w=(OUT, D)
    ),
    "tensordot, two axes": op(
        lambda p, x: torch.tensordot(x[..., None] * x[..., None, :], p["w"], dims=2), tokens(), w=(D, D, OUT)
    ),
    "einsum with spaces": op(lambda p, x: torch.einsum("b t i, i o -> b t o", x, p["w"]), tokens(), w=(D, OUT)),
    "bmm of experts": op(routed(lambda x, p: torch.bmm(x, p["w"])), tokens(), w=(2, D, OUT)),
    "bmm of experts, T * B": op(routed_minor, tokens(), w=(2, D, OUT)),
    "bmm, method, transposed experts": op(
        routed(lambda x, p: x.bmm(p["w"].transpose(1, 2))), tokens(), w=(2, OUT, D)
    ),
    "baddbmm of experts": op(
        routed(lambda x, p: torch.baddbmm(p["b"], x, p["w"])), tokens(), b=(2, 1, OUT), w=(2, D, OUT)
    ),
    "baddbmm, method, beta, alpha": op(
        routed(lambda x, p: p["b"].baddbmm(x, p["w"], beta=0.5, alpha=2.0)), tokens(), b=(2, 1, OUT), w=(2, D, OUT)
    ),
    "baddbmm, beta 0": op(
        routed(lambda x, p: torch.baddbmm(x.new_zeros(1, 1, 1), x, p["w"], beta=0)), tokens(), w=(2, D, OUT)
    ),
    "x @ W, 3 axes": op(lambda p, x: x @ p["w"], tokens(), w=(1, D, OUT)),
    "x @ W, 3 axes, heads": op(lambda p, x: torch.matmul(x[:, None], p["w"]), tokens(), w=(2, D, OUT)),
    "x @ W, 3 axes, heads, grids": op(lambda p, x: torch.matmul(x, p["w"]), grids(), w=(2, D, OUT)),
    "x @ W, 4 axes": op(lambda p, x: x[:, None] @ p["w"], grids(), w=(3, 1, D, OUT)),
    "x @ W, 3 axes, (B * T, d)": op(
        lambda p, x: (x.flatten(0, 1) @ p["w"]).tanh().sum(0).unflatten(0, x.shape[:2]), tokens(), w=(2, D, OUT)
    ),
    "x @ W, 3 axes, frames B * T": op(
        lambda p, x: (x.flatten(0, 1) @ p["w"]).unflatten(0, x.shape[:2]), videos, w=(2, 4, OUT)
    ),
    "W @ x, 3 axes": op(lambda p, x: p["w"] @ x.mT[:, None], tokens(), w=(2, OUT, D)),
    "W @ x, 3 axes, columns": op(
        lambda p, x: (p["w"] @ x.flatten(0, 1).T).tanh().sum(0).T.unflatten(0, x.shape[:2]), tokens(), w=(2, OUT, D)
    ),
    "outer": op(lambda p, x: torch.outer(x[:, 0], p["w"]).tanh(), vectors(), w=(OUT,)),
    "outer, method, W first": op(lambda p, x: p["w"].outer(x[:, 0]).T.tanh(), vectors(), w=(OUT,)),
    # distances
    "cosine similarity": op(
        lambda p, x: F.cosine_similarity(x[:, :, None], p["w"][None, None], dim=-1), tokens(), w=(OUT, D)
    ),
    "cosine similarity, vectors": op(lambda p, x: torch.cosine_similarity(x, p["w"][None]), vectors(), w=(D,)),
    "cosine similarity, first axis": op(
        lambda p, x: F.cosine_similarity(p["w"], x.mT, dim=1, eps=0.5), tokens(), w=(D, 1)
    ),
    "cosine similarity, short": op(
        lambda p, x: F.cosine_similarity(0.1 * x, p["w"], dim=-1, eps=1.5), tokens(), w=(D,)
    ),
    "cosine similarity, one feature": op(
        lambda p, x: F.cosine_similarity(p["w"], x[..., :1], dim=2) + x[..., 1], tokens(), w=(D,)
    ),
    "cosine similarity, module": op(
        lambda p, x: nn.CosineSimilarity(dim=2)(x, p["w"][None]), tokens(), w=(1, D)
    ),
    "cdist": op(lambda p, x: torch.cdist(x, p["w"]), tokens(), w=(OUT, D)),
    "cdist, W first": op(lambda p, x: torch.cdist(p["w"][None], x), tokens(), w=(OUT, D)),
    "cdist, vectors": op(lambda p, x: torch.cdist(x, p["w"]), vectors(), w=(OUT, D)),
    "cdist, p=1": op(lambda p, x: torch.cdist(x, p["w"], p=1.0), tokens(), w=(OUT, D)),
    "cdist, p=3": op(lambda p, x: torch.cdist(x, p["w"], p=3.0), tokens(), w=(OUT, D)),
    "cdist, largest": op(lambda p, x: torch.cdist(x, p["w"], p=float("inf")), tokens(), w=(OUT, D)),
    "cdist, many": op(lambda p, x: torch.cdist(x, p["w"]), tokens(), w=(30, D)),
    "pairwise distance": op(lambda p, x: F.pairwise_distance(x, p["w"]), tokens(), w=(D,)),
    "pairwise distance, p=1, keepdim": op(
        lambda p, x: F.pairwise_distance(p["w"], x, p=1.0, eps=0.1, keepdim=True), tokens(), w=(D,)
    ),
    "pairwise distance, module": op(lambda p, x: nn.PairwiseDistance()(x, p["w"]), vectors(), w=(D,)),
    "normalised prototypes": op(lambda p, x: F.linear(x, F.normalize(p["w"], dim=1)), tokens(), w=(OUT, D)),
    # convolutions
    "conv1d": conv(nn.Conv1d, 2, 3, 3),
    "conv2d": conv(nn.Conv2d, 2, 3, 3),
    "conv3d": conv(nn.Conv3d, 2, 3, 3),
    "conv1d, stride, padding": conv(nn.Conv1d, 2, 3, 3, stride=2, padding=1),
    "conv2d, stride, padding": conv(nn.Conv2d, 2, 3, 3, stride=(2, 1), padding=(1, 2)),
    "conv3d, stride, padding": conv(nn.Conv3d, 2, 3, 2, stride=2, padding=1),
    "conv2d, stride that leaves a rest": conv(nn.Conv2d, 2, 3, 2, stride=3),
    "conv1d, same": conv(nn.Conv1d, 2, 3, 3, padding="same"),
    "conv1d, same, even": conv(nn.Conv1d, 2, 3, 4, padding="same"),
    "conv2d, same": conv(nn.Conv2d, 2, 3, 3, padding="same"),
    "conv2d, same, even": conv(nn.Conv2d, 2, 3, 4, padding="same"),
    "conv2d, same, even and odd": conv(nn.Conv2d, 2, 3, (2, 3), padding="same"),
    "conv2d, same, dilation": conv(nn.Conv2d, 2, 3, 2, padding="same", dilation=3),
    "conv3d, same, even": conv(nn.Conv3d, 2, 3, 2, padding="same"),
    "conv2d, valid": conv(nn.Conv2d, 2, 3, 3, padding="valid"),
    "conv1d, dilation": conv(nn.Conv1d, 2, 3, 2, dilation=3),
    "conv2d, dilation": conv(nn.Conv2d, 2, 3, 2, dilation=(2, 3), padding=2),
    "conv2d, groups": conv(nn.Conv2d, 4, 6, 3, groups=2, padding=1),
    "conv1d, groups": conv(nn.Conv1d, 4, 2, 3, groups=2),
    "conv2d, depthwise": conv(nn.Conv2d, 3, 3, 3, groups=3, padding=1),
    "conv1d, depthwise, multiplier": conv(nn.Conv1d, 3, 6, 3, groups=3, padding=2),
    "conv3d, groups": conv(nn.Conv3d, 2, 4, 2, groups=2),
    "conv2d, 1 x 1": conv(nn.Conv2d, 3, 5, 1),
    "conv1d, 1": conv(nn.Conv1d, 3, 5, 1),
    "conv2d, 1 x 1, stride": conv(nn.Conv2d, 3, 5, 1, stride=2),
    "conv2d, 1 x 1, groups": conv(nn.Conv2d, 4, 6, 1, groups=2),
    "conv2d, no bias": conv(nn.Conv2d, 2, 3, 3, bias=False),
    "conv2d, many channels": conv(nn.Conv2d, 16, 24, 3),
    "conv1d, circular": conv(nn.Conv1d, 2, 3, 3, padding=1, padding_mode="circular"),
    "conv2d, circular": conv(nn.Conv2d, 2, 3, 3, padding=1, padding_mode="circular"),
    "conv2d, reflect": conv(nn.Conv2d, 2, 3, 3, padding=1, padding_mode="reflect"),
    "conv2d, replicate": conv(nn.Conv2d, 2, 3, 3, padding=2, padding_mode="replicate"),
    "conv2d, frames B * T": module(lambda: nn.Conv2d(2, 3, 3, padding=1), videos, frames),
    "conv2d, frames T * B": module(lambda: nn.Conv2d(2, 3, 3, padding=1), videos, frames_minor),
    "conv2d, 1 x 1, frames T * B": module(lambda: nn.Conv2d(2, 3, 1), videos, frames_minor),
    "conv2d, patches": conv(nn.Conv2d, 2, 3, 2, stride=2),
    "transposed 1d": conv(nn.ConvTranspose1d, 2, 3, 3, stride=2, padding=1),
    "transposed 1d, output_padding": conv(nn.ConvTranspose1d, 2, 3, 3, stride=2, output_padding=1),
    "transposed 2d": conv(nn.ConvTranspose2d, 2, 3, 3),
    "transposed 2d, output_padding, groups": conv(
        nn.ConvTranspose2d, 4, 6, 3, stride=2, padding=1, output_padding=1, groups=2
    ),
    "transposed 2d, dilation": conv(nn.ConvTranspose2d, 2, 3, 2, dilation=2),
    "transposed 2d, 1 x 1": conv(nn.ConvTranspose2d, 2, 3, 1),
    "transposed 2d, frames T * B": module(lambda: nn.ConvTranspose2d(2, 3, 2), videos, frames_minor),
    "conv1d, few positions": conv(nn.Conv1d, 32, 48, 3, stride=2),
    "conv2d, few positions": conv(nn.Conv2d, 32, 48, 3, stride=2, padding=1),
    "conv2d, few positions, dilation": conv(nn.Conv2d, 32, 48, (3, 2), stride=3, padding=2, dilation=(2, 1)),
    "conv2d, few positions, groups": conv(nn.Conv2d, 64, 64, 3, stride=3, padding=1, groups=2),
    "conv2d, few positions, circular": conv(nn.Conv2d, 32, 48, 3, 3, padding=1, padding_mode="circular"),
    "conv2d, large patches": conv(nn.Conv2d, 8, 48, (5, 4), stride=4, padding=2),
    "conv3d, few positions": conv(nn.Conv3d, 16, 32, 3, stride=3, padding=1),
    "conv2d, 1 x 1, stride, padding": conv(nn.Conv2d, 3, 5, 1, stride=2, padding=1),
    "conv2d, few positions, frames T * B": module(lambda: nn.Conv2d(2, 64, 4), videos, frames_minor),
    "transposed 1d, few positions": conv(nn.ConvTranspose1d, 64, 48, 3, stride=1, padding=2),
    "transposed 2d, few positions, groups": conv(
        nn.ConvTranspose2d, 128, 128, 3, stride=1, padding=(3, 2), groups=2, dilation=2
    ),
    "transposed 2d, output_padding over the stride": conv(
        nn.ConvTranspose2d, 3, 4, 2, stride=1, dilation=3, output_padding=2
    ),
    "transposed 3d": conv(nn.ConvTranspose3d, 2, 4, 2, stride=2, output_padding=1, groups=2),
    # tables
    "embedding": module(lambda: nn.Embedding(VOCAB, D), ids()),
    "embedding, large": module(lambda: nn.Embedding(VOCAB + 50, D), ids()),
    "embedding, padding_idx": module(lambda: nn.Embedding(VOCAB, D, padding_idx=2), ids()),
    "embedding, padding_idx -1": module(lambda: nn.Embedding(VOCAB, D, padding_idx=-1), ids()),
    "embedding, repeated ids": module(lambda: nn.Embedding(VOCAB + 50, D), repeated_ids),
    "embedding, one id each": module(lambda: nn.Embedding(VOCAB, D), lambda draw, B, T: (draw.ints(VOCAB, B),)),
    "embedding, 3 axes": module(lambda: nn.Embedding(VOCAB, D), ids(2)),
    "embedding, (T, B)": module(lambda: nn.Embedding(VOCAB + 50, D), ids(), flipped),
    "embedding, T * B": module(
        lambda: nn.Embedding(VOCAB + 50, D), ids(),
        lambda run, x: run(x.T.flatten()).unflatten(0, x.shape[::-1]).transpose(0, 1),
    ),
    "embedding bag, sum": module(lambda: nn.EmbeddingBag(VOCAB, D, mode="sum"), ids()),
    "embedding bag, mean": module(lambda: nn.EmbeddingBag(VOCAB, D, mode="mean"), ids()),
    "embedding bag, weights": module(
        lambda: nn.EmbeddingBag(VOCAB, D, mode="sum"), weighted_ids,
        lambda run, x, w: run(x, per_sample_weights=w),
    ),
    "embedding bag, padding_idx": module(lambda: nn.EmbeddingBag(VOCAB, D, mode="sum", padding_idx=1), ids()),
    "embedding bag, mean, padding_idx -1": module(
        lambda: nn.EmbeddingBag(VOCAB, D, mode="mean", padding_idx=-1), ids()
    ),
    "embedding bag, max": module(lambda: nn.EmbeddingBag(VOCAB, D, mode="max"), ids()),
    "embedding bag, max, padding_idx": module(
        lambda: nn.EmbeddingBag(VOCAB, D, mode="max", padding_idx=1), ids()
    ),
    "embedding bag, sparse": module(lambda: nn.EmbeddingBag(VOCAB, D, mode="sum", sparse=True), ids()),
    "embedding bag, offsets": bagged(1, False, mode="mean"),
    "embedding bag, offsets, two bags": bagged(2, False, mode="sum"),
    "embedding bag, offsets, two bags, mean": bagged(2, False, mode="mean"),
    "embedding bag, offsets, two bags, max": bagged(2, False, mode="max"),
    "embedding bag, last offset": bagged(2, True, mode="sum"),
    "embedding bag, last offset, mean, padding_idx": bagged(2, True, mode="mean", padding_idx=2),
    "embedding bag, last offset, max, padding_idx": bagged(2, True, mode="max", padding_idx=2),
    "embedding bag, offsets, weights, sparse": bagged(2, False, mode="sum", weighted=True, sparse=True),
    "table[ids]": op(lambda p, x: p["w"][x], ids(), w=(VOCAB, D)),
    "table[ids], numbers": op(lambda p, x: p["w"][x], ids(), w=(VOCAB,)),
    "table[ids], matrices": op(lambda p, x: p["w"][x], ids(), w=(VOCAB, 2, D)),
    "table[ids], negative ids": op(lambda p, x: p["w"][x - VOCAB], ids(), w=(VOCAB, D)),
    "table[ids], large": op(lambda p, x: p["w"][x], ids(), w=(VOCAB + 50, D)),
    "table[(ids,)]": op(lambda p, x: p["w"][(x,)], ids(), w=(VOCAB, D)),
    "index_select": op(
        lambda p, x: torch.index_select(p["w"], 0, x.flatten()).unflatten(0, x.shape), ids(), w=(VOCAB, D)
    ),
    "index_select, method, T * B": op(
        lambda p, x: p["w"].index_select(0, x.T.flatten()).unflatten(0, x.T.shape).transpose(0, 1),
        ids(), w=(VOCAB, D),
    ),
    "embedding twice": op(
        lambda p, x: F.embedding(x, p["w"]) * F.embedding((x + 1) % VOCAB, p["w"]), ids(), w=(VOCAB, D)
    ),
    "embedding twice, large": op(
        lambda p, x: F.embedding(x, p["w"]) * F.embedding((x + 1) % VOCAB, p["w"]), ids(), w=(VOCAB + 50, D)
    ),
    "tied embedding and head": module(Tied, ids()),
    "tied embedding and head, large": op(
        lambda p, x: F.linear(torch.tanh(F.embedding(x, p["w"])), p["w"]), ids(), w=(VOCAB + 50, D)
    ),
    # norms
    "layer norm": norm(lambda: nn.LayerNorm(D), tokens()),
    "layer norm, vectors": norm(lambda: nn.LayerNorm(D), vectors()),
    "layer norm, 2 axes": norm(lambda: nn.LayerNorm((2, D)), lambda draw, B, T: (draw.normal(B, T, 2, D),)),
    "layer norm, no bias": norm(lambda: nn.LayerNorm(D, bias=False), tokens()),
    "layer norm, no affine": norm(
        lambda: nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D, elementwise_affine=False)), tokens()
    ),
    "layer norm, (T, B, d)": module(lambda: nn.LayerNorm(D), tokens(), flipped),
    "layer norm, T * B": module(lambda: nn.LayerNorm(D), tokens(), flat_minor),
    "group norm": norm(lambda: nn.GroupNorm(2, 4), signals(4, 2)),
    "group norm, bias alone": op(lambda p, x: F.group_norm(x, 2, x.new_ones(4), p["b"]), signals(4, 2), b=(4,)),
    "group norm, weight alone": op(lambda p, x: F.group_norm(x, 2, p["w"]), signals(4, 2), w=(4,)),
    "group norm, 1d": norm(lambda: nn.GroupNorm(2, 4), signals(4, 1)),
    "group norm, frames T * B": module(lambda: nn.GroupNorm(1, 2), videos, frames_minor),
    "group norm, no axes": norm(lambda: nn.GroupNorm(1, 4), vectors()),
    "instance norm": norm(lambda: nn.InstanceNorm2d(3, affine=True), signals(3, 2)),
    "instance norm, 1d": norm(lambda: nn.InstanceNorm1d(3, affine=True), signals(3, 1)),
    "instance norm, statistics": norm(
        lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), signals(3, 1)
    ),
    "rms norm": norm(lambda: nn.RMSNorm(D), tokens()),
    "rms norm, eps, 2 axes": norm(
        lambda: nn.RMSNorm((2, D), eps=1e-3), lambda draw, B, T: (draw.normal(B, T, 2, D),)
    ),
    "rms norm by hand": op(lambda p, x: p["w"] * rms(x), tokens(), w=(D,)),
    "rms norm by hand, 1 + w": op(lambda p, x: (1 + p["w"]) * rms(x), tokens(), w=(D,)),
    "rms norm by hand, float": op(lambda p, x: rms(x) * (1.0 + p["w"].float()).to(x.dtype), tokens(), w=(D,)),
    "batch norm, eval": norm(lambda: nn.BatchNorm2d(3), signals(3, 2)),
    "batch norm, eval, 1d": norm(lambda: nn.BatchNorm1d(3), vectors(3)),
    "PReLU": norm(lambda: nn.PReLU(), tokens()),
    "PReLU, channels": norm(lambda: nn.PReLU(3), signals(3, 2)),
    "PReLU, vectors": norm(lambda: nn.PReLU(D), vectors()),
    # pointwise
    "x + b": op(lambda p, x: torch.tanh(x + p["b"]), tokens(), b=(D,)),
    "b + x": op(lambda p, x: torch.tanh(p["b"] + x), tokens(), b=(D,)),
    "x += b": op(added, tokens(), b=(D,)),
    "x *= w": op(scaled, tokens(), w=(D,)),
    "x * w": op(lambda p, x: x * p["w"], tokens(), w=(D,)),
    "w * x, vectors": op(lambda p, x: p["w"] * x, vectors(), w=(D,)),
    "x - b": op(lambda p, x: torch.tanh(x - p["b"]), tokens(), b=(D,)),
    "b - x": op(lambda p, x: torch.tanh(p["b"] - x), tokens(), b=(D,)),
    "x / w": op(lambda p, x: x / p["w"].square(), tokens(), w=(D,)),
    "x / w, plain": op(lambda p, x: x / p["w"], tokens(), w=(D,)),
    "1 / w * x": op(lambda p, x: 1 / p["w"] * x, tokens(), w=(D,)),
    "w / x": op(lambda p, x: p["w"] / (2 + x.square()), tokens(), w=(D,)),
    "x * w, B * T": op(lambda p, x: flat(lambda x: x * p["w"], x), tokens(), w=(D,)),
    "x * w, T * B": op(lambda p, x: flat_minor(lambda x: x * p["w"], x), tokens(), w=(D,)),
    "x * w, (T, B, d)": op(lambda p, x: flipped(lambda x: x * p["w"], x), tokens(), w=(D,)),
    "x * w, channels": op(lambda p, x: x * p["w"][:, None, None], signals(3, 2), w=(3,)),
    "x * w, shape (1, C, 1, 1)": op(lambda p, x: x * p["w"], signals(3, 2), w=(1, 3, 1, 1)),
    "where(mask, x, token)": op(
        lambda p, x, hidden: torch.where(hidden[..., None], x, p["token"]).tanh(), masked, token=(D,)
    ),
    "where(mask, token, x)": op(
        lambda p, x, hidden: torch.where(~hidden[..., None], p["token"], x).tanh(), masked, token=(1, 1, D)
    ),
    "mask * token": op(
        lambda p, x, hidden: torch.tanh(x + (~hidden)[..., None].to(x.dtype) * p["token"]), masked, token=(D,)
    ),
    "lerp": op(lambda p, x: torch.lerp(x, x.tanh(), p["w"]), tokens(), w=(D,)),
    "maximum": op(lambda p, x: torch.maximum(x, p["w"] - 1), tokens(), w=(D,)),
    "addcmul": op(lambda p, x: torch.addcmul(p["b"], x, p["w"]), tokens(), b=(D,), w=(D,)),
    "pow": op(lambda p, x: torch.pow(1 + x.square(), p["w"]), tokens(), w=(D,)),
    "x ** w": op(lambda p, x: (1 + x.square()) ** p["w"], tokens(), w=(D,)),
    "addcdiv": op(lambda p, x: torch.addcdiv(p["b"], x, p["w"], value=0.5), tokens(), b=(D,), w=(D,)),
    "atan2": op(lambda p, x: torch.atan2(x, p["w"]), tokens(), w=(D,)),
    "clamp": op(lambda p, x: x.clamp(p["low"] - 2, max=p["high"]), tokens(), low=(D,), high=(1,)),
    "clamp_min": op(lambda p, x: torch.clamp_min(x, p["w"] - 1), tokens(), w=(D,)),
    "copysign": op(lambda p, x: torch.copysign(p["w"], x), tokens(), w=(D,)),
    "float_power": op(lambda p, x: torch.float_power(1 + x.square(), p["w"]).to(x.dtype), tokens(), w=(D,)),
    "fmax, fmin": op(lambda p, x: torch.fmax(x, p["v"] - 2).fmin(p["w"]), tokens(), v=(D,), w=(D,)),
    "hypot": op(lambda p, x: torch.hypot(x, p["w"]), tokens(), w=(D,)),
    "logaddexp": op(lambda p, x: torch.logaddexp(x, p["w"]), tokens(), w=(D,)),
    "logaddexp2": op(lambda p, x: torch.logaddexp2(p["w"], x), tokens(), w=(D,)),
    "remainder, fmod": op(
        lambda p, x: torch.remainder(x, 0.3 + p["v"].square()) + x.fmod(0.3 + p["w"].square()), tokens(), v=(D,), w=(D,)
    ),
    "xlogy": op(lambda p, x: torch.xlogy(x, 0.1 + p["w"].square()), tokens(), w=(D,)),
    "x * w + b": op(lambda p, x: x * p["w"] + p["b"], tokens(), w=(D,), b=(D,)),
    "scalar": op(lambda p, x: x * p["s"], tokens(), s=()),
    "scalar, shape (1,)": op(lambda p, x: x * p["s"], tokens(), s=(1,)),
    "exp(scalar)": op(lambda p, x: torch.tanh(x * p["s"].exp() + p["t"]), tokens(), s=(), t=()),
    "softplus(w)": op(lambda p, x: x * F.softplus(p["w"]), tokens(), w=(D,)),
    "scale twice": op(lambda p, x: torch.tanh(x * p["w"]) * p["w"], tokens(), w=(D,)),
    "unused": op(lambda p, x: x * p["w"], tokens(), unused=("u",), w=(D,), u=(D, 2)),
    # tokens and positions
    "class token, expand": op(class_token(lambda cls, B: cls.expand(B, -1, -1)), tokens(), cls=(1, 1, D)),
    "class token, expand, vector": op(class_token(lambda cls, B: cls.expand(B, 1, -1)), tokens(), cls=(D,)),
    "class token, repeat": op(class_token(lambda cls, B: cls.repeat(B, 1, 1)), tokens(), cls=(1, 1, D)),
    "class token, [None].repeat": op(class_token(lambda cls, B: cls[None, None].repeat(B, 1, 1)), tokens(), cls=(D,)),
    "class token, zeros +": op(
        lambda p, x: torch.cat([x.new_zeros(len(x), 1, D) + p["cls"], x], 1).tanh(), tokens(), cls=(1, 1, D)
    ),
    "class token, tile": op(class_token(lambda cls, B: torch.tile(cls, (B, 1, 1))), tokens(), cls=(1, D)),
    "class token, tile, method": op(class_token(lambda cls, B: cls.tile(B, 1, 1)), tokens(), cls=(1, 1, D)),
    "class tokens, repeat": op(class_token(lambda cls, B: cls.repeat(B, 2, 1)), tokens(), cls=(2, D)),
    "class tokens, repeat, B * T": op(
        class_token(lambda cls, B: cls.repeat(B, 1).unflatten(0, (B, -1))), tokens(), cls=(2, D)
    ),
    "class tokens, repeat, T * B": op(
        class_token(lambda cls, B: cls.repeat(1, B).unflatten(1, (B, -1)).transpose(0, 1)), tokens(), cls=(2, D)
    ),
    "class token, stack": op(
        lambda p, x: torch.stack([x, p["cls"].expand_as(x)], 1).tanh(), tokens(), cls=(D,)
    ),
    "class token, (T, B, d)": op(
        lambda p, x: flipped(lambda x: torch.cat([p["cls"].expand(1, x.shape[1], -1), x]).tanh(), x),
        tokens(), cls=(1, 1, D),
    ),
    "table repeated for positions": op(
        lambda p, x: torch.tanh(x + p["w"].repeat(LONGEST, 1)[: x.shape[1]]), tokens(), w=(2, D)
    ),
    "index_add, shared": op(
        lambda p, x: torch.tanh(x + x.new_zeros(2, D).index_add(0, torch.tensor([0, 1, 0]), p["w"])[0]),
        tokens(), w=(3, D),
    ),
    "position table": op(lambda p, x: torch.tanh(x + p["w"][:, : x.shape[1]]), tokens(), w=(1, LONGEST, D)),
    "position table, rows": op(lambda p, x: torch.tanh(x + p["w"][: x.shape[1]]), tokens(), w=(LONGEST, D)),
    "position embedding": op(positions_by_id, tokens(), table=(LONGEST, D)),
    "position embedding, expanded ids": op(positions_by_expanded_id, tokens(), table=(LONGEST, D)),
    "position embedding, (T, B, d)": op(
        lambda p, x: flipped(lambda x: torch.tanh(x + F.embedding(torch.arange(len(x)), p["w"])[:, None]), x),
        tokens(), w=(LONGEST, D),
    ),
    "stacked parameters": op(lambda p, x: x * torch.stack([p["v"], p["w"]]).sum(0), tokens(), v=(D,), w=(D,)),
    "joined matrices": op(lambda p, x: F.linear(x, torch.cat([p["v"], p["w"]])), tokens(), v=(2, D), w=(OUT, D)),
    "split matrix": op(
        lambda p, x: torch.tanh(F.linear(x, p["w"].chunk(2)[0])) * F.linear(x, p["w"].chunk(2)[1]),
        tokens(), w=(6, D),
    ),
    # attention
    "attention": attended(),
    "attention, weights": attended(weights=True),
    "attention, (T, B, d)": attended(first=False),
    "attention, (T, B, d), weights": attended(weights=True, first=False),
    "attention, no bias": attended(bias=False),
    "attention, added key": attended(add_bias_kv=True),
    "attention, padding": masked_attention(True),
    "attention, padding, (T, B, d)": masked_attention(False),
    "attention, causal": causal_attention(False),
    "attention, causal, weights": causal_attention(True),
    "attention, cross": crossed(True),
    "attention, cross, (T, B, d)": crossed(False),
    "attention, kdim, vdim": crossed(True, kdim=5, vdim=6),
    "attention, kdim, vdim, (T, B, d)": crossed(False, kdim=5, vdim=6),
    "attention, learned queries": module(lambda: Queries(True), tokens()),
    "attention, learned queries, (T, B, d)": module(lambda: Queries(False), tokens()),
    "attention, bias as mask": op(biased_attention, several, bias=(2, 2 * LONGEST)),
    "attention, bias by table": op(biased_by_table, several, table=(2 * LONGEST, 2)),
    "attention, bias in place": op(biased_in_place, several, bias=(2, 2 * LONGEST)),
    "encoder layer": module(lambda: nn.TransformerEncoderLayer(D, 2, 6, batch_first=True), tokens()),
    "encoder layer, (T, B, d)": module(lambda: nn.TransformerEncoderLayer(D, 2, 6), tokens(), flipped),
    "encoder layer, norm first, gelu": module(
        lambda: nn.TransformerEncoderLayer(D, 2, 6, batch_first=True, norm_first=True, activation="gelu"), tokens()
    ),
    "encoder layer, padding": module(
        lambda: nn.TransformerEncoderLayer(D, 2, 6, batch_first=True), masked,
        lambda run, x, hidden: run(x, src_key_padding_mask=hidden),
    ),
    "decoder layer": module(lambda: decoder(True), pairs()),
    "decoder layer, (T, B, d)": module(lambda: decoder(False), pairs(), flipped),
    # cells
    "LSTM cell": celled(nn.LSTMCell),
    "LSTM cell, no bias": celled(nn.LSTMCell, bias=False),
    "GRU cell": celled(nn.GRUCell),
    "GRU cell, no bias": celled(nn.GRUCell, bias=False),
    "tanh cell": celled(nn.RNNCell),
    "relu cell": celled(nn.RNNCell, nonlinearity="relu"),
    "relu cell, no bias": celled(nn.RNNCell, nonlinearity="relu", bias=False),
    # parameters that are computed
    "weight standardisation": module(lambda: Standardised(2, 3, 3), signals(2, 2)),
    "weight norm, linear": module(lambda: parametrizations.weight_norm(nn.Linear(D, OUT)), tokens()),
    "weight norm, conv1d": module(lambda: parametrizations.weight_norm(nn.Conv1d(2, 3, 3)), signals(2, 1)),
    "symmetric matrix": module(symmetric_linear, tokens()),
    "orthogonal matrix": module(lambda: parametrizations.orthogonal(nn.Linear(D, OUT)), tokens()),
    "merged LoRA": op(merged_lora, tokens(), w=(OUT, D), A=(2, D), B=(OUT, 2), b=(OUT,)),
    "LoRA": op(
        lambda p, x: F.linear(x, p["w"]) + 2.0 * F.linear(F.linear(x, p["A"]), p["B"]),
        tokens(), w=(OUT, D), A=(2, D), B=(OUT, 2),
    ),
    "cast matrix": op(lambda p, x: F.linear(x.double(), p["w"].double()), tokens(), w=(OUT, D)),
    "reshaped matrix": op(lambda p, x: F.linear(x, p["w"].view(OUT, D)), tokens(), w=(OUT * D,)),
    # used more than once
    "shared twice": module(lambda: Times(nn.Linear(D, D), 2), tokens()),
    "shared three times": module(lambda: Times(nn.Linear(D, D), 3), vectors()),
    "shared convolution": module(lambda: Times(nn.Conv2d(2, 2, 3, padding=1), 2), signals(2, 2)),
    "shared norm": module(lambda: Times(nn.LayerNorm(D), 2), tokens()),
    "matrix and its transpose": op(lambda p, x: torch.tanh(x @ p["w"]) @ p["w"].T, tokens(), w=(D, OUT)),
    "matrix and scale": op(matrix_and_scale, tokens(), w=(D, D)),
    "matrix on two lengths": op(
        lambda p, x: torch.cat([x, x.mean(1, keepdim=True)], 1) @ p["w"] + (x.mean(1) @ p["w"])[:, None],
        tokens(), w=(D, OUT),
    ),
    # activations in place, dropout off
    "linear, in-place ReLU": module(lambda: Activated(nn.Linear(D, OUT)), tokens()),
    "conv2d, in-place ReLU": module(lambda: Activated(nn.Conv2d(2, 3, 3)), signals(2, 2)),
    "norm, in-place ReLU": module(lambda: Activated(nn.GroupNorm(1, 2)), signals(2, 2)),
    "layer norm, in-place ReLU": module(lambda: Activated(nn.LayerNorm(D)), tokens()),
    "embedding, in-place ReLU": module(lambda: Activated(nn.Embedding(VOCAB, D)), ids()),
    "scale, in-place ReLU": op(lambda p, x: F.relu(x * p["w"], inplace=True), tokens(), w=(D,)),
    "x @ W, in-place ReLU": op(lambda p, x: torch.relu_(x @ p["w"]), tokens(), w=(D, OUT)),
    "dropout off": module(lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, OUT)), tokens()),
}  # fmt: skip
