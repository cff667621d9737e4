"""Operations along axes: reductions, softmax, sorting, scans, flips, Fourier transforms.

They combine the positions of some axes, and leave the others alone: rows on another axis stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from dpfunc.engines.tracing.call import Aligned, Call, Handler, Single, Type, broadcast, combined, shaped_too
from dpfunc.engines.tracing.families.aligning import beside_matrices
from dpfunc.engines.tracing.rows import ONE_SAMPLE, Mixed, Rows, axes_of, samples_by_position, shuffled, slots_of


def _reduced(kind: Type, ndim: int, axes: Sequence[int], keepdim: bool, mixed: Mixed) -> Type:
    """The type after axes were reduced."""
    if not isinstance(kind, Rows):
        return kind
    if kind.axis == ONE_SAMPLE:
        return kind
    if kind.axis in axes:
        return mixed
    return kind if keepdim else kind.moved(kind.axis - sum(axis < kind.axis for axis in axes))


def _reduction(dim: int = 1, keepdim: int | None = 2, agrees: bool | None = None) -> Single:
    """A reduction of the first argument over the axes that the argument `dim` names, all if it is not given."""

    def handler(call: Call) -> Type:
        input: Tensor = call.args[0]
        given = call.arg(dim, "dim")
        named = isinstance(given, (int, list, tuple)) and not isinstance(given, bool)
        axes = axes_of(given if named else None, input.ndim)
        keeps = bool(call.arg(keepdim, "keepdim", False)) if keepdim is not None else False
        mixed = call.mixed("over the batch")._replace(agrees=agrees)
        return _reduced(call.type_of(input), input.ndim, axes, keeps, mixed)

    return handler


def _whole_reduction(call: Call) -> Type:
    """A reduction of everything to one number."""
    if len(call.args) > 1 and isinstance(call.args[1], (int, list, tuple)):  # max.dim and others of the same name
        return _reduction()(call)
    input: Tensor = call.args[0]
    if len(call.args) > 1 and isinstance(call.args[1], Tensor):  # max.other
        return combined(call, [broadcast(tensor, call.out.ndim) for tensor in call.inputs])
    if "dim" in call.kwargs:
        return _reduction()(call)
    return _reduced(call.type_of(input), input.ndim, axes_of(None, input.ndim), False, call.mixed("over the batch"))


def _truth_value(agrees: bool) -> Handler:
    """`all` and `any`: the result keeps the value that implies the same value for each sample alone."""
    return _reduction(agrees=agrees)


def _along(*dims: int, names: Sequence[str] = ("dim", "dims"), default: int | None = None, tensors: int = 1) -> Single:
    """An operation on its first tensors that combines the positions of the axes in an argument and keeps the shape."""

    def handler(call: Call) -> Type:
        operands = [value for value in call.args[:tensors] if isinstance(value, Tensor)]
        given = next((call.args[dim] for dim in dims if len(call.args) > dim), None)
        for name in names:
            given = call.kwargs.get(name, given)
        given = default if given is None else given
        ndim = operands[0].ndim
        axes = axes_of(given, ndim) if not isinstance(given, bool) else axes_of(None, ndim)
        return combined(call, [broadcast(operand, ndim) for operand in operands], axes)

    return handler


def _last_axes(count: int, tensors: int = 8) -> Handler:
    """An operation that combines the last axes of its tensors: triangles, matrices."""

    def handler(call: Call) -> Type:
        operands = [value for value in call.inputs if value.ndim >= count][:tensors]
        if any(call.type_of(value) is not None for value in call.inputs if value.ndim < count):
            return call.mixed("of a vector")
        ndim = max(operand.ndim for operand in operands)
        return combined(call, [broadcast(operand, ndim) for operand in operands], range(ndim - count, ndim))

    return handler


def _sorting(call: Call) -> Type | list[Type]:
    """sort, and sort.stable, whose second argument says whether it is stable.

    Rows of numbers sorted among all: the values are each of their own sample, in an order that depends on all.
    """
    kind = call.type_of(call.args[0])
    if isinstance(kind, Rows) and kind.axis == 0 and call.args[0].ndim == 1 and isinstance(call.out, (tuple, list)):
        return _sorted_among_all(call, kind, *call.out)
    position = 1
    if len(call.args) > 1 and isinstance(call.args[1], bool) and "dim" not in call.kwargs:
        position = 2
    return _along(position, default=-1)(call)


def _sorted_among_all(call: Call, kind: Rows, values: Tensor, positions: Tensor) -> Type | list[Type]:
    """The types of sorted numbers, one a row, and of the positions that they had."""
    if kind.slots is not None or kind.doubt:
        return call.mixed()
    order, count = positions.cpu(), call.types.num_samples
    slots, of = slots_of(kind, count)
    if not values.is_floating_point():
        call.types.keep_integers(values)
    return [shuffled(samples_by_position(kind)[order], 0, slots[order], of, count, False), call.mixed()]


def _least_squares(call: Call) -> list[Type]:
    """`lstsq(A, B, rcond, *, driver)`: some drivers give residuals only where all matrices have full rank."""
    one, other = call.args[:2]
    ndim = max(one.ndim, other.ndim)
    kind = combined(call, [beside_matrices(each, one, ndim) for each in (one, other)], (ndim - 2, ndim - 1))
    by_rank = call.kwargs.get("driver") in ("gelss", "gelsd") and kind is not None
    residuals = shaped_too(call.mixed("whose residuals depend on all ranks")) if by_rank else kind
    return [kind, residuals, *[kind] * (len(call.out) - 2)]


def _pseudoinverse(call: Call) -> Type:
    """`pinv(A, atol, rtol)`: a tolerance has the axes of A (..., n, m) before the last two, so (...,)."""
    matrices, ndim = call.args[0], call.out.ndim

    def of_matrices(tolerance: Tensor) -> Aligned:
        shift = ndim - 2 - tolerance.ndim
        return Aligned(tolerance, lambda axis: axis + shift, lambda axis: axis - shift if axis < ndim - 2 else -1)

    operands = [broadcast(each, ndim) if each is matrices else of_matrices(each) for each in call.inputs]
    return combined(call, operands, (ndim - 2, ndim - 1))


def _cumulative(call: Call) -> Type:
    """Scans along an axis, as cumsum: its positions are combined."""
    return _along(1)(call)


def _glu(call: Call) -> Type:
    """The halves of one axis are multiplied."""
    input: Tensor = call.args[-2] if isinstance(call.args[-1], int) and len(call.args) > 2 else call.args[0]
    dim = call.args[-1] if isinstance(call.args[-1], int) else -1
    tensors = call.inputs
    return combined(call, [broadcast(tensor, input.ndim) for tensor in tensors], axes_of(dim, input.ndim))


def _renorm(call: Call) -> Type:
    """Norms of the slices along an axis: everything but that axis is combined."""
    input: Tensor = call.args[0]
    (kept,) = axes_of(call.args[2], input.ndim)
    return combined(call, [broadcast(input, input.ndim)], [axis for axis in range(input.ndim) if axis != kept])


def _vector_norm(call: Call) -> Type:
    """`linalg_vector_norm(x, ord, dim, keepdim)` and `norm(x, p, dim, keepdim)`."""
    return _reduction(2, 3)(call)


def _topk(call: Call) -> Type:
    """`_topk(x, k, dim)`, `kthvalue(x, k, dim, keepdim)`."""
    input: Tensor = call.args[0]
    dim = call.arg(2, "dim", -1)
    kind = combined(call, [broadcast(input, input.ndim)], axes_of(dim, input.ndim))
    if call.name == "kthvalue" and isinstance(kind, Rows) and not call.arg(3, "keepdim", False):
        return _reduced(kind, input.ndim, axes_of(dim, input.ndim), False, call.mixed())
    return kind


def _selecting(handler: Handler) -> Handler:
    """Medians: torch partitions in place a copy that keeps the strides, which is wrong where numbers share memory."""

    def checked(call: Call) -> object:
        input: Tensor = call.args[0]
        shared = any(stride == 0 and size > 1 for stride, size in zip(input.stride(), input.shape, strict=True))
        if shared and call.type_of(input) is not None:
            return call.mixed("of numbers that share memory")
        return handler(call)

    return checked


_SOFTMAX_BACKWARD = _along(2, tensors=2)
FAMILY: dict[str, Callable[[Call], object]] = {
    **dict.fromkeys(
        ("sum", "mean", "nansum", "nanmean", "amax", "amin", "argmax", "argmin", "logsumexp", "count_nonzero", "var",
         "std", "var_mean", "std_mean"),
        _reduction(),
    ),
    **dict.fromkeys(("mode", "nanmedian"), _selecting(_reduction())),
    **dict.fromkeys(("max", "min", "prod", "aminmax"), _whole_reduction),
    "median": _selecting(_whole_reduction),
    "all": _truth_value(True),
    "any": _truth_value(False),
    "_is_all_true": _truth_value(True),
    "_is_any_true": _truth_value(False),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _vector_norm),
    **dict.fromkeys(
        ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "_softmax", "_log_softmax", "_safe_softmax",
         "_cummax_helper", "_cummin_helper"),
        _cumulative,
    ),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _SOFTMAX_BACKWARD),
    "sort": _sorting,
    "argsort": _sorting,
    "msort": _along(default=0),
    "topk": _topk,
    "kthvalue": _selecting(_topk),
    "flip": _along(1),
    "roll": _along(2),
    "glu": _glu,
    "glu_backward": _glu,
    "renorm": _renorm,
    "tril": _last_axes(2),
    "triu": _last_axes(2),
    **dict.fromkeys(("_fft_r2c", "_fft_c2c", "_fft_c2r"), _along(1)),
    **dict.fromkeys(
        ("linalg_cholesky_ex", "linalg_inv_ex", "linalg_qr", "_linalg_svd", "_linalg_eigh", "_linalg_det",
         "linalg_matrix_exp", "_linalg_slogdet", "linalg_eig", "linalg_lu_factor_ex", "cholesky_inverse",
         "_cholesky_solve_helper"),
        _last_axes(2),
    ),
    "linalg_pinv": _pseudoinverse,
    "linalg_lstsq": _least_squares,
}  # fmt: skip
