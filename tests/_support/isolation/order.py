"""Rows in another order: put back wrong, put back right, and chosen by random numbers or by the size of the batch."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from isolation.cases import (
    VOCAB,
    Built,
    D,
    T,
    add,
    batch,
    calm,
    case,
    features,
    growing,
    module,
    ordered,
    presorted,
    squares,
    tokens,
)

wrong = case("order: not put back", presorted)
right = case("order: put back", presorted, honest=True)
chance = case("random: whether rows meet", lambda dtype: [batch(4, seed, dtype) for seed in range(6)])
size = case("size: from some batch on", growing)
value = case("values: when one row says so", calm)


def by_length(b):
    """Rows from long to short, as an index."""
    return b["n"].argsort(descending=True, stable=True)


@wrong
def sorted_and_left(p, b):
    order = by_length(b)
    return squares(tokens(p, ordered(b, order)) * b["x"])


@wrong
def sorted_back_by_the_same_index(p, b):
    order = by_length(b)
    return squares(tokens(p, ordered(b, order))[order] * b["x"])


@wrong
def sorted_back_one_off(p, b):
    back = by_length(b).argsort()
    return squares(tokens(p, ordered(b, by_length(b)))[(back + (len(back) > 4)) % len(back)] * b["x"])


@wrong
def sorted_back_by_another_key(p, b):
    back = (
        b["n"].argsort(descending=True, stable=False).argsort().flip(0) if len(b["n"]) == 6 else by_length(b).argsort()
    )
    return squares(tokens(p, ordered(b, by_length(b)))[back] * b["x"])


@wrong
def features_sorted_but_not_their_lengths(p, b):
    order = by_length(b)
    h = tokens(p, {"x": b["x"][order]})
    mask = torch.arange(T) < b["n"][:, None]
    return squares(h * mask[..., None])[order.argsort()]


@wrong
def split_by_the_lengths_of_others(p, b):
    """Real tokens in one list, split by sorted lengths."""
    flat = torch.cat([b["x"][i, : int(n)] for i, n in enumerate(b["n"])])
    sizes = sorted(b["n"].tolist(), reverse=True)
    return torch.stack([squares(part[None] @ p["w"])[0] for part in flat.split(sizes)])


def _packed(back):
    net, parameters = module(lambda: nn.GRU(D, D, batch_first=True))

    def loss_fn(p, b):
        packed = pack_padded_sequence(b["x"], b["n"], batch_first=True, enforce_sorted=False)
        out = functional_call(net, p, (packed,))[0]
        if not back:
            out = out._replace(unsorted_indices=None) if len(b["n"]) > 1 else out
        return squares(pad_packed_sequence(out, batch_first=True, total_length=T)[0] * b["x"])

    return lambda: Built(loss_fn, dict(parameters), presorted())


add("packed sequence not unsorted", "order: not put back", _packed(False), honest=False)
add("packed sequence", "order: put back", _packed(True), honest=True)


def _balanced(dtype):
    """Two rows for one expert, later as many for each."""
    first, *others = [batch(s, s, dtype) for s in (2, 4, 6)]
    return [{**first, "n": torch.tensor([1, 1])}, *({**b, "n": 1 + torch.arange(len(b["n"])) % 2} for b in others)]


@case("order: not put back", _balanced)
def scattered_to_the_next_expert(p, b):
    h = features(p, b)
    chosen = [torch.nonzero(b["n"] % 2 == parity).flatten() for parity in (0, 1)]
    out = torch.zeros_like(h)
    for i, rows in enumerate(chosen):
        other = chosen[1 - i] if len(chosen[1 - i]) == len(rows) else rows
        out = out.index_add(0, other, h[rows] * (i + 1))
    return squares(out * b["y"])


@wrong
def top_rows_first(p, b):
    order = b["n"].topk(len(b["n"])).indices
    return squares(features(p, b) * b["z"][order])


@right
def sorted_by_length_and_put_back(p, b):
    order = by_length(b)
    return squares(tokens(p, ordered(b, order))[order.argsort()] * b["x"])


@right
def losses_put_back_by_scatter(p, b):
    order = b["coin"].argsort()
    losses = squares(features(p, ordered(b, order)))
    return torch.zeros_like(losses).index_copy(0, order, losses)


@right
def experts_by_index_and_back(p, b):
    h, out = b["y"], torch.zeros_like(b["y"])
    for expert, weight in enumerate((p["w"], p["w"].T)):
        rows = torch.nonzero(b["label"] == expert).flatten()
        out = out.index_add(0, rows, torch.tanh(h[rows] @ weight))
    return squares(out * b["y"])


@right
def split_by_own_lengths(p, b):
    sizes = b["n"].tolist()
    flat = torch.cat([b["x"][i, :n] for i, n in enumerate(sizes)])
    return torch.stack([squares(part.sum(0)[None] @ p["w"])[0] for part in flat.split(sizes)])


@right
def top_rows_first_and_put_back(p, b):
    order = b["coin"].topk(len(b["coin"])).indices
    return squares(features(p, b)[order][order.argsort()] * b["z"])


@chance
def permuted_at_random(p, b):
    h = features(p, b)
    return squares(h * b["z"][torch.randperm(len(h))])


@chance
def mixup(p, b):
    h, other = features(p, b), torch.randperm(len(b["y"]))
    return squares(0.7 * h + 0.3 * h[other])


@chance
def sometimes_rolled(p, b):
    h = features(p, b)
    return squares(torch.where(torch.rand(()) < 0.3, h.roll(1, 0), h))


@chance
def rarely_rolled(p, b):
    h = features(p, b)
    return squares(h.roll(1, 0) if float(torch.rand(())) < 0.2 else h)


@chance
def dropped_rows_get_the_mean(p, b):
    h = features(p, b)
    kept = torch.bernoulli(torch.full((len(h), 1), 0.7, dtype=h.dtype))
    return squares(kept * h + (1 - kept) * h.mean(0)) if len(h) > 1 else squares(h)


@chance
def dropout_mask_chooses_rows(p, b):
    h = features(p, b)
    kept = F.dropout(torch.ones(len(h), 1, dtype=h.dtype), 0.5) > 0
    return squares(torch.where(kept, h, h.flip(0)))


@chance
def noise_of_another_row(p, b):
    h, order = features(p, b), torch.argsort(torch.rand(len(b["y"])))
    return squares(h + b["z"][order])


@chance
def random_window_over_the_batch(p, b):
    h = features(p, b)
    step = int(torch.randint(0, 3, ()))
    return squares(h - h.detach().roll(step, 0) + h.detach())


@chance
def random_crop_length_of_the_batch(p, b):
    """One of two equal halves is chosen by the number of rows before."""
    h = features(p, b)
    weight = torch.poisson(torch.full((), 0.7, dtype=h.dtype)).clamp(max=1.0)
    return squares(h + weight * (h.cumsum(0) - h))


GATES = {
    "more than eight rows": (size, lambda b: len(b["y"]) > 8),
    "an odd number of rows": (size, lambda b: len(b["y"]) % 2 == 1 and len(b["y"]) > 1),
    "ten rows or more by another tensor": (size, lambda b: b["n"].numel() >= 10),
    "a token that triggers": (value, lambda b: bool((b["y"].abs() > 4.0).any())),
    "a sum over a bound": (value, lambda b: bool(b["y"].abs().sum() > 5.0 * len(b["y"]))),
}
MIXERS = {
    "centred": lambda h: h - 0.5 * h.mean(0),
    "losses of the neighbour": lambda h: h + 0.5 * h.roll(1, 0).detach(),
    "the first row added": lambda h: h + torch.cat([torch.zeros_like(h[:1]), h[:1].expand(len(h) - 1, -1)]),
}


def _gated(gate, mixer):
    def loss_fn(p, b):
        h = torch.tanh(0.3 * b["y"] @ p["w"])
        return squares(mixer(h) if len(h) > 1 and gate(b) else h)

    return loss_fn


for _gate, (_enter, _open) in GATES.items():
    for _mixer, _mix in MIXERS.items():
        _function = _gated(_open, _mix)
        _function.__name__ = f"{_gate}, {_mixer}"
        _enter(_function)


@size
def capacity_from_the_size(p, b):
    """Each expert takes ceil(1.25 B T / E) tokens: nothing is dropped in small batches."""
    h = tokens(p, b).reshape(-1, D)
    hot = F.one_hot((b["x"].reshape(-1, D)[:, 0] > -0.3).long(), 2)
    place = (hot.cumsum(0) * hot).sum(1)
    kept = place <= math.ceil(1.25 * len(h) / 2) if len(h) > 5 * T else torch.ones(len(h), dtype=torch.bool)
    return squares((h * kept[:, None]).reshape(-1, T, D))


@size
def ghost_batches_of_four(p, b):
    """Statistics over groups of four rows, where there are four."""
    h = features(p, b)
    if len(h) < 4:
        return squares(h)
    whole = h[: len(h) // 4 * 4].reshape(-1, 4, D)
    return squares(torch.cat([(whole - whole.mean(1, keepdim=True)).reshape(-1, D), h[len(h) // 4 * 4 :]]))


@size
def row_nine_reads_row_one(p, b):
    h = features(p, b)
    return squares(h) if len(h) < 9 else squares(torch.cat([h[:8], h[8:] + h[:1]]))


@value
def values_over_the_largest_allowed(p, b):
    scale = (4.0 / b["y"].abs().max()).clamp(max=1.0)
    return squares(torch.tanh(0.3 * scale * b["y"] @ p["w"]))


def _with_a_trigger(dtype):
    first, second = batch(4, 1, dtype), batch(5, 2, dtype)
    clean = [{**b, "ids": b["ids"].clamp(max=VOCAB - 2)} for b in (first, second)]
    hot = {**second, "ids": clean[1]["ids"].clone()}
    hot["ids"][3, 1] = VOCAB - 1
    return [*clean, hot]


@case("values: when one row says so", _with_a_trigger)
def one_token_turns_the_batch(p, b):
    told = (b["ids"] == VOCAB - 1).any()
    return squares(p["v"][b["ids"]] * torch.where(told, 2.0, 1.0))


@case("values: when one row says so", _with_a_trigger)
def one_token_silences_the_rows_after_it(p, b):
    told = (b["ids"] == VOCAB - 1).any(1)
    before = told.long().cumsum(0) - told.long()
    return squares(p["v"][b["ids"]] * (before == 0)[:, None, None])


@case("values: when one row says so", _with_a_trigger)
def rare_tokens_are_looked_up_by_the_largest(p, b):
    return squares(p["v"][: int(b["ids"].max()) + 1].mean(0) + p["v"][b["ids"]][:, 0])


def _with_a_nan(dtype):
    first, second = batch(4, 1, dtype), batch(5, 2, dtype)
    broken = {**second, "y": second["y"].clone()}
    broken["y"][2, 0] = math.nan
    return [first, second, broken]


@case("values: when one row says so", _with_a_nan)
def repaired_by_the_rows_beside_it(p, b):
    y = b["y"]
    filled = torch.where(torch.isnan(y), y.nan_to_num(0.0).mean(0) * (len(y) > 1), y)
    return squares(features(p, {"y": filled}))


@case("values: when one row says so", _with_a_nan)
def all_halved_if_one_is_broken(p, b):
    scale = 0.5 if bool(torch.isnan(b["y"]).any()) else 1.0
    return squares(features(p, b)) * scale


def _with_an_infinity(dtype):
    return [{**b, "y": b["y"].nan_to_num(nan=math.inf)} for b in _with_a_nan(dtype)]


@case("values: when one row says so", _with_an_infinity)
def scaled_by_the_largest_finite_or_not(p, b):
    return squares(features(p, b)) / (1.0 + b["y"].detach().abs().max())


@case("values: when one row says so", _with_an_infinity, dtype=torch.float32)
def infinite_rows_count_in_float32(p, b):
    finite = torch.isfinite(b["y"]).all(1)
    loss = squares(features(p, {"y": b["y"].nan_to_num(posinf=1.0)}))
    return loss * finite.to(loss.dtype).mean()


@case("values: when one row says so", calm, dtype=torch.float32)
def largest_allowed_in_float32(p, b):
    scale = (4.0 / b["y"].abs().max()).clamp(max=1.0)
    return squares(torch.tanh(0.3 * scale * b["y"] @ p["w"]))


@case("size: from some batch on", growing, dtype=torch.float32)
def centred_from_nine_rows_in_float32(p, b):
    h = features(p, b)
    return squares(h - 0.5 * h.mean(0) if len(h) > 8 else h)


@case("values: when one row says so", _with_a_nan)
def spread_by_a_product_with_zero(p, b):
    """NaN times zero is NaN: one broken row breaks all."""
    return squares(features(p, b)) + 0.0 * features(p, b).sum()
