"""Convolutions, over samples on axis 0 or in groups of channels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dpfunc.engines.tracing.call import Aligned, Call, Handler, Type, combined
from dpfunc.engines.tracing.families.aligning import nowhere
from dpfunc.engines.tracing.rows import Mixed, Rows, alike


def _convolution(call: Call) -> Type:
    """`(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)`."""
    input, weight, bias = call.args[0], call.args[1], call.arg(2, "bias")
    groups = call.arg({"mkldnn_convolution": 6}.get(call.name, 8), "groups", 1)
    return _convolved(call, input, weight, [bias] if isinstance(bias, Tensor) else [], groups, "input")


def _convolved(call: Call, data: Tensor, weight: Tensor, others: Sequence[Tensor], groups: int, what: str) -> Type:
    """Samples on axis 0, with the same weights; or in groups of channels, each with weights of its own."""
    kind = call.type_of(data)
    if isinstance(kind, Rows) and kind.axis == 1 and kind.pre == 1 and groups % kind.count == 0:
        doubt = kind.doubt
        for own in (weight, *others):
            weights = call.type_of(own)
            each = Rows(0, kind.count, 1, own.shape[0] // kind.count, kind.ids)
            if isinstance(weights, Mixed):
                return weights
            if weights is None and not call.types.uniform(own, each, 0):
                return call.mixed("with weights that differ between positions of the batch")
            if weights is not None and (weights.axis != 0 or not alike(weights, each)):
                return call.mixed("with weights of other samples")
            doubt = doubt or (weights.doubt if weights is not None else "")
        post = call.out.shape[1] // kind.count if isinstance(call.out, Tensor) else kind.post
        return kind._replace(post=post, doubt=doubt)
    operands = [Aligned(data, lambda axis: axis, lambda axis: axis), *(nowhere(t) for t in (weight, *others))]
    return combined(call, operands, range(1, 8))


def _convolution_backward(call: Call) -> list[Type]:
    """`(grad, input, weight, bias_sizes, ..., groups, mask)`: gradients of input, weight and bias."""
    grad, input, weight, groups = call.args[0], call.args[1], call.args[2], call.args[-2]
    kind = call.type_of(grad)
    if isinstance(kind, Rows) and kind.axis == 1:
        given = _convolved(call, grad, weight, [], groups, "grad")
        data = call.type_of(input)
        if isinstance(given, Rows) and isinstance(data, Rows) and data.axis == 1 and data.pre == 1 \
                and alike(data._replace(post=kind.post), kind):  # fmt: skip
            count = given.count
            own = Rows(0, count, 1, weight.shape[0] // count, given.ids, given.doubt or data.doubt)
            return [given._replace(post=input.shape[1] // count), own, given._replace(axis=0, post=kind.post)]
        given = given._replace(post=input.shape[1] // given.count) if isinstance(given, Rows) else given
        return [given, call.mixed(), call.mixed()]
    operands = [Aligned(grad, lambda axis: axis, lambda axis: axis), nowhere(weight)]
    return [combined(call, operands, range(1, 8)), call.mixed("gradient of weights"), call.mixed("gradient of biases")]


FAMILY: dict[str, Handler] = {
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution"), _convolution),
    **dict.fromkeys(("convolution_backward", "convolution_backward_overrideable"), _convolution_backward),
}  # fmt: skip
