"""Rules for operations of users' own.

May import: its folder, batches, rng and below. Privacy depends on it: yes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from dpfunc.engines._levels import PassResult
from dpfunc.engines._per_sample import Dense
from dpfunc.engines._rules import REGISTERED
from dpfunc.engines._rules.table import REQUIRED, ParameterUse, Rule
from dpfunc.engines.loop import loop
from dpfunc.engines.vmap_grad import VmapGrad
from dpfunc.errors import InvalidArgument


def register_rule(
    op: Callable[..., Tensor],
    parameter: str,
    per_sample_grad: Callable[..., Tensor],
    *,
    needs: Sequence[str],
    example: Mapping[str, Any],
) -> None:
    """Add a rule for one operation to the engines, after it is compared with single samples.

    It makes steps faster: without it, the gradient is formed by vmap(grad). It gets rows that are batches of one,
    joined on axis 0; other uses of the operation are left to vmap(grad).

    Args:
        op: a function that torch can intercept: one of torch's own, or one that calls
            `torch.overrides.handle_torch_function`. Its samples are on axis 0 of its result.
        parameter: the name of the argument that is the parameter.
        per_sample_grad: `(grad, **arguments) -> (B, *shape)`: the gradient of each sample from the gradient of the
            result and the arguments, in the operation's order and names; those not in `needs` are None if tensors.
        needs: arguments whose tensors `per_sample_grad` uses, on axis 0 the samples.
        example: arguments by name for the comparison, float64 where floating, with at least two samples.

    Raises:
        InvalidArgument: the rule does not give what single samples give, or is not used; it is not added.

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

    def _grads(use: ParameterUse, grad: Tensor, **arguments: Any) -> Mapping[str, Dense]:
        grads_B, shape = per_sample_grad(grad, **arguments), (use.num_samples, *use.shapes[parameter])
        if grads_B.shape != shape:
            raise InvalidArgument(
                f"Expected the rule for {use.name} to give gradients {shape}, got {tuple(grads_B.shape)}."
            )
        return {parameter: Dense(grads_B)}

    rule = Rule((op,), dict.fromkeys(example, REQUIRED), _grads, {parameter: tuple(needs)})
    before = {op: REGISTERED[op]} if op in REGISTERED else {}
    with ExitStack() as undo:
        undo.callback(REGISTERED.update, before)
        undo.callback(REGISTERED.pop, op)
        REGISTERED[op] = rule
        _compare(rule, op, parameter, example)
        undo.pop_all()


def _compare(rule: Rule, op: Callable[..., Tensor], parameter: str, example: Mapping[str, Any]) -> None:
    batch = {name: example[name] for name in rule.needs[parameter]}
    output = op(*example.values())
    weights = torch.linspace(0.5, 2.0, output[0].numel(), dtype=output.dtype, device=output.device)
    weights = weights.reshape(output.shape[1:])

    def loss_fn(params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        values = {**example, **batch, **params}
        return (op(*values.values()) * weights).square().flatten(1).sum(1) if weights.ndim else op(*values.values())

    passes: list[PassResult] = []
    params = {parameter: example[parameter]}
    one_each_BB = torch.eye(len(output), dtype=torch.float64, device=output.device)
    found, truth = (
        torch.stack([per_sample.weighted_sum({parameter: factors_B})[parameter] for factors_B in one_each_BB])
        for per_sample in (engine(loss_fn, params, batch) for engine in (VmapGrad(on_pass=passes.append), loop()))
    )
    if not any(use.rule is rule for each in passes for use in each.uses):
        raise InvalidArgument(
            f"Expected the rule for {getattr(op, '__name__', op)} to be used for its example, and it is not. Take a "
            "function that torch can intercept, whose samples are on axis 0 of its result and of needs."
        )
    off = float((found - truth).abs().max()) / max(float(truth.abs().max()), 1e-12)
    if found.shape != truth.shape or not off <= 1e-8:
        raise InvalidArgument(
            f"Expected the rule for {getattr(op, '__name__', op)} to give what single samples give, got a relative "
            f"difference of {off:.3g}. Compare per_sample_grad with the gradient of one sample."
        )
