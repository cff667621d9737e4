"""Native kernels below both levels: rows beside others have what each row alone has, whatever axes the loss gives them."""

from __future__ import annotations

import pytest
import torch
from models import Case
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from zoo.parity import differences, truth_of

from dpfunc.engines import _native as native_operations
from dpfunc.engines import auto, loop

B, T, D = 3, 3, 4  # as many positions as rows: an axis that is taken for the other one shows
attention, gelu, silu, norm, pool = F.scaled_dot_product_attention, F.gelu, F.silu, F.rms_norm, F.max_pool2d

# Of x (1, T, D), a row times a parameter, and the row itself.
CASES = {
    "attention": lambda x, b: attention(x, b, b),
    "attention of a position": lambda x, b: attention(x[:, 0], x[:, 1], x[:, 2]),
    "attention without batch": lambda x, b: attention(x[0], b[0], x[0]),
    "attention of one head": lambda x, b: attention(x[:, None], x[:, None], x[:, None], is_causal=True),
    "attention, own mask": lambda x, b: attention(x, b, b, attn_mask=b @ b.mT),
    "attention, own mask of the last axis": lambda x, b: attention(x, b, b, attn_mask=b[:, :, 0]),
    "attention, own mask that is turned": lambda x, b: attention(x, b, b, attn_mask=b[0, :, :1].T),
    "attention, one query": lambda x, b: attention(x[:, :1], b, x),
    "gelu": lambda x, b: gelu(x),
    "gelu of a position": lambda x, b: gelu(x[:, 0], approximate="tanh"),
    "gelu without batch": lambda x, b: gelu(x[0]),
    "silu": lambda x, b: silu(x),
    "silu in place": lambda x, b: silu(x * 1, inplace=True),
    "rms_norm": lambda x, b: norm(x, (D,)),
    "rms_norm of all": lambda x, b: norm(x, (1, T, D)),
    "rms_norm of a position": lambda x, b: norm(x[:, 0], (1, D)),
    "rms_norm, own weight": lambda x, b: norm(x, (D,), b[0, 0]),
    "max_pool2d": lambda x, b: pool(x[:, None], 2, 1),
    "max_pool2d without batch": lambda x, b: pool(x, 2, 1),
    "max_pool2d, positions": lambda x, b: pool(x, 2, 1, return_indices=True)[1] * x.sum(),
    "checkpointed": lambda x, b: checkpoint(lambda h: attention(gelu(h), h, h), x, use_reentrant=False),
}


@pytest.mark.parametrize("name", CASES)
def test_native_kernels_keep_rows_apart(name, monkeypatch):
    monkeypatch.setattr(native_operations, "_LARGE", 0)
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(D, generator=generator, dtype=torch.float64) + 2}
    loss_fn = lambda p, b: CASES[name](b * p["w"], b).sin().flatten(1).sum() + (b * p["w"]).sum((1, 2))
    case = Case(loss_fn, params, torch.randn(B, T, D, generator=generator, dtype=torch.float64))
    assert all(value < 1e-10 for value in differences(auto(), case, truth_of(case)).values())


HEADS, QUERIES, KEYS, WIDTH = 2, 3, 4, 8
EVERY = torch.tensor(
    [[True, False, True, True], [False] * 4, [True] * 4]
)  # of queries and keys: the second sees no key


def images(*values):
    """Two images of one row, the second without the parameter."""
    return [torch.cat([value, value.detach() + 1]) for value in values]


# Of queries, keys and values of a row (1, heads, positions, features) times a parameter, its mask, and the parameters.
ATTENTION = {
    "plain": lambda q, k, v, m, p: attention(q, k, v),
    "causal": lambda q, k, v, m, p: attention(q, k, v, is_causal=True),
    "scaled": lambda q, k, v, m, p: attention(q, k, v, scale=0.7),
    "by name": lambda q, k, v, m, p: attention(value=v, key=k, query=q),
    "own mask": lambda q, k, v, m, p: attention(q, k, v, m),
    "own mask in numbers": lambda q, k, v, m, p: attention(q, k, v, torch.where(m, 0.5, -torch.inf).to(q.dtype)),
    "own mask, with a gradient": lambda q, k, v, m, p: attention(q, k, v, m * q[..., :1]),
    "own mask of a row without batch": lambda q, k, v, m, p: attention(q, k, v, m[0]),
    "own mask without heads": lambda q, k, v, m, p: attention(q, k, v, m[0, 0]),
    "mask of all rows": lambda q, k, v, m, p: attention(q, k, v, EVERY),
    "mask of all rows with axes": lambda q, k, v, m, p: attention(q, k, v, EVERY[None, None]),
    "mask of a parameter": lambda q, k, v, m, p: attention(q, k, v, p["bias"]),
    "keys of no row": lambda q, k, v, m, p: attention(q, p["keys"], v),
    "keys and values of no row": lambda q, k, v, m, p: attention(q, p["keys"], p["keys"].sin()),
    "queries of no row": lambda q, k, v, m, p: attention(p["keys"], k, v),
    "without heads": lambda q, k, v, m, p: attention(q[0, 0], k[0, 0], v[0, 0]),
    "without batch": lambda q, k, v, m, p: attention(q[0], k[0], v[0], m[0]),
    "queries without heads": lambda q, k, v, m, p: attention(q[0, 0], k[0], v[0]),
    "one more axis": lambda q, k, v, m, p: attention(q[None], k[None], v[None], m[None]),
    "keys of one head": lambda q, k, v, m, p: attention(q, k[:, :1], v[:, :1]),
    "two images": lambda q, k, v, m, p: attention(*images(q, k, v)),
    "two images, one mask": lambda q, k, v, m, p: attention(*images(q, k, v), m),
    "two images, masks of all rows": lambda q, k, v, m, p: attention(*images(q, k, v), torch.stack([EVERY, ~EVERY])[:, None]),
    "two images, keys of one": lambda q, k, v, m, p: attention(*images(q), k, v),
    "images on two axes": lambda q, k, v, m, p: attention(*(torch.stack(images(x, x)) for x in (q, k, v))),
    "grouped queries": lambda q, k, v, m, p: attention(torch.cat([q, -q], 1), k, v, enable_gqa=True),
    "grouped queries, own mask": lambda q, k, v, m, p: attention(torch.cat([q, -q], 1), k, v, m, enable_gqa=True),
    "wider values": lambda q, k, v, m, p: attention(q, k, torch.cat([v, v.sin()], -1)),
    "no keys": lambda q, k, v, m, p: attention(q, k[:, :, :0], v[:, :, :0]) + q,
    "positions before heads": lambda q, k, v, m, p: attention(*(x.transpose(1, 2).contiguous().mT.mT.transpose(1, 2) for x in (q, k, v))),
    "without a gradient": lambda q, k, v, m, p: attention(q.detach(), k.detach(), v.detach()) * q,
    "without gradients": lambda q, k, v, m, p: torch.no_grad()(attention)(q, k, v) * q,
    "checkpointed": lambda q, k, v, m, p: checkpoint(attention, q, k, v, m, use_reentrant=False),
}  # fmt: skip


def of_attention(name, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)
    q, k, v = (draw(B, HEADS, count, WIDTH) for count in (QUERIES, KEYS, KEYS))
    mask = torch.rand(B, 1, QUERIES, KEYS, generator=generator) > 0.4
    mask[1] = False  # a row whose queries see nothing
    params = {"w": draw(WIDTH) + 2, "bias": draw(HEADS, QUERIES, KEYS), "keys": draw(1, HEADS, KEYS, WIDTH)}

    def loss_fn(p, b):
        q, k, v, m = b
        return ATTENTION[name](q * p["w"], k * p["w"].cos(), v * p["w"], m, p).sin().sum().reshape(1)

    return Case(loss_fn, params, (q, k, v, mask))


@pytest.fixture
def called(monkeypatch):
    """Shapes of the queries of each call of attention below the levels."""
    shapes, as_one_node = [], native_operations.as_one_node

    def noted(owner, call, inputs, wanted):
        return as_one_node(owner, lambda *given: shapes.append(given[0].shape) or call(*given), inputs, wanted)

    monkeypatch.setattr(native_operations, "as_one_node", noted)
    return shapes


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_runs_once_for_all_rows(name, called):
    case, engine = of_attention(name), auto()
    found = differences(engine, case, truth_of(case))
    assert all(value < 1e-10 for value in found.values())
    assert engine.decision(case.loss_fn).reason == "all rows together"
    assert {shape[0] for shape in called} - {1} == {B}  # a made-up row is looked at before


@pytest.mark.parametrize(
    "name", ["plain", "causal", "own mask", "own mask in numbers", "mask of all rows", "grouped queries"]
)
def test_attention_of_a_row_has_the_bits_that_it_has_alone(name):
    """Also where another row is not finite. Torch's kernels for a CPU take one image after the other."""
    case = of_attention(name, torch.float32)
    alone = loop()(case.loss_fn, case.params, case.batch)
    case.batch[0][2, 0, 1], case.batch[2][2] = torch.nan, torch.inf
    found = auto()(case.loss_fn, case.params, case.batch)
    assert not torch.isfinite(found.losses_B[2])
    assert torch.equal(found.losses_B[:2], alone.losses_B[:2])
    assert all(torch.equal(grad.dense()[:2], alone.grads[name].dense()[:2]) for name, grad in found.grads.items())


def test_attention_has_the_second_derivatives_of_rows_alone():
    """A loss with a gradient of its own runs without rules; torch's fused kernels have no second derivative."""
    q, k, v, _ = of_attention("plain").batch

    def loss_fn(p, b):
        with sdpa_kernel(SDPBackend.MATH):
            scores = attention(b[0] * p["w"], b[1], b[2]).sin().sum()
        (grad,) = torch.autograd.grad(scores, p["w"], create_graph=True)
        return grad.square().sum().reshape(1)

    case = Case(loss_fn, {"w": torch.linspace(1, 2, WIDTH, dtype=torch.float64)}, (q, k, v))
    assert all(value < 1e-10 for value in differences(auto(), case, truth_of(case)).values())


CLASSES = {
    "of a row": lambda x, classes, **how: F.cross_entropy(x[:, 0], classes[:, 0], **how),
    "of positions": lambda x, classes, **how: F.cross_entropy(x[0], classes[0], **how),
    "of positions last": lambda x, classes, **how: F.cross_entropy(x.mT, classes, **how),
    "of images": lambda x, classes, **how: F.cross_entropy(x.mT[..., None], classes[..., None], **how),
    "of one vector": lambda x, classes, **how: F.cross_entropy(x[0, 0], classes[0, 0], **how),
    "own weight of classes": lambda x, classes, **how: F.cross_entropy(x[0], classes[0], x[0, 0].detach().exp(), **how),
    "smoothed": lambda x, classes, **how: F.cross_entropy(x[0], classes[0], label_smoothing=0.1, **how),
}


@pytest.mark.parametrize(
    "how", [{}, {"reduction": "sum"}, {"reduction": "none", "ignore_index": 1}, {"ignore_index": 0}]
)
@pytest.mark.parametrize("name", CLASSES)
def test_cross_entropy_keeps_rows_apart(name, how):
    """Row 1 has no class that counts: its mean is NaN, as alone."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.tensor([[0, 1, 3], [0, 0, 0], [2, 1, 2]])
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    loss_fn = lambda p, b: CLASSES[name](b[0] * p["w"], b[1], **how).reshape(-1).sum(0, keepdim=True)
    params = {"w": torch.randn(D, generator=generator, dtype=torch.float64)}
    engine, batch = auto(), (x, classes)
    found, alone = engine(loss_fn, params, batch), loop()(loss_fn, params, batch)
    torch.testing.assert_close(found.losses_B, alone.losses_B, equal_nan=True)
    torch.testing.assert_close(found.grads["w"].dense(), alone.grads["w"].dense(), equal_nan=True)
    assert engine.decision(loss_fn).reason == "all rows together"


def test_cross_entropy_is_used_and_has_its_rounding():
    """One node, whose numbers are those of torch's kernels to the last bit."""
    x, classes = torch.randn(B, D, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2])
    logits = x.clone().requires_grad_()
    expected = F.cross_entropy(logits, classes, reduction="none")
    (grad,) = torch.autograd.grad(expected.sum(), logits)
    found = auto()(
        lambda p, b: F.cross_entropy(b[0] + p["w"], b[1], reduction="none"), {"w": torch.zeros(D)}, (x, classes)
    )
    assert torch.equal(found.losses_B, expected)
    assert torch.equal(found.grads["w"].dense(), grad)


def test_native_kernels_are_used(monkeypatch):
    """Otherwise the comparisons say nothing."""
    used = []
    build = native_operations.Kernel.build
    monkeypatch.setattr(native_operations, "_LARGE", 0)
    monkeypatch.setattr(native_operations.Kernel, "build", lambda self, *given: used.append(1) or build(self, *given))
    for name in ("attention", "rms_norm"):
        used.clear()
        loss_fn = lambda p, b, name=name: CASES[name](b * p["w"], b).flatten(1).sum(1)
        auto()(loss_fn, {"w": torch.ones(D)}, torch.randn(B, T, D))
        assert used, name
