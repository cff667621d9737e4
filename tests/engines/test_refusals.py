"""Fail closed: what an engine cannot do is an error that says so, never a number that is wrong."""

from __future__ import annotations

import re

import pytest
import torch
from models import Case
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo.parity import ENGINES, differences, truth_of

from dpfunc.clipped import make_clipped_grad
from dpfunc.clipping import Flat
from dpfunc.engines import bookkeeping, vmap
from dpfunc.engines.uses.sample_axis import SampleAxis
from dpfunc.errors import DPFuncError, InvalidArgument, UnsupportedModel
from dpfunc.functional import functionalize

B, T, D, OUT, VOCAB = 5, 3, 4, 4, 7
FAST = ("bookkeeping", "ghost")
fast = pytest.mark.parametrize("engine", FAST)
every = pytest.mark.parametrize("engine", ["loop", *FAST])


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


def unless_large(p, b):
    """Another operation for batches of four and more, which two and three rows never show."""
    x = b["x"]
    return x @ p["w"] if len(x) < 4 else (p["w"].T @ x.mT).mT * p["b"]


def unless_large_silently(p, b):
    """The same operation, with the samples elsewhere, for batches of four and more."""
    x = b["x"]
    if len(x) < 4:
        return (x.reshape(-1, D) @ p["w"]).unflatten(0, (-1, x.shape[1]))
    return (x.transpose(0, 1).reshape(-1, D) @ p["w"]).unflatten(0, (x.shape[1], -1)).transpose(0, 1)


# How a parameter may be used; each is either exact or an error. `op` is in the message where it is an error.
USES = {
    "mm by keyword": (lambda p, b: torch.mm(b["y"], mat2=p["w"]), "mm"),
    "matmul, samples last": (lambda p, b: (p["w"] @ b["y"].T).T, "matmul"),
    "mv": (lambda p, b: torch.mv(b["y"], p["b"]), "mv"),
    "bmm of heads": (lambda p, b: b["x"][:, None] @ torch.stack([p["w"], p["w"] * 2]), "matmul"),
    "bmm by hand": (lambda p, b: torch.bmm(b["x"], p["w"].expand(len(b["x"]), -1, -1)), "bmm"),
    "baddbmm": (lambda p, b: torch.baddbmm(p["b"], b["x"], p["w"].expand(len(b["x"]), -1, -1)), "baddbmm"),
    "addmm, beta": (lambda p, b: torch.addmm(p["b"], b["y"], p["w"], beta=0.5), "addmm"),
    "addmv": (lambda p, b: torch.addmv(b["y"][:, 0], b["y"], p["b"]), "addmv"),
    "addr": (lambda p, b: torch.addr(b["y"], b["y"][:, 0], p["b"]), "addr"),
    "dot of rows": (lambda p, b: torch.stack([row.dot(p["b"]) for row in b["y"]]), "dot"),
    "inner": (lambda p, b: torch.inner(b["x"], p["w"]), "inner"),
    "tensordot": (lambda p, b: torch.tensordot(b["x"], p["w"], 1), "tensordot"),
    "outer": (lambda p, b: torch.outer(b["y"][:, 0], p["b"]), "outer"),
    "kron": (lambda p, b: torch.kron(b["y"], p["b"]), "kron"),
    "cross": (lambda p, b: torch.linalg.cross(b["y"][:, :3], p["b"][None, :3]), "cross"),
    "cdist": (lambda p, b: torch.cdist(b["x"], p["v"][None]), "cdist"),
    "cosine_similarity": (lambda p, b: F.cosine_similarity(b["x"], p["b"], dim=-1), "cosine_similarity"),
    "cosine to a table": (
        lambda p, b: F.cosine_similarity(b["x"][:, :, None], p["v"], dim=-1), "cosine_similarity"
    ),
    "pairwise_distance": (lambda p, b: F.pairwise_distance(b["y"], p["b"]), "pairwise_distance"),
    "solve": (lambda p, b: torch.linalg.solve(p["w"], b["y"].T).T, "solve"),
    "solve, batched": (lambda p, b: torch.linalg.solve(p["w"], b["x"].mT), "solve"),
    "solve_triangular": (lambda p, b: torch.linalg.solve_triangular(p["w"], b["x"].mT, upper=True), "solve"),
    "inverse": (lambda p, b: b["x"] @ torch.linalg.inv(p["w"]), None),
    "matrix_exp": (lambda p, b: b["x"] @ torch.matrix_exp(p["w"]), None),
    "key of attention": (
        lambda p, b: F.scaled_dot_product_attention(b["x"], p["v"].expand(len(b["x"]), -1, -1), p["v"][None]),
        "scaled_dot_product_attention",
    ),
    "shared key of attention": (
        lambda p, b: F.scaled_dot_product_attention(b["x"], p["v"][None], p["v"][None]),
        "scaled_dot_product_attention",
    ),
    "key that depends on the batch": (
        lambda p, b: F.scaled_dot_product_attention(b["x"], b["x"] * p["b"], b["x"]), None
    ),
    "custom Function": (lambda p, b: Double.apply(b["x"], p["b"]), "custom autograd.Function"),
    "custom Function of a product": (lambda p, b: Double.apply(b["x"] @ p["w"], p["b"]), "custom autograd.Function"),
    "several indices": (lambda p, b: p["v"][b["ids"], b["ids"] % D], "getitem"),
    "index and slice": (lambda p, b: p["v"][b["ids"], 1:], "getitem"),
    "index after a slice": (lambda p, b: p["w"][:, b["ids"] % D].movedim(0, -1), "getitem"),
    "take": (lambda p, b: p["v"].take(b["ids"]), "take"),
    "gather": (lambda p, b: p["v"].gather(0, b["ids"][:, :D]), "gather"),
    "index_select, dim 1": (
        lambda p, b: p["w"].index_select(1, b["ids"].flatten() % OUT).T.unflatten(0, b["ids"].shape), "index_select"
    ),
    "embedding by frequency": (lambda p, b: F.embedding(b["ids"], p["v"], scale_grad_by_freq=True), "embedding"),
    "embedding bag, max": (lambda p, b: F.embedding_bag(b["ids"], p["v"], mode="max"), "embedding_bag"),
    "embedding bag, offsets": (
        lambda p, b: F.embedding_bag(b["ids"].flatten(), p["v"], torch.arange(0, b["ids"].numel(), T)),
        "embedding_bag",
    ),
    "trained per_sample_weights": (
        lambda p, b: F.embedding_bag(b["ids"], p["v"], mode="sum", per_sample_weights=p["b"][:T].expand(len(b["ids"]), -1)),
        None,
    ),
    "einsum with dots": (lambda p, b: torch.einsum("...i,io->...o", b["x"], p["w"]), "einsum"),
    "einsum, implicit": (lambda p, b: torch.einsum("bti,io", b["x"], p["w"]), "einsum"),
    "einsum, three operands": (lambda p, b: torch.einsum("bti,io,o->bto", b["x"], p["w"], p["b"]), "einsum"),
    "einsum, diagonal": (lambda p, b: torch.einsum("bti,ii->bti", b["x"], p["w"]), "einsum"),
    "einsum, lone letter": (lambda p, b: torch.einsum("bti,io->bti", b["x"], p["w"]), "einsum"),
    "einsum, list of operands": (lambda p, b: torch.einsum("bti,io->bto", [b["x"], p["w"]]), "einsum"),
    "einsum, numbers": (lambda p, b: torch.einsum(b["x"], [0, 1, 2], p["w"], [2, 3], [0, 1, 3]), "einsum"),
    "einsum, samples joined": (
        lambda p, b: torch.einsum("ni,io->no", b["x"].flatten(0, 1), p["w"]).unflatten(0, b["x"].shape[:2]), "einsum"
    ),
    "cat": (lambda p, b: torch.cat([b["x"], p["v"][None].expand(len(b["x"]), -1, -1)], 1), None),
    "cat by value": (lambda p, b: torch.cat([b["y"].flatten(), p["b"]])[: b["y"].numel()].view_as(b["y"]), None),
    "stack": (lambda p, b: torch.stack([b["y"], p["b"].expand_as(b["y"])], 1), None),
    "hstack": (lambda p, b: torch.hstack([b["y"], p["b"].repeat(len(b["y"]), 1)]), None),
    "broadcast_tensors": (lambda p, b: torch.broadcast_tensors(b["y"], p["b"])[1] * b["y"], "broadcast_tensors"),
    "repeat_interleave": (lambda p, b: p["b"][None].repeat_interleave(len(b["y"]), 0) * b["y"], None),
    "expand_as": (lambda p, b: p["b"].expand_as(b["x"]) * b["x"], None),
    "meshgrid": (lambda p, b: torch.meshgrid(b["y"][:, 0], p["b"], indexing="ij")[1] * b["y"], "meshgrid"),
    "masked_fill": (lambda p, b: b["x"].masked_fill(b["x"] > 0, p["s"]), "masked_fill"),
    "masked_scatter": (lambda p, b: b["x"].masked_scatter(b["x"] > 9, p["v"].flatten().repeat(9)), "masked_scatter"),
    "clamp": (lambda p, b: b["x"].clamp(min=p["b"] - 1), "clamp"),
    "atan2": (lambda p, b: torch.atan2(b["x"], p["b"]), "atan2"),
    "xlogy": (lambda p, b: torch.xlogy(b["x"], p["b"].square() + 1), "xlogy"),
    "hypot": (lambda p, b: torch.hypot(b["x"], p["b"]), "hypot"),
    "logaddexp": (lambda p, b: torch.logaddexp(b["x"], p["b"]), "logaddexp"),
    "fmod": (lambda p, b: torch.remainder(b["x"], p["b"].square() + 1), "remainder"),
    "addcdiv": (lambda p, b: torch.addcdiv(b["x"], b["x"], p["b"].square() + 1), "addcdiv"),
    "x ** w": (lambda p, b: (b["x"].square() + 1) ** p["b"], "pow"),
    "w ** x": (lambda p, b: (p["b"].square() + 1) ** b["x"], "pow"),
    "where of two parameters": (lambda p, b: torch.where(b["x"] > 0, p["b"], p["b"] * 2) * b["x"], None),
    "prelu, several": (lambda p, b: F.prelu(b["x"].transpose(1, 2), p["b"]), None),
    "mse to a parameter": (lambda p, b: F.mse_loss(b["y"], p["b"].expand_as(b["y"]), reduction="none"), None),
    "smooth loss to a parameter": (
        lambda p, b: F.smooth_l1_loss(b["y"], p["b"][None].expand(len(b["y"]), -1), reduction="none"), None
    ),
    "targets from a parameter": (
        lambda p, b: F.cross_entropy(b["y"], p["b"].softmax(0).expand_as(b["y"]), reduction="none"), None
    ),
    "cosine distance to a class": (lambda p, b: F.normalize(b["y"], dim=1) @ F.normalize(p["v"], dim=1).T, None),
    "fft": (lambda p, b: torch.fft.irfft(torch.fft.rfft(b["x"]) * torch.fft.rfft(p["b"])), None),
    "cumsum": (lambda p, b: (b["x"] * p["b"]).cumsum(1), None),
    "cumprod of a parameter": (lambda p, b: b["x"] * p["b"].cumprod(0), None),
    "grid_sample": (
        lambda p, b: F.grid_sample(p["w"][None, None].expand(len(b["x"]), -1, -1, -1), b["x"][:, None, :, :2].tanh(),
                                   align_corners=True), None
    ),
    "grid from a parameter": (
        lambda p, b: F.grid_sample(b["x"][:, None], p["w"][None, None, :, :2].tanh().expand(len(b["x"]), -1, -1, -1),
                                   align_corners=True), None
    ),
    "affine_grid": (
        lambda p, b: F.grid_sample(
            b["x"][:, None],
            F.affine_grid(p["w"][None, :2, :3].expand(len(b["x"]), -1, -1), [len(b["x"]), 1, 3, 3], align_corners=True),
            align_corners=True,
        ), None,
    ),
    "conv, samples as channels": (
        lambda p, b: F.conv1d(b["y"][None], p["b"][None, None, :3].expand(len(b["y"]), -1, -1), groups=len(b["y"]))[0], None
    ),
    "conv without batch": (lambda p, b: torch.stack([F.conv1d(x, p["w"][None, :T, :2]) for x in b["x"]]), None),
    "group norm, samples as channels": (lambda p, b: F.layer_norm(b["x"].mT.mT, (D,), p["b"], p["b"]), None),
    "lstm cell": (
        lambda p, b: torch.lstm_cell(
            b["y"], (b["y"], b["y"]), p["w"].repeat(4, 1), p["w"].repeat(4, 1), p["b"].repeat(4), p["b"].repeat(4)
        )[0], None
    ),
    "gru cell": (lambda p, b: torch.gru_cell(b["y"], b["y"], p["w"].repeat(3, 1), p["w"].repeat(3, 1)), "gru_cell"),
    "in-place into a copy": (written, None),
    "added into zeros": (scattered, None),
    "assigned into a row": (received, None),
    "copied into zeros": (copied, None),
    "fill_": (lambda p, b: torch.zeros_like(b["x"]).fill_(p["s"]) * b["x"], None),
    "index_put": (
        lambda p, b: torch.zeros_like(b["x"]).index_put((torch.arange(len(b["x"])),), p["b"]) * b["x"], None
    ),
    "scatter": (lambda p, b: torch.zeros_like(b["y"]).scatter(1, b["ids"] % D, p["v"][: len(b["y"]), :T]), None),
    "unbound rows": (lambda p, b: sum(row * b["x"] for row in p["v"].unbind(0)), None),
    "new_tensor": (lambda p, b: b["x"] * p["b"].detach().clone().requires_grad_() + b["x"] * p["b"], None),
    ".data": (lambda p, b: b["x"] * p["b"].data + b["x"] @ p["w"], None),
    "view_as_complex": (
        lambda p, b: torch.view_as_real(
            torch.view_as_complex(b["x"].unflatten(2, (2, 2)).contiguous()) * torch.view_as_complex(p["b"].view(2, 2))
        ), None,
    ),
    "two flat orders": (two_flat_orders, None),
    "sample by sample": (by_sample, None),
    "sample by sample, scaled": (by_sample_scaled, None),
    "sample by sample, chunks": (by_sample_chunks, None),
    "checkpointed": (
        lambda p, b: checkpoint(lambda x: torch.tanh(x @ p["w"]) * p["b"], b["x"], use_reentrant=False), None
    ),
    "checkpointed with arguments": (
        lambda p, b: checkpoint(lambda x, w: torch.tanh(x @ w), b["x"], p["w"], use_reentrant=False), None
    ),
    "partly without gradient": (
        lambda p, b: b["x"] * p["b"] + b["x"] @ _without_gradient(lambda: p["w"] * p["b"]), None
    ),
    "use without gradient": (lambda p, b: b["x"] * p["b"] + _without_gradient(lambda: b["x"] @ p["w"]), None),
    "detached": (lambda p, b: b["x"] * p["b"] + (b["x"] @ p["w"]).detach(), None),
    "gradient of a gradient": (
        lambda p, b: torch.autograd.grad(
            squares(_leaf(b["x"]) @ p["w"]).sum(), p["w"], create_graph=True
        )[0].sum() * b["y"], None
    ),
    "gradient penalty": (lambda p, b: _input_gradient(p, b), None),
    "regularisation in each loss": (lambda p, b: b["y"] * p["b"] + p["w"].square().sum(), None),
    "regularisation alone": (lambda p, b: b["y"][:, :1] * 0 + p["w"].square().sum(), None),
    "hook on an output": (lambda p, b: _hooked(b["x"] @ p["w"]), None),
    "topk of a parameter": (lambda p, b: b["x"] * p["v"].topk(1, 0).values, None),
    "sorted rows": (lambda p, b: (b["x"] @ p["w"]).sort(1).values, None),
    "experts by mask": (
        lambda p, b: torch.where((b["ids"] % 2 == 0)[..., None], b["x"] @ p["w"], b["x"] @ p["w"].T), None
    ),
    "experts by index": (lambda p, b: _routed(p, b), None),
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
@fast
def test_a_use_is_exact_or_refused(engine, name):
    """The error is one of this library where torch can differentiate the loss."""
    function, _ = USES[name]
    loss_fn = lambda p, b: squares(function(p, b))
    case = Case(loss_fn, params(s=random(1)[0]), batch())
    try:
        truth = truth_of(Case(loss_fn, params(s=random(1)[0]), batch()))
    except RuntimeError:  # torch refuses the loss itself
        with pytest.raises((DPFuncError, RuntimeError)):
            run(engine, loss_fn, case.params)
        return
    try:
        found = differences(ENGINES[engine](), case, truth)
    except DPFuncError:
        return
    assert all(value < 1e-10 for value in found.values()), found


NAMED = {name: use for name, use in USES.items() if use[1] is not None}


@pytest.mark.parametrize("name", NAMED)
@fast
def test_a_refusal_says_what_to_do(engine, name):
    """The parameter, the operation, and another engine; shapes where the operation is known."""
    function, op = NAMED[name]
    parameters = params(s=random(1)[0])
    try:
        run(engine, lambda p, b: squares(function(p, b)), parameters)
    except UnsupportedModel as error:
        message = str(error)
        assert op in message
        assert 'engine="vmap"' in message
        used = [
            name for name in parameters if f"'{name}'" in message or f"[{name}" in message or f" {name} " in message
        ]
        assert used, message
        if "custom" not in op and "used 2 times" not in message:
            assert re.search(r"\(\d+,", message), message


# Samples that influence each other.


def batch_norm(p, b):
    return F.batch_norm(b["y"] @ p["w"], None, None, p["b"], None, training=True)


def over_the_batch(p, b):
    """Attention over axis 0, which is the batch."""
    x_BTd = b["x"] @ p["w"]
    return F.scaled_dot_product_attention(*(x_BTd.transpose(0, 1),) * 3).transpose(0, 1)


def attention_module(p, b):
    """nn.MultiheadAttention with batch_first left out, by mistake."""
    forward, _ = ATTENTION
    return forward({name: p[name] for name in ATTENTION[1]}, *(b["x"],) * 3)[0]


def in_batch_negatives(p, b):
    scores_BB = F.normalize(b["y"] @ p["w"], dim=1) @ F.normalize(b["y"], dim=1).T
    return F.cross_entropy(scores_BB, torch.arange(len(scores_BB)), reduction="none")


def topk_of_the_batch(p, b):
    scores_BT = b["x"] @ p["b"]
    return torch.where(scores_BT >= scores_BT.flatten().topk(2).values[-1], scores_BT, 0 * scores_BT)


def capacity(p, b):
    """An expert that takes half of the samples of a batch; the others go without."""
    scores_B = b["y"] @ p["b"]
    kept_B = torch.zeros(len(scores_B), dtype=torch.float64)
    kept_B[scores_B.topk((len(scores_B) + 1) // 2).indices] = 1.0
    return (b["y"] @ p["w"]) * kept_B[:, None] * scores_B[:, None]


def balance(p, b):
    """Load balancing as in mixtures of experts."""
    shares_BE = (b["y"] @ p["w"]).softmax(1)
    return shares_BE + shares_BE.mean(0).square()


def detached_mean(p, b):
    out = b["y"] @ p["w"]
    return out - out.mean(0).detach()


def per_token_of_the_batch(p, b):
    """A mean over the tokens of the whole batch: the divisor is a matter of the others."""
    return (b["x"] @ p["w"]) / (b["ids"] > 2).sum()


def by_size(p, b):
    return (b["x"] @ p["w"]) / len(b["x"])


def rank_in_batch(p, b):
    out = b["y"] @ p["w"]
    return out * out.detach().argsort(0).argsort(0)


def shuffled_batch(p, b):
    """MixUp: each row is mixed with the next one."""
    return (0.7 * b["y"] + 0.3 * b["y"].roll(1, 0)) @ p["w"]


def sorted_batch(p, b):
    """Rows in an order that depends on all of them, and losses in that order."""
    return (b["y"] @ p["w"])[b["y"][:, 0].argsort()]


MIXING = {
    "batch norm": batch_norm,
    "mean of the batch": lambda p, b: b["y"] @ p["w"] - (b["y"] @ p["w"]).mean(0),
    "mean of the inputs": lambda p, b: (b["y"] - b["y"].mean(0)) @ p["w"],
    "mean before a scale": lambda p, b: (b["y"] - b["y"].mean(0)) * p["b"],
    "mean after a scale": lambda p, b: b["y"] * p["b"] - (b["y"] * p["b"]).mean(0),
    "maximum of the batch": lambda p, b: b["y"] @ p["w"] - (b["y"] @ p["w"]).amax(),
    "softmax over the batch": lambda p, b: (b["y"] @ p["w"]).softmax(0),
    "attention over the batch": over_the_batch,
    "attention without batch_first": attention_module,
    "in-batch negatives": in_batch_negatives,
    "top-k of the batch": topk_of_the_batch,
    "capacity of an expert": capacity,
    "load balancing": balance,
    "cumsum over the batch": lambda p, b: (b["y"] @ p["w"]).cumsum(0),
    "cumsum over the batch, bias": lambda p, b: (b["y"] + p["b"]).cumsum(0),
    "convolution over the batch": lambda p, b: F.conv1d(b["y"].T[None], p["w"][:, :, None].repeat(1, 1, 3), padding=1)[0].T,
    "layer norm over the batch": lambda p, b: F.layer_norm(b["y"].T @ b["y"], (D,), p["b"])[:1].expand(len(b["y"]), -1),
    "detached mean": detached_mean,
    "tokens of the batch": per_token_of_the_batch,
    "rank in the batch": rank_in_batch,
    "mixed rows": shuffled_batch,
    "sorted rows": sorted_batch,
    "flipped rows": lambda p, b: (b["y"] @ p["w"]).flip(0),
    "one loss for all": lambda p, b: (b["y"] @ p["w"]).mean(0, keepdim=True).expand(len(b["y"]), -1),
    "shared down to the loss": lambda p, b: b["y"].mean(0, keepdim=True) @ p["w"] + 0 * b["y"],
}  # fmt: skip

with torch.random.fork_rng():
    torch.manual_seed(0)
    ATTENTION = functionalize(nn.MultiheadAttention(D, 2).double())


@pytest.mark.parametrize("name", MIXING)
@fast
def test_samples_that_influence_each_other_are_refused(engine, name):
    parameters = params(**ATTENTION[1]) if "batch_first" in name else params()
    with pytest.raises(UnsupportedModel):
        run(engine, lambda p, b: squares(MIXING[name](p, b)), parameters)


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
    with pytest.raises((DPFuncError, RuntimeError), match="reentrant"):
        run(engine, lambda p, b: squares(REENTRANT[name](p, b)))


@pytest.mark.parametrize("engine", ["vmap", "loop", *FAST])
def test_a_loss_does_not_overwrite_parameters(engine):
    """A loss that writes into its parameters is refused; by the fast engines before it happens."""
    parameters, before = params(), params()

    def loss_fn(p, b):
        with torch.no_grad():
            p["b"].mul_(0.5)
        return squares(b["x"] * p["b"])

    with pytest.raises((DPFuncError, RuntimeError)):
        (vmap() if engine == "vmap" else ENGINES[engine]())(loss_fn, parameters, batch())
    if engine in FAST:
        assert all(torch.equal(parameters[name], value) for name, value in before.items())


@every
def test_one_tensor_under_two_names(engine):
    """Each name has its own gradient, or it is an error: not one gradient under one of the names."""
    shared = random(D, OUT)
    parameters = params(w=shared, again=shared)
    loss_fn = lambda p, b: squares(torch.tanh(b["x"] @ p["w"]) @ p["again"])
    truth = truth_of(Case(loss_fn, parameters, batch()))
    try:
        found = differences(ENGINES[engine](), Case(loss_fn, parameters, batch()), truth)
    except DPFuncError:
        return
    assert all(value < 1e-10 for value in found.values()), found


@fast
def test_other_losses_after_a_refusal(engine):
    """An engine that has refused one loss still works for another, and refuses again."""
    fast_engine = ENGINES[engine]()
    mixing = lambda p, b: squares((b["y"] @ p["w"]).softmax(0))
    good = lambda p, b: squares(b["y"] @ p["w"])
    for _ in range(2):
        with pytest.raises(UnsupportedModel):
            fast_engine(mixing, params(), batch())
        case = Case(good, params(), batch())
        assert all(value < 1e-10 for value in differences(fast_engine, case, truth_of(case)).values())


@fast
def test_sums_of_a_ghost_are_taken_once(engine):
    result = ENGINES[engine]()(lambda p, b: squares(b["y"] @ p["w"]), params(), batch())
    factors = dict.fromkeys(params(), torch.ones(B, dtype=torch.float64))
    first = result.weighted_sum(factors)
    if engine == "ghost":
        with pytest.raises(InvalidArgument, match="once"):
            result.weighted_sum(factors)
    else:
        assert all(torch.equal(first[name], value) for name, value in result.weighted_sum(factors).items())


SIZED = {"size of the batch": lambda p, b: by_size(p, b), "another operation": lambda p, b: unless_large(p, b)}


@pytest.mark.parametrize("name", SIZED)
@fast
def test_what_depends_on_the_size_is_seen_by_the_audit(engine, name):
    """A Python number: no trace follows it. The first batch of each size is audited."""
    loss_fn = lambda p, b: squares(SIZED[name](p, b))
    prepared = make_clipped_grad(loss_fn, Flat(1.0), engine=ENGINES[engine]())
    with pytest.raises(UnsupportedModel, match="computed alone"):
        prepared(params(s=random(1)[0]), batch())


def test_a_sample_axis_gives_each_sample_its_rows():
    rows = torch.arange(12.0).reshape(6, 2)
    assert torch.equal(SampleAxis(0, 1, 2).split(rows, 3), rows.reshape(3, 2, 2))
    assert torch.equal(SampleAxis(0, 2, 1).split(rows, 3), rows.reshape(2, 3, 2).movedim(1, 0))
    assert torch.equal(SampleAxis(1).split(rows.T, 6)[:, :, 0], rows)
    packed = SampleAxis(0, ids=torch.tensor([2, 0, 1, 0, 2, 0])).split(rows, 3)
    assert packed.shape == (3, 3, 2)
    assert torch.equal(packed[0], rows[[1, 3, 5]])
    assert torch.equal(packed[1], torch.cat([rows[2:3], torch.zeros(2, 2)]))
    each = SampleAxis(0, 2, 2).expand_copies(torch.tensor([[1.0], [2.0]]), 2)
    assert each.flatten().tolist() == [1, 1, 2, 2, 1, 1, 2, 2]


def test_part_of_a_table_at_a_number_of_the_batch():
    """As loops over experts take it: a value of parameters, whose gradient is theirs; the number is a doubt."""

    def loss_fn(params, batch):
        x, chosen = batch
        total = 0.0
        for expert in (chosen.max(), chosen.min()):
            total = total + x @ params["w"].view(3, 2, 4)[expert].T
        return total.square().sum(1)

    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 0, 1])
    params = {"w": torch.randn(6, 4, generator=torch.Generator().manual_seed(1))}
    found = bookkeeping(unproven="audit")(loss_fn, params, batch)
    assert found.evidence.doubts
    leaves = {"w": params["w"].clone().requires_grad_()}
    losses_B = loss_fn(leaves, batch)
    for row in range(3):
        (grad,) = torch.autograd.grad(losses_B[row], leaves["w"], retain_graph=True)
        torch.testing.assert_close(found.sq_norms()["w"][row], grad.square().sum())
