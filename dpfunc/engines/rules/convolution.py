"""Convolutions of 1, 2 and 3 axes, grouped, dilated, transposed. `grad_i` is torch's own weight gradient of sample i.

The norm is measured on the formed gradients, or as the ghost norm of the unfolded input, whichever takes fewer
operations; the weighted sum is one weight gradient of the whole batch, with the rows of g scaled.
Axis letters: B samples, m images of one sample, C and P channels, G groups, T positions, K taps of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its usual name)

from dpfunc.engines.per_sample import Dense, Outer, PerSampleGrad
from dpfunc.engines.rules.cost import matrix_form
from dpfunc.engines.rules.table import Form, Grads, Rule, Use
from dpfunc.engines.sums import SCRATCH, sq_sum, wide, without_dropped


@dataclass(frozen=True)
class ConvolutionArgs:
    """Arguments of a convolution beside its tensors, and the shape of its weight."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    def weight_grad(self, g_NP: Tensor, x_NC: Tensor, copies: int = 1) -> Tensor:
        """torch's gradient of the weight, summed over N; with `copies` samples side by side on the channel axis."""
        weight = x_NC.new_empty(1).expand(copies * self.shape[0], *self.shape[1:])
        output_padding = self.output_padding or (0,) * len(self.stride)
        options = (self.stride, self.padding, self.dilation, self.transposed, output_padding, copies * self.groups)
        wanted = [False, True, False]
        grad: Tensor = torch.ops.aten.convolution_backward(g_NP, x_NC, weight, None, *options, wanted)[1]
        return grad


@dataclass(frozen=True)
class Convolved:
    """B gradients of one kernel: from g (B, m, P, ...) and x (B, m, C, ...)."""

    g_BmP: Tensor
    x_BmC: Tensor
    args: ConvolutionArgs

    def dense(self) -> Tensor:
        """Sample by sample on the CPU, where that is fastest; elsewhere as one convolution with B times the groups."""
        g_BmP, x_BmC = wide(self.g_BmP), wide(self.x_BmC)
        num_samples = len(g_BmP)
        if g_BmP.device.type != "cpu" or torch.compiler.is_compiling():
            return self._side_by_side(g_BmP, x_BmC)
        grads_B = g_BmP.new_empty(num_samples, *self.args.shape)
        for sample in range(num_samples):
            grads_B[sample] = self.args.weight_grad(g_BmP[sample], x_BmC[sample])
        return grads_B

    def _side_by_side(self, g_BmP: Tensor, x_BmC: Tensor) -> Tensor:
        g_mBP, x_mBC = g_BmP.transpose(0, 1).flatten(1, 2), x_BmC.transpose(0, 1).flatten(1, 2)
        return torch.unflatten(self.args.weight_grad(g_mBP, x_mBC, len(g_BmP)), 0, (len(g_BmP), -1))

    def sq_norms(self) -> Tensor:
        """Squared norms, in pieces that bound the memory."""
        positions = math.prod(self.g_BmP.shape[3:]) * self.g_BmP.shape[1]
        unfolded = self._taps() * positions * self.x_BmC.shape[2]
        ghost = self.ghost_is_cheaper(positions)
        size = max(1, SCRATCH // (unfolded if ghost else math.prod(self.args.shape)))
        pieces = [
            replace(self, g_BmP=g, x_BmC=x)
            for g, x in zip(torch.split(self.g_BmP, size), torch.split(self.x_BmC, size), strict=True)
        ]
        measured = [piece._outer().sq_norms() if ghost else sq_sum(piece.dense().flatten(1)) for piece in pieces]
        return torch.cat(measured)

    def ghost_is_cheaper(self, positions: int) -> bool:
        """T (p + d) < p d, for the kinds that can be unfolded."""
        p, d = self.args.shape[0], math.prod(self.args.shape[1:])
        can = not self.args.transposed and self.args.groups == 1 and len(self.args.stride) == 2
        return can and positions * (p + d) < p * d

    def _taps(self) -> int:
        return math.prod(self.args.shape[2:])

    def _outer(self) -> Outer:
        args, count = self.args, len(self.g_BmP)
        unfolded_NdT = F.unfold(
            wide(self.x_BmC.flatten(0, 1)), args.shape[2:], args.dilation, args.padding, args.stride
        )
        x_BTd = torch.unflatten(unfolded_NdT, 0, (count, -1)).transpose(2, 3).flatten(1, 2)
        g_BTp = wide(self.g_BmP).flatten(3).transpose(2, 3).flatten(1, 2)
        return Outer(g_BTp, x_BTd, args.shape)

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        """One weight gradient of all samples."""
        factors_B, g_BmP, x_BmC = without_dropped(factors_B, wide(self.g_BmP), wide(self.x_BmC))
        scaled = g_BmP * factors_B.to(g_BmP.dtype).reshape(-1, *(1,) * (g_BmP.ndim - 1))
        if not len(scaled):
            return g_BmP.new_zeros(self.args.shape)
        return self.args.weight_grad(scaled.flatten(0, 1), x_BmC.flatten(0, 1))

    def fits(self, num_samples: int, shape: tuple[int, ...]) -> bool:
        return self.args.shape == shape and self.g_BmP.shape[:2] == self.x_BmC.shape[:2]

    @property
    def num_bytes(self) -> int:
        return sum(side.numel() * side.element_size() for side in (self.g_BmP, self.x_BmC))


def form(use: Use) -> Form:
    """Choose the faster form for the weight; where it is not used on samples of axis 0, form the gradients."""
    if "weight" not in use.shapes or use.layout.axis != 0 or len(use.output) != len(use.shapes["weight"]):
        return "dense"
    shape = use.shapes["weight"]
    positions = use.output.numel() // max(1, use.num_samples * use.output[use.layout.axis + 1])
    return matrix_form(positions, shape[0], math.prod(shape[1:]))


def _tuple(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value) * (axes if len(tuple(value)) == 1 else 1)


def _padded(x: Tensor, padding: str, args: ConvolutionArgs) -> tuple[Tensor, tuple[int, ...]]:
    """`padding="same"` may be one wider on the right: then the input is padded by hand."""
    axes = len(args.stride)
    if padding == "valid":
        return x, (0,) * axes
    totals = [dilation * (size - 1) for dilation, size in zip(args.dilation, args.shape[2:], strict=True)]
    if all(total % 2 == 0 for total in totals):
        return x, tuple(total // 2 for total in totals)
    sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return F.pad(x, sides), (0,) * axes


def _grads(use: Use, grad: Tensor, x: Tensor, args: ConvolutionArgs) -> Grads:
    if use.layout.axis != 0 or len(use.output) != len(args.stride) + 2:
        raise use.refuse("the samples are not on axis 0 of (N, C, ...).")
    grads: dict[str, PerSampleGrad] = {}
    g_BmP = use.split(grad)
    if "weight" in use.wanted:
        x_BmC = use.split(x)
        plain = math.prod(args.shape[2:]) == 1 and args.groups == 1 and not args.transposed
        if plain and set(args.stride) == {1} and not any(args.padding):  # 1 x 1: a matrix at each position
            g_BTp, x_BTd = (side.flatten(3).transpose(2, 3).flatten(1, 2) for side in (g_BmP, x_BmC))
            grads["weight"] = Outer(g_BTp, x_BTd, args.shape)
        else:
            grads["weight"] = Convolved(g_BmP, x_BmC, args)
    if "bias" in use.wanted:
        grads["bias"] = Dense(wide(g_BmP).sum([axis for axis in range(1, g_BmP.ndim) if axis != 2]))
    return grads


def convolution(
    use: Use,
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Grads:
    """Gradients of weight and bias in conv1d, conv2d and conv3d."""
    axes = len(use.output) - 2
    shape = tuple(use.shapes.get("weight", ()))
    numeric = 0 if isinstance(padding, str) else padding
    args = ConvolutionArgs(shape, _tuple(stride, axes), _tuple(numeric, axes), _tuple(dilation, axes), groups)
    if isinstance(padding, str) and "weight" in use.wanted:
        input, pads = _padded(input, padding, args)
        args = replace(args, padding=pads)
    return _grads(use, grad, input, args)


def transposed(
    use: Use,
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Grads:
    """Gradients of weight and bias in conv_transpose1d, conv_transpose2d and conv_transpose3d."""
    axes = len(use.output) - 2
    shape = tuple(use.shapes.get("weight", ()))
    strides, pads, dilations = (_tuple(value, axes) for value in (stride, padding, dilation))
    return _grads(
        use, grad, input, ConvolutionArgs(shape, strides, pads, dilations, groups, True, _tuple(output_padding, axes))
    )


NEEDS: dict[str, tuple[str, ...]] = {"weight": ("input",), "bias": ()}
RULES = (
    Rule((F.conv1d, F.conv2d, F.conv3d), convolution, NEEDS, form),
    Rule((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), transposed, NEEDS, form),
)
