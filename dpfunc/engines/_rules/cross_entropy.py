"""Cross-entropy of classes in whole numbers, which takes no parameter: its gradient in closed form, without a graph.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

Axis letters: B rows, n samples of one row, C classes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines._rules.table import REQUIRED, Bound, Form, Rule, anything

_NO_REDUCTION = 0  # torch's number of it


def _run(bound: Bound) -> tuple[Tensor, Any]:
    """Losses of all positions, (B * n, ...), of logits (B * n, C, ...)."""
    x, target = bound["input"], bound["target"].flatten(0, 1)
    classes = target
    if x.ndim > 2:  # torch's kernels take samples, or samples with two axes of positions
        x, classes = x.reshape(*x.shape[:2], 1, -1), target.reshape(len(x), 1, -1)
    left = (x.log_softmax(1), classes, None, _NO_REDUCTION, bound["ignore_index"])
    run = torch.ops.aten.nll_loss_forward if x.ndim == 2 else torch.ops.aten.nll_loss2d_forward
    losses, weight = run(*left)
    return losses.reshape(target.shape), (*left, weight)


def _input_grad(bound: Bound, grad: Tensor, left: Any) -> Tensor:
    log_probs, classes, *_ = left
    run = torch.ops.aten.nll_loss_backward if log_probs.ndim == 2 else torch.ops.aten.nll_loss2d_backward
    of_log = run(grad.reshape(classes.shape), *left)
    found: Tensor = torch.ops.aten._log_softmax_backward_data(of_log, log_probs, 1, log_probs.dtype)
    return found


def _are_classes(target: Any, bound: Bound) -> bool:
    """True for a class of each sample of a row; the input has an axis of samples."""
    logits = bound["input"]
    if logits.ndim < 2 or not len(logits):
        return False
    return bool(target.dtype == torch.int64 and target.shape == logits.shape[:1] + logits.shape[2:])


RULES = (
    Rule(
        (F.cross_entropy,),
        {
            "input": REQUIRED, "target": REQUIRED, "weight": None, "size_average": None, "ignore_index": -100,
            "reduce": None, "reduction": "mean", "label_smoothing": 0.0,
        },
        lambda use, grad, **_: {},
        {},
        form=Form(
            "input", _run, _input_grad,
            {**dict.fromkeys(("input", "ignore_index", "reduction"), anything), "target": _are_classes},
            lambda bound: bound["input"].ndim - 1,
        ),
    ),
)  # fmt: skip
