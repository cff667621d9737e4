"""Convolutions of 1, 2 and 3 axes, grouped, dilated, transposed. `grad_i` is torch's own weight gradient of sample i.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

Gradients of many samples are formed by one convolution whose groups are the samples.
Axis letters: B samples, m images of one sample, C and P channels, G groups, T positions.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines import _numerics as numerics
from dpfunc.engines._numerics import Costs, Measured, kernel_cost, matrix_cost, sum_cost, to_accumulation_dtype
from dpfunc.engines._per_sample import Dense, Outer, PerSampleGrad
from dpfunc.engines._rules.table import REQUIRED, Bound, Form, Grads, ParameterUse, Rule, of_axes, shaped

# Numbers that may be formed at a time: 1 MiB of float32. torch needs up to three times as much, and small pieces stay
# in the caches of a processor.
_PIECE = numerics.SCRATCH // 16

_Sizes = int | Sequence[int]


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

    @property
    def apart(self) -> bool:
        """True if each cell is in one window at most, and no window beyond them: a matrix at each position."""
        spans = [(taps - 1) * gap + 1 for taps, gap in zip(self.shape[2:], self.dilation, strict=True)]
        overlap = any(span > step for span, step in zip(spans, self.stride, strict=True))
        return not (overlap or self.transposed or any(self.padding) or self.groups > 1)

    def costs(self, size: int) -> Costs:
        """Costs of one sample's gradient, whose result has so many positions, of all images."""
        moves = math.prod(self.stride)
        positions, cells = (size // moves, size) if self.transposed else (size, size * moves)
        return kernel_cost(positions, cells, moves, self.shape, self.groups)

    def weight_grad(self, g_NP: Tensor, x_NC: Tensor, copies: int = 1, memory: Tensor | None = None) -> Tensor:
        """torch's gradient of the weight, summed over N; with `copies` samples side by side on the channel axis."""
        shape = (copies * self.shape[0], *self.shape[1:])
        weight = x_NC.new_empty(shape) if memory is None else memory.view(shape)
        output_padding = self.output_padding or (0,) * len(self.stride)
        options = (self.stride, self.padding, self.dilation, self.transposed, output_padding, copies * self.groups)
        wanted = [False, True, False]
        grad: Tensor = torch.ops.aten.convolution_backward(g_NP, x_NC, weight, None, *options, wanted)[1]
        return grad

    def of_windows(self, moved: Tensor, sizes: Sequence[int]) -> Tensor:
        """Products (n, m * T, m * T) of all windows of values (n, c, m, ...): sums over taps of products of cells.

        Two windows meet at cells that are a multiple of the stride apart: one product for each rest of the division.
        """
        axes = list(zip(sizes, self.shape[2:], self.stride, self.dilation, self.padding, moved.shape[3:], strict=True))
        counts = [size + (taps - 1) * gap // step for size, taps, step, gap, *_ in axes]
        ends = [(pad, own * step - pad - cells) for own, (_, _, step, _, pad, cells) in zip(counts, axes, strict=True)]
        cells = F.pad(moved, [end for pair in reversed(ends) for end in pair])  # negative: cells that no window reaches
        for axis, step in enumerate(self.stride):
            cells = cells.unflatten(3 + 2 * axis, (-1, step)).movedim(4 + 2 * axis, 0)
        shape = (*cells.shape[: 1 + len(axes)], *(moved.shape[2], *counts) * 2)
        products = _products(cells.flatten(0, len(axes))).reshape(shape)
        for axis, (size, taps, step, gap, *_) in reversed(list(enumerate(axes))):
            places = [divmod(tap * gap, step) for tap in range(taps)]
            first, second = 2 * axis + 2, 2 * axis + 3 + len(axes)
            products = reduce(add, [products[r].narrow(first, at, size).narrow(second, at, size) for at, r in places])
        return products.flatten(1, 1 + len(axes)).flatten(2)


@dataclass(frozen=True)
class Convolved:
    """B gradients of one kernel: from g (B, m, P, ...) and x (B, m, C, ...)."""

    g_BmP: Tensor
    x_BmC: Tensor
    args: ConvolutionArgs

    def _pieces(self, numbers: int) -> Iterator["Convolved"]:
        """Some samples at a time, of which so many numbers each are formed."""
        for g_BmP, x_BmC in numerics.in_pieces(numbers, self.g_BmP, self.x_BmC, limit=_PIECE):
            yield Convolved(g_BmP, x_BmC, self.args)

    def dense(self) -> Tensor:
        """Weight gradients of all samples, of many numbers in pieces."""
        size = math.prod(self.args.shape)
        if len(self.g_BmP) * size <= _PIECE:
            return self._formed()
        dtype = numerics.accumulation_dtype(self.g_BmP.dtype)
        grads_B = self.g_BmP.new_empty(len(self.g_BmP), *self.args.shape, dtype=dtype)
        for (rows,), own in zip(numerics.in_pieces(size, grads_B, limit=_PIECE), self._pieces(size), strict=True):
            rows.copy_(own._formed(rows))
        return grads_B

    def _formed(self, memory: Tensor | None = None) -> Tensor:
        """One convolution with B times the groups; it may use the memory of its result."""
        g_BmP, x_BmC = to_accumulation_dtype(self.g_BmP), to_accumulation_dtype(self.x_BmC)
        if not len(g_BmP):
            return g_BmP.new_zeros(0, *self.args.shape)
        g_mBP, x_mBC = g_BmP.transpose(0, 1).flatten(1, 2), x_BmC.transpose(0, 1).flatten(1, 2)
        return torch.unflatten(self.args.weight_grad(g_mBP, x_mBC, len(g_BmP), memory), 0, (len(g_BmP), -1))

    def measure(self) -> Measured:
        """Norms, in pieces that bound the memory."""
        if not len(self.g_BmP):
            return Measured(to_accumulation_dtype(self.g_BmP.new_zeros(0)))
        size, numbers = self.g_BmP.shape[1] * math.prod(self.g_BmP.shape[3:]), math.prod(self.args.shape)
        if not self.args.costs(size).ghost_pays:
            return numerics.concatenated([own._formed_and_measured() for own in self._pieces(numbers)])
        moves = math.prod(self.args.stride)
        numbers = self.args.groups * (-(-(size**2) // moves) if self.args.transposed else size**2 * moves)
        return numerics.concatenated([own._ghost() for own in self._pieces(numbers)])

    def _ghost(self) -> Measured:
        """`sum_{t,u} (g_t . g_u)(x_t . x_u)` with the windows x_t.

        Bu et al. 2022, Scalable and Efficient Training of Large Convolutional Neural Networks with Differential
        Privacy, section 3.
        """
        groups = self.args.groups
        wide = [torch.unflatten(to_accumulation_dtype(side), 2, (groups, -1)) for side in self._sides()]
        moved, still = (side.movedim(1, 3).flatten(0, 1) for side in wide)  # (B * G, c, m, ...)
        numbers = max(math.prod(self.args.shape[1:]), still.shape[1])
        by_group = numerics.of_pairs(self.args.of_windows(moved, still.shape[3:]), _products(still), numbers)
        return Measured(*(each.unflatten(0, (-1, groups)).norm(dim=1) for each in by_group if each is not None))

    def _sides(self) -> tuple[Tensor, Tensor]:
        """The side that the kernel moves over, and the one with a value for each of its positions."""
        return (self.g_BmP, self.x_BmC) if self.args.transposed else (self.x_BmC, self.g_BmP)

    def _formed_and_measured(self) -> Measured:
        """Norms, and `sum_t |g_t| |x_t|` with the windows x_t, of the groups together."""
        args, axes = self.args, len(self.args.stride)
        sides = (_scaled(to_accumulation_dtype(side), args.groups) for side in self._sides())
        (moved, scale_B), (still, other_B) = sides
        ones = moved.new_ones(args.groups, 1, *args.shape[2:])
        windows = _CONVOLUTIONS[axes - 1](moved, ones, None, args.stride, args.padding, args.dilation, args.groups)
        for axis, size in enumerate(still.shape[2:], 2):
            windows = windows.narrow(axis, 0, size)  # output_padding may reach further
        reach_BG = torch.unflatten((windows * still).sqrt().flatten(2).sum(2), 0, (len(scale_B), -1)).sum(1)
        norms_B = numerics.norms_of_rows(self._formed().flatten(1))
        return numerics.of_parts(norms_B, numerics.lengths(reach_BG, 1) / scale_B / other_B)

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        """One weight gradient of all samples."""
        g_BmP, x_BmC = to_accumulation_dtype(self.g_BmP), to_accumulation_dtype(self.x_BmC)
        if not len(g_BmP):
            return g_BmP.new_zeros(self.args.shape)
        scale_B = factors_B.to(g_BmP.dtype).reshape(-1, *(1,) * (g_BmP.ndim - 1))
        g_BmP, x_BmC = (g_BmP * scale_B, x_BmC) if g_BmP.numel() <= x_BmC.numel() else (g_BmP, x_BmC * scale_B)
        return self.args.weight_grad(g_BmP.flatten(0, 1), x_BmC.flatten(0, 1))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.args.shape


def _scaled(side: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Squared norms over the channels of each group, of samples times a power of two: none is lost or infinite."""
    squares = torch.unflatten(side.flatten(0, 1), 1, (groups, -1)).square().sum(2)
    peaks_B = squares.reshape(len(side), -1).amax(1)
    if side.device.type == "cpu" and bool(((peaks_B > 1e-20) & (peaks_B < 1e20)).all()):  # a device would have to wait
        return squares, torch.ones_like(peaks_B)
    peaks_B = torch.linalg.vector_norm(side.flatten(1), ord=torch.inf, dim=1)
    scale_B = torch.ldexp(torch.ones_like(peaks_B), -torch.frexp(peaks_B).exponent.clamp(-100, 100))
    scaled = side * scale_B.reshape(-1, *(1,) * (side.ndim - 1))
    return numerics.lengths(torch.unflatten(scaled.flatten(0, 1), 1, (groups, -1)), 2).square(), scale_B


def _products(side: Tensor) -> Tensor:
    """Products of all positions of a sample with each other, (n, m * T, m * T), from (n, c, m, ...)."""
    flat_ncT = side.flatten(2)
    return flat_ncT.transpose(1, 2) @ flat_ncT


def _args(use: ParameterUse) -> ConvolutionArgs:
    shape, options = tuple(use.shapes["weight"]), use.options
    stride, padding, dilation, beyond = (
        _per_axis(options.get(name, ()), len(shape) - 2) for name in ("stride", "padding", "dilation", "output_padding")
    )
    return ConvolutionArgs(shape, stride, padding, dilation, options["groups"], bool(beyond), beyond)


def _costs(use: ParameterUse) -> Costs:
    if "weight" not in use.shapes:
        return sum_cost(sum(math.prod(shape) for shape in use.shapes.values()))
    args, size = _args(use), use.output.numel() // max(1, use.num_samples * use.output[1])
    return matrix_cost(size, args.shape[0], math.prod(args.shape[1:])) if args.apart else args.costs(size)


def _per_axis(value: _Sizes, axes: int) -> tuple[int, ...]:
    """One number for each axis."""
    return (value,) * axes if isinstance(value, int) else tuple(value) * (axes if len(tuple(value)) == 1 else 1)


def _convolution(use: ParameterUse, grad: Tensor, input: Tensor, **_: Any) -> Grads:
    """Gradients of weight and bias; a transposed convolution has an output_padding."""
    grads: dict[str, PerSampleGrad] = {}
    g_BmP = use.split(grad)
    if "weight" in use.wanted:
        grads["weight"] = of_weight(g_BmP, use.split(input), _args(use))
    if "bias" in use.wanted:
        grads["bias"] = Dense(to_accumulation_dtype(g_BmP).sum([axis for axis in range(1, g_BmP.ndim) if axis != 2]))
    return grads


def of_weight(g_BmP: Tensor, x_BmC: Tensor, args: ConvolutionArgs) -> PerSampleGrad:
    """Gradients of a kernel; as those of a matrix where windows are apart: no row is then computed by itself."""
    if not args.apart:
        return Convolved(g_BmP, x_BmC, args)
    for axis, (taps, gap, step) in enumerate(zip(args.shape[2:], args.dilation, args.stride, strict=True), 3):
        x_BmC = x_BmC.unfold(axis, (taps - 1) * gap + 1, step)[..., ::gap]
    axes = len(args.stride)
    g_BTp, x_BTC = (side.movedim(2, 2 + axes).flatten(1, 1 + axes) for side in (g_BmP, x_BmC))
    return Outer(g_BTp, x_BTC.flatten(2), args.shape)


def _run(run: Callable[..., Tensor], bound: Bound) -> tuple[Tensor, Any]:
    return run(**bound), bound["input"].shape


def _input_grad(bound: Bound, grad: Tensor, shape: torch.Size) -> Tensor:
    weight, further = bound["weight"].to(grad.dtype), bound.get("output_padding")
    stride, padding, dilation, beyond = (
        _per_axis(value, weight.ndim - 2)
        for value in (bound["stride"], bound["padding"], bound["dilation"], further or 0)
    )
    given = bound["input"]  # only its shape counts: no copy where there is none
    like = grad.new_empty(1).expand(shape) if given is None else given
    options = (stride, padding, dilation, further is not None, beyond, bound["groups"], [True, False, False])
    found: Tensor = torch.ops.aten.convolution_backward(grad, like, weight, None, *options)[0]
    return found


def _are_numbers(value: Any, bound: Bound) -> bool:
    """True for one whole number, or one for each axis."""
    if isinstance(value, (tuple, list)):
        return len(value) in (1, bound["weight"].ndim - 2) and all(_is_number(each, bound) for each in value)
    return _is_number(value, bound)


def _is_number(value: Any, bound: Bound) -> bool:
    return isinstance(value, int)


def _is_padding(padding: Any, bound: Bound) -> bool:
    """True for a padding in numbers, and for words that are put as such in its place: "same" where it is symmetric."""
    if not isinstance(padding, str):
        return _are_numbers(padding, bound)
    axes = bound["weight"].ndim - 2
    dilation, stride = _per_axis(bound["dilation"], axes), _per_axis(bound["stride"], axes)
    totals = [step * (taps - 1) for step, taps in zip(dilation, bound["weight"].shape[2:], strict=True)]
    bound["padding"] = [0] * axes if padding == "valid" else [total // 2 for total in totals]
    symmetric = not any(total % 2 for total in totals) and set(stride) == {1}
    return padding == "valid" or (padding == "same" and symmetric)


def _rule(op: Callable[..., Tensor], axes: int, options: Mapping[str, Any]) -> Rule:
    arguments = {"input": REQUIRED, "weight": REQUIRED, "bias": None, "stride": 1, "padding": 0, **options}
    needs: dict[str, tuple[str, ...]] = {"weight": ("input",), "bias": ()}
    channels = 1 if "output_padding" in options else 0
    takes = {
        **dict.fromkeys(("stride", "dilation", "output_padding"), _are_numbers),
        "groups": _is_number,
        "input": of_axes(axes + 1, axes + 2),
        "weight": of_axes(axes + 2),
        "bias": shaped(lambda bound: (bound["weight"].shape[channels] * (bound["groups"] if channels else 1),)),
        "padding": _is_padding,
    }
    form = Form("input", partial(_run, op), _input_grad, takes, lambda bound: axes + 1)
    return Rule((op,), arguments, _convolution, needs, _costs, form)


_CONVOLUTIONS: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED: tuple[Callable[..., Tensor], ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
RULES = (
    *(_rule(op, axes, {"dilation": 1, "groups": 1}) for axes, op in enumerate(_CONVOLUTIONS, 1)),
    *(_rule(op, axes, {"output_padding": 0, "groups": 1, "dilation": 1}) for axes, op in enumerate(_TRANSPOSED, 1)),
)
