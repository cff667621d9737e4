"""What the engine takes for granted of torch's private parts, one fact a test: a new version that differs fails here."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpfunc.engines._levels import (
    Node,
    OutsideTransforms,
    apply_node,
    inside,
    is_dead,
    is_row,
    levels,
    of_rows,
    outside_levels,
    run_backward,
    seen_as_compiling,
)

X = torch.arange(6.0).reshape(3, 2)
W = torch.tensor([1.0, -1.0])


def test_a_row_is_wrapped_twice_and_comes_back_whole():
    with levels(3) as over:
        row = over.row(X)
        assert is_row(row)
        assert row.shape == (2,)
        assert of_rows(row) is X
        assert torch.equal(of_rows(row * 2), X * 2)


def test_an_axis_that_an_operation_has_moved_comes_back_first():
    with levels(3) as over:
        moved = torch.stack([over.row(X), over.row(X)])
        with OutsideTransforms():
            assert of_rows(moved).shape == (3, 2, 2)


def test_constants_are_not_rows():
    with levels(3) as over:
        for value in (over.constant(W), over.leaf(W), torch.ones(2), W):
            assert not is_row(value)
            assert of_rows(value) is None
            assert not torch._C._functorch.is_functorch_wrapped_tensor(inside(value))


def test_only_leaves_need_gradients():
    with levels(3) as over:
        assert over.leaf(W).requires_grad
        assert not over.row(X).requires_grad
        assert not over.constant(W).requires_grad
        assert (over.row(X) * over.leaf(W)).requires_grad


def test_gradients_have_an_axis_of_rows():
    with levels(3) as over:
        leaf = over.leaf(W)
        loss = (over.row(X) * leaf).square().sum()
        (grad,) = run_backward(loss, (leaf,))
        assert torch.allclose(of_rows(grad), 2 * X * X * W)


def test_code_is_told_that_it_is_transformed():
    """As under torch.compile; code that dynamo itself traces is told so by another function."""
    with seen_as_compiling():
        assert torch.compiler.is_compiling()
        assert not torch.compiler.is_dynamo_compiling()
    assert not torch.compiler.is_compiling()


def test_a_fallback_row_by_row_is_silent_inside_only(capfd):
    """A user cannot do anything about it, and torch's message asks for an issue."""
    query = torch.ones(3, 1, 2, 4, 8)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        # some versions of torch write to the standard error, others warn
        text = lambda: f"{[str(each.message) for each in said]}{capfd.readouterr().err}"
        with levels(3) as over:
            row = over.row(query)
            attention(row, row, row)
        assert "performance drop" not in text()
        torch.func.vmap(lambda row: attention(row, row, row)[0])(query)
        assert "performance drop" in text()


def test_a_backward_pass_keeps_modes_on():
    """`torch.autograd.grad` is a torch function itself, and would switch them off."""
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with levels(3) as over, Mode():
        leaf = over.leaf(W)
        h = over.row(X) * leaf
        h.register_hook(lambda grad: grad.cosh())
        run_backward(h.sum(), (leaf,))
    assert "cosh" in seen


def test_tensors_of_rows_are_gone_after_the_call():
    with levels(3) as over:
        row, constant = over.row(X) * 2, over.constant(W) * 2
        assert not is_dead(row)
    assert is_dead(row)
    assert is_row(row)
    assert not is_row(constant)
    with levels(3):
        assert is_dead(row), "also while other levels of the same number are open"
        assert not is_row(constant)
        assert not is_dead(X)


def test_numbers_of_torch_that_nobody_answers_are_errors():
    with levels(3) as over, pytest.raises(RuntimeError, match="random"):
        torch.rand_like(over.row(X))


def test_memory_from_outside_cannot_be_written():
    outside = torch.zeros(2)
    with levels(3) as over:
        for write in (lambda: outside.add_(over.row(X)), lambda: outside.mul_(2), lambda: outside.copy_(over.row(X))):
            with pytest.raises(RuntimeError):
                write()
    assert outside.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("around", [OutsideTransforms, outside_levels])
def test_below_both_levels_tensors_are_plain(around):
    with levels(3) as over:
        with around():
            made = F.linear(X, torch.eye(2)) + torch.ones(2)
            assert not torch._C._functorch.is_functorch_wrapped_tensor(made)
        assert torch._C._functorch.is_functorch_wrapped_tensor(torch.ones(2))
        assert torch._C._functorch.maybe_current_level() == over.grad


def test_custom_functions_run_below_both_levels():
    class Old(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 3 * grad

    with levels(3), outside_levels(), torch.enable_grad():
        x = X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(Old.apply(x).sum(), x)
        assert torch.equal(grad, torch.full_like(X, 3.0))


class Five(Node):
    @staticmethod
    def forward(over, x):
        with OutsideTransforms():
            value = 2 * of_rows(x)
        return over.row(value)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad):
        assert is_row(ctx.saved_tensors[0])
        return None, 5 * grad


def test_a_node_has_its_own_derivative_at_the_level_of_gradients():
    with levels(3) as over:
        leaf = over.leaf(W)
        loss = apply_node(Five, over, over.row(X) * leaf).sum()
        (grad,) = run_backward(loss, (leaf,))
        assert torch.allclose(of_rows(grad), 5 * X)
    assert not torch._C._functorch.get_single_level_autograd_function_allowed()


def test_transforms_of_the_loss_are_seen():
    seen = []
    with levels(3) as over:
        level = torch._C._functorch.maybe_current_level
        torch.func.grad(lambda v: (seen.append(level()), v.sum())[1])(over.row(X))
        assert seen == [over.grad + 1]
        assert level() == over.grad


def test_a_custom_function_is_seen_by_a_mode():
    """So a rule for vmap of its own is found before it runs."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def vmap(info, in_dims, x):
            raise AssertionError("it ran")

    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch._functorch.autograd_function.custom_function_call:
                seen.append(args[0])
                return args[1]
            return func(*args, **(kwargs or {}))

    with levels(3) as over, Mode():
        Own.apply(over.row(X))
    assert seen[0].vmap is not torch.autograd.Function.vmap


def test_frozen_parameters_keep_no_graph_below():
    frozen = torch.ones(2, requires_grad=True)
    with levels(3) as over:
        made = over.row(X) * frozen
    assert of_rows(made).grad_fn is None
