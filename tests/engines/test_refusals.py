"""Each use of a parameter is exact, and what is no loss is an error that says so: never a number that is wrong."""

from __future__ import annotations

import pytest
import torch
from models import Case
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo.parity import ENGINES, differences, truth_of

from dpfunc.errors import DPFuncError

B, T, D, OUT, VOCAB = 5, 3, 4, 4, 7
every = pytest.mark.parametrize("engine", ENGINES)


def random(*shape):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def batch():
    ids = torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(0))
    return {"x": random(B, T, D), "ids": ids, "y": random(B, D)}


def params(**changes):
    chosen = {"w": random(D, OUT), "b": random(D), "v": random(VOCAB, D)}
    return {**chosen, **changes}


def run(engine, loss_fn, parameters=None, rows=None):
    """Losses, norms and sums: all that an engine can be asked for."""
    result = ENGINES[engine]()(loss_fn, parameters or params(), rows or batch())
    size = len(result.losses_B)
    factors = dict.fromkeys(parameters or params(), torch.ones(size, dtype=torch.float64))
    return result.losses_B, result.sq_norms(), result.weighted_sum(factors)


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


def written(p, b):
    """In place, into a row of the parameter itself."""
    w = p["w"].clone()
    w[0] = b["y"][0]
    return b["x"] @ w


def scattered(p, b):
    """A leaf that is not the parameter, which receives it in place."""
    out = torch.zeros_like(b["x"])
    out += p["b"]
    out.copy_(out * b["x"])
    return out


def received(p, b):
    out = b["x"].clone()
    out[:, 0] = p["b"]
    return out.tanh() * b["x"]


def copied(p, b):
    out = torch.zeros_like(b["x"])
    out.copy_(p["b"])
    return out * b["x"]


def two_flat_orders(p, b):
    x = b["x"]
    first = (x.reshape(-1, D) @ p["w"]).unflatten(0, (-1, x.shape[1]))
    second = (x.transpose(0, 1).reshape(-1, D) @ p["w"]).unflatten(0, (x.shape[1], -1))
    return first + second.transpose(0, 1).square()


def by_sample(p, b):
    return torch.stack([b["x"][i] @ p["w"] for i in range(len(b["x"]))])


def by_sample_scaled(p, b):
    return torch.stack([row * p["b"] for row in b["x"]])


def by_sample_chunks(p, b):
    return torch.cat([F.linear(row, p["w"], p["b"]) for row in b["x"].split(1)])


# How a parameter may be used: each is exact, whether an operation has a rule or not.
USES = {
    "mm by keyword": lambda p, b: torch.mm(b["y"], mat2=p["w"]),
    "matmul, samples last": lambda p, b: (p["w"] @ b["y"].T).T,
    "least squares": lambda p, b: torch.linalg.lstsq((p["w"] @ p["w"].T)[None], b["x"].mT).solution,
    "mv": lambda p, b: torch.mv(b["y"], p["b"]),
    "bmm of heads": lambda p, b: b["x"][:, None] @ torch.stack([p["w"], p["w"] * 2]),
    "bmm by hand": lambda p, b: torch.bmm(b["x"], p["w"].expand(len(b["x"]), -1, -1)),
    "baddbmm": lambda p, b: torch.baddbmm(p["b"], b["x"], p["w"].expand(len(b["x"]), -1, -1)),
    "addmm, beta": lambda p, b: torch.addmm(p["b"], b["y"], p["w"], beta=0.5),
    "addmv": lambda p, b: torch.addmv(b["y"][:, 0], b["y"], p["b"]),
    "addr": lambda p, b: torch.addr(b["y"], b["y"][:, 0], p["b"]),
    "dot of rows": lambda p, b: torch.stack([row.dot(p["b"]) for row in b["y"]]),
    "inner": lambda p, b: torch.inner(b["x"], p["w"]),
    "tensordot": lambda p, b: torch.tensordot(b["x"], p["w"], 1),
    "outer": lambda p, b: torch.outer(b["y"][:, 0], p["b"]),
    "kron": lambda p, b: torch.kron(b["y"], p["b"]),
    "cross": lambda p, b: torch.linalg.cross(b["y"][:, :3], p["b"][None, :3]),
    "cdist": lambda p, b: torch.cdist(b["x"], p["v"][None]),
    "cosine_similarity": lambda p, b: F.cosine_similarity(b["x"], p["b"], dim=-1),
    "cosine to a table": lambda p, b: F.cosine_similarity(b["x"][:, :, None], p["v"], dim=-1),
    "pairwise_distance": lambda p, b: F.pairwise_distance(b["y"], p["b"]),
    "solve, twice": lambda p, b: torch.linalg.solve(torch.stack([p["w"], p["w"].T])[None], b["x"].mT[:, None]),
    "solve for a vector": lambda p, b: torch.linalg.solve(p["w"] + b["x"].mT @ b["x"], p["b"]),
    "solve for a matrix": lambda p, b: torch.linalg.solve(p["w"] + b["x"].mT @ b["x"], p["w"]),
    "solve": lambda p, b: torch.linalg.solve(p["w"], b["y"].T).T,
    "solve, batched": lambda p, b: torch.linalg.solve(p["w"], b["x"].mT),
    "solve_triangular": lambda p, b: torch.linalg.solve_triangular(p["w"], b["x"].mT, upper=True),
    "inverse": lambda p, b: b["x"] @ torch.linalg.inv(p["w"]),
    "matrix_exp": lambda p, b: b["x"] @ torch.matrix_exp(p["w"]),
    "key of attention": lambda p, b: F.scaled_dot_product_attention(b["x"], p["v"].expand(len(b["x"]), -1, -1), p["v"][None]),
    "shared key of attention": lambda p, b: F.scaled_dot_product_attention(b["x"], p["v"][None], p["v"][None]),
    "key that depends on the batch": lambda p, b: F.scaled_dot_product_attention(b["x"], b["x"] * p["b"], b["x"]),
    "custom Function": lambda p, b: Double.apply(b["x"], p["b"]),
    "custom Function of a product": lambda p, b: Double.apply(b["x"] @ p["w"], p["b"]),
    "several indices": lambda p, b: p["v"][b["ids"], b["ids"] % D],
    "index and slice": lambda p, b: p["v"][b["ids"], 1:],
    "index after a slice": lambda p, b: p["w"][:, b["ids"] % D].movedim(0, -1),
    "take": lambda p, b: p["v"].take(b["ids"]),
    "gather": lambda p, b: p["v"].gather(0, b["ids"][:, :D]),
    "index_select, dim 1": lambda p, b: p["w"].index_select(1, b["ids"].flatten() % OUT).T.unflatten(0, b["ids"].shape),
    "embedding by frequency": lambda p, b: F.embedding(b["ids"], p["v"], scale_grad_by_freq=True),
    "embedding bag, max": lambda p, b: F.embedding_bag(b["ids"], p["v"], mode="max"),
    "embedding bag, offsets": lambda p, b: F.embedding_bag(b["ids"].flatten(), p["v"], torch.arange(0, b["ids"].numel(), T)),
    "trained per_sample_weights": lambda p, b: F.embedding_bag(b["ids"], p["v"], mode="sum", per_sample_weights=p["b"][:T].expand(len(b["ids"]), -1)),
    "einsum with dots": lambda p, b: torch.einsum("...i,io->...o", b["x"], p["w"]),
    "einsum, implicit": lambda p, b: torch.einsum("bti,io", b["x"], p["w"]),
    "einsum, three operands": lambda p, b: torch.einsum("bti,io,o->bto", b["x"], p["w"], p["b"]),
    "einsum, diagonal": lambda p, b: torch.einsum("bti,ii->bti", b["x"], p["w"]),
    "einsum, lone letter": lambda p, b: torch.einsum("bti,io->bti", b["x"], p["w"]),
    "einsum, list of operands": lambda p, b: torch.einsum("bti,io->bto", [b["x"], p["w"]]),
    "einsum, numbers": lambda p, b: torch.einsum(b["x"], [0, 1, 2], p["w"], [2, 3], [0, 1, 3]),
    "einsum, samples joined": lambda p, b: torch.einsum("ni,io->no", b["x"].flatten(0, 1), p["w"]).unflatten(0, b["x"].shape[:2]),
    "cat": lambda p, b: torch.cat([b["x"], p["v"][None].expand(len(b["x"]), -1, -1)], 1),
    "stack": lambda p, b: torch.stack([b["y"], p["b"].expand_as(b["y"])], 1),
    "hstack": lambda p, b: torch.hstack([b["y"], p["b"].repeat(len(b["y"]), 1)]),
    "broadcast_tensors": lambda p, b: torch.broadcast_tensors(b["y"], p["b"])[1] * b["y"],
    "repeat_interleave": lambda p, b: p["b"][None].repeat_interleave(len(b["y"]), 0) * b["y"],
    "expand_as": lambda p, b: p["b"].expand_as(b["x"]) * b["x"],
    "meshgrid": lambda p, b: torch.meshgrid(b["y"][:, 0], p["b"], indexing="ij")[1] * b["y"],
    "masked_fill": lambda p, b: b["x"].masked_fill(b["x"] > 0, p["s"]),
    "masked_scatter": lambda p, b: b["x"].masked_scatter(b["x"] > 0, p["v"].flatten().repeat(9)),
    "clamp": lambda p, b: b["x"].clamp(min=p["b"] - 1),
    "atan2": lambda p, b: torch.atan2(b["x"], p["b"]),
    "xlogy": lambda p, b: torch.xlogy(b["x"], p["b"].square() + 1),
    "hypot": lambda p, b: torch.hypot(b["x"], p["b"]),
    "logaddexp": lambda p, b: torch.logaddexp(b["x"], p["b"]),
    "fmod": lambda p, b: torch.remainder(b["x"], p["b"].square() + 1),
    "addcdiv": lambda p, b: torch.addcdiv(b["x"], b["x"], p["b"].square() + 1),
    "x ** w": lambda p, b: (b["x"].square() + 1) ** p["b"],
    "w ** x": lambda p, b: (p["b"].square() + 1) ** b["x"],
    "where of two parameters": lambda p, b: torch.where(b["x"] > 0, p["b"], p["b"] * 2) * b["x"],
    "prelu, several": lambda p, b: F.prelu(b["x"].transpose(1, 2), p["b"]),
    "mse to a parameter": lambda p, b: F.mse_loss(b["y"], p["b"].expand_as(b["y"]), reduction="none"),
    "smooth loss to a parameter": lambda p, b: F.smooth_l1_loss(b["y"], p["b"][None].expand(len(b["y"]), -1), reduction="none"),
    "targets from a parameter": lambda p, b: F.cross_entropy(b["y"], p["b"].softmax(0).expand_as(b["y"]), reduction="none"),
    "cosine distance to a class": lambda p, b: F.normalize(b["y"], dim=1) @ F.normalize(p["v"], dim=1).T,
    "fft": lambda p, b: torch.fft.irfft(torch.fft.rfft(b["x"]) * torch.fft.rfft(p["b"])),
    "cumsum": lambda p, b: (b["x"] * p["b"]).cumsum(1),
    "cumprod of a parameter": lambda p, b: b["x"] * p["b"].cumprod(0),
    "grid_sample": lambda p, b: F.grid_sample(p["w"][None, None].expand(len(b["x"]), -1, -1, -1), b["x"][:, None, :, :2].tanh(),
                                   align_corners=True),
    "grid from a parameter": lambda p, b: F.grid_sample(b["x"][:, None], p["w"][None, None, :, :2].tanh().expand(len(b["x"]), -1, -1, -1),
                                   align_corners=True),
    "affine_grid": lambda p, b: F.grid_sample(
            b["x"][:, None],
            F.affine_grid(p["w"][None, :2, :3].expand(len(b["x"]), -1, -1), [len(b["x"]), 1, 3, 3], align_corners=True),
            align_corners=True,
        ),
    "conv, samples as channels": lambda p, b: F.conv1d(b["y"][None], p["b"][None, None, :3].expand(len(b["y"]), -1, -1), groups=len(b["y"]))[0],
    "conv without batch": lambda p, b: torch.stack([F.conv1d(x, p["w"][None, :T, :2]) for x in b["x"]]),
    "group norm, samples as channels": lambda p, b: F.layer_norm(b["x"].mT.mT, (D,), p["b"], p["b"]),
    "lstm cell": lambda p, b: torch.lstm_cell(
            b["y"], (b["y"], b["y"]), p["w"].repeat(4, 1), p["w"].repeat(4, 1), p["b"].repeat(4), p["b"].repeat(4)
        )[0],
    "gru cell": lambda p, b: torch.gru_cell(b["y"], b["y"], p["w"].repeat(3, 1), p["w"].repeat(3, 1)),
    "in-place into a copy": written,
    "added into zeros": scattered,
    "assigned into a row": received,
    "copied into zeros": copied,
    "fill_": lambda p, b: torch.zeros_like(b["x"]).fill_(p["s"]) * b["x"],
    "index_put": lambda p, b: torch.zeros_like(b["x"]).index_put((torch.arange(len(b["x"])),), p["b"]) * b["x"],
    "scatter": lambda p, b: torch.zeros_like(b["y"]).scatter(1, b["ids"] % D, p["v"][: len(b["y"]), :T]),
    "unbound rows": lambda p, b: sum(row * b["x"] for row in p["v"].unbind(0)),
    "new_tensor": lambda p, b: b["x"] * p["b"].detach().clone().requires_grad_() + b["x"] * p["b"],
    ".data": lambda p, b: b["x"] * p["b"].data + b["x"] @ p["w"],
    "view_as_complex": lambda p, b: torch.view_as_real(
            torch.view_as_complex(b["x"].unflatten(2, (2, 2)).contiguous()) * torch.view_as_complex(p["b"].view(2, 2))
        ),
    "two flat orders": two_flat_orders,
    "sample by sample": by_sample,
    "sample by sample, scaled": by_sample_scaled,
    "sample by sample, chunks": by_sample_chunks,
    "checkpointed": lambda p, b: checkpoint(lambda x: torch.tanh(x @ p["w"]) * p["b"], b["x"], use_reentrant=False),
    "checkpointed with arguments": lambda p, b: checkpoint(lambda x, w: torch.tanh(x @ w), b["x"], p["w"], use_reentrant=False),
    "partly without gradient": lambda p, b: b["x"] * p["b"] + b["x"] @ _without_gradient(lambda: p["w"] * p["b"]),
    "use without gradient": lambda p, b: b["x"] * p["b"] + _without_gradient(lambda: b["x"] @ p["w"]),
    "detached": lambda p, b: b["x"] * p["b"] + (b["x"] @ p["w"]).detach(),
    "gradient of a gradient": lambda p, b: torch.autograd.grad(
            squares(_leaf(b["x"]) @ p["w"]).sum(), p["w"], create_graph=True
        )[0].sum() * b["y"],
    "gradient penalty": lambda p, b: _input_gradient(p, b),
    "regularisation in each loss": lambda p, b: b["y"] * p["b"] + p["w"].square().sum(),
    "regularisation alone": lambda p, b: b["y"][:, :1] * 0 + p["w"].square().sum(),
    "hook on an output": lambda p, b: _hooked(b["x"] @ p["w"]),
    "topk of a parameter": lambda p, b: b["x"] * p["v"].topk(1, 0).values,
    "sorted rows": lambda p, b: (b["x"] @ p["w"]).sort(1).values,
    "experts by mask": lambda p, b: torch.where((b["ids"] % 2 == 0)[..., None], b["x"] @ p["w"], b["x"] @ p["w"].T),
    "experts by index": lambda p, b: _routed(p, b),
    "transposed, and direct": lambda p, b: F.linear(b["x"], p["w"]) + F.linear(b["x"], p["w"].t()),
    "scaled, and direct": lambda p, b: F.linear(b["x"], p["w"]).square() + F.linear(b["x"], p["w"] * 3),
    "derived, and direct": lambda p, b: F.linear(b["x"], p["w"]).tanh() + F.linear(b["x"], p["w"].exp()),
    "added, and direct": lambda p, b: F.linear(b["x"], p["w"]) * F.linear(b["x"], torch.eye(D).double() + p["w"]),
    "part, and direct": lambda p, b: F.linear(b["x"], p["w"]) * F.linear(b["x"], torch.cat([p["w"][:3], p["w"][:1]])),
    "custom Function, and direct": lambda p, b: F.linear(b["x"], p["w"]) + Double.apply(b["x"], p["w"][:T]),
    "weight and bias": lambda p, b: F.linear(b["x"], p["w"], p["w"][:, 0]),
    "a transpose that is reshaped": lambda p, b: (b["x"] @ p["v"].t().reshape(D, VOCAB)).tanh(),
    "derived in a checkpoint": lambda p, b: checkpoint(
        lambda x, w, v: F.linear(x, w + v[:4] @ w).tanh(), b["x"], p["w"], p["v"], use_reentrant=False
    ),
    "a bias that broadcasts": lambda p, b: F.linear(b["x"], torch.ones(2, D).double(), p["b"][:1]),
    "einsum that broadcasts": lambda p, b: torch.einsum("btd,td->bt", b["x"], p["w"][:1]),
    "part of a table at a number": lambda p, b: b["x"] @ p["w"].view(2, 2, D)[b["ids"][0, 0] % 2].T,
    "branch on the length": lambda p, b: F.linear(b["x"].mT if b["x"].shape[1] > D else b["x"], p["w"]),
    "a gradient inside, detached": lambda p, b: (b["x"] @ p["w"]) * _input_gradient(p, b).detach().sigmoid(),
    "rows of a table between its entries": lambda p, b: F.grid_sample(
        p["w"][None, None], b["x"].reshape(1, -1, 1, 2).tanh(), mode="bicubic", align_corners=False,
        padding_mode="border",
    ).reshape(len(b["x"]), -1),
    "unused": lambda p, b: b["x"] * p["b"] + 0 * F.linear(b["x"], p["w"]).detach(),
}  # fmt: skip


def _without_gradient(function):
    with torch.no_grad():
        return function()


def _leaf(x):
    return x.detach().clone().requires_grad_()


def _input_gradient(p, b):
    x = _leaf(b["x"])
    return torch.autograd.grad(torch.tanh(x @ p["w"]).sum(), x, create_graph=True)[0]


def _hooked(out):
    out.register_hook(lambda grad: grad * 2)
    return out


def _routed(p, b):
    """Positions of one expert gathered over the whole batch, as in a mixture of experts."""
    out = torch.zeros_like(b["x"])
    chosen = b["ids"] % 2 == 0
    out[chosen] = b["x"][chosen] @ p["w"]
    return out


@pytest.mark.parametrize("name", USES)
@every
def test_every_use_is_exact(engine, name):
    """Also where the loss would mix the samples of a batch: it sees one row."""
    case = Case(lambda p, b: squares(USES[name](p, b)), params(s=random(1)[0]), batch())
    found = differences(ENGINES[engine](), case, truth_of(case))
    assert all(value < 1e-10 for value in found.values()), found


# Losses that are none.


WRONG = {
    "one number": lambda p, b: squares(b["y"] @ p["w"]).mean(),
    "one for each token": lambda p, b: (b["x"] @ p["w"]).sum(2),
    "a column": lambda p, b: squares(b["y"] @ p["w"])[:, None],
    "too many": lambda p, b: torch.cat([squares(b["y"] @ p["w"])] * 2),
    "too few": lambda p, b: squares(b["y"] @ p["w"])[1:],
    "an integer": lambda p, b: squares(b["y"] @ p["w"]).long(),
    "a tuple": lambda p, b: (squares(b["y"] @ p["w"]),),
    "a number": lambda p, b: 1.0,
    "nothing": lambda p, b: None,
    "no gradient": lambda p, b: squares(b["y"]),
    "detached": lambda p, b: squares(b["y"] @ p["w"]).detach(),
    "under no_grad": lambda p, b: _without_gradient(lambda: squares(b["y"] @ p["w"])),
    "parameters under no_grad": lambda p, b: squares(b["y"] * _without_gradient(lambda: p["b"] * 2)),
    "under inference_mode": lambda p, b: _in_inference(lambda: squares(b["y"] @ p["w"])),
}


def _in_inference(function):
    with torch.inference_mode():
        return function()


@pytest.mark.parametrize("name", WRONG)
@every
def test_losses_that_are_none_are_refused(engine, name):
    with pytest.raises(DPFuncError, match="loss"):
        run(engine, WRONG[name])


REENTRANT = {
    "alone": lambda p, b: checkpoint(
        lambda x: torch.tanh(x @ p["w"]), (b["x"] * 1).requires_grad_(), use_reentrant=True
    ),
    "beside another use": lambda p, b: b["x"] * p["b"] + REENTRANT["alone"](p, b),
    "after a layer": lambda p, b: checkpoint(
        lambda x: torch.tanh(x @ p["w"]), b["x"] * p["b"], use_reentrant=True
    ),
    "with arguments": lambda p, b: checkpoint(
        lambda x, w: torch.tanh(x @ w), b["x"], p["w"], use_reentrant=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REENTRANT)
@every
def test_reentrant_checkpoints_are_refused(engine, name):
    """Only `backward()` reaches the parameters inside; everything else would leave them out."""
    with pytest.raises(DPFuncError, match="reentrant"):
        run(engine, lambda p, b: squares(REENTRANT[name](p, b)))


@pytest.mark.parametrize("part", [False, True])
@every
def test_a_loss_does_not_overwrite_parameters(engine, part):
    """Refused before it happens."""
    parameters, before = params(), params()

    def loss_fn(p, b):
        with torch.no_grad():
            (p["b"][1:] if part else p["b"]).mul_(0.5)
        return squares(b["x"] * p["b"])

    with pytest.raises(DPFuncError, match="writes into"):
        run(engine, loss_fn, parameters)
    assert all(torch.equal(parameters[name], value) for name, value in before.items())


@every
def test_an_input_that_is_overwritten_before_its_use_in_the_backward_pass(engine):
    """An error, as torch's own: the product with the new numbers would be wrong."""

    def loss_fn(p, b):
        x = b["x"].clone()
        out = F.linear(x, p["w"])
        x.relu_()
        return squares(out.tanh())

    with pytest.raises((DPFuncError, RuntimeError), match="modified by an inplace operation"):
        run(engine, loss_fn)


@every
def test_one_tensor_under_two_names(engine):
    """Each name has its own gradient: not one gradient under one of the names."""
    shared = random(D, OUT)
    loss_fn = lambda p, b: squares(torch.tanh(b["x"] @ p["w"]) @ p["again"])
    case = Case(loss_fn, params(w=shared, again=shared), batch())
    assert all(value < 1e-10 for value in differences(ENGINES[engine](), case, truth_of(case)).values())


@every
def test_other_losses_after_a_refusal(engine):
    """An engine that has refused one loss still works for another, and refuses again."""
    run_again, good = ENGINES[engine](), Case(lambda p, b: squares(b["y"] @ p["w"]), params(), batch())
    for _ in range(2):
        with pytest.raises(DPFuncError):
            run_again(WRONG["a column"], params(), batch())
        assert all(value < 1e-10 for value in differences(run_again, good, truth_of(good)).values())
