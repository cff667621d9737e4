"""Every way to use a parameter against the loop over single samples. A new layer is a line in layers.py."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from layers import LAYERS, build
from models import Case
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo.parity import ENGINES, differences, truth_of, without_gradient

from dpfunc.engines._numerics import Costs, sum_cost
from dpfunc.engines._rules import RULES

# torch says once that "same" padding of even kernels copies the input
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
LENGTH = 3
# dtype -> (seed, batch size): 1 is no batch, 3 is also the length.
RUNS = {torch.float64: ((0, 1), (0, 3), (0, 5), (1, 3)), torch.float32: ((0, 3),)}

layers = pytest.mark.parametrize("name", LAYERS)


@cache
def built(name, dtype, seed):
    return build(name, dtype, seed)


@cache
def truth(name, dtype, seed, size):
    return truth_of(built(name, dtype, seed)(size, LENGTH))


def check(engine, name, dtype, seed, size):
    found = differences(engine, built(name, dtype, seed)(size, LENGTH), truth(name, dtype, seed, size))
    wrong = {what: value for what, value in found.items() if not value < TOLERANCE[dtype]}
    assert not wrong, f"B={size} seed={seed} {dtype}"


@layers
@pytest.mark.parametrize("engine", ENGINES)
def test_layers_equal_the_loop(engine, name):
    run = ENGINES[engine]()
    for dtype, runs in RUNS.items():
        for seed, size in runs[: 2 if engine == "loop" else None]:
            check(run, name, dtype, seed, size)


@layers
@pytest.mark.parametrize("formed", [True, False], ids=["formed", "factors"])
def test_both_forms_are_the_same(formed, name, monkeypatch):
    """Whether gradients are formed at once or kept as factors is a matter of speed."""
    costs = sum_cost(1) if formed else Costs(product=0, ghost=0, numbers=1, factors=0)
    assert (costs.choose(3).representation == "formed") is formed
    for op, rule in RULES.items():
        monkeypatch.setitem(RULES, op, replace(rule, costs=lambda use: costs))
    check(ENGINES["auto"](), name, torch.float64, 0, 3)


@layers
def test_every_parameter_has_a_gradient(name):
    """Otherwise the comparisons say nothing about it."""
    assert tuple(without_gradient(truth(name, torch.float64, 0, 5))) == LAYERS[name].unused


# Other uses of a matrix w, a vector b, a table v or a number s, with rows x (T, D), y (D,) and ids (T,). Most have no
# rule; where the loss would mix the samples of a batch, it sees one row.

B, T, D, OUT, VOCAB = 5, 3, 4, 4, 7


def random(*shape):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def squares(out):
    rows = out.reshape(len(out), -1)
    return (rows.square() + rows * torch.arange(1.0, rows.shape[1] + 1, dtype=rows.dtype).sin()).sum(1)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum_to_size(w.shape)


class Again(torch.autograd.Function):
    """A layer that is computed again in the backward pass, with a gradient of its own there."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        with torch.no_grad():
            return F.linear(x, w).tanh()

    @staticmethod
    def backward(ctx, grad):
        x, w = (value.detach().requires_grad_() for value in ctx.saved_tensors)
        with torch.enable_grad():
            return torch.autograd.grad(F.linear(x, w).tanh(), (x, w), grad)


class ByNumPy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(3 * x.detach().numpy())

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


def hooked_by(inside):
    """A use of a parameter in a hook, where a gradient is taken of it."""

    def use(p, y):
        def hook(grad):
            with torch.enable_grad():
                return inside(lambda z: F.linear(z, p["w"]).tanh().sum(), grad.detach().requires_grad_())

        out = y * p["b"]
        out.register_hook(hook)
        return out.tanh() + F.linear(y, p["w"])

    return use


def without_grad(context, p, y):
    with context():
        turned, out = p["w"].T.clone(), F.linear(y, p["w"], p["b"])
    return y @ turned + out * p["b"] + F.linear(y, p["w"])


def turned_without_grad(p, y):
    with torch.no_grad():
        turned = p["w"].T
    return y @ turned + y @ p["w"]


def into(memory, write):
    """A copy, written into."""
    copy = memory.clone()
    write(copy)
    return copy


def leaf(x):
    return x.detach().clone().requires_grad_()


def input_gradient(p, x):
    x = leaf(x)
    return torch.autograd.grad(torch.tanh(x @ p["w"]).sum(), x, create_graph=True)[0]


def hooked(out):
    out.register_hook(lambda grad: grad * 2)
    return out


def routed(p, x, y, ids):
    """Positions of one expert gathered over the whole batch, as in a mixture of experts."""
    out, chosen = torch.zeros_like(x), ids % 2 == 0
    out[chosen] = x[chosen] @ p["w"]
    return out


USES = {
    "mm by keyword": lambda p, x, y, ids: torch.mm(y, mat2=p["w"]),
    "matmul, samples last": lambda p, x, y, ids: (p["w"] @ y.T).T,
    "least squares": lambda p, x, y, ids: torch.linalg.lstsq((p["w"] @ p["w"].T)[None], x.mT).solution,
    "bmm of heads": lambda p, x, y, ids: x[:, None] @ torch.stack([p["w"], p["w"] * 2]),
    "baddbmm": lambda p, x, y, ids: torch.baddbmm(p["b"], x, p["w"].expand(len(x), -1, -1)),
    "kron": lambda p, x, y, ids: torch.kron(y, p["b"]),
    "solve, twice": lambda p, x, y, ids: torch.linalg.solve(torch.stack([p["w"], p["w"].T])[None], x.mT[:, None]),
    "solve for a matrix": lambda p, x, y, ids: torch.linalg.solve(p["w"] + x.mT @ x, p["w"]),
    "solve": lambda p, x, y, ids: torch.linalg.solve(p["w"], y.T).T,
    "key of attention": lambda p, x, y, ids: F.scaled_dot_product_attention(x, p["v"].expand(len(x), -1, -1), p["v"][None]),
    "key that depends on the batch": lambda p, x, y, ids: F.scaled_dot_product_attention(x, x * p["b"], x),
    "custom Function of a product": lambda p, x, y, ids: Double.apply(x @ p["w"], p["b"]),
    "several indices": lambda p, x, y, ids: p["v"][ids, ids % D],
    "index and slice": lambda p, x, y, ids: p["v"][ids, 1:],
    "index after a slice": lambda p, x, y, ids: p["w"][:, ids % D].movedim(0, -1),
    "take": lambda p, x, y, ids: p["v"].take(ids),
    "gather": lambda p, x, y, ids: p["v"].gather(0, ids[:, :D]),
    "index_select, dim 1": lambda p, x, y, ids: p["w"].index_select(1, ids.flatten() % OUT).T.unflatten(0, ids.shape),
    "embedding by frequency": lambda p, x, y, ids: F.embedding(ids, p["v"], scale_grad_by_freq=True),
    "trained per_sample_weights": lambda p, x, y, ids: F.embedding_bag(ids, p["v"], mode="sum", per_sample_weights=p["b"][:T].expand(len(ids), -1)),
    "einsum, three operands": lambda p, x, y, ids: torch.einsum("bti,io,o->bto", x, p["w"], p["b"]),
    "einsum, list of operands": lambda p, x, y, ids: torch.einsum("bti,io->bto", [x, p["w"]]),
    "einsum, numbers": lambda p, x, y, ids: torch.einsum(x, [0, 1, 2], p["w"], [2, 3], [0, 1, 3]),
    "einsum, samples joined": lambda p, x, y, ids: torch.einsum("ni,io->no", x.flatten(0, 1), p["w"]).unflatten(0, x.shape[:2]),
    "cat": lambda p, x, y, ids: torch.cat([x, p["v"][None].expand(len(x), -1, -1)], 1),
    "repeat_interleave": lambda p, x, y, ids: p["b"][None].repeat_interleave(len(y), 0) * y,
    "masked_fill": lambda p, x, y, ids: x.masked_fill(x > 0, p["s"]),
    "masked_scatter": lambda p, x, y, ids: x.masked_scatter(x > 0, p["v"].flatten().repeat(9)),
    "targets from a parameter": lambda p, x, y, ids: F.cross_entropy(y, p["b"].softmax(0).expand_as(y), reduction="none"),
    "grid_sample": lambda p, x, y, ids: F.grid_sample(p["w"][None, None].expand(len(x), -1, -1, -1), x[:, None, :, :2].tanh(), align_corners=True),
    "affine_grid": lambda p, x, y, ids: F.grid_sample(
        x[:, None], F.affine_grid(p["w"][None, :2, :3].expand(len(x), -1, -1), [len(x), 1, 3, 3], align_corners=True), align_corners=True),
    "conv without batch": lambda p, x, y, ids: torch.stack([F.conv1d(row, p["w"][None, :T, :2]) for row in x]),
    "in-place into a copy": lambda p, x, y, ids: x @ into(p["w"], lambda w: w[0].copy_(y[0])),
    "added into zeros": lambda p, x, y, ids: into(torch.zeros_like(x), lambda out: out.add_(p["b"]).mul_(x)),
    "assigned into a row": lambda p, x, y, ids: into(x, lambda out: out[:, 0].copy_(p["b"])).tanh() * x,
    "fill_": lambda p, x, y, ids: torch.zeros_like(x).fill_(p["s"]) * x,
    "index_put": lambda p, x, y, ids: torch.zeros_like(x).index_put((torch.arange(len(x)),), p["b"]) * x,
    "scatter": lambda p, x, y, ids: torch.zeros_like(y).scatter(1, ids % D, p["v"][: len(y), :T]),
    "new_tensor": lambda p, x, y, ids: x * p["b"].detach().clone().requires_grad_() + x * p["b"],
    ".data": lambda p, x, y, ids: x * p["b"].data + x @ p["w"],
    "view_as_complex": lambda p, x, y, ids: torch.view_as_real(
        torch.view_as_complex(x.unflatten(2, (2, 2)).contiguous()) * torch.view_as_complex(p["b"].view(2, 2))),
    "sample by sample": lambda p, x, y, ids: torch.stack([x[i] @ p["w"] for i in range(len(x))]),
    "sample by sample, chunks": lambda p, x, y, ids: torch.cat([F.linear(row, p["w"], p["b"]) for row in x.split(1)]),
    "checkpointed with arguments": lambda p, x, y, ids: checkpoint(lambda x, w: torch.tanh(x @ w), x, p["w"], use_reentrant=False),
    "use without gradient": lambda p, x, y, ids: x * p["b"] + torch.no_grad()(lambda: x @ p["w"])(),
    "detached": lambda p, x, y, ids: x * p["b"] + (x @ p["w"]).detach(),
    "gradient of a gradient": lambda p, x, y, ids: torch.autograd.grad(squares(leaf(x) @ p["w"]).sum(), p["w"], create_graph=True)[0].sum() * y,
    "gradient penalty": lambda p, x, y, ids: input_gradient(p, x),
    "regularisation in each loss": lambda p, x, y, ids: y * p["b"] + p["w"].square().sum(),
    "hook on an output": lambda p, x, y, ids: hooked(x @ p["w"]),
    "experts by mask": lambda p, x, y, ids: torch.where((ids % 2 == 0)[..., None], x @ p["w"], x @ p["w"].T),
    "experts by index": routed,
    "scaled, and direct": lambda p, x, y, ids: F.linear(x, p["w"]).square() + F.linear(x, p["w"] * 3),
    "derived, and direct": lambda p, x, y, ids: F.linear(x, p["w"]).tanh() + F.linear(x, p["w"].exp()),
    "custom Function, and direct": lambda p, x, y, ids: F.linear(x, p["w"]) + Double.apply(x, p["w"][:T]),
    "weight and bias": lambda p, x, y, ids: F.linear(x, p["w"], p["w"][:, 0]),
    "a transpose that is reshaped": lambda p, x, y, ids: (x @ p["v"].t().reshape(D, VOCAB)).tanh(),
    "derived in a checkpoint": lambda p, x, y, ids: checkpoint(lambda x, w, v: F.linear(x, w + v[:4] @ w).tanh(), x, p["w"], p["v"], use_reentrant=False),
    "a bias that broadcasts": lambda p, x, y, ids: F.linear(x, torch.ones(2, D).double(), p["b"][:1]),
    "einsum that broadcasts": lambda p, x, y, ids: torch.einsum("btd,td->bt", x, p["w"][:1]),
    "part of a table at a number": lambda p, x, y, ids: x @ p["w"].view(2, 2, D)[ids[0, 0] % 2].T,
    "a gradient inside, detached": lambda p, x, y, ids: (x @ p["w"]) * input_gradient(p, x).detach().sigmoid(),
    "a layer in its own backward": lambda p, x, y, ids: Again.apply((y * p["b"]).tanh(), p["w"]) + F.linear(y, p["w"]),
    "a gradient in a hook": lambda p, x, y, ids: hooked_by(lambda f, z: torch.autograd.grad(f(z), z)[0])(p, y),
    "a transform in a hook": lambda p, x, y, ids: hooked_by(lambda f, z: torch.func.grad(f)(z))(p, y),
    "a gradient in a checkpoint": lambda p, x, y, ids: checkpoint(
        lambda z: torch.autograd.grad(F.linear(z, p["w"]).tanh().sum(), z, create_graph=True)[0] * F.linear(z, p["w"]),
        y * p["b"], use_reentrant=False),
    "custom Function of NumPy": lambda p, x, y, ids: ByNumPy.apply(y @ p["w"]),
    "custom Function of NumPy, last": lambda p, x, y, ids: ByNumPy.apply((y @ p["w"]).sum(1, keepdim=True)),
    "turned without gradient": lambda p, x, y, ids: turned_without_grad(p, y),
    "no gradient": lambda p, x, y, ids: without_grad(torch.no_grad, p, y),
    "gradients off": lambda p, x, y, ids: without_grad(lambda: torch.set_grad_enabled(False), p, y),
    "detached transpose": lambda p, x, y, ids: (y @ p["w"].T.detach()) * p["b"] + y @ p["w"].T,
    "rows of a table between its entries": lambda p, x, y, ids: F.grid_sample(
        p["w"][None, None], x.reshape(1, -1, 1, 2).tanh(), mode="bicubic", align_corners=False, padding_mode="border").reshape(len(x), -1),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_use_is_exact(engine, name):
    params = {"w": random(D, OUT), "b": random(D), "v": random(VOCAB, D), "s": random(1)[0]}
    batch = (random(B, T, D), random(B, D), torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(0)))
    case = Case(lambda p, b: squares(USES[name](p, *b)), params, batch)
    found = differences(ENGINES[engine](), case, truth_of(case))
    assert all(value < 1e-10 for value in found.values()), found
