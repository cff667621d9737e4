"""Code of others inside of functions of torch may keep numbers of the batch: no mode sees what it reads."""

from __future__ import annotations

import pytest
import torch
from row_losses import batch, head, params
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dpfunc import clipping
from dpfunc.clipped import clipped_grad
from dpfunc.engines import auto, bookkeeping
from dpfunc.errors import UnsupportedModel


class Kept(list):
    """Numbers of tensors."""

    def keep(self, tensor):
        self.append(tensor.detach().flatten().tolist()[0])
        return tensor


def by_saved_tensors(x, kept):
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
        x.clone().requires_grad_().sin()


def by_a_distance(x, kept):
    F.triplet_margin_with_distance_loss(
        x, x, x, distance_function=lambda one, other: (kept.keep(one) - other).sum(1), reduction="none"
    )


def by_a_mode(x, kept):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(kept.keep(args[0]), *args[1:], **(kwargs or {}))

    with Mode():
        x.sin()


def by_an_operation(x, kept):
    library = torch.library.Library("dpfunc_test_inside", "DEF")
    library.define("log(Tensor x) -> Tensor")
    library.impl("log", lambda tensor: kept.keep(tensor).clone(), "CPU")
    torch.ops.dpfunc_test_inside.log(x)
    library._destroy()


def by_a_class(x, kept):
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                return func(kept.keep(args[0]), *args[1:], **(kwargs or {}))

    x.as_subclass(Own).sin()


def by_the_shape_of_an_argument(x, kept):
    kept.append(torch.nonzero(x > 0, out=torch.empty(0, dtype=torch.int64)).shape[0])


def by_an_error(x, kept):
    try:
        x[x[:, 0] > 0].narrow(0, 0, 5)
    except RuntimeError:
        kept.append(2.0)


@pytest.mark.parametrize(
    "read",
    [
        by_saved_tensors, by_a_distance, by_a_mode, by_an_operation, by_a_class, by_the_shape_of_an_argument, by_an_error,
    ],
)  # fmt: skip
def test_what_is_read_inside_is_a_doubt_now_and_later(read):
    kept, engine = Kept(), bookkeeping()

    def loss_fn(p, x):
        if not kept:
            read(x.detach(), kept)
        return head(x, p) * kept[-1]

    for seed in range(2):
        with pytest.raises(UnsupportedModel, match="influence each other"):
            engine(loss_fn, params(), batch(seed))


def test_the_hooks_of_torch_are_none_of_others():
    def loss_fn(p, x):
        with torch.autograd.graph.save_on_cpu():
            x = x.sin()
        return head(checkpoint(torch.tanh, x, use_reentrant=False), p)

    assert not bookkeeping(unproven="audit")(loss_fn, params(), batch(0)).evidence.doubts


class Counting(TorchDispatchMode):
    """A mode of whoever calls a step, such as a profiler's."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_around_a_step_is_none_of_the_loss():
    def inside(p, x):
        with Counting():
            return head(x, p)

    with Counting():
        assert bookkeeping()(lambda p, x: head(x, p), params(), batch(0))
    with pytest.raises(UnsupportedModel, match="a dispatch mode of the loss"):
        bookkeeping()(inside, params(), batch(0))


@pytest.mark.parametrize("engine", [auto(), bookkeeping(unproven="audit")])
def test_errors_of_torch_show_no_record(engine):
    """torch prints the modes around an operator of higher order that none of them takes."""
    weights, x = {"w": torch.randn(8, 8)}, torch.randn(4, 8)
    x[2, 0] = 123.456

    def loss_fn(params, batch):
        noisy = torch.nn.functional.linear(torch.normal(batch, 1.0), params["w"])
        return torch.cond(torch.tensor(True), lambda h: h * 2, lambda h: h * 1.0, (noisy,)).square().sum(1)

    with pytest.raises(Exception) as error:  # noqa: PT011  (whatever torch raises)
        clipped_grad(loss_fn, weights, x, clipping.Flat(0.5), engine=engine)
    text = str(error.value)
    assert "123.4" not in text
    assert "1.2346e+02" not in text
    assert len(text) < 2000
