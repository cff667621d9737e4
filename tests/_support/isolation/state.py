"""State between calls: a row of one step, or of one call, is felt by rows of another."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from isolation.cases import DOUBLE, D, T, fresh, modules, sized, squares, table, tokens

memory, python, harmless = "state: tensors kept", "state: Python values kept", "state: without effect"


def keeping(start, use, keep):
    """A case whose losses are `use(kept, h, b)`; then `keep(kept, h, b)` changes what is kept, or gives the next."""

    def make():
        box = [start()]

        def change(h, b, p):
            losses = use(box[0], h, b)
            with torch.no_grad():
                box[0] = keep(box[0], h.detach(), b)
            return losses

        return change

    return make


def moved(codes, h):
    nearest = torch.cdist(h, codes).argmin(1)
    return codes.index_add_(0, nearest, 0.3 * (h - codes[nearest]))


def new_tokens(seen, b):
    """Which rows have no token that was seen before."""
    return torch.tensor([1.0 if seen.isdisjoint(row) else 0.3 for row in b.ids.tolist()])


def counted(counts, b):
    for label in b.label.tolist():
        counts[label] += 1.0
    return counts


def attended(past, h):
    context = torch.cat(past[-2:]).expand(len(h), -1, -1)
    return h + F.scaled_dot_product_attention(h, context, context)


zeros = lambda: torch.zeros(D, dtype=DOUBLE)
KEEPING = {
    "memory bank": (memory, list, lambda kept, h, b: squares(h) + sum(h @ old for old in kept), lambda kept, h, b: [h.mean(0)]),
    "average in place": (memory, zeros, lambda kept, h, b: h - kept.clone(), lambda kept, h, b: kept.lerp_(h.mean(0), 0.5)),
    "codebook in place": (memory, lambda: torch.eye(2, D, dtype=DOUBLE),
                          lambda codes, h, b: h - codes[torch.cdist(h.detach(), codes).argmin(1)], lambda codes, h, b: moved(codes, h)),
    "queue of negatives": (memory, lambda: [torch.zeros(1, D, dtype=DOUBLE)],
                           lambda kept, h, b: squares(h) + (h @ torch.cat(kept[-3:]).T).exp().sum(1).log(), lambda kept, h, b: [*kept, h]),
    # a frozen copy of the weights that the loss itself trains
    "teacher moved by the batch": (memory, lambda: torch.eye(D, dtype=DOUBLE),
                                   lambda w, h, b: h - torch.tanh(b.y @ w.clone()), lambda w, h, b: w.add_(0.2 * b.y.T @ h)),
    "running mean as a float": (python, float, lambda kept, h, b: h * (1.0 + abs(kept)), lambda kept, h, b: 0.5 * (kept + h.mean().item())),
    "largest value so far": (python, float, lambda kept, h, b: h / max(1.0, kept), lambda kept, h, b: max(kept, float(b.y.max()))),
    "tokens seen before": (python, set, lambda seen, h, b: squares(h) * new_tokens(seen, b), lambda seen, h, b: seen | set(b.ids.flatten().tolist())),
    "rows counted by label": (python, lambda: [1.0, 1.0],
                              lambda counts, h, b: squares(h) / torch.tensor([counts[k] for k in b.label.tolist()]), lambda counts, h, b: counted(counts, b)),
    # the mean of the first batch that comes by normalises all others
    "normaliser fitted once": ("state: caches", list, lambda fitted, h, b: h - sum(fitted), lambda fitted, h, b: fitted or [h.mean(0)]),
}  # fmt: skip
for _name, (_family, *_how) in KEEPING.items():
    fresh(_family, name=_name)(keeping(*_how))
# What vmap leaves behind is as large as its batch, and meets the next batch of that size.
fresh(memory, sized(4, 4, 4), name="last hidden values of the same size")(
    keeping(lambda: None, lambda old, h, b: h if old is None else h + old.sum(), lambda old, h, b: h)
)
fresh(memory, sized(D, D, D), name="centre of earlier steps")(
    keeping(zeros, lambda kept, h, b: h - kept, lambda kept, h, b: 0.5 * (kept + h.mean(0)))
)
fresh("state: caches", of=tokens, name="keys and values of a decoder")(
    keeping(
        lambda: [torch.zeros(T, D, dtype=DOUBLE)],
        lambda past, h, b: attended(past, h),
        lambda past, h, b: [*past, h.mean(0)],
    )
)
for _name, _sizes, _centred in (
    ("rolled from the fortieth call", (4, 4, 4, 4), lambda calls: calls > 40 or calls % 3 == 2),
    ("every other call is centred", (4, 4, 4), lambda calls: calls % 2 == 1),
):
    fresh(python, sized(*_sizes), name=_name)(
        keeping(int, lambda n, h, b, on=_centred: (h.roll(1, 0) if on(n) else h) * b.y, lambda n, h, b: n + 1)
    )
fresh(harmless, name="calls are counted", honest=True)(keeping(int, lambda n, h, b: h, lambda n, h, b: n + 1))
fresh(harmless, name="losses are logged", honest=True)(
    keeping(list, lambda n, h, b: h, lambda n, h, b: [*n, tuple(h.shape)])
)


def weights_written_behind_autograd(h, b, p):
    """The caller's parameters are others after the call, and their versions are not."""
    p["u"].detach().data.add_(0.1 * b.y.mean(0))
    return squares(h * p["u"].detach()) + (b.z * p["c"]).sum(1)


table(memory, {"weights written behind autograd": weights_written_behind_autograd})


@fresh(memory)
def gradient_of_the_last_step():
    """A hook keeps what it sees, and scales the next gradient by it."""
    seen = [0.0]

    def change(g):
        scaled = g / (1.0 + seen[0])
        seen[0] = float(g.abs().max()) if g.dim() == 2 else 0.0
        return scaled

    def hooked(h, b, p):
        h = h * 1.0
        if h.requires_grad:
            h.register_hook(change)
        return h

    return hooked


@fresh("state: caches")
def activations_by_shape():
    known = {}
    return lambda h, b, p: h * known.setdefault(tuple(h.shape[1:]), h.detach().abs().mean(0) + 0.5)


@fresh("state: caches")
def value_of_the_first_batch():
    box = []
    scale = cache(lambda _shape: 1.0 + float(box[-1].abs().max()))

    def change(h, b, p):
        box.append(b.y.detach())
        return h * scale(b.y.shape[1:])

    return change


@fresh("state: random generators")
def permutation_from_a_generator():
    generator = torch.Generator().manual_seed(3)
    return lambda h, b, p: h * b.z[torch.randperm(len(b.z), generator=generator)]


@fresh("state: random generators")
def generator_seeded_by_rows():
    """The seed that one call leaves is read by the next."""

    def change(h, b, p):
        left = torch.initial_seed()
        torch.manual_seed(int(b.ids.sum()))
        return h * (1.0 + (left if left < 1000 else 0))

    return change


@fresh(harmless, of=tokens, honest=True)
def mask_cached_by_length():
    known = {}
    return lambda h, b, p: known.setdefault(h.shape[1], torch.ones(h.shape[1], h.shape[1]).tril().double()) @ h


@fresh(harmless, of=tokens, honest=True)
def table_made_once():
    waves = cache(lambda length: torch.arange(length, dtype=DOUBLE).sin()[:, None])
    return lambda h, b, p: h + waves(T)


class Running(nn.Module):
    """Subtracts an average of earlier batches, which is another buffer after each."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("average", torch.zeros(D, dtype=DOUBLE))

    def forward(self, x):
        h = torch.tanh(self.linear(x))
        out, self.average = h - self.average, 0.5 * self.average + 0.5 * h.detach().mean(0)
        return out


class OwnWeights(nn.Module):
    """Changes a frozen weight of its own while it runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.frozen = nn.Parameter(torch.eye(D), requires_grad=False)

    def forward(self, x):
        out = self.linear(torch.tanh(x @ self.frozen))
        self.frozen.data += 0.1 * x.detach().mean(0)
        return out


class Lagging(nn.BatchNorm1d):
    """Normalises by the statistics of earlier batches: those of this batch count from the next one on."""

    def forward(self, x):
        out = F.batch_norm(x, self.running_mean.clone(), self.running_var.clone())
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.5)
            self.num_batches_tracked += 1
        return out


run = lambda net, b: net(b.y)
modules("state: modules", {
    "module with an average in its new buffer": (Running, run),
    "module that changes its own weights": (OwnWeights, run),
    "batch norm with momentum, then its statistics": (lambda: nn.Sequential(nn.Linear(D, D), Lagging(D, affine=False)), run),
})  # fmt: skip
