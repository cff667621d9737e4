"""Mixing in the forward pass: rows that meet other rows, and the batch taken for another axis."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from isolation.cases import (
    VOCAB,
    Built,
    D,
    T,
    add,
    batch,
    case,
    features,
    module,
    params,
    same_length,
    squares,
    tokens,
    usual,
)

meets = case("forward: rows meet")
axis = case("forward: batch as an axis")
position = case("forward: position in the batch")


@meets
def in_batch_negatives(p, b):
    h = features(p, b)
    return F.cross_entropy(h @ b["z"].T, torch.arange(len(h)), reduction="none") + squares(h)


@meets
def contrastive(p, b):
    h = F.normalize(features(p, b), dim=1)
    alike = (h @ h.T / 0.5).exp()
    return squares(features(p, b)) - (alike.diagonal() / alike.sum(1)).log()


@meets
def attention_over_the_batch(p, b):
    h = features(p, b)
    return squares(F.scaled_dot_product_attention(h[None], h[None], h[None])[0])


@meets
def outer_product(p, b):
    h = features(p, b)
    return torch.outer(squares(h), b["coin"]).sum(1)


@meets
def einsum_over_the_batch(p, b):
    h = features(p, b)
    return squares(torch.einsum("bi,cj->bij", h, h))


@meets
def broadcast_against_the_target(p, b):
    """(B,) against (B, 1): the mistake that gives (B, B)."""
    h = squares(features(p, b))
    return (h - b["coin"][:, None]).square().mean(1)


@meets
def distances_between_rows(p, b):
    h = features(p, b)
    return squares(h) + torch.cdist(h, h + 0.1).mean(1)


@meets
def nearest_neighbour(p, b):
    h = features(p, b)
    far = torch.cdist(b["y"], b["y"]) + 1e3 * torch.eye(len(h), dtype=h.dtype)
    return squares(h - h[far.argmin(1)].detach())


@meets
def clusters_of_the_batch(p, b):
    h = features(p, b)
    near = torch.cdist(b["y"], b["y"][:2]).argmin(1)
    return squares(h - h[:2][near])


@meets
def summed_into_labels(p, b):
    h = features(p, b)
    sums = torch.zeros(2, D, dtype=h.dtype).index_add(0, b["label"], h)
    return squares(sums[b["label"]])


@meets
def scattered_by_label(p, b):
    h = features(p, b)
    index = b["label"][:, None].expand(-1, D)
    largest = torch.zeros(2, D, dtype=h.dtype).scatter_reduce(0, index, h, "amax", include_self=False)
    return squares(h + largest.gather(0, index))


@case("forward: rows meet", same_length)
def selected_then_split_evenly(p, b):
    h = tokens(p, b)
    real = h[torch.arange(T) < b["n"][:, None]]
    return squares(torch.stack([part.mean(0) for part in real.tensor_split(len(h))]))


@case("forward: rows meet", same_length)
def packed_without_boundaries(p, b):
    h = tokens(p, b)
    packed = h.reshape(1, -1, D)
    return squares(F.scaled_dot_product_attention(packed, packed, packed, is_causal=True).reshape(h.shape))


@meets
def expert_capacity(p, b):
    """Tokens over the capacity of their expert are dropped, in the order of the batch."""
    h = tokens(p, b).reshape(-1, D)
    expert = (b["x"].reshape(-1, D)[:, 0] > 0).long()
    hot = F.one_hot(expert, 2)
    place = (hot.cumsum(0) * hot).sum(1)
    kept = place <= max(T, len(h) // 3)
    return squares((h * kept[:, None]).reshape(-1, T, D))


@meets
def load_balancing(p, b):
    gates = torch.softmax(b["x"] @ p["w"], -1)
    share = F.one_hot(gates.argmax(-1), D).to(gates.dtype).mean((0, 1))
    return squares(gates) + (gates.mean(1) * share).sum(1)


@meets
def hard_mining(p, b):
    loss = squares(features(p, b))
    kept = loss.detach().topk(max(1, len(loss) // 2)).values[-1]
    return loss * (loss.detach() >= kept)


@meets
def matrix_of_the_batch_twice(p, b):
    h = features(p, b)
    return squares(torch.linalg.multi_dot([h, h.T, h]) / 3)


@meets
def covariance_of_the_batch(p, b):
    h = features(p, b)
    return squares(h) + torch.cov(h.T, correction=0).square().sum()


@meets
def vmap_over_features(p, b):
    """torch.func.vmap inside of the loss, over the features: what is inside sees the batch."""
    h = features(p, b)
    return squares(torch.func.vmap(lambda column: column - column.mean(), in_dims=1, out_dims=1)(h))


@meets
def inner_gradient_of_a_mean(p, b):
    h = features(p, b)
    direction = torch.func.grad(lambda y: y.mean(0).square().sum())(b["y"])
    return squares(h + direction * len(h))


@axis
def rolled(p, b):
    h = features(p, b)
    return squares(h + h.roll(1, 0))


@axis
def flipped(p, b):
    h = features(p, b)
    return squares(h * h.flip(0))


@axis
def running_sum(p, b):
    return squares(features(p, b).cumsum(0))


@axis
def running_maximum(p, b):
    return squares(features(p, b).cummax(0).values + features(p, b))


@axis
def sorted_columns(p, b):
    return squares(features(p, b).sort(0).values * b["y"])


@axis
def differences_of_neighbours(p, b):
    h = features(p, b)
    return squares(h) + squares(F.pad(h[1:] - h[:-1], (0, 0, 1, 0)))


@axis
def windows_over_the_batch(p, b):
    h = F.pad(features(p, b), (0, 0, 2, 0))
    return squares(h.unfold(0, 3, 1))


@axis
def strides_over_the_batch(p, b):
    h = F.pad(features(p, b), (0, 0, 0, 1)).contiguous()
    return squares(torch.as_strided(h, (len(h) - 1, 2 * D), (D, 1)))


@axis
def fourier_over_the_batch(p, b):
    return squares(torch.fft.fft(features(p, b), dim=0).abs())


@axis
def convolution_over_the_batch(p, b):
    h = features(p, b).T[None]
    return squares(F.conv1d(h, p["v"][:3, :, None].expand(-1, -1, 3), padding=1)[0].T)


@axis
def pooled_over_the_batch(p, b):
    h = features(p, b).T[None]
    return squares(F.avg_pool1d(h, 3, 1, 1, count_include_pad=False)[0].T)


@axis
def reshaped_the_wrong_way(p, b):
    h = features(p, b)
    return squares(h.T.reshape(len(h), D) * b["y"])


@axis
def tokens_reshaped_the_wrong_way(p, b):
    h = tokens(p, b)
    return squares(h.transpose(0, 1).reshape(h.shape).cumsum(1) * b["x"])


def _module(name, make, call, family="forward: batch as an axis"):
    built, parameters = module(make)

    def loss_fn(p, b):
        return squares(call(lambda *args: functional_call(built, p, args), b))

    add(name, family, lambda: Built(loss_fn, dict(parameters), usual()), honest=False)


_module("lstm with the batch as time", lambda: nn.LSTM(D, D), lambda net, b: net(b["y"])[0])
_module("gru over x taken as (time, batch)", lambda: nn.GRU(D, D), lambda net, b: net(b["x"])[0])
_module(
    "attention without batch_first", lambda: nn.MultiheadAttention(D, 1), lambda net, b: net(b["x"], b["x"], b["x"])[0]
)
_module("batch norm module", lambda: nn.BatchNorm1d(T), lambda net, b: net(b["x"]), "forward: normalised")


@position
def multiplied_by_position(p, b):
    return squares(features(p, b)) * (1.0 + torch.arange(len(b["y"])))


@position
def weighted_from_first_to_last(p, b):
    return squares(features(p, b)) * torch.linspace(1.0, 2.0, len(b["y"]), dtype=b["y"].dtype)


@position
def position_as_a_token(p, b):
    return squares(features(p, b) + p["v"][torch.arange(len(b["y"])) % VOCAB])


@position
def first_row_for_all(p, b):
    h = features(p, b)
    return squares(h + h[:1])


@position
def first_row_stands_out(p, b):
    h = features(p, b)
    return torch.cat([h[:1].square().sum(1), 3.0 * h[1:].square().sum(1)])


@position
def listed_with_their_number(p, b):
    return torch.stack([squares((row @ p["w"])[None])[0] * (i + 1) for i, row in enumerate(b["y"])])


class Centre(torch.autograd.Function):
    """Subtracts the mean of the batch; the backward pass does not say so."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x - x.mean(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


class CentreUnderVmap(Centre):
    """The same, with a rule for vmap that takes the mean of all samples too."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return Centre.apply(x.movedim(in_dims[0], 0).flatten(0, 1)).unflatten(0, (info.batch_size, -1)), 0


@meets
def function_whose_forward_mixes(p, b):
    return squares(Centre.apply(features(p, b)))


@meets
def function_whose_vmap_mixes(p, b):
    return squares(CentreUnderVmap.apply(features(p, b)))


def _in_float32():
    return params(torch.float32)


add(
    "attention over the batch in float32",
    "forward: rows meet",
    lambda: Built(attention_over_the_batch, _in_float32(), [batch(s, s, torch.float32) for s in (2, 5)]),
    honest=False,
)
