"""Convolutions of 1, 2 and 3 axes, grouped, dilated, transposed. `grad_i` is torch's own weight gradient of sample i.

May import: its folder, batches, rng and below. Trusted: yes.

Gradients of many samples are formed by one convolution whose groups are the samples.
Axis letters: B samples, m images of one sample, C and P channels, G groups, T positions, S cells of the input.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfunc.engines import _numerics as numerics
from dpfunc.engines._numerics import Costs, Kernel, Measured, matrix, summed, to_accumulation_dtype
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

    def weight_grad(self, g_NP: Tensor, x_NC: Tensor, copies: int = 1, memory: Tensor | None = None) -> Tensor:
        """torch's gradient of the weight, summed over N; with `copies` samples side by side on the channel axis."""
        shape = (copies * self.shape[0], *self.shape[1:])
        weight = x_NC.new_empty(shape) if memory is None else memory.view(shape)
        output_padding = self.output_padding or (0,) * len(self.stride)
        options = (self.stride, self.padding, self.dilation, self.transposed, output_padding, copies * self.groups)
        wanted = [False, True, False]
        grad: Tensor = torch.ops.aten.convolution_backward(g_NP, x_NC, weight, None, *options, wanted)[1]
        return grad

    def unfolded(self, values: Tensor, sizes: Sequence[int]) -> Tensor:
        """Windows (n, c * taps, m * T) of values (n, c, m, *cells), copied."""
        axes = len(sizes)
        reach = [
            (size - 1) * step + (taps - 1) * dilation + 1
            for size, step, taps, dilation in zip(sizes, self.stride, self.shape[2:], self.dilation, strict=True)
        ]
        cells = zip(reach, self.padding, values.shape[3:], strict=True)  # negative: cells that no window reaches
        sides = [(pad, length - pad - count) for length, pad, count in cells]
        ends = [side for pair in reversed(sides) for side in pair]
        windows = F.pad(values, ends) if any(ends) else values
        for axis, (taps, gap, step) in enumerate(zip(self.shape[2:], self.dilation, self.stride, strict=True), 3):
            windows = windows.unfold(axis, (taps - 1) * gap + 1, step)[..., ::gap]
        windows = windows.movedim(list(range(3 + axes, 3 + 2 * axes)), list(range(2, 2 + axes)))
        return windows.flatten(2 + axes).flatten(1, 1 + axes)

    def taps_by_residue(self, axis: int) -> dict[int, list[int]]:
        """The taps of one axis by the cells that they read, `t s + k` with `k = r + s o`: r -> each o."""
        offsets: dict[int, list[int]] = {}
        for tap in range(self.shape[2 + axis]):
            offset, residue = divmod(tap * self.dilation[axis] - self.padding[axis], self.stride[axis])
            offsets.setdefault(residue, []).append(offset)
        return offsets

    def over_taps(self, values: Tensor, axis: int, size: int, offsets: Sequence[int]) -> Tensor:
        """Sums of `values[t + o, u + o]` over the offsets o on one axis of the cells, for all positions t and u."""
        first, second = 2 + axis, 3 + len(self.stride) + axis
        shape = list(values.shape)
        shape[first] = shape[second] = size
        sums = values.new_zeros(shape)
        for offset in offsets:
            start, length = max(0, -offset), min(size, values.shape[first] - offset) - max(0, -offset)
            if length > 0:  # elsewhere the tap meets nothing but padding
                written, read = sums, values
                for both in (first, second):
                    written, read = written.narrow(both, start, length), read.narrow(both, start + offset, length)
                written.add_(read)
        return sums


@dataclass(frozen=True)
class Convolved:
    """B gradients of one kernel: from g (B, m, P, ...) and x (B, m, C, ...)."""

    g_BmP: Tensor
    x_BmC: Tensor
    args: ConvolutionArgs

    def dense(self) -> Tensor:
        """One convolution with B times the groups; of many numbers in pieces, whose memory is used again."""
        g_BmP, x_BmC = to_accumulation_dtype(self.g_BmP), to_accumulation_dtype(self.x_BmC)
        size = self._piece()
        if size >= len(g_BmP):
            return self._formed(g_BmP, x_BmC)
        grads_B = g_BmP.new_empty(len(g_BmP), *self.args.shape)
        for rows, g, x in zip(*(torch.split(each, size) for each in (grads_B, g_BmP, x_BmC)), strict=True):
            rows.copy_(self._formed(g, x, rows))
        return grads_B

    def _piece(self) -> int:
        """Samples whose gradients have no more than _PIECE numbers; one at least."""
        return max(1, _PIECE // max(1, math.prod(self.args.shape)))

    def _formed(self, g_BmP: Tensor, x_BmC: Tensor, memory: Tensor | None = None) -> Tensor:
        if not len(g_BmP):
            return g_BmP.new_zeros(0, *self.args.shape)
        g_mBP, x_mBC = g_BmP.transpose(0, 1).flatten(1, 2), x_BmC.transpose(0, 1).flatten(1, 2)
        return torch.unflatten(self.args.weight_grad(g_mBP, x_mBC, len(g_BmP), memory), 0, (len(g_BmP), -1))

    def measure(self) -> Measured:
        """Norms, in pieces that bound the memory."""
        if not len(self.g_BmP):
            return Measured(to_accumulation_dtype(self.g_BmP.new_zeros(0)))
        kernel, costs = self.kernel(), self.kernel().costs()
        numbers = self.args.groups * (kernel.cells**2 + kernel.positions**2) if costs.ghost_pays else costs.numbers
        run = self._ghost if costs.ghost_pays else self._formed_and_measured

        def measure(g_BmP: Tensor, x_BmC: Tensor) -> Measured:
            return run(to_accumulation_dtype(g_BmP), to_accumulation_dtype(x_BmC))

        return numerics.in_pieces(measure, numbers, self.g_BmP, self.x_BmC, limit=_PIECE)

    def kernel(self) -> Kernel:
        moved, still = self._sides(self.g_BmP, self.x_BmC)
        images = moved.shape[1]
        positions, cells = (images * math.prod(side.shape[3:]) for side in (still, moved))
        return Kernel(positions, cells, self.args.shape, self.args.stride, self.args.groups)

    def _sides(self, g_BmP: Tensor, x_BmC: Tensor) -> tuple[Tensor, Tensor]:
        """The side that the kernel moves over, and the one with a value for each of its positions."""
        return (g_BmP, x_BmC) if self.args.transposed else (x_BmC, g_BmP)

    def _formed_and_measured(self, g_BmP: Tensor, x_BmC: Tensor) -> Measured:
        norms_B = numerics.norms_of_rows(self._formed(g_BmP, x_BmC).flatten(1))
        return numerics.of_parts(norms_B, self._reach(g_BmP, x_BmC))

    def _reach(self, g_BmP: Tensor, x_BmC: Tensor) -> Tensor:
        """`sum_t |g_t| |x_t|` with the windows x_t, of the groups together."""
        args, axes = self.args, len(self.args.stride)
        (moved, scale_B), (still, other_B) = (_scaled(side, args.groups) for side in self._sides(g_BmP, x_BmC))
        ones = moved.new_ones(args.groups, 1, *args.shape[2:])
        windows = _CONVOLUTIONS[axes - 1](moved, ones, None, args.stride, args.padding, args.dilation, args.groups)
        for axis, size in enumerate(still.shape[2:], 2):
            windows = windows.narrow(axis, 0, size)  # output_padding may reach further
        reach_BG = torch.unflatten((windows * still).sqrt().flatten(2).sum(2), 0, (len(g_BmP), -1)).sum(1)
        return numerics.lengths(reach_BG, 1) / scale_B / other_B

    def _ghost(self, g_BmP: Tensor, x_BmC: Tensor) -> Measured:
        """`sum_{t,u} (g_t . g_u)(x_t . x_u)` with the windows x_t, whose products are sums over the taps.

        Bu et al. 2022, Scalable and Efficient Training of Large Convolutional Neural Networks with Differential
        Privacy, section 3.
        """
        moved, still = (self._by_group(side) for side in self._sides(g_BmP, x_BmC))
        numbers = math.prod(self.args.shape) // self.args.groups // still.shape[1]
        windows = self._of_windows(moved, still.shape[3:])
        by_group = numerics.of_pairs(windows, _products(still), max(numbers, still.shape[1]))
        return Measured(*(each.unflatten(0, (len(g_BmP), -1)).norm(dim=1) for each in by_group if each is not None))

    def _by_group(self, side: Tensor) -> Tensor:
        """(B, m, G * c, ...) -> (B * G, c, m, ...)."""
        return torch.unflatten(side, 2, (self.args.groups, -1)).transpose(1, 2).transpose(2, 3).flatten(0, 1)

    def _of_windows(self, moved: Tensor, sizes: Sequence[int]) -> Tensor:
        """Products of all windows of a sample with each other, (n, m * T, m * T)."""
        kernel = self.kernel()
        if kernel.unfolded() <= kernel.by_cells():
            windows = self.args.unfolded(moved, sizes)
            return windows.transpose(1, 2) @ windows
        by_axis = [self.args.taps_by_residue(axis) for axis in range(len(sizes))]
        parts = [self._over_taps(moved, sizes, by_axis, residues) for residues in product(*by_axis)]
        return reduce(Tensor.add_, parts)

    def _over_taps(
        self, moved: Tensor, sizes: Sequence[int], by_axis: Sequence[Mapping[int, Sequence[int]]],
        residues: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """Products of windows, over the taps that read the cells of these residues."""
        picked = tuple(slice(residue, None, step) for residue, step in zip(residues, self.args.stride, strict=True))
        cells = moved[(slice(None),) * 3 + picked]
        products = _products(cells).reshape(len(cells), *cells.shape[2:], *cells.shape[2:])
        for axis, (size, residue, offsets) in enumerate(zip(sizes, residues, by_axis, strict=True)):
            products = self.args.over_taps(products, axis, size, offsets[residue])
        positions = moved.shape[2] * math.prod(sizes)
        return products.reshape(len(cells), positions, positions)

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
        return summed(sum(math.prod(shape) for shape in use.shapes.values()))
    args, size = _args(use), use.output.numel() // max(1, use.num_samples * use.output[1])
    if args.apart:
        return matrix(size, args.shape[0], math.prod(args.shape[1:]))
    moves = math.prod(args.stride)
    positions, cells = (size // moves, size) if args.transposed else (size, size * moves)
    return Kernel(positions, cells, args.shape, args.stride, args.groups).costs()


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
