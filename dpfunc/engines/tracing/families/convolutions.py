"""Convolutions, over samples on axis 0 or in groups of channels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dpfunc.engines.tracing.call import Aligned, Call, Handler, Type, combined, doubt_in
from dpfunc.engines.tracing.families.aligning import nowhere
from dpfunc.engines.tracing.rows import Mixed, Rows, alike


def _convolution(call: Call) -> Type:
    """`(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)`."""
    input, weight, bias = call.args[0], call.args[1], call.arg(2, "bias")
    groups = call.arg({"mkldnn_convolution": 6}.get(call.name, 8), "groups", 1)
    return _convolved(call, input, [weight, bias] if isinstance(bias, Tensor) else [weight], groups)


def _convolved(call: Call, data: Tensor, weights: Sequence[Tensor], groups: int) -> Type:
    """Samples on axis 0, with the same weights; or in groups of channels, each with weights of its own."""
    kind = call.type_of(data)
    if isinstance(kind, Rows) and kind.axis == 1 and kind.pre == 1 and groups % kind.count == 0:
        return _convolved_in_groups(call, kind, weights)
    operands = [Aligned(data, lambda axis: axis, lambda axis: axis), *map(nowhere, weights)]
    return combined(call, operands, range(1, 8))


def _convolved_in_groups(call: Call, rows: Rows, weights: Sequence[Tensor]) -> Type:
    """Samples in groups of channels: the weights of a group are of its sample, or the same for each."""
    doubt = rows.doubt
    for weight in weights:
        kind, each = call.type_of(weight), Rows(0, rows.count, 1, weight.shape[0] // rows.count, rows.ids)
        if isinstance(kind, Mixed):
            return kind
        if kind is None and not call.types.uniform(weight, each, 0):
            return call.mixed("with weights that differ between positions of the batch")
        if kind is not None and (kind.axis != 0 or not alike(kind, each)):
            return call.mixed("with weights of other samples")
        doubt = doubt or doubt_in(kind)
    post = call.out.shape[1] // rows.count if isinstance(call.out, Tensor) else rows.post
    return rows._replace(post=post, doubt=doubt)


def _convolution_backward(call: Call) -> list[Type]:
    """`(grad, input, weight, bias_sizes, ..., groups, mask)`: gradients of input, weight and bias."""
    grad, input, weight, groups = call.args[0], call.args[1], call.args[2], call.args[-2]
    kind = call.type_of(grad)
    if isinstance(kind, Rows) and kind.axis == 1:
        given = _convolved(call, grad, [weight], groups)
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
