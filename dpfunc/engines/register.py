"""Rules for operations of users' own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpfunc.engines.bookkeeping import bookkeeping
from dpfunc.engines.loop import loop
from dpfunc.engines.per_sample import Dense
from dpfunc.engines.rules import RULES
from dpfunc.engines.rules.table import Rule, Use
from dpfunc.errors import InvalidArgument

_TOLERANCE = 1e-8


def register_rule(
    op: Callable[..., Tensor],
    parameter: str,
    per_sample_grad: Callable[..., Tensor],
    *,
    needs: Sequence[str],
    example: Mapping[str, Any],
) -> None:
    """Add a rule for one operation to the fast engines, after it is compared with single samples.

    Args:
        op: a function that torch can intercept: one of torch's own, or one that calls
            `torch.overrides.handle_torch_function`. Its samples are on axis 0 of its result.
        parameter: the name of the argument that is the parameter.
        per_sample_grad: `(grad, **arguments) -> (B, *shape)`: the gradient of each sample from the gradient of the
            result and the arguments, in the operation's order and names; those not in `needs` are None if tensors.
        needs: arguments whose tensors `per_sample_grad` uses, on axis 0 the samples.
        example: arguments by name for the comparison, float64 where floating, with at least two samples.

    Raises:
        InvalidArgument: the rule does not give what single samples give; it is not added.

    Guarantees:
        a wrong rule is refused (tests/engines/test_register.py::test_a_wrong_rule_is_refused).

    >>> def grad_of_table(grad, input, vec):
    ...     return grad[:, None] * input
    >>> x, w = torch.randn(3, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    >>> register_rule(torch.mv, "vec", grad_of_table, needs=["input"], example={"input": x, "vec": w})
    """
    if parameter not in example or not isinstance(example[parameter], Tensor):
        raise InvalidArgument(f"Expected example to have a tensor {parameter!r}, got {sorted(example)}.")
    unknown = [name for name in needs if name not in example]
    if unknown:
        raise InvalidArgument(f"Expected needs to name arguments of the example, got unknown {unknown}.")

    def _grads(use: Use, grad: Tensor, **arguments: Any) -> Mapping[str, Dense]:
        if use.sample_axis.axis != 0 or use.output[0] != use.num_samples:
            raise use.refuse("the samples are not on axis 0.")
        return {parameter: Dense(per_sample_grad(grad, **arguments))}

    rule = Rule((op,), _grads, {parameter: tuple(needs)}, names=tuple(example))
    before = RULES.pop(op, None)
    RULES[op] = rule
    right = False
    try:
        _compare(op, parameter, example, list(needs))
        right = True
    finally:
        if not right:
            del RULES[op]
        if not right and before is not None:
            RULES[op] = before


def _compare(op: Callable[..., Tensor], parameter: str, example: Mapping[str, Any], needs: Sequence[str]) -> None:
    batch = {name: example[name] for name in needs}
    output = op(*example.values())
    weights = torch.linspace(0.5, 2.0, output[0].numel(), dtype=output.dtype).reshape(output.shape[1:])

    def loss_fn(params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        values = {**example, **batch, **params}
        return (op(*values.values()) * weights).square().flatten(1).sum(1) if weights.ndim else op(*values.values())

    params = {parameter: example[parameter]}
    one_each_BB = torch.eye(len(output), dtype=torch.float64)
    found, truth = (
        torch.stack([per_sample.weighted_sum({parameter: factors_B})[parameter] for factors_B in one_each_BB])
        for per_sample in (engine(loss_fn, params, batch) for engine in (bookkeeping(), loop()))
    )
    off = float((found - truth).abs().max()) / max(float(truth.abs().max()), 1e-12)
    if found.shape != truth.shape or not off <= _TOLERANCE:
        raise InvalidArgument(
            f"Expected the rule for {getattr(op, '__name__', op)} to give what single samples give, got a relative "
            f"difference of {off:.3g}. Compare per_sample_grad with the gradient of one sample."
        )
