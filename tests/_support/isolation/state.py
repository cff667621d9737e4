"""State between calls: a row of one step, or of one call, is felt by rows of another."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional as F

from isolation.cases import D, T, batch, features, fresh, squares, tokens

memory = fresh("state: tensors kept")
python = fresh("state: Python values kept")
cached = fresh("state: caches")
chance = fresh("state: random generators")
harmless = fresh("state: without effect", honest=True)


@memory
def memory_bank():
    kept = []

    def loss_fn(p, b):
        h = features(p, b)
        loss = squares(h) + sum(h @ old for old in kept)
        kept[:] = [h.detach().mean(0)]
        return loss

    return loss_fn


@fresh("state: tensors kept", lambda dtype: [batch(D, seed, dtype) for seed in range(3)])
def centre_of_earlier_steps():
    state = {"centre": torch.zeros(D, dtype=torch.float64)}

    def loss_fn(p, b):
        h = features(p, b)
        loss = squares(h - state["centre"])
        state["centre"] = 0.5 * state["centre"] + 0.5 * h.detach().mean(0)
        return loss

    return loss_fn


@fresh("state: tensors kept", lambda dtype: [batch(4, seed, dtype) for seed in range(3)])
def last_hidden_values_of_the_same_size():
    """What vmap leaves behind is as large as its batch, and meets the next batch of that size."""
    kept = []

    def loss_fn(p, b):
        h = features(p, b)
        loss = squares(h) + (sum(old.sum() for old in kept) if kept else 0.0) * h.sum(1)
        kept[:] = [h.detach()]
        return loss

    return loss_fn


@memory
def average_in_place():
    average = torch.zeros(D, dtype=torch.float64)

    def loss_fn(p, b):
        h = features(p, b)
        loss = squares(h - average.clone())
        with torch.no_grad():
            average.lerp_(h.detach().mean(0), 0.5)
        return loss

    return loss_fn


@memory
def codebook_in_place():
    codes = torch.eye(2, D, dtype=torch.float64)

    def loss_fn(p, b):
        h = features(p, b)
        nearest = torch.cdist(h.detach(), codes).argmin(1)
        loss = squares(h - codes[nearest])
        with torch.no_grad():
            codes.index_add_(0, nearest, 0.3 * (h.detach() - codes[nearest]))
        return loss

    return loss_fn


@memory
def queue_of_negatives():
    queue = [torch.zeros(1, D, dtype=torch.float64)]

    def loss_fn(p, b):
        h = features(p, b)
        negatives = torch.cat(queue[-3:])
        loss = squares(h) + (h @ negatives.T).exp().sum(1).log()
        queue.append(h.detach())
        return loss

    return loss_fn


@memory
def teacher_moved_by_the_batch():
    """A frozen copy of the weights that the loss itself trains."""
    teacher = torch.eye(D, dtype=torch.float64)

    def loss_fn(p, b):
        h = features(p, b)
        loss = (h - torch.tanh(b["y"] @ teacher.clone())).square().sum(1)
        with torch.no_grad():
            teacher.add_(0.2 * b["y"].T @ h.detach())
        return loss

    return loss_fn


@memory
def weights_written_behind_autograd():
    """The caller's parameters are others after the call, and their versions are not."""

    def loss_fn(p, b):
        p["u"].detach().data.add_(0.1 * b["y"].mean(0))
        return squares(features(p, b) * p["u"].detach()) + (b["z"] * p["c"]).sum(1)

    return loss_fn


@memory
def gradient_of_the_last_step():
    """A hook keeps what it sees, and scales the next gradient by it."""
    seen = [0.0]

    def change(g):
        scaled = g / (1.0 + seen[0])
        seen[0] = float(g.abs().max()) if g.dim() == 2 else 0.0
        return scaled

    def loss_fn(p, b):
        h = features(p, b) * 1.0
        if h.requires_grad:
            h.register_hook(change)
        return squares(h)

    return loss_fn


@python
def running_mean_as_a_float():
    running = [0.0]

    def loss_fn(p, b):
        loss = squares(features(p, b))
        out = loss * (1.0 + abs(running[0]))
        running[0] = 0.5 * running[0] + 0.5 * loss.detach().mean().item()
        return out

    return loss_fn


@python
def largest_value_so_far():
    largest = [0.0]

    def loss_fn(p, b):
        before, largest[0] = largest[0], max(largest[0], float(b["y"].max()))
        return squares(features(p, b)) / max(1.0, before)

    return loss_fn


@fresh("state: Python values kept", lambda dtype: [batch(4, seed, dtype) for seed in range(4)])
def rolled_from_the_fortieth_call():
    calls = [0]

    def loss_fn(p, b):
        calls[0] += 1
        h = features(p, b)
        return squares(h.roll(1, 0) * b["y"] if calls[0] > 40 or calls[0] % 3 == 0 else h * b["y"])

    return loss_fn


@fresh("state: Python values kept", lambda dtype: [batch(4, seed, dtype) for seed in range(3)])
def every_other_call_is_centred():
    calls = [0]

    def loss_fn(p, b):
        calls[0] += 1
        h = features(p, b)
        return squares(h - h.roll(1, 0).detach() + h.detach() if calls[0] % 2 == 0 else h)

    return loss_fn


@python
def tokens_seen_before():
    seen = set()

    def loss_fn(p, b):
        new = [all(i not in seen for i in row) for row in b["ids"].tolist()]
        seen.update(b["ids"].flatten().tolist())
        return squares(p["v"][b["ids"]]) * torch.tensor([1.0 if n else 0.3 for n in new])

    return loss_fn


@python
def rows_counted_by_label():
    counts = [1.0, 1.0]

    def loss_fn(p, b):
        weights = torch.tensor([1.0 / counts[label] for label in b["label"].tolist()])
        for label in b["label"].tolist():
            counts[label] += 1.0
        return squares(features(p, b)) * weights

    return loss_fn


@cached
def activations_by_shape():
    known = {}

    def loss_fn(p, b):
        h = features(p, b)
        kept = known.setdefault(tuple(h.shape[1:]), h.detach().abs().mean(0) + 0.5)
        return squares(h * kept)

    return loss_fn


@cached
def value_of_the_first_batch():
    box = []

    @cache
    def scale(_shape):
        return 1.0 + float(box[-1].abs().max())

    def loss_fn(p, b):
        box.append(b["y"].detach())
        return squares(features(p, b)) * scale(b["y"].shape[1:])

    return loss_fn


@cached
def keys_and_values_of_a_decoder():
    past = []

    def loss_fn(p, b):
        h = tokens(p, b)
        past.append(h.detach().mean(0))
        context = torch.cat(past[-2:])
        return squares(
            h + F.scaled_dot_product_attention(h, context.expand(len(h), -1, -1), context.expand(len(h), -1, -1))
        )

    return loss_fn


@cached
def normaliser_fitted_once():
    """The mean of the first batch that comes by normalises all others."""
    fitted = []

    def loss_fn(p, b):
        if not fitted:
            fitted.extend((b["y"].mean(0), b["y"].std(0, unbiased=False) + 1.0))
        return squares(features(p, {"y": (b["y"] - fitted[0]) / fitted[1]}))

    return loss_fn


@chance
def permutation_from_a_generator():
    generator = torch.Generator().manual_seed(3)

    def loss_fn(p, b):
        return squares(features(p, b) * b["z"][torch.randperm(len(b["z"]), generator=generator)])

    return loss_fn


@chance
def generator_seeded_by_rows():
    """The seed that one call leaves is read by the next."""

    def loss_fn(p, b):
        left = torch.initial_seed()
        torch.manual_seed(int(b["ids"].sum()))
        return squares(features(p, b)) * (1.0 + (left if left < 1000 else 0))

    return loss_fn


@harmless
def calls_are_counted():
    calls = [0]

    def loss_fn(p, b):
        calls[0] += 1
        return squares(features(p, b))

    return loss_fn


@harmless
def mask_cached_by_length():
    known = {}

    def loss_fn(p, b):
        length = b["x"].shape[1]
        mask = known.setdefault(length, torch.ones(length, length).tril().double())
        return squares(mask @ tokens(p, b))

    return loss_fn


@harmless
def table_made_once():
    @cache
    def table(length):
        return torch.arange(length, dtype=torch.float64).sin()[:, None]

    def loss_fn(p, b):
        return squares(tokens(p, b) + table(T))

    return loss_fn


@harmless
def losses_are_logged():
    log = []

    def loss_fn(p, b):
        loss = squares(features(p, b))
        log.append(tuple(loss.shape))
        return loss

    return loss_fn
