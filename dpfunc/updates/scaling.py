"""Gradients that are clipped in other coordinates: scale, then privatise.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from dpfunc._utils.validation import expect
from dpfunc.types import Params


def _moved(value: Tensor, scale: Tensor) -> Tensor:
    """The same numbers, whose derivative is `scale`."""
    fixed = value.detach()
    return fixed + scale * (value - fixed)


def _check(scales: Mapping[str, Tensor], params: Params) -> None:
    expect(scales.keys() == params.keys(), "a scale for each parameter", "scales", sorted(scales))


def scaled_loss(loss_fn: Callable[..., Any], scales: Mapping[str, Tensor]) -> Callable[[Params, Any], Any]:
    """The loss whose gradient is `scale * gradient`, number by number, for a step that clips and adds noise there.

    Noise of one size in all coordinates drowns those with small gradients. In coordinates in which gradients are alike
    it does not: with scale `1 / (sqrt(v) + s)` of a second moment v of what was released before, they are. The clip
    bound is that of the scaled gradient, and so is the sensitivity; the ledger is that of any other loss. What is
    released goes back by `unscaled`: there the noise is in proportion to 1 / scale.
    Ganesh et al. 2025, On Design Principles for Private Adaptive Optimizers, arXiv 2507.01129 (scale-then-privatize).

    Args:
        loss_fn: `(params, batch) -> (B,)`.
        scales: for each parameter positive numbers of its shape, of what was released or is public. They may be written
            between steps (`scales[name].copy_(...)`), never within one.

    Returns:
        A loss for `make_dp_step`, with the same values. Its gradients are formed for each row, which takes memory
        for B times the parameters.

    Raises:
        InvalidArgument: from the loss, parameters of other names.

    Guarantees:
        tests/updates/test_scaling.py: with each engine the clipped sum is that of scaled gradients
        (test_gradients_are_clipped_where_they_are_scaled), a record moves it by at most the bound (test_sensitivity),
        and scales that were written count in the next step (test_scales_may_be_written_between_steps).

    >>> import torch
    >>> loss = scaled_loss(lambda params, x: x @ params["w"], {"w": torch.tensor([2.0, 0.5])})
    >>> torch.func.grad(lambda params: loss(params, torch.ones(1, 2)).sum())({"w": torch.zeros(2)})["w"]
    tensor([2.0000, 0.5000])
    """

    def scaled(params: Params, batch: Any) -> Any:
        _check(scales, params)
        return loss_fn({name: _moved(value, scales[name]) for name, value in params.items()}, batch)

    return scaled


def unscaled(grads: Params, scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Released gradients of a `scaled_loss` in the coordinates of the parameters: `gradient / scale`.

    Args:
        grads: what a step with the scaled loss released. scales: those of that step.

    Returns:
        name -> gradient; released.

    Raises:
        InvalidArgument: other names.

    >>> import torch
    >>> unscaled({"w": torch.tensor([2.0, 0.5])}, {"w": torch.tensor([2.0, 0.5])})["w"]
    tensor([1., 1.])
    """
    _check(scales, grads)
    return {name: value / scales[name] for name, value in grads.items()}
