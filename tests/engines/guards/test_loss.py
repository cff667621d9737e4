"""What is no loss is an error that says so, in every engine: never a number that is wrong."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from models import Case
from reference import loop_gradients
from rows_alone import W, X
from torch._higher_order_ops import scan, while_loop
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo.parity import ENGINES, differences, truth_of

from dpfunc.errors import DPFuncError, UnsupportedModel

every = pytest.mark.parametrize("engine", ENGINES)


def numbers(*shape):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


BATCH = {"x": numbers(5, 3, 4), "y": numbers(5, 4)}


def params(**changes):
    return {"w": numbers(4, 4), "b": numbers(4), **changes}


def run(engine, loss_fn, parameters):
    """Losses, norms and sums: all that an engine can be asked for."""
    result = ENGINES[engine]()(loss_fn, parameters, BATCH)
    ones = torch.ones(len(result.losses_B), dtype=torch.float64)
    return result.losses_B, result.sq_norms(), result.weighted_sum(dict.fromkeys(parameters, ones))


def squares(out):
    rows = out.reshape(len(out), -1)
    return (rows.square() + rows * torch.arange(1.0, rows.shape[1] + 1, dtype=rows.dtype).sin()).sum(1)


def loss(p, b):
    return squares(b["y"] @ p["w"])


WRONG = {
    "one number": lambda p, b: loss(p, b).mean(),
    "one for each token": lambda p, b: (b["x"] @ p["w"]).sum(2),
    "a column": lambda p, b: loss(p, b)[:, None],
    "too many": lambda p, b: torch.cat([loss(p, b)] * 2),
    "too few": lambda p, b: loss(p, b)[1:],
    "an integer": lambda p, b: loss(p, b).long(),
    "a tuple": lambda p, b: (loss(p, b),),
    "a number": lambda p, b: 1.0,
    "nothing": lambda p, b: None,
    "no gradient": lambda p, b: squares(b["y"]),
    "detached": lambda p, b: loss(p, b).detach(),
    "under no_grad": lambda p, b: torch.no_grad()(loss)(p, b),
    "parameters under no_grad": lambda p, b: squares(b["y"] * torch.no_grad()(lambda: p["b"] * 2)()),
    "under inference_mode": lambda p, b: torch.inference_mode()(loss)(p, b),
}


@pytest.mark.parametrize("name", WRONG)
@every
def test_losses_that_are_none_are_refused(engine, name):
    """And an engine that has refused a loss works for another."""
    again, good = ENGINES[engine](), Case(loss, params(), BATCH)
    with pytest.raises(DPFuncError, match="loss"):
        again(WRONG[name], params(), BATCH).weighted_sum(dict.fromkeys(params(), torch.ones(5, dtype=torch.float64)))
    assert all(value < 1e-10 for value in differences(again, good, truth_of(good)).values())


SKIPS = {
    "by a number of the row": lambda y: bool(y.sum() > 0),
    "by a random number": lambda y: bool(torch.rand(()) < 0.5),
    "always, after a look": lambda y: not y.isnan().any(),
    "always, where rows are computed alone": lambda y: not y.isnan().any() and y.data_ptr() != 0,
}


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", SKIPS)
@every
def test_rows_that_skip_each_trained_layer_have_a_gradient_of_zero(engine, name, rows):
    """As those of LayerDrop do; a batch in which all rows do is no error."""
    batch, skipped = {column: values[:rows] for column, values in BATCH.items()}, set()

    def loss_fn(p, b):
        return squares(b["y"] if SKIPS[name](b["y"]) else b["y"] @ p["w"])

    full = torch.stack([grads["w"] for _, grads in loop_gradients(loss, params(), batch)])
    for seed in range(4):
        torch.manual_seed(seed)
        result = ENGINES[engine]()(loss_fn, params(), batch)
        skips_B = ~result.losses_B.isclose(loss(params(), batch))
        skipped |= set(skips_B.tolist())
        truth = torch.where(skips_B[:, None, None], 0.0, full)
        torch.testing.assert_close(result.sq_norms()["w"], truth.square().sum((1, 2)))
        sums = result.weighted_sum(dict.fromkeys(params(), torch.arange(1.0, rows + 1)))
        torch.testing.assert_close(sums["w"], torch.tensordot(torch.arange(1.0, rows + 1).double(), truth, 1))
        if "random" not in name:
            assert skips_B.tolist() == [SKIPS[name](y[None]) for y in batch["y"]]
    assert "always" in name or rows == 1 or len(skipped) == 2


CONTROL_FLOW = {
    "cond": lambda out: torch.cond(out.sum() > 0, torch.neg, torch.square, (out,)),
    "while_loop": lambda out: while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y * 2), (torch.tensor(0), out))[1],
    "scan": lambda out: scan(lambda sum, y: (sum + y, y * 1), torch.zeros_like(out[0]), out)[1],
}


@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_control_flow_of_torch_is_refused_by_name(name):
    """By the name of the operation, which the code of the loss has, and by no number of a row."""
    with pytest.raises(UnsupportedModel, match=rf"control flow of torch \({name}\), whose operations.*Use torch.where"):
        run("auto", lambda p, b: squares(CONTROL_FLOW[name](b["y"] @ p["w"])), params())


def again(function, *args):
    return checkpoint(function, *args, use_reentrant=True)


REENTRANT = {
    "alone": lambda p, b: again(lambda x: torch.tanh(x @ p["w"]), (b["x"] * 1).requires_grad_()),
    "beside another use": lambda p, b: b["x"] * p["b"] + REENTRANT["alone"](p, b),
    "after a layer": lambda p, b: again(lambda x: torch.tanh(x @ p["w"]), b["x"] * p["b"]),
    "with arguments": lambda p, b: again(lambda x, w: torch.tanh(x @ w), b["x"], p["w"]),
}


@pytest.mark.parametrize("name", REENTRANT)
@every
def test_reentrant_checkpoints_are_refused(engine, name):
    """Only `backward()` reaches the parameters inside; everything else would leave them out."""
    with pytest.raises(DPFuncError, match="reentrant"):
        run(engine, lambda p, b: squares(REENTRANT[name](p, b)), params())


@every
def test_an_input_that_is_overwritten_before_its_use_in_the_backward_pass(engine):
    """An error, as torch's own: the product with the new numbers would be wrong."""

    def loss_fn(p, b):
        x = b["x"].clone()
        out = F.linear(x, p["w"])
        x.relu_()
        return squares(out.tanh())

    with pytest.raises((DPFuncError, RuntimeError), match="modified by an inplace operation"):
        run(engine, loss_fn, params())


@every
def test_one_tensor_under_two_names(engine):
    """Each name has its own gradient: not one gradient under one of the names."""
    shared = numbers(4, 4)
    loss_fn = lambda p, b: squares(torch.tanh(b["x"] @ p["w"]) @ p["again"])
    case = Case(loss_fn, params(w=shared, again=shared), BATCH)
    assert all(value < 1e-10 for value in differences(ENGINES[engine](), case, truth_of(case)).values())


WRITES = {
    "data": lambda w: w.data.mul_(2),
    "a list": lambda w: torch._foreach_mul_([w], 2.0),
    "out": lambda w: torch.mul(w, 2.0, out=w),
    "without gradients": lambda w: torch.no_grad()(w.mul_)(2.0),
    "a part": lambda w: torch.no_grad()(w[1:].mul_)(2.0),
}


@pytest.mark.parametrize("way", WRITES)
@every
def test_a_loss_does_not_overwrite_parameters(way, engine):
    """Refused, by name where it is seen; or each row has its own: the last of several has what it has alone."""

    def loss_fn(p, x):
        WRITES[way](p["w"])
        return (p["w"] * x).square().sum(1)

    def last(rows):
        given = {"w": W["w"].clone()}
        found, said = torch.zeros(()), ""
        try:
            found = ENGINES[engine]()(loss_fn, given, rows).sq_norms()["w"][-1]
        except (DPFuncError, RuntimeError) as error:
            said = str(error)
        assert "writes into" in said or way not in ("without gradients", "a part")
        assert torch.equal(given["w"], W["w"])
        return found

    torch.testing.assert_close(last(X), last(X[-1:]))


def _net(p):
    return lambda z: torch.tanh(z @ p["w"]) * p["b"]


def _jacobian(p, y):
    y = y.detach().clone().requires_grad_()
    each = torch.eye(4, dtype=y.dtype)[:, None].expand(4, *y.shape)
    return torch.autograd.grad(_net(p)(y), y, each, is_grads_batched=True, create_graph=True)[0].movedim(0, 1)


func = torch.func
TRANSFORMS = {
    "vjp": lambda p, y: func.vjp(_net(p), y)[1](y)[0],
    "vjp, twice": lambda p, y: (lambda out, back: back(out)[0] + back(y)[0])(*func.vjp(_net(p), y)),
    "jacrev": lambda p, y: func.jacrev(_net(p))(y),
    "jacfwd": lambda p, y: func.jacfwd(_net(p))(y),
    "jacrev of a parameter": lambda p, y: func.jacrev(lambda w: torch.tanh(y @ w).sum(0))(p["w"])[None],
    "hessian": lambda p, y: func.hessian(lambda z: _net(p)(z).sum())(y),
    "vmap of hessian": lambda p, y: func.vmap(func.hessian(lambda z: _net(p)(z).sum()))(y),
    "vmap of jacrev": lambda p, y: func.vmap(func.jacrev(_net(p)))(y),
    "grad of grad": lambda p, y: func.grad(lambda z: func.grad(lambda q: _net(p)(q).sum())(z).sum())(y),
    "jvp": lambda p, y: func.jvp(_net(p), (y,), (y.cos(),))[1],
    "linearize": lambda p, y: func.linearize(_net(p), y)[0] * p["b"],
    "batched gradients": _jacobian,
    "autograd.functional": lambda p, y: torch.autograd.functional.jacobian(
        lambda z: _net(p)(z).sum(0), y, create_graph=True, vectorize=True).movedim(1, 0),
}  # fmt: skip


@cache
def case_and_truth(name):
    case = Case(lambda p, b: squares(TRANSFORMS[name](p, b["y"])), params(), BATCH)
    return case, truth_of(case)


# torch says so of each tensor that a trace holds
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
@every
def test_transforms_inside_of_a_loss(engine, name):
    """A tensor of a level that has ended within the call is the row's own."""
    assert all(value < 1e-10 for value in differences(ENGINES[engine](), *case_and_truth(name)).values())


@pytest.mark.parametrize("transform", [func.grad, func.vmap])
@every
def test_a_row_kept_inside_of_a_transform_is_refused(engine, transform):
    kept = []

    def loss_fn(p, b):
        transform(lambda z: (kept.append(z * 1.0), (z @ p["w"]).sum())[1])(b["y"])
        return loss(p, b) + kept[0].sum()

    def twice():
        run_it = ENGINES[engine]()
        return [run_it(loss_fn, params(), BATCH) for _ in range(2)]

    with pytest.raises((DPFuncError, RuntimeError), match="kept|escaped"):
        twice()


INITIALIZED = {
    "uniform_": lambda y: torch.nn.init.uniform_(torch.empty_like(y)),
    "normal_": lambda y: torch.nn.init.normal_(torch.empty_like(y)),
    "xavier_uniform_": lambda y: torch.nn.init.xavier_uniform_(y.new_empty(4, 4))[:1],
    "constant_": lambda y: torch.nn.init.constant_(torch.empty_like(y), 0.5),
    "a layer": lambda y: torch.nn.Linear(4, 4).double()(y),
}


@pytest.mark.parametrize("name", INITIALIZED)
@every
def test_tensors_are_initialized_inside_of_a_loss(engine, name):
    loss_fn = lambda p, b: squares(b["y"] * p["b"] + INITIALIZED[name](b["y"]).detach())
    losses, norms, _ = run(engine, loss_fn, params())
    assert losses.isfinite().all()
    assert (norms["b"] > 0).all()
