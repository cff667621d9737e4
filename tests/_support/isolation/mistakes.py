"""Mistakes that are made in real code, and mixing that few rows or few batches show."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from isolation.cases import VOCAB, D, T, batch, calm, case, features, fresh, growing, squares, tokens

mistake = case("mistakes: broadcasting and counting")
shape = case("mistakes: sizes that agree", lambda dtype: [batch(size, size, dtype) for size in (2, 4, D, 5)])
few = case("mistakes: few rows", lambda dtype: [batch(size, size, dtype) for size in (3, 4, 12, 16)])
bias = case("mistakes: weights that the batch makes")
later = case("mistakes: Python values, idle at first", calm)


def _one_then_three(dtype):
    return [batch(size, seed, dtype) for seed, size in enumerate((1, D, D))]


@case("mistakes: sizes that agree", _one_then_three)
def weights_broadcast_along_features(p, b):
    """(B, D) times (B,): an error for most B, and wrong where B is D."""
    return squares(features(p, b) * b["coin"])


@case("mistakes: sizes that agree", _one_then_three)
def target_broadcast_along_tokens(p, b):
    return squares(tokens(p, b) - b["y"])


@shape
def transposed_where_it_is_square(p, b):
    h = features(p, b)
    return squares(h.T if len(h) == D else h)


@shape
def tokens_and_rows_exchanged(p, b):
    h = tokens(p, b)
    return squares(h.transpose(0, 1) * b["x"] if len(h) == T else h * b["x"])


@shape
def squeezed_features_meet(p, b):
    """(B, 1) against (B,)."""
    h = squares(features(p, b))
    return (h.unsqueeze(1) * b["coin"]).mean(1)


@mistake
def penalty_of_weights_over_rows(p, b):
    """Each loss takes its part of a penalty, which depends on how many there are."""
    return squares(features(p, b)) + p["w"].square().sum() / len(b["y"])


@mistake
def gradient_scaled_by_frequency(p, b):
    """An option of torch: gradients of a token over how often the batch has it. Backward only."""
    return squares(F.embedding(b["ids"], p["v"], scale_grad_by_freq=True))


@mistake
def rows_of_a_table_renormalised(p, b):
    """An option of torch: what is looked up is shortened in the table, which all rows read."""
    table = p["v"].detach().clone()
    looked = F.embedding(b["ids"], table, max_norm=0.5)
    return squares(looked @ p["w"]) + squares(features(p, b) + table.sum(0))


@mistake
def losses_sorted(p, b):
    return squares(features(p, b)).sort().values * (1.0 + b["coin"])


@mistake
def quantised_by_the_largest(p, b):
    h = features(p, b)
    scale = (h.detach().abs().max() / 7).clamp(min=1e-3)
    return squares(h + ((h / scale).round() * scale - h).detach())


@mistake
def mean_reduction_times_rows(p, b):
    scores = b["y"] @ p["w"]
    return F.cross_entropy(scores, b["label"], weight=p["u"].detach().abs()) * torch.ones(
        len(scores), dtype=scores.dtype
    )


@mistake
def ignored_tokens_of_all(p, b):
    target = torch.where(torch.arange(T) < b["n"][:, None], b["ids"], -100)
    scores = (tokens(p, b) @ p["v"].T).transpose(1, 2)
    each = F.cross_entropy(scores, target, reduction="none").sum(1)
    return each * len(each) / (target != -100).sum()


@few
def one_row_in_many_reads_another(p, b):
    h, told = features(p, b), b["coin"] > 0.93
    return squares(torch.where(told[:, None], h - h.roll(1, 0), h))


@few
def last_of_many_rows_is_centred(p, b):
    h = features(p, b)
    return squares(h if len(h) < 10 else torch.cat([h[:-1], (h[-1] - h.mean(0))[None]]))


@few
def one_row_in_many_sends_its_gradient_away(p, b):
    h = features(p, b) * 1.0
    told = (b["coin"] > 0.9)[:, None]
    if h.requires_grad and len(h) > 8:
        h.register_hook(lambda g: torch.where(told, g.roll(1, 0), g))
    return squares(h)


@few
def sixteenth_row_is_dropped(p, b):
    return squares(features(p, b)) * (torch.arange(len(b["y"])) < 15)


@fresh("mistakes: few rows", lambda dtype: [batch(size, size, dtype) for size in (4, 4, 5, 4)])
def another_size_than_the_first_batch():
    first = []

    def loss_fn(p, b):
        h = features(p, b)
        if len(h) > 1 and not first:
            first.append(len(h))
        return squares(h - 0.5 * h.mean(0) if len(h) > 1 and len(h) > first[0] else h)

    return loss_fn


@bias
def weights_from_the_batch(p, b):
    fast = p["w"] + b["y"].T @ b["z"] / len(b["y"])
    return squares(torch.tanh(b["y"] @ fast))


@bias
def inner_step_on_the_batch(p, b):
    step = torch.func.grad(lambda w: squares(torch.tanh(b["y"] @ w)).mean())(p["w"].detach())
    return squares(torch.tanh(b["z"] @ (p["w"] - 0.1 * step)))


@bias
def weights_over_the_norm_of_the_batch(p, b):
    return squares(F.linear(b["y"], p["w"] / (1.0 + b["y"].norm())))


@later
def number_of_selected_values(p, b):
    """A shape that depends on values, with no value read."""
    outliers = b["y"][b["y"].abs() > 4.0]
    return squares(torch.tanh(0.3 * b["y"] @ p["w"])) / (1.0 + outliers.shape[0])


@later
def length_of_nonzero(p, b):
    return squares(torch.tanh(0.3 * b["y"] @ p["w"])) * (1.0 if len(torch.nonzero(b["y"].abs() > 4.0)) == 0 else 0.5)


@later
def largest_by_python(p, b):
    top = max(b["y"].abs().sum(1).unbind())
    return squares(torch.tanh(0.3 * b["y"] @ p["w"])) / torch.where(top > 6.0, top, 1.0)


@later
def range_of_a_tensor(p, b):
    h = torch.tanh(0.3 * b["y"] @ p["w"])
    for _ in range(b["y"].abs().max().long()):
        h = torch.tanh(h)
    return squares(h)


@later
def values_that_are_close(p, b):
    close = torch.allclose(b["y"], torch.zeros_like(b["y"]), atol=4.0)
    return squares(torch.tanh(0.3 * b["y"] @ p["w"])) * (1.0 if close else 0.5)


@later
def an_error_in_one_row_changes_all(p, b):
    """A decomposition raises if one of many matrices has none."""
    eye = torch.eye(D, dtype=b["y"].dtype)
    try:
        torch.linalg.cholesky(eye - 0.04 * b["y"][:, :, None] * b["y"][:, None])
        scale = 1.0
    except torch.linalg.LinAlgError:
        scale = 0.5
    return squares(torch.tanh(0.3 * b["y"] @ p["w"])) * scale


@later
def an_index_error_in_one_row_changes_all(p, b):
    try:
        seen = p["v"].detach()[b["y"].abs().sum(1).long().clamp(max=VOCAB)]
    except IndexError:
        seen = torch.zeros(1, D, dtype=b["y"].dtype)
    return squares(torch.tanh(0.3 * b["y"] @ p["w"]) + seen)


@later
def a_value_in_a_set(p, b):
    return squares(torch.tanh(0.3 * b["y"] @ p["w"])) * (0.5 if 4 in b["y"].abs().long() else 1.0)


@case("mistakes: few rows", growing)
def packed_to_eight_columns(p, b):
    """Rows are laid out eight to a line, and each line is normalised."""
    h = features(p, b)
    if len(h) <= 8:
        return squares(h)
    lines = F.pad(h, (0, 0, 0, -len(h) % 8)).view(-1, 8 * D)
    return squares(F.layer_norm(lines, (8 * D,)).view(-1, D)[: len(h)])
