"""Random numbers of a row: a function of the seed and of its position, in every engine and for every microbatch size."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dpfunc
from dpfunc import clipping, engines
from dpfunc.clipped import clipped_grad
from dpfunc.rng import insecure_key, torch_seed

D, ROWS = 4, 7
KEY = insecure_key(3)


def batch(rows=ROWS):
    return torch.randn(rows, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def weights():
    return {"w": torch.linspace(-1, 1, D, dtype=torch.float64)}


def of(draw):
    """A loss that adds what is drawn to its row."""
    return lambda p, x: (p["w"] * (x + draw(x))).square().sum(1)


def in_groups(x):
    first = torch.randn(D, dtype=x.dtype)
    return first + (torch.randn(D, dtype=x.dtype) if x[0, 0] > 0 else F.dropout(x, 0.5))


def kept_in_part(p, x):
    """Dropout inside of a part that is computed again in the backward pass."""
    return checkpoint(lambda v: F.dropout(v * p["w"], 0.5).tanh(), x, use_reentrant=False).square().sum(1)


LOSSES = {
    "dropout": of(lambda x: F.dropout(x, 0.5)),
    "dropout in place": of(lambda x: F.dropout(x.clone(), 0.5, inplace=True)),
    "dropout of channels": of(lambda x: F.dropout1d(x[:, None, :].expand(1, 3, D), 0.5).sum(1)),
    "alpha dropout": of(lambda x: F.alpha_dropout(x, 0.5, training=True)),
    "randn": of(lambda x: torch.randn(D, dtype=x.dtype)),
    "randn_like": of(torch.randn_like),
    "bernoulli": of(lambda x: torch.bernoulli(torch.sigmoid(x))),
    "bernoulli_": of(lambda x: torch.empty_like(x).bernoulli_(0.3)),
    "multinomial": of(lambda x: torch.multinomial(x.exp(), 2)[:, :1].to(x.dtype)),
    "gumbel": of(lambda x: F.gumbel_softmax(x, hard=True)),
    "slopes": of(lambda x: F.rrelu(x, training=True)),
    "attention": of(lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[:, 0]),
    "groups": of(in_groups),
    "a branch": lambda p, x: (p["w"] * x).sum(1) * (1.0 if torch.rand([]) < 0.3 else 2.0),
    "a part that is computed again": kept_in_part,
    "a seed of its own": lambda p, x: (torch.manual_seed(0), of(torch.randn_like)(p, x))[1],
}


def without_keys(p, x):
    """Attention whose first query has no key: zero, as torch has it, no NaN."""
    mask = torch.ones(2, 2, dtype=torch.bool).tril(-1)
    heads = (x * p["w"]).reshape(1, 1, 2, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask, dropout_p=0.5).square().sum((1, 2, 3))


LOSSES["a query without keys"] = lambda p, x: without_keys(p, x) + (p["w"] * x).sum(1)
POSITIVE = {
    "Gamma": lambda a: torch.distributions.Gamma(a, torch.ones_like(a)),
    "Chi2": torch.distributions.Chi2,
    "Beta": lambda a: torch.distributions.Beta(a, a + 1),
    "FisherSnedecor": lambda a: torch.distributions.FisherSnedecor(a, 2 * a),
    "Dirichlet": lambda a: torch.distributions.Dirichlet(a.expand(*a.shape[:-1], D)),
    "Normal": lambda a: torch.distributions.Normal(a, a),
}


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("name", POSITIVE)
def test_draws_have_the_gradient_of_their_parameters(name, engine):
    """Of the law that torch's own have: the mean over many draws."""
    x, params = batch(1).abs() + 0.5, {"w": torch.full((D,), 1.5, dtype=torch.float64)}
    direction = torch.linspace(1.0, 2.0, D, dtype=torch.float64)

    def loss_fn(params, x):
        return (POSITIVE[name](params["w"] * x).rsample() * direction).sum(1)

    leaf = params["w"].clone().requires_grad_()
    moved = []
    for seed in range(100):
        torch.manual_seed(seed)
        moved.append(torch.autograd.grad(loss_fn({"w": leaf}, x)[0], leaf)[0])
    truth = torch.stack(moved)
    run = getattr(engines, engine)()
    found = run(loss_fn, params, x.expand(100 if engine != "loop" else 40, D)).grads["w"].dense()
    spread = truth.std(0) * (1 / len(truth) + 1 / len(found)) ** 0.5
    assert ((truth.mean(0) - found.mean(0)).abs() < 5 * spread + 1e-9).all()


def test_slopes_at_zero():
    x = torch.zeros(3, D, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.rrelu(leaf, 0.25, 0.25, training=True).sum(), leaf)
    by_bias = lambda p, x: F.rrelu(x + p["w"] - p["w"].detach(), 0.25, 0.25, training=True).sum(1)
    assert (slope == 0.25).all()
    assert (engines.auto()(by_bias, weights(), x).grads["w"].dense() == 0.25).all()


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, dropout=0.5, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.3, batch_first=True)
        self.recurrent = nn.LSTM(1, 3, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x):
        h = x[:, None] * torch.arange(1.0, 4.0, dtype=x.dtype)[:, None]
        h, _ = self.attention(h, h, h)
        return self.encoder(h).square().sum((1, 2)) + self.recurrent(x[..., None])[0].sum((1, 2))


def case(name):
    """A loss and its parameters."""
    if name != "a module":
        return LOSSES[name], weights()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        forward, params = dpfunc.functionalize(Attending().double().train())
    return (lambda p, x: forward(p, x)), params


cases = pytest.mark.parametrize("name", [*LOSSES, "a module"])


@cases
@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_a_row_draws_alone_what_it_draws_beside_others(name, engine):
    """Other draws would differ by far more than rounding."""
    loss_fn, params = case(name)
    found = []
    for each in (getattr(engines, engine)(), engines.loop()):
        with torch_seed(KEY):
            result = each.rows(loss_fn, params, batch(), range(5, 5 + ROWS))
        found.append((result.losses_B, result.sq_norms()))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def clipped(loss_fn, params, rows, engine, size, key=KEY):
    made = getattr(engines, engine)()
    return clipped_grad(loss_fn, params, rows, clipping.Flat(0.5), engine=made, microbatch_size=size, key=key)


@cases
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_draws_do_not_depend_on_microbatches(name, engine):
    whole, *parts = (clipped(*case(name), batch(), engine, size) for size in (None, 1, 3))
    for part in parts:
        torch.testing.assert_close(part[0].sums, whole[0].sums, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(part[1], whole[1], rtol=1e-10, atol=1e-12)


ATEN = torch.ops.aten
INT = torch.int64
WITHOUT_FORM = {
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "aten.native_dropout": lambda x: ATEN.native_dropout.default(x, 0.5, True)[0],
    "dropout after native_dropout": lambda x: (torch.native_dropout(x, 0.5, True), F.dropout(x, 0.5))[1],
    "native_dropout after randn": lambda x: (torch.randn(D), torch.native_dropout(x, 0.5, True)[0])[1],
    "aten.rand": lambda x: ATEN.rand([D], dtype=x.dtype),
    "aten.randn": lambda x: ATEN.randn.default([D], dtype=x.dtype),
    "aten.rand_like": lambda x: ATEN.rand_like(x),
    "aten.randperm": lambda x: ATEN.randperm(D).to(x.dtype),
    "aten.bernoulli": lambda x: ATEN.bernoulli.p(x.expand(8, D), 0.5).mean(0),
    "aten.bernoulli_": lambda x: ATEN.bernoulli_.float(torch.empty(8, D), 0.5).mean(0),
    "aten.uniform": lambda x: ATEN.uniform(x),
    "aten.uniform_": lambda x: ATEN.uniform_(torch.empty_like(x)),
    "aten.normal_functional": lambda x: ATEN.normal_functional(x),
    "aten.cauchy": lambda x: ATEN.cauchy(x),
    "aten.exponential": lambda x: ATEN.exponential.default(x),
    "rrelu_with_noise": lambda x: ATEN.rrelu_with_noise(x, torch.empty_like(x), 0.1, 0.9, True),
    "rand(out=)": lambda x: torch.rand(D, out=torch.empty(D)),
    "randperm(out=)": lambda x: torch.randperm(D, out=torch.empty(D, dtype=INT)).to(x.dtype),
    "multinomial(out=)": lambda x: torch.multinomial(x.exp(), 2, out=torch.empty(1, 2, dtype=INT))[:, :1].to(x.dtype),
    "normal(out=)": lambda x: torch.normal(x, 1.0, out=torch.empty_like(x)),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(torch.arange(81.0).reshape(1, 9, 9), 2, 4)[0, 1],
    "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(torch.arange(729.0).reshape(1, 9, 9, 9), 2, 4)[0, 1, 1],
    "random_split": lambda x: torch.tensor(torch.utils.data.random_split(range(50), [49, 1])[0].indices[:D]),
    "torch's generator": lambda x: torch.rand(D, generator=torch.default_generator),
    "inside of grad": torch.func.grad(lambda v: (F.dropout(v, 0.5) * v).sum()),
    "inside of vmap": torch.func.vmap(torch.rand_like, in_dims=1, out_dims=1, randomness="different"),
    "the same inside of vmap": torch.func.vmap(torch.rand_like, in_dims=1, out_dims=1, randomness="same"),
    "a part that is computed again": lambda x: checkpoint(
        lambda v: torch.native_dropout(v, 0.5, True)[0], x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("name", WITHOUT_FORM)
def test_each_row_has_a_draw_of_its_own(name):
    """Also of operations that draw inside of a kernel: rows with the same numbers draw what they draw alone."""
    loss_fn, rows = of(WITHOUT_FORM[name]), batch(1).expand(ROWS, D).clone()
    sums = []
    for engine in ("auto", "loop"):
        whole, *parts = (clipped(loss_fn, weights(), rows, engine, size) for size in (None, 1, 3))
        for part in parts:
            torch.testing.assert_close(part[0].sums, whole[0].sums, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(part[1].losses_B, whole[1].losses_B, rtol=1e-10, atol=1e-12)
        assert len(set(whole[1].losses_B.tolist())) > 2, engine
        sums.append(whole[0].sums)
    torch.testing.assert_close(*sums, rtol=1e-10, atol=1e-12)


def test_tokens_of_a_vmap_draw_as_the_loss_says():
    drawn = []
    for randomness in ("different", "same"):
        draw = torch.func.vmap(lambda v: F.dropout(v, 0.5), in_dims=1, out_dims=1, randomness=randomness)
        loss_fn = lambda p, x, draw=draw: (p["w"] * x).sum(1) * 0 + draw(torch.ones_like(x).repeat(1, 16)).std(1)
        drawn.append(engines.auto()(loss_fn, weights(), batch()).losses_B)
    assert (drawn[0] > 0).all()
    assert (drawn[1] == 0).all()


@pytest.mark.parametrize("engine", ["auto", "ghost", "vmap"])
def test_a_draw_that_nobody_sees_ends_the_pass(engine):
    """A draw below the levels that no torch function shows, whether or not another one is seen after it."""
    for others in (lambda x: x, lambda x: F.dropout(x, 0.5)):

        def loss_fn(p, x, others=others):
            with torch._C._DisableFuncTorch(), torch._C.DisableTorchFunction():
                noise = torch.rand(D, dtype=x.dtype)
            return (p["w"] * (others(x) + noise)).square().sum(1)

        found = getattr(engines, engine)()(loss_fn, weights(), batch(1).expand(3, D))
        assert len(set(found.losses_B.tolist())) == 3


def forked(*contexts):
    """A draw inside of contexts that hide it, and of one that puts the generator's state back after it."""

    def loss_fn(p, x):
        with torch.random.fork_rng(devices=[]), ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            noise = torch.rand(D, dtype=x.dtype)
        return (p["w"] * (x + noise)).square().sum(1)

    return loss_fn


HIDDEN = {
    "by nothing": (),
    "from levels": (torch._C._DisableFuncTorch,),
    "from modes": (torch._C.DisableTorchFunction,),
}


@pytest.mark.parametrize("hidden", HIDDEN)
def test_each_row_has_a_draw_of_its_own_where_the_state_is_put_back(hidden):
    sums = []
    for engine in ("auto", "ghost", "vmap", "loop"):
        found, unreleased = clipped(forked(*HIDDEN[hidden]), weights(), batch(1).expand(ROWS, D), engine, None)
        assert len(set(unreleased.losses_B.tolist())) == ROWS, engine
        sums.append(found.sums)
    for each in sums:
        torch.testing.assert_close(each, sums[-1], rtol=1e-10, atol=1e-12)


def test_the_seed_that_torch_tells_is_that_of_the_step():
    torch.manual_seed(5)
    found = engines.loop()(lambda p, x: (p["w"] * x).sum(1) * 0 + torch.initial_seed(), weights(), batch())
    assert (found.losses_B == 5).all()


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_rows_draw_different_numbers(engine):
    """Also rows of different microbatches."""
    _, unreleased = clipped(LOSSES["randn"], weights(), batch(1).expand(ROWS, D), engine, 2)
    assert len(set(unreleased.losses_B.tolist())) == ROWS
