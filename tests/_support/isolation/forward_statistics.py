"""Mixing in the forward pass: statistics of the batch, and what is divided, normalised or chosen by them."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from isolation.cases import LABELS, VOCAB, D, T, calm, case, features, growing, same_length, squares, tokens, twins

statistic = case("forward: statistics")
normalised = case("forward: normalised")
counted = case("forward: counted")
python = case("forward: Python values", calm)


@statistic
def centred(p, b):
    h = features(p, b)
    return squares(h - h.mean(0))


@statistic
def centred_without_gradient(p, b):
    h = features(p, b)
    return squares(h - h.detach().mean(0))


@case("forward: statistics", dtype=torch.float32)
def centred_in_float32(p, b):
    h = features(p, b)
    return squares(h - 0.5 * h.mean(0, keepdim=True))


@statistic
def divided_by_the_deviation(p, b):
    h = features(p, b)
    return squares(h / (h.std(0, unbiased=False) + 1.0))


@statistic
def largest_of_the_batch(p, b):
    h = features(p, b)
    return squares(h / (1.0 + h.abs().amax(0)))


@statistic
def median_of_the_batch(p, b):
    h = features(p, b)
    return squares(h - 0.3 * h.median(0).values)


@case("forward: statistics", growing)
def quantile_threshold(p, b):
    loss = squares(features(p, b))
    return torch.where(loss <= loss.detach().quantile(0.8), loss, 0.1 * loss)


@statistic
def kth_value(p, b):
    h = features(p, b)
    return squares(h - 0.2 * torch.kthvalue(h, 1, dim=0).values)


@statistic
def softmax_over_the_batch(p, b):
    h = features(p, b)
    return squares(h * torch.softmax(h, 0))


@statistic
def whitened(p, b):
    h = features(p, b)
    cov = h.T @ h / len(h) + torch.eye(D, dtype=h.dtype)
    return squares(torch.linalg.solve_triangular(torch.linalg.cholesky(cov), h.T, upper=False).T)


@statistic
def gram_matrix(p, b):
    h = features(p, b)
    return squares(h) + (h @ h.T).square().sum(1)


@statistic
def spectral_norm_of_activations(p, b):
    h = features(p, b)
    return squares(h) / (1.0 + torch.linalg.matrix_norm(h.detach(), 2))


@statistic
def frobenius_norm_of_the_batch(p, b):
    return squares(features(p, {"y": b["y"] / b["y"].norm()}))


@statistic
def group_means_by_label(p, b):
    h = features(p, b)
    hot = F.one_hot(b["label"], LABELS).to(h.dtype)
    centres = hot.T @ h / hot.sum(0).clamp(min=1)[:, None]
    return squares(h - 0.5 * centres[b["label"]])


@statistic
def ridge_regression_on_the_batch(p, b):
    h = features(p, b)
    coefficients = torch.linalg.solve(h.T @ h + torch.eye(D, dtype=h.dtype), h.T @ b["z"])
    return squares(h @ coefficients - b["z"])


@normalised
def batch_norm(p, b):
    h = F.batch_norm(b["x"].transpose(1, 2), None, None, p["u"], p["c"], training=True)
    return squares(h)


@normalised
def batch_norm_with_statistics_kept(p, b):
    mean, var = torch.zeros(D, dtype=p["u"].dtype), torch.ones(D, dtype=p["u"].dtype)
    h = F.batch_norm(tokens(p, b).transpose(1, 2), mean, var, p["u"], p["c"], training=True)
    return squares(h + mean[:, None])


@normalised
def layer_norm_over_batch_and_features(p, b):
    h = features(p, b)
    return squares(F.layer_norm(h, h.shape) * p["u"])


@normalised
def instance_norm_over_merged_rows(p, b):
    h = tokens(p, b).permute(2, 0, 1).reshape(1, D, -1)
    return squares(F.instance_norm(h).reshape(D, -1, T).transpose(0, 1))


@normalised
def group_norm_with_rows_as_channels(p, b):
    h = features(p, b)
    return squares(F.group_norm(h.reshape(1, -1, 1), 1).reshape(h.shape))


@normalised
def normalised_along_the_batch(p, b):
    return squares(F.normalize(features(p, b) + 2.0, dim=0) + features(p, b))


@normalised
def row_over_its_deviation_in_the_batch(p, b):
    """NaN for a row alone, finite for rows together."""
    r = (b["y"] * p["u"]).sum(1)
    return (r / r.std()).square()


@normalised
def batch_norm_of_rows_that_fails_for_one(p, b):
    return squares(F.batch_norm(features(p, b), None, None, p["u"], p["c"], training=True))


@case("forward: normalised", twins)
def divided_by_rows_less_one(p, b):
    """Infinite for a row alone."""
    return squares(features(p, b)) / (len(b["y"]) - 1)


@counted
def divided_by_rows(p, b):
    return squares(features(p, b)) / len(b["y"])


@counted
def divided_by_rows_of_another_tensor(p, b):
    return squares(features(p, b)) / b["coin"].numel()


@case("forward: counted", same_length)
def mean_over_the_tokens_of_the_batch(p, b):
    mask = torch.arange(T) < b["n"][:, None]
    loss = (tokens(p, b).square().sum(2) * mask).sum(1)
    return loss * len(loss) / mask.sum()


@counted
def batchmean_of_all(p, b):
    h = features(p, b)
    loss = F.mse_loss(h, b["z"], reduction="sum") / h.numel()
    return loss.expand(len(h))


@counted
def class_weights_of_the_batch(p, b):
    counts = torch.bincount(b["label"], minlength=LABELS)
    return squares(features(p, b)) / counts[b["label"]]


@counted
def unique_tokens_of_the_batch(p, b):
    return squares(p["v"][b["ids"]]) / torch.unique(b["ids"]).numel()


@counted
def frequency_of_tokens_in_the_batch(p, b):
    counts = torch.bincount(b["ids"].flatten(), minlength=VOCAB)
    return squares(p["v"][b["ids"]] / counts[b["ids"]][..., None])


@counted
def histogram_of_the_batch(p, b):
    counts = torch.histc(b["coin"].detach(), 2, 0.0, 1.0)
    return squares(features(p, b)) * counts[(b["coin"] >= 0.5).long()]


@case("forward: counted", same_length)
def mean_over_the_longest_row(p, b):
    longest = int(b["n"].max())
    mask = torch.arange(longest) < b["n"][:, None]
    return squares((tokens(p, b)[:, :longest] * mask[..., None]).mean(1))


@case("forward: counted", same_length)
def scaled_by_the_longest_row(p, b):
    return squares(features(p, b)) * (b["n"] / b["n"].max())


@python
def branch_on_the_mean(p, b):
    h = features(p, b)
    return squares(h) if b["y"].abs().mean() < 0.5 or len(h) == 1 else squares(h).clamp(max=0.1)


@python
def item_of_a_sum(p, b):
    return squares(features(p, b)) * (1.0 + b["y"].square().sum().item())


@python
def list_of_values(p, b):
    return squares(features(p, b)) * (1.0 + max(b["y"].flatten().tolist()))


@python
def float_of_the_largest(p, b):
    return squares(features(p, b)) * max(1.0, float(b["y"].max()))


@python
def any_value_above(p, b):
    return squares(features(p, b) * (2.0 if (b["y"].abs() > 2.0).any() else 1.0))


@python
def all_values_below(p, b):
    calm_batch = torch.all(b["y"].abs() < 4.0)
    return squares(features(p, b) * (1.0 if bool(calm_batch) else 2.0))


@python
def numpy_round_trip(p, b):
    h = features(p, b)
    return squares(h - torch.from_numpy(h.detach().numpy().mean(0)))


@python
def numpy_function_of_a_tensor(p, b):
    return squares(features(p, b) * float(np.abs(b["y"].numpy()).max()))


@python
def where_the_largest_is_above(p, b):
    h = features(p, b)
    return squares(torch.where(b["y"].max() > 2.0, 0.5 * h, h))


@python
def clipped_by_the_norm_of_the_batch(p, b):
    return squares(features(p, {"y": b["y"] * (1.0 / b["y"].norm()).clamp(max=1.0)}))


@python
def equality_of_shapes_and_values(p, b):
    return squares(features(p, b)) * (1.0 if torch.equal(b["y"], b["y"].clamp(-4.0, 4.0)) else 3.0)


@python
def tensor_as_an_index(p, b):
    where = int(b["y"].sum(1).argmax())
    return squares(features(p, b) + b["y"][where].detach())


@statistic
def default_of_the_batch_for_some_rows(p, b):
    """Scales of time series: rows without observations take the mean of the batch."""
    h = features(p, b)
    own = h.sum(1, keepdim=True)
    return squares(h * torch.where(own > 0, own, own.mean(0)))


@statistic
def default_of_the_batch_for_all_rows(p, b):
    h = features(p, b)
    own = h.abs().mean(1, keepdim=True)
    return squares(h * torch.where(own < 0, own, own.mean(0)))
