"""Honest losses: the batch axis moves, is merged, split, cut and joined, and each row still sees its own values only."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from isolation.cases import LABELS, Built, D, T, add, batch, case, features, module, same_length, squares, tokens, usual

axes = case("honest: where the samples are", honest=True)
pieces = case("honest: cut and joined", honest=True)
own = case("honest: own entries", honest=True)
python = case("honest: Python", honest=True)


@axes
def time_first(p, b):
    h = torch.tanh(b["x"].transpose(0, 1) @ p["w"])
    return squares(h.transpose(0, 1))


@axes
def batch_merged_with_time(p, b):
    h = torch.tanh(b["x"].reshape(-1, D) @ p["w"])
    return squares(h.view(-1, T, D))


@axes
def time_merged_before_batch(p, b):
    h = torch.tanh(b["x"].transpose(0, 1).reshape(-1, D) @ p["w"])
    return squares(h.view(T, -1, D).transpose(0, 1))


@axes
def samples_last(p, b):
    return squares(torch.tanh(p["w"].T @ b["y"].T).T)


@axes
def heads_merged_with_batch(p, b):
    h = tokens(p, b)
    heads = h[..., None, :].expand(-1, -1, 2, -1).transpose(1, 2).reshape(-1, T, D)
    out = torch.softmax(heads @ heads.mT, -1) @ heads
    return squares(out.view(-1, 2, T, D).transpose(1, 2))


@axes
def windows_merged_with_batch(p, b):
    """As in Swin: windows of a grid become rows, and rows become a grid again."""
    grid = F.pad(tokens(p, b), (0, 0, 0, 1)).view(-1, 2, 2, D).repeat(1, 2, 2, 1)
    windows = grid.view(-1, 2, 2, 2, 2, D).transpose(2, 3).reshape(-1, 4, D)
    mixed = torch.softmax(windows @ windows.mT, -1) @ windows
    back = mixed.view(-1, 2, 2, 2, 2, D).transpose(2, 3).reshape(-1, 4, 4, D)
    return squares(back.roll((1, 1), (1, 2)))


@axes
def pixel_shuffle(p, b):
    image = torch.einsum("btd,de->bet", b["x"].repeat(1, 4, 4), torch.cat([p["w"]] * 4)).reshape(-1, D, 4, T)
    return squares(F.pixel_shuffle(image.repeat(1, 4, 1, 1)[:, : 4 * (D // 2 + 1)], 2))


@axes
def einsum_that_keeps_rows(p, b):
    return squares(torch.einsum("btd,bse,de->bts", b["x"], b["x"], p["w"]).tanh())


@axes
def matrix_of_each_row(p, b):
    h = tokens(p, b)
    return squares(h @ h.mT) + torch.linalg.matrix_norm(h, 2)


@axes
def batch_folded_into_channels_of_groups(p, b):
    """Grouped convolution, in which each sample is a group."""
    x = b["x"].transpose(1, 2)
    size = len(x)
    weight = p["v"].view(2, D, D)[:, :, :2].expand(size, -1, -1, -1).reshape(2 * size, D, 2)
    return squares(F.conv1d(x.reshape(1, size * D, T), weight, groups=size).view(size, -1))


def _module(name, make, call, batches=usual):
    net, parameters = module(make)

    def loss_fn(p, b):
        return squares(call(lambda *args: functional_call(net, p, args), b))

    add(name, "honest: modules", lambda: Built(loss_fn, dict(parameters), batches()), honest=True)


_module("lstm with time first", lambda: nn.LSTM(D, D), lambda net, b: net(b["x"].transpose(0, 1))[0].transpose(0, 1))
_module("lstm with the batch first", lambda: nn.LSTM(D, D, batch_first=True), lambda net, b: net(b["x"])[0])
_module("gru", lambda: nn.GRU(D, D, batch_first=True, bidirectional=True), lambda net, b: net(b["x"])[0])
_module(
    "attention with a padding mask",
    lambda: nn.MultiheadAttention(D, 1, batch_first=True),
    lambda net, b: net(b["x"], b["x"], b["x"], torch.arange(T) >= b["n"][:, None])[0],
)
_module(
    "transformer layer",
    lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    lambda net, b: net(F.pad(b["x"], (0, 1))),
)
_module(
    "convolutions and group norm",
    lambda: nn.Sequential(nn.Conv1d(D, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv1d(4, 2, 1)),
    lambda net, b: net(b["x"].mT),
)
_module(
    "batch norm with fixed statistics",
    lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)).eval(),
    lambda net, b: net(b["y"]),
)
_module("layer norm", lambda: nn.LayerNorm((T, D)), lambda net, b: net(b["x"]))
_module(
    "instance norm",
    lambda: nn.Sequential(nn.Conv1d(D, D, 1), nn.InstanceNorm1d(D, affine=True)),
    lambda net, b: net(b["x"].mT),
)


@pieces
def chunks_of_the_batch(p, b):
    return torch.cat([squares(torch.tanh(part @ p["w"])) for part in b["y"].chunk(3)])


@pieces
def split_and_joined(p, b):
    first, second = b["y"].tensor_split(2)
    return squares(torch.cat([torch.tanh(first @ p["w"]), torch.tanh(second @ p["w"])]))


@pieces
def rows_one_by_one(p, b):
    return torch.stack([squares(torch.tanh(b["y"][i] @ p["w"])[None])[0] for i in range(len(b["y"]))])


@pieces
def rows_in_a_list_with_their_length(p, b):
    return torch.stack([(b["x"][i, : int(n)] @ p["w"]).square().mean() for i, n in enumerate(b["n"])])


@pieces
def unbound_and_stacked(p, b):
    h = tokens(p, b)
    return squares(torch.stack([row.cumsum(0) for row in h.unbind(0)]))


@pieces
def class_token_expanded(p, b):
    token = p["u"].expand(len(b["x"]), 1, -1)
    h = torch.cat([token, tokens(p, b)], 1)
    return squares(torch.softmax(h @ h.mT, -1) @ h)


@pieces
def table_of_positions(p, b):
    return squares(torch.tanh(p["v"][b["ids"]] + p["v"][:T]) @ p["w"])


@pieces
def same_number_selected_in_each_row(p, b):
    """A boolean mask with two entries in each row."""
    h = tokens(p, b)
    keep = b["x"].sum(2).argsort(1).argsort(1) < 2
    return squares(h[keep].view(-1, 2, D))


@pieces
def twice_the_batch(p, b):
    """Two views of each row, run as one batch of twice the size."""
    both = torch.tanh(torch.cat([b["y"], b["z"]]) @ p["w"])
    first, second = both.chunk(2)
    return squares(first - 0.5 * second)


@pieces
def repeated_and_averaged(p, b):
    h = torch.tanh(b["y"].repeat_interleave(2, 0) @ p["w"])
    return squares(h.view(-1, 2, D).mean(1))


@own
def own_entry_by_number(p, b):
    h = tokens(p, b)
    return squares(h[torch.arange(len(h)), b["n"] - 1])


@own
def own_diagonal_of_a_product(p, b):
    """The product of all rows, of which only each row's own entry is used."""
    h = features(p, b)
    return (h @ b["z"].T).diagonal() + squares(h)


@own
def cross_entropy_by_hand(p, b):
    scores = torch.log_softmax(b["y"] @ p["w"], -1)
    return -scores.gather(1, b["label"][:, None])[:, 0] + squares(features(p, b))


@own
def scattered_within_rows(p, b):
    h = tokens(p, b)
    return squares(torch.zeros_like(h).scatter_add(1, (b["ids"] % T)[..., None].expand(-1, -1, D), h))


@own
def nonzero_of_own_rows(p, b):
    where = torch.nonzero(torch.arange(T) < b["n"][:, None])
    h = tokens(p, b)[where[:, 0], where[:, 1]]
    return torch.zeros(len(b["n"]), dtype=h.dtype).index_add(0, where[:, 0], h.square().sum(1))


@own
def index_put_into_own_rows(p, b):
    h = tokens(p, b)
    out = torch.zeros_like(h)
    out[torch.arange(len(h)), b["n"] - 1] = h[:, 0]
    return squares(out + h)


@own
def take_along_an_axis(p, b):
    h = tokens(p, b)
    return squares(torch.take_along_dim(h, b["x"].argsort(1), 1) * b["x"])


@case("honest: own entries", same_length, honest=True)
def sum_over_rows_in_one_segment_each(p, b):
    """All tokens in one list, with the number of their row."""
    h = tokens(p, b).reshape(-1, D)
    row = torch.arange(len(b["x"])).repeat_interleave(T)
    return squares(torch.zeros(len(b["x"]), D, dtype=h.dtype).index_add(0, row, h))


@python
def shapes_as_numbers(p, b):
    size, length, width = b["x"].shape
    return squares(tokens(p, b).reshape(size, length * width) / math.sqrt(length))


@python
def constants_from_numpy(p, b):
    weights = torch.from_numpy(torch.linspace(0.0, 1.0, D, dtype=torch.float64).numpy().copy())
    return squares(features(p, b) * weights)


@python
def shortcut_that_changes_nothing(p, b):
    mask = torch.arange(T) < b["n"][:, None]
    h = tokens(p, b)
    return squares(h) if mask.all() else squares(torch.where(mask[..., None], h, h))


@python
def any_padding_at_all(p, b):
    """The usual shortcut: without padding no mask is made."""
    mask = torch.arange(T) < b["n"][:, None]
    h = tokens(p, b)
    scores = h @ h.mT
    if not bool(mask.all()):
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
    return squares(torch.softmax(scores, -1) @ h)


@python
def cut_to_the_longest_row(p, b):
    """Padding that no row looks at is cut off for all."""
    longest = int(b["n"].max())
    mask = (torch.arange(longest) < b["n"][:, None])[..., None]
    h = tokens(p, {"x": b["x"][:, :longest]}) * mask
    return h.square().sum((1, 2)) / b["n"]


@python
def assertions_about_the_batch(p, b):
    if not bool(torch.isfinite(b["y"]).all()) or int(b["label"].max()) >= LABELS:
        raise ValueError("broken batch")
    return squares(features(p, b))


@python
def nested_dictionaries(p, b):
    return squares(features(p, {"y": {"in": {"y": b["y"]}}["in"]["y"]}))


@case("honest: Python", lambda dtype: [batch(1, 0, dtype), batch(5, 1, dtype), batch(1, 2, dtype)], honest=True)
def batches_of_one(p, b):
    return squares(features(p, b) if len(b["y"]) > 1 else torch.tanh(b["y"][0] @ p["w"])[None])
