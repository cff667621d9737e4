"""Uses that occur again run as a whole: with the results of the first time, and never where somebody else takes part."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from layers import LAYERS, build
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpfunc import engines
from dpfunc.engines.uses import repeated_uses, tracker
from dpfunc.errors import UnsupportedModel

# torch says once that "same" padding of even kernels copies the input
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

B, D = 4, 3


@pytest.fixture
def repeated(monkeypatch):
    """Count of uses that were repeated as a whole."""
    results = []

    def repeat(*args):
        result = repeated_uses.repeat(*args)
        results.extend([result] * (result is not None))
        return result

    monkeypatch.setattr(tracker, "repeat", repeat)
    repeated_uses._known.clear()
    return results


def drawn():
    return {"w": torch.randn(D, D), "v": torch.randn(D, D)}, torch.randn(B, D)


def losses(params, batch):
    return F.linear(F.linear(batch, params["w"]).tanh(), params["v"]).square().sum(1)


def gradients(engine, loss_fn, params, batch):
    found = engine(loss_fn, params, batch)
    factors_B = torch.linspace(0.5, 1.5, len(found.losses_B), dtype=next(iter(params.values())).dtype)
    return {
        **found.sq_norms(),
        **{f"sum {n}": v for n, v in found.weighted_sum(dict.fromkeys(params, factors_B)).items()},
    }


@pytest.mark.parametrize("hooked", [False, True], ids=["settled", "followed"])
@pytest.mark.parametrize("name", LAYERS)
def test_steps_are_equal(repeated, hooked, name):
    """Also where a hook makes the trace follow the backward pass: it knows all that derivatives need."""
    made = build(name, torch.float64, 0)
    case, engine = made.case(3, 3), engines.bookkeeping()

    def loss_fn(params, batch):
        losses_B = case.loss_fn(params, batch)
        if hooked:
            losses_B.register_hook(lambda grad: grad * 1.0)
        return losses_B

    try:
        first = gradients(engine, loss_fn, case.params, case.batch)
    except UnsupportedModel:  # what is refused at first is not remembered
        with pytest.raises(UnsupportedModel):
            engine(loss_fn, case.params, case.batch)
        return
    again = gradients(engine, loss_fn, case.params, case.batch)
    assert all(torch.allclose(again[key], value, rtol=1e-12, atol=1e-14) for key, value in first.items())


def test_uses_are_repeated(repeated):
    params, batch = drawn()
    for steps in (0, 1, 2):
        engines.bookkeeping()(losses, params, batch)
        assert len(repeated) == 5 * steps


def normalised(params, batch):
    return F.linear(F.rms_norm(batch, (D,)), params["w"]).square().sum(1)


def test_functions_of_several_operations_run_as_a_whole(repeated):
    """Their rows are those of the first time; a hook on the graph, of which they hide a part, makes the step new."""
    params, batch = drawn()
    del params["v"]
    engine, calls, hooked = engines.bookkeeping(), [], []

    def loss_fn(params, batch):
        calls.append(1)
        losses_B = normalised(params, batch)
        if hooked:
            losses_B.register_hook(lambda grad: grad * 1.0)
        return losses_B

    expected = gradients(engines.loop(), normalised, params, batch)
    for step in (0, 1, 2):
        found = gradients(engine, loss_fn, params, batch)
        assert len(repeated) == 4 * step
        assert len(calls) == step + 1
        assert all(torch.allclose(found[key], value, rtol=1e-5) for key, value in expected.items())
    hooked.append(True)
    for tries in (2, 3):
        found = gradients(engine, loss_fn, params, batch)
        assert len(calls) == 3 + tries
        assert all(torch.allclose(found[key], value, rtol=1e-5) for key, value in expected.items())


def test_a_hook_that_mixes_rows_of_functions_that_ran_as_a_whole_is_seen(repeated):
    params, batch = {"w": torch.randn(D, D)}, torch.randn(B, D)
    engine, hooked = engines.bookkeeping(), []

    def loss_fn(params, batch):
        y = F.rms_norm(F.linear(batch, params["w"]), (D,))
        if hooked:
            y.register_hook(lambda grad: grad + grad.sum())
        return y.pow(3).sum(1)

    for _ in range(3):
        engine(loss_fn, params, batch)
    hooked.append(True)
    with pytest.raises(UnsupportedModel):
        engine(loss_fn, params, batch)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: F.relu(x, inplace=True),
        lambda x: torch.add(x, 1.0, out=x),
        lambda x: F.batch_norm(x.new_ones(2, D), x[0], x[1].square(), training=True) + x[:1],
    ],
    ids=["in place", "out", "statistics"],
)
def test_functions_that_write_into_arguments_are_followed(repeated, write):
    """Also those whose result has memory of its own."""

    def loss_fn(params, batch):
        with torch.no_grad():
            constants = torch.ones(3, D)
        write(constants)
        return F.linear(batch, params["w"]).square().sum(1) * constants.sum()

    params, batch = {"w": torch.randn(D, D)}, torch.randn(B, D)
    engine = engines.bookkeeping()
    for _ in range(3):
        engine(loss_fn, params, batch)
    assert not [key for key in repeated_uses._known if key[0] in (F.relu, torch.add, F.batch_norm)]


def test_values_of_parameters_are_no_constants(repeated):
    """A value that a custom function made of a parameter is found, whatever ran before with the same shapes."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    params, batch, own = {"w": torch.randn(D)}, torch.randn(B, D), []

    def loss_fn(params, batch):
        made = Own.apply(params["w"]) if own else torch.ones(D)
        return (batch * made).sum(1) + (batch * params["w"]).sum(1)

    engine = engines.bookkeeping()
    for made in ([], [], [True], [True]):
        own[:] = made
        found, expected = (gradients(each, loss_fn, params, batch) for each in (engine, engines.loop()))
        assert all(torch.allclose(found[key], value, rtol=1e-4) for key, value in expected.items())


class MixingOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result - result.mean(0) if func is torch.ops.aten.mm.default else result


class MixingFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result - result.mean(0) if func is F.linear else result


@pytest.mark.parametrize(
    ("mode", "outside"), [(MixingOperations, False), (MixingFunctions, False), (MixingFunctions, True)]
)
def test_a_mode_that_mixes_rows_later_is_seen(repeated, mode, outside):
    params, batch = drawn()
    mixing = []

    def loss_fn(params, batch):
        if not mixing or outside:
            return losses(params, batch)
        with mode():
            return losses(params, batch)

    engine = engines.bookkeeping()
    for _ in range(3):
        engine(loss_fn, params, batch)
    mixing.append(True)
    with mode() if outside else nullcontext(), pytest.raises(UnsupportedModel):
        engine(loss_fn, params, batch)


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t - t.mean(0), lambda t: t),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
    ids=["hooks on saved tensors", "autocast"],
)
def test_what_changes_a_use_is_followed(repeated, around):
    params, batch = drawn()
    engine = engines.bookkeeping(unproven="audit")
    for _ in range(2):
        engine(losses, params, batch)
    count = len(repeated)

    def loss_fn(params, batch):
        with around():
            return losses(params, batch)

    engine(loss_fn, params, batch)
    assert len(repeated) == count == 5


def test_rows_that_others_move_are_seen(repeated):
    """The same shapes, and another axis of the samples."""
    params, turned = {"w": torch.randn(D, D)}, []
    square = torch.randn(D, D)
    engine = engines.bookkeeping()

    def loss_fn(params, batch):
        y = F.linear(batch.mT.contiguous() if turned else batch, params["w"])
        return (y.mT if turned else y).square().sum(1)

    for _ in range(2):
        engine(loss_fn, params, square)
    turned.append(True)
    with pytest.raises(UnsupportedModel):
        engine(loss_fn, params, square)


def test_a_value_out_of_range_is_the_error_of_the_loss(repeated):
    params, ids = {"table": torch.randn(5, D)}, torch.tensor([[0, 1], [2, 3]])
    engine = engines.bookkeeping()

    def loss_fn(params, ids):
        return F.embedding(ids, params["table"]).square().sum((1, 2))

    for _ in range(2):
        engine(loss_fn, params, ids)
    with pytest.raises(IndexError):
        engine(loss_fn, params, ids + 3)


def test_what_is_known_is_bounded(repeated, monkeypatch):
    monkeypatch.setattr("dpfunc.engines.tracing.repeated._KEPT", 3)
    for width in range(2, 9):
        engines.bookkeeping()(losses, {"w": torch.randn(D, D), "v": torch.randn(width, D)}, torch.randn(B, D))
        assert len(repeated_uses._known) <= 3


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


def test_parameters_that_a_custom_function_changed_are_found_in_each_step():
    """No torch function gave them, so that nothing names them when the linear is called again."""
    loss_fn = lambda params, x: F.linear(x, Halved.apply(params["w"])).square().sum(1)
    params, x, engine = {"w": torch.randn(3, 2)}, torch.randn(4, 2), engines.bookkeeping()
    wanted = engines.loop()(loss_fn, params, x).sq_norms()["w"]
    for _ in range(3):
        assert torch.allclose(engine(loss_fn, params, x).sq_norms()["w"], wanted)
