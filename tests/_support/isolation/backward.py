"""Gradients that a loss changes itself, rightly or not; and state between calls: what rows of later steps feel."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from isolation.cases import (
    DOUBLE,
    Built,
    D,
    T,
    add,
    calm,
    case,
    fresh,
    growing,
    module,
    modules,
    sized,
    squares,
    table,
    tokens,
    usual,
)


def hook(h, change):
    """The same values, with a changed gradient."""
    h = h * 1.0
    if h.requires_grad:
        h.register_hook(change)
    return h


def hooked(change):
    return lambda h, b, p: hook(h, change)


def own_hook(param, change):
    """A hook on a tensor itself; the tensor."""
    if param.requires_grad:
        param.register_hook(change)
    return param


def of_node(h, register):
    """A hook on the node of a tensor; the tensor."""
    if h.grad_fn is not None:
        register(h.grad_fn)
    return h


def of_many(tensors, change):
    if tensors[0].requires_grad:
        torch.autograd.graph.register_multi_grad_hook(tensors, change)


def void(_):
    """None: the gradient is the same tensor, written into."""


table("backward: hooks of activations", {
    "gradient over its norm": hooked(lambda g: g / (1.0 + g.norm())),
    "gradient of the neighbour": hooked(lambda g: g.roll(1, 0)),
    "hook of a node": lambda h, b, p: of_node(h, lambda n: n.register_prehook(lambda g: (g[0] - 0.5 * g[0].mean(0),))),
    "hook after a node": lambda h, b, p: of_node(h, lambda n: n.register_hook(lambda g, _: (g[0] * (1.0 + g[0].abs().max()),))),
    "hook of the losses": lambda h, b, p: hook(squares(h), lambda g: g / g.sum()),
    "hook that writes": hooked(lambda g: void(g.copy_(g.cumsum(0)))),
    "sometimes at random": hooked(lambda g: g.flip(0) if float(torch.rand(())) < 0.5 else g),
})  # fmt: skip
table("backward: hooks of activations", {
    "gradient of tokens over its norm": hooked(lambda g: F.normalize(g.flatten(), dim=0).view_as(g)),
}, of=tokens)  # fmt: skip
later = "backward: hooks that are idle at first"
linear = lambda p, b: 0.3 * b.y @ p["w"]
table(later, {
    "clipped by the norm of all": hooked(lambda g: g * (3.0 / g.norm()).clamp(max=1.0)),
    "silenced where one is large": hooked(lambda g: g * 0.5 if bool(g.abs().max() > 4.0) else g),
}, calm, linear)  # fmt: skip
table(later, {
    "gradient rolled from nine rows": hooked(lambda g: g.roll(1, 0) if len(g) > 8 else g),
    "hook only in large batches": lambda h, b, p: hook(h, lambda g: g + g.mean(0)) if len(h) > 8 else h,
}, growing)  # fmt: skip
table("backward: hooks", {
    "hook that scales": hooked(lambda g: 0.5 * g),
    "hook that clips each row": hooked(lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=0.5)),
    "hook that looks": hooked(lambda g: None),
    "mask of a parameter": lambda h, b, p: torch.tanh(b.y @ own_hook(p["w"], lambda g: g * torch.eye(D, dtype=g.dtype))),
    "mask of a view of a parameter": lambda h, b, p: F.linear(b.y, own_hook(p["w"].t(), lambda g: g * torch.eye(D, dtype=g.dtype))),
}, honest=True)  # fmt: skip


def _net(change, pre=False):
    net, parameters = module(lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)))
    if pre:
        net[1].register_full_backward_pre_hook(lambda _, outputs: (change(outputs[0]),))
    else:
        net[1].register_full_backward_hook(lambda _, inputs, outputs: (change(inputs[0]),))
    return lambda: Built(lambda p, b: squares(functional_call(net, p, (b.y,))), dict(parameters), usual())


_family = "backward: hooks of modules"
add("module hook over its norm", _family, _net(lambda g: g / (1.0 + g.norm())), honest=False)
add("module hook centres", _family, _net(lambda g: g - 0.5 * g.mean(0), pre=True), honest=False)
add("module hook scales", _family, _net(lambda g: 0.5 * g), honest=True)


@case("backward: hooks of parameters")
def hook_of_many_gradients(h, b, p):
    h = h * p["u"]
    of_many((h,), lambda grads: grads[0].mul_(1.0 / (1.0 + grads[0].norm())))
    return h


table("backward: hooks of parameters", {
    "gradient of a weight over its norm": lambda h, b, p: torch.tanh(b.y @ hook(p["w"], lambda g: g / (1.0 + g.norm()))),
    "gradient of the parameter itself": lambda h, b, p: torch.tanh(b.y @ own_hook(p["w"], lambda g: g.clamp(-0.5, 0.5))),
    "gradient of a view of a weight": lambda h, b, p: F.linear(b.y, own_hook(p["w"].t(), lambda g: g.clamp(-0.5, 0.5))).tanh(),
    "sign of the gradient": lambda h, b, p: h * hook(p["u"], torch.sign),
})  # fmt: skip


class MeanOfGradients(torch.autograd.Function):
    """The values go through; each row gets the mean of the gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.kept = inputs[0].detach()

    @staticmethod
    def backward(ctx, grad):
        return grad.mean(0, keepdim=True).expand_as(grad)


def backward_of(change):
    """A function that gives each row what `change(grad, ctx)` says."""
    return type("Changed", (MeanOfGradients,), {"backward": staticmethod(lambda ctx, grad: change(grad, ctx))})


class WrongSum(MeanOfGradients):
    """x @ w, whose gradient of w is divided by the number of rows."""

    @staticmethod
    def forward(x, w):
        return x @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad / len(x)


OwnNorm = backward_of(lambda grad, ctx: grad * ctx.saved_tensors[0].norm(dim=1, keepdim=True))
table("backward: autograd.Function", {
    "mean of gradients": lambda h, b, p: MeanOfGradients.apply(h),
    "product with a mean gradient": lambda h, b, p: torch.tanh(WrongSum.apply(b.y, p["w"])),
})  # fmt: skip
table("backward: autograd.Function", {
    "function with own gradient of each row": lambda h, b, p: OwnNorm.apply(h),
}, honest=True)  # fmt: skip


def scaled(factor):
    """The value of a loss, with a gradient that is scaled by `factor(loss, batch)`."""

    def change(h, b, p):
        loss = squares(h)
        return loss.detach() + factor(loss.detach(), b) * (loss - loss.detach())

    return change


table("backward: detached factors", {
    "scaled by the neighbour": scaled(lambda loss, b: (b.coin - b.coin.roll(1)).abs() + 0.5),
    "scaled by python": scaled(lambda loss, b: 1.0 / (1.0 + loss.max().item())),
    # the values cancel, the gradients do not
    "other rows with gradient zero": lambda h, b, p: h + h.sum(0) - h - (h.sum(0) - h).detach(),
})  # fmt: skip
table("backward: detached factors", {
    "scaled where the batch is large": scaled(lambda loss, b: torch.where(b.y.abs().max() > 4.0, 0.5, 1.0)),
}, calm, linear)  # fmt: skip
table("backward: detached factors", {
    "scaled by its own loss": scaled(lambda loss, b: 1.0 / (1.0 + loss)),
    "straight through rounding": lambda h, b, p: h + (torch.round(4 * h) / 4 - h).detach(),
}, honest=True)  # fmt: skip


def saved_tensors_rolled(h, b, p):
    unpack = lambda t: t.roll(1, 0) if t.ndim == 2 and len(t) == len(h) != D else t
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        return squares(torch.tanh(b.y @ p["w"]))


def saved_value_written_behind_autograd(h, b, p):
    losses = squares(h)
    h.data.copy_(h.data.roll(1, 0))
    return losses


def gradient_inside(x, of, **options):
    """The gradient of `of(x)` for a leaf x that is made for it."""
    leaf = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(of(leaf).sum(), leaf, **options)[0]


def mixing_when_computed_again(h, b, p):
    """Rows are alone the first time, and mixed when the checkpoint computes again for the backward pass."""
    times = []

    def inner(y, w):
        times.append(1)
        return torch.tanh((y if len(times) == 1 else y.roll(1, 0)) @ w)

    return checkpoint(inner, b.y, p["w"], use_reentrant=False) * b.z


def mean_of_squares(x, w):
    return torch.tanh(x @ w).mean(0).square()


table("backward: saved tensors", {
    "checkpoint around mixing": lambda h, b, p: checkpoint(lambda y, w: torch.tanh(y @ w) - 0.5 * torch.tanh(y @ w).mean(0), b.y, p["w"], use_reentrant=False),
    "mixing when computed again": mixing_when_computed_again,
    "saved tensors rolled": saved_tensors_rolled,
    "saved value written behind autograd": saved_value_written_behind_autograd,
    "inner gradient of all losses": lambda h, b, p: torch.tanh((b.y + gradient_inside(b.y, lambda y: mean_of_squares(y, p["w"].detach()))) @ p["w"]),
})  # fmt: skip
table("backward: saved tensors", {
    "checkpointed": lambda h, b, p: checkpoint(lambda x, w: torch.tanh(x @ w), b.x, p["w"], use_reentrant=False),
}, of=tokens, honest=True)  # fmt: skip


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
    "queue of negatives": (memory, lambda: [torch.zeros(1, D, dtype=DOUBLE)],
                           lambda kept, h, b: squares(h) + (h @ torch.cat(kept[-3:]).T).exp().sum(1).log(), lambda kept, h, b: [*kept, h]),
    # a frozen copy of the weights that the loss itself trains
    "teacher moved by the batch": (memory, lambda: torch.eye(D, dtype=DOUBLE),
                                   lambda w, h, b: h - torch.tanh(b.y @ w.clone()), lambda w, h, b: w.add_(0.2 * b.y.T @ h)),
    "running mean as a float": (python, float, lambda kept, h, b: h * (1.0 + abs(kept)), lambda kept, h, b: 0.5 * (kept + h.mean().item())),
    "largest value so far": (python, float, lambda kept, h, b: h / max(1.0, kept), lambda kept, h, b: max(kept, float(b.y.max()))),
    "tokens seen before": (python, set, lambda seen, h, b: squares(h) * new_tokens(seen, b), lambda seen, h, b: seen | set(b.ids.flatten().tolist())),
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


run = lambda net, b: net(b.y)
modules("state: modules", {
    "module with an average in its new buffer": (Running, run),
    "module that changes its own weights": (OwnWeights, run),
})  # fmt: skip
