"""Honest losses in which rows share a computation: equal rows are computed once, penalties belong to all."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from isolation.cases import VOCAB, D, T, batch, case, features, squares, tokens


def repeating(dtype):
    """Rows that differ, then rows of which some are equal."""
    first, second, third = batch(4, 4, dtype), batch(5, 5, dtype), batch(6, 6, dtype)
    again = torch.tensor([0, 1, 0, 2, 1])
    same = {**third, "ids": third["ids"].clone()}
    same["ids"][:, 0] = 2
    return [first, {**second, "y": second["y"][again], "ids": second["ids"][again]}, same]


shared = case("honest: computed once for several rows", repeating, honest=True)
penalty = case("honest: penalties", honest=True)
usual = case("honest: usual code", honest=True)


@shared
def equal_rows_computed_once(p, b):
    rows, back = torch.unique(b["y"], dim=0, return_inverse=True)
    return squares(torch.tanh(rows @ p["w"])[back] * b["z"])


@shared
def equal_tokens_embedded_once(p, b):
    ids, back = b["ids"].unique(return_inverse=True)
    return squares(p["v"][ids][back] @ p["w"])


@shared
def common_beginning_computed_once(p, b):
    """Where all rows begin alike, the beginning is computed for one and expanded."""
    alike = bool((b["ids"][:, 0] == b["ids"][0, 0]).all())
    first = torch.tanh(p["v"][b["ids"][:1, 0] if alike else b["ids"][:, 0]] @ p["w"])
    return squares(first.expand(len(b["ids"]), -1) + features(p, b))


@shared
def all_tokens_embedded_and_looked_up(p, b):
    table = torch.tanh(p["v"] @ p["w"])
    return squares(table[b["ids"]])


@penalty
def weight_decay_in_each_loss(p, b):
    return squares(features(p, b)) + 0.1 * p["w"].square().sum()


@penalty
def weight_decay_expanded(p, b):
    return squares(features(p, b)) + (p["u"].norm() + p["c"].sum()).expand(len(b["y"]))


@penalty
def entropy_of_a_parameter(p, b):
    gate = torch.softmax(p["u"], 0)
    return squares(features(p, b) * gate) - (gate * gate.log()).sum()


@usual
def padded_to_eight_rows(p, b):
    y = F.pad(b["y"], (0, 0, 0, 8 - len(b["y"])))
    return squares(torch.tanh(y @ p["w"]))[: len(b["y"])]


@usual
def early_exit_without_work(p, b):
    told = b["label"] == 0
    if not bool(told.any()):
        return features(p, b).sum(1) * 0.0
    return squares(features(p, b)) * told


@usual
def embedding_with_padding(p, b):
    return squares(F.embedding(b["ids"], p["v"], padding_idx=VOCAB - 1) @ p["w"])


@usual
def bags_of_tokens(p, b):
    return squares(F.embedding_bag(b["ids"], p["v"], mode="mean"))


@usual
def loop_over_tokens(p, b):
    state = torch.zeros(len(b["x"]), D, dtype=b["x"].dtype)
    for t in range(T):
        state = torch.tanh(b["x"][:, t] @ p["w"] + state * p["u"])
    return squares(state)


@usual
def inner_step_of_each_row(p, b):
    inner = torch.func.grad(lambda w, y: torch.tanh(y @ w).square().sum())
    steps = torch.func.vmap(inner, in_dims=(None, 0))(p["w"].detach(), b["y"])
    return squares(torch.einsum("bi,bij->bj", b["z"], p["w"] - 0.1 * steps))


@usual
def weights_from_its_own_row(p, b):
    fast = p["w"] + b["y"][:, :, None] * b["z"][:, None]
    return squares(torch.einsum("bi,bij->bj", b["y"], fast).tanh())


@usual
def masked_tokens_filled_with_a_parameter(p, b):
    real = (torch.arange(T) < b["n"][:, None])[..., None]
    return squares(torch.where(real, tokens(p, b), p["u"]) @ p["w"])


@usual
def losses_in_a_list(p, b):
    h = features(p, b)
    return torch.cat([squares(h[i : i + 1]) for i in range(len(h))])


@usual
def label_smoothing(p, b):
    return F.cross_entropy(b["y"] @ p["w"], b["label"], reduction="none", label_smoothing=0.1)


@usual
def gradient_clamped_within_the_loss(p, b):
    return F.huber_loss(features(p, b), b["z"], reduction="none", delta=0.1).sum(1)
