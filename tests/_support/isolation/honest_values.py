"""Honest losses: each row is normalised, sorted, masked, compared or dropped by its own values."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from isolation.cases import VOCAB, D, T, batch, case, features, growing, squares, tokens

row = case("honest: own statistics", honest=True)
loss = case("honest: losses", honest=True)
stopped = case("honest: no gradient", honest=True)


@row
def centred_within_rows(p, b):
    h = features(p, b)
    return squares(h - h.mean(1, keepdim=True))


@row
def deviation_within_rows(p, b):
    h = tokens(p, b)
    return squares(h / (0.1 + h.std((1, 2), keepdim=True)))


@row
def largest_within_rows(p, b):
    h = tokens(p, b)
    return squares(h / h.abs().amax((1, 2), keepdim=True))


@row
def sorted_within_rows(p, b):
    return squares(features(p, b).sort(1).values)


@row
def top_entries_within_rows(p, b):
    return squares(features(p, b).topk(2, 1).values)


@row
def running_sum_within_rows(p, b):
    return squares(tokens(p, b).cumsum(1))


@row
def rolled_within_rows(p, b):
    h = tokens(p, b)
    return squares(h * h.roll(1, 1).flip(2))


@row
def quantile_within_rows(p, b):
    h = features(p, b)
    return squares(h - h.quantile(0.5, dim=1, keepdim=True))


@row
def mean_over_own_tokens(p, b):
    mask = torch.arange(T) < b["n"][:, None]
    return (tokens(p, b).square().sum(2) * mask).sum(1) / mask.sum(1)


@row
def distances_within_rows(p, b):
    h = tokens(p, b)
    return squares(torch.cdist(h, h + 0.1))


@row
def covariance_within_rows(p, b):
    h = tokens(p, b)
    cov = h.mT @ h + torch.eye(D, dtype=h.dtype)
    return torch.linalg.cholesky(cov).diagonal(dim1=1, dim2=2).log().sum(1) + squares(h)


@row
def vmap_over_rows(p, b):
    return squares(torch.func.vmap(lambda y: torch.tanh(y @ p["w"]) * y.norm())(b["y"]))


@row
def vmap_over_tokens(p, b):
    return squares(torch.func.vmap(lambda x: torch.tanh(x @ p["w"]), in_dims=1, out_dims=1)(b["x"]))


@row
def experts_by_own_gates(p, b):
    gates = torch.softmax(b["x"] @ p["w"][:, :2], -1)
    best = gates.topk(1, -1)
    out = torch.stack([tokens(p, b), torch.relu(b["x"] @ p["w"].T)], -1)
    return squares(best.values * out.gather(-1, best.indices[..., None, :].expand(-1, -1, D, -1))[..., 0])


@row
def clipped_by_own_norm(p, b):
    y = b["y"]
    return squares(features(p, {"y": y / y.norm(dim=1, keepdim=True).clamp(min=1.0)}))


@row
def fourier_within_rows(p, b):
    return squares(torch.fft.rfft(tokens(p, b), dim=1).abs())


@row
def histogram_of_own_tokens(p, b):
    counts = F.one_hot(b["ids"], VOCAB).sum(1).to(p["v"].dtype)
    return squares(counts @ p["v"])


@row
def largest_of_all_subtracted(p, b):
    """The largest value of the whole batch makes exp safe; the result does not depend on it."""
    h = b["y"] @ p["w"]
    top = h.detach().max()
    return (h - top).exp().sum(1).log() + top


@row
def shifted_by_the_batch_and_back(p, b):
    h = features(p, b)
    shift = h.detach().mean(0)
    return squares((h - shift) + shift)


@case("honest: own statistics", growing, dtype=torch.float32, honest=True)
def attention_within_rows_in_float32(p, b):
    h = tokens(p, b)
    return squares(F.scaled_dot_product_attention(h, h, h, is_causal=True))


@case("honest: own statistics", growing, dtype=torch.float32, honest=True)
def layer_norm_in_float32(p, b):
    return squares(F.layer_norm(b["y"], (D,), p["u"], p["c"]))


@loss
def cosine_similarity(p, b):
    return 1.0 - F.cosine_similarity(features(p, b), b["z"], dim=1)


@loss
def cross_entropy_of_tokens(p, b):
    scores = tokens(p, b) @ p["v"].T
    return F.cross_entropy(scores.transpose(1, 2), b["ids"], reduction="none").mean(1)


@loss
def ctc(p, b):
    scores = F.log_softmax(p["v"][b["ids"]] @ p["v"].T, -1).transpose(0, 1)
    lengths = torch.full((len(b["n"]),), T)
    return F.ctc_loss(scores, b["ids"][:, :1], lengths, torch.ones_like(lengths), reduction="none")


@loss
def tied_weights(p, b):
    h = torch.tanh(p["v"][b["ids"]] @ p["w"])
    return F.cross_entropy((h @ p["v"].T).flatten(0, 1), b["ids"].flatten(), reduction="none").view(-1, T).sum(1)


@loss
def triplet_of_own_views(p, b):
    h = tokens(p, b)
    near, far = (h[:, 0] - h[:, 1]).norm(dim=1), (h[:, 0] - h[:, 2]).norm(dim=1)
    return F.softplus(near - far)


@loss
def zero_for_some_rows(p, b):
    """Rows that count nothing are rows all the same."""
    return squares(features(p, b)) * (b["label"] == 0)


@loss
def teacher_of_constant_weights(p, b):
    teacher = torch.tanh(b["y"] @ torch.eye(D, dtype=b["y"].dtype))
    return F.kl_div(F.log_softmax(b["y"] @ p["w"], 1), F.softmax(teacher, 1), reduction="none").sum(1)


@stopped
def target_detached(p, b):
    h = features(p, b)
    return squares(h - 0.5 * h.detach().flip(1))


@stopped
def weights_detached_in_one_use(p, b):
    return squares(torch.tanh(features(p, b) @ p["w"].detach()))


@stopped
def without_gradient_inside(p, b):
    with torch.no_grad():
        scale = features(p, b).norm(dim=1, keepdim=True)
    return squares(features(p, b) / (1.0 + scale))


@stopped
def quantised_straight_through(p, b):
    h = features(p, b)
    codes = p["v"].detach()
    nearest = codes[torch.cdist(h.detach(), codes).argmin(1)]
    return squares(h + (nearest - h).detach()) + (h - nearest).square().sum(1)


# Random, each row for itself: the gradient of a row has an entry of its own, times what the random numbers say.


def unit_rows(dtype):
    """Row i has a one at entry i: what u gets at entry i comes from row i."""
    return [
        {
            **batch(D, seed, dtype),
            "y": torch.eye(D, dtype=dtype),
            "x": torch.eye(D, dtype=dtype)[:, None].repeat(1, T, 1),
        }
        for seed in range(4)
    ]


def plain(p, b):
    """The sum of u at the entries of each row."""
    return (b["y"] * p["u"]).sum(1)


def random(*factors):
    """Enter a random loss: factors are what its random numbers may multiply a row by."""
    return case("honest: random", unit_rows, honest=True, plain=plain, factors=factors)


@random(2.0)
def dropout(p, b):
    return (F.dropout(b["y"], 0.5) * p["u"]).sum(1)


@random(2.0)
def dropout_after_a_parameter(p, b):
    return F.dropout(b["y"] * p["u"], 0.5).sum(1)


@random(2.0)
def dropout_of_features(p, b):
    return F.dropout1d(b["x"].transpose(1, 2) * p["u"][:, None], 0.5).mean(2).sum(1)


@random(1.25)
def drop_path(p, b):
    keep = b["y"].new_empty(len(b["y"]), 1).bernoulli_(0.8)
    return (b["y"] * p["u"] * keep / 0.8).sum(1)


@random(2.0)
def drop_path_by_uniform_numbers(p, b):
    keep = (0.5 + torch.rand(len(b["y"]), 1, dtype=b["y"].dtype)).floor()
    return (b["y"] * p["u"] * keep / 0.5).sum(1)


@random(1.0)
def noise_on_the_loss(p, b):
    """Each row has noise of its own, which has no gradient."""
    return (b["y"] * p["u"]).sum(1) + torch.randn(len(b["y"]), dtype=b["y"].dtype)


@row
def default_of_the_batch_that_no_row_needs(p, b):
    """Scales of time series: the mean of the batch is taken for rows without observations, of which there are none."""
    h = features(p, b)
    own = h.abs().mean(1, keepdim=True)
    return squares(h / (0.1 + torch.where(own >= 0, own, own.mean(0))))
