"""Operations that turn numbers into Python values or shapes, on which the rest of the step may depend."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dpfunc.engines.tracing.call import Call, Type, shaped_too
from dpfunc.engines.tracing.rows import is_shaped_by_values


def _read(call: Call) -> Type:
    """Note that Python was given a number, or the answer to a question about tensors."""
    for tensor in call.inputs:
        call.types.note_read(call.name, tensor, call.out)
    return None


def _by_values(call: Call) -> Type:
    """Results whose shapes depend on values: mixed where these depend on the batch."""
    if any(call.type_of(tensor) is not None for tensor in call.inputs):
        return call.mixed("whose shape depends on values of the batch")._replace(shaped=True)
    return None


def _checked(call: Call) -> Type:
    """Constant: checks that pass or raise have no result that could depend on rows."""
    return None


def _counted(call: Call) -> Type:
    """Counts of values in the whole tensor: mixed if it depends on the batch."""
    return call.mixed("over the batch") if any(call.type_of(t) is not None for t in call.inputs) else None


def _counted_to_the_largest(call: Call) -> Type:
    """`(integers, weights, minlength)`: as many counts as the largest value says, or `minlength` for each row alone."""
    kind, least = _counted(call), call.arg(2, "minlength", 0)
    return shaped_too(kind) if len(call.out) != least else kind


def _tensor_of_shape(call: Call) -> Type:
    """Numbers that follow from shapes alone."""
    shaped = any(is_shaped_by_values(call.type_of(tensor)) for tensor in call.inputs)
    return call.mixed("of a tensor whose shape depends on values of the batch") if shaped else None


FAMILY: dict[str, Callable[[Call], object]] = {
    **dict.fromkeys(("_local_scalar_dense", "item", "equal", "is_nonzero", "allclose"), _read),
    **dict.fromkeys(
        ("nonzero_static", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive"), _by_values
    ),
    **dict.fromkeys(("histc", "histogram"), _counted),
    "bincount": _counted_to_the_largest,
    **dict.fromkeys(("_assert_async", "_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range"), _checked),
    **dict.fromkeys(("sym_size", "sym_numel", "_shape_as_tensor"), _tensor_of_shape),
}
__all__ = ["FAMILY", "Tensor"]
