"""Released gradients where an optimizer of torch reads them.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""

from collections.abc import Mapping

from torch import Tensor

from dpfunc._utils.validation import apart
from dpfunc.errors import InvalidArgument


def set_grads(params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
    """Write each gradient into `.grad` of the parameter of its name, for `optimizer.step()`.

    `params[name].grad = grads[name]`. It computes nothing: `.grad` is the tensor of `grads`, and what was there is
    replaced, so `optimizer.zero_grad()` is not needed. All names are checked before anything is written.

    Args:
        params: the mapping of `functionalize`, or `dict(model.named_parameters())`; the optimizer has these tensors.
        grads: what a step released: for each parameter one of its shape, dtype and device.

    Returns:
        None. What is written is released if `grads` is.

    Raises:
        InvalidArgument: parameters without a gradient, gradients of unknown names, one parameter under two names, or a
            gradient of another shape, dtype or device than its parameter. Nothing was written.

    Guarantees:
        tests/updates/test_gradients.py: an optimizer moves each parameter by its own gradient
        (test_an_optimizer_reads_what_was_written); after an error no parameter has another gradient than before
        (test_an_error_names_the_parameter_and_nothing_is_written).

    >>> import torch
    >>> params = {"w": torch.ones(2)}
    >>> optimizer = torch.optim.SGD(params.values(), lr=0.5)
    >>> set_grads(params, {"w": torch.tensor([1.0, -2.0])})
    >>> optimizer.step()
    >>> params["w"]
    tensor([0.5000, 2.0000])
    """
    if params.keys() != grads.keys():
        raise InvalidArgument(
            "Expected a gradient for each parameter and no others, got grads "
            f"{apart(params.keys() - grads.keys(), grads.keys() - params.keys())}. Pass the params that the step was "
            "called with: the mapping of functionalize or lora.attach. Nothing was written."
        )
    if len({id(param) for param in params.values()}) < len(params):
        raise InvalidArgument(
            "Expected each parameter under one name, got a tensor under several: of their gradients the last one would "
            "count. Take forward, params = dpfunc.functionalize(module), where tied parameters have one name. Nothing "
            "was written."
        )
    for name, param in params.items():
        expected = _kind(param)
        given = _kind(grads[name])
        if given != expected:
            raise InvalidArgument(
                f"Expected the gradient of {name!r} to have the shape, dtype and device of its parameter, {expected}; "
                f"got {given}. Nothing was written."
            )
    for name, param in params.items():
        param.grad = grads[name]


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
