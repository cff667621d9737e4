"""Several views of each record, whose gradients are averaged before the clip: augmentation multiplicity.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpfunc._utils.validation import expect
from dpfunc.batches import tree_map


@dataclass(frozen=True)
class MeanOverViews:
    """A loss of records with several views; see `mean_over_views`."""

    sample_loss: Callable[..., Any]

    def __call__(self, *parameters_and_batch: Any) -> Any:
        """The loss of each record (B,), from (params, batch) or (forward, params, batch)."""
        *before, batch = parameters_and_batch
        shapes = {tuple(leaf.shape[:2]) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
        expect(
            len(shapes) == 1 and len(next(iter(shapes))) == 2, "a batch with leaves of shape (B, K, ...)", "shapes",
            sorted(shapes), "Take it of plan.loader(..., views=K).",
        )  # fmt: skip
        (shape,) = shapes
        losses = self.sample_loss(*before, tree_map(lambda leaf: leaf.flatten(0, 1), batch))

        def mean(values: Tensor) -> Tensor:
            views = values if values.is_floating_point() else values.float()
            return views.unflatten(0, shape).mean(1)  # type: ignore[no-any-return]  # untyped in torch

        return tree_map(mean, losses)


def mean_over_views(sample_loss: Callable[..., Any]) -> MeanOverViews:
    """The loss of a record: the mean of the losses of its K views, `sum_k loss_k / K`.

    Its gradient is the mean of the gradients of the views, which is then clipped, as one. So a record costs what it
    costs without views, and its gradient has less of the randomness of one view.
    De et al. 2022, Unlocking High-Accuracy Differentially Private Image Classification through Scale (augmentation
    multiplicity).

    Args:
        sample_loss: `(params, batch) -> (B,)` or `(forward, params, batch) -> (B,)`, the loss of single views; or
            `(losses, aux)`, whose aux is averaged as well.

    Returns:
        The same kind of function on batches whose leaves are (B, K, ...), e.g. those of `plan.loader(..., views=K)`.

    Raises:
        InvalidArgument: from the loss, a batch of another kind.

    Guarantees:
        tests/sampling/test_views.py: the clipped sum is that of the mean of the gradients, with each engine and
        microbatch size (test_the_mean_is_before_the_clip); a record moves it by at most the sensitivity
        (test_a_record_with_views_has_bounded_sensitivity).

    >>> import torch
    >>> loss = mean_over_views(lambda params, x: params["w"] * x)
    >>> loss({"w": torch.tensor(1.0)}, torch.tensor([[1.0, 3.0], [5.0, 7.0]]))
    tensor([2., 6.])
    """
    return MeanOverViews(sample_loss)
