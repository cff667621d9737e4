"""Functions that give numbers of tensors to Python without an operation that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpfunc.engines.tracing.call import tensors_of

READING = frozenset(
    (
        Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__, Tensor.untyped_storage,
        Tensor.storage, Tensor.__repr__, Tensor.__format__, Tensor.__reduce_ex__, Tensor.__deepcopy__,
    )
)  # fmt: skip
ERRORS = (RuntimeError, IndexError, ValueError, TypeError)
"""Errors that functions of torch raise."""
# Names of those whose result shares the memory of the tensor, so that it can be written into without an operation.
SHARING = frozenset(("numpy", "__array__", "data_ptr", "__dlpack__", "untyped_storage", "storage"))
_INDEXING = frozenset((Tensor.__getitem__, Tensor.__setitem__))
_CONVERTING = frozenset((Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__bool__, Tensor.__complex__))
# They read numbers of arguments from this position on; the last three also give them to Python functions, and write.
READING_INSIDE: Mapping[object, int] = {
    torch.tensor_split: 1, Tensor.tensor_split: 1, torch.tensordot: 2,
    Tensor.apply_: 0, Tensor.map_: 0, Tensor.map2_: 0,
}  # fmt: skip
SIZES = frozenset((
    Tensor.shape.__get__, Tensor.size, Tensor.__len__, Tensor.numel, Tensor.nelement, torch.numel,  # type: ignore[attr-defined]  # descriptors
))  # fmt: skip
# Their results, which are no tensors, say nothing about a shape, or read numbers and are noted by these.
_WITHOUT_SHAPE = frozenset((
    "requires_grad", "is_leaf", "retains_grad", "ndim", "dim", "ndimension", "itemsize", "element_size", "get_device",
    "output_nr", "_version", "type", "name", "names", "backward", "data_ptr", "item", "tolist", "equal", "allclose",
    "__contains__", "__hash__", "dtype", "device", "layout", "is_floating_point", "is_complex", "is_signed",
    "is_inference", "is_conj", "is_neg", "is_nonzero", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse",
    "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_pinned", "is_shared", "is_distributed",
))  # fmt: skip
# Their results have the shape of another tensor, and perhaps no numbers of it.
_AS_ANOTHER = frozenset(("expand_as", "view_as", "reshape_as", "_shape_as_tensor"))


class _Reader(Protocol):
    """Receiver of notes about values that Python was given; see `Trace` for its counts of operations."""

    lifted: int
    given: int
    ragged: bool

    def note_read(self, what: str, value: Tensor, result: object) -> None:
        """Note that Python was given numbers of a tensor."""
        ...

    def note_shape_read(self, value: Tensor) -> None:
        """Note that Python was given the shape of a tensor."""
        ...

    def note_code_inside(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note that code of others may have run inside of a function, where no mode sees what it reads."""
        ...


def noting_reads(reader: _Reader, call: Callable[..., Any], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The result of `call(func, args, kwargs)`; numbers of tensors that `func` reads without an operation are noted.

    It reads those in lists of which it makes a tensor, and those that constructors such as `torch.FloatTensor` take.
    """
    lifted, given = reader.lifted, reader.given
    reader.note_code_inside(func, args, kwargs)
    try:
        result = call(func, args, kwargs)
    except ERRORS:  # the loss may catch it, and has learnt a shape
        for tensor in tensors_of((*args, *kwargs.values())):
            reader.note_shape_read(tensor)
        raise
    found: list[Tensor] = []
    if reader.lifted != lifted:
        values = (*args, *kwargs.values())
        if func in _INDEXING:
            values = args[1] if isinstance(args[1], tuple) else args[1:2]
        found += tensors_of(value for value in values if isinstance(value, (list, tuple)))
    if func in _CONVERTING and reader.given == given:
        found.append(args[0])
    if func in READING_INSIDE:
        found += tensors_of((*args[READING_INSIDE[func] :], *_but_inputs(kwargs)))
    for tensor in found:
        reader.note_read(name_of(func), tensor, result)
    if reader.ragged and func not in SIZES and _tells_a_shape(func, result):
        for tensor in tensors_of((*args, *kwargs.values())):
            reader.note_shape_read(tensor)
    return result


def _tells_a_shape(func: Callable[..., Any], result: object) -> bool:
    """True if Python may learn a shape from a result: a value, the length of a list, or the shape of other numbers."""
    name = name_of(getattr(func, "__self__", func) if name_of(func) == "__get__" else func)
    if isinstance(result, Tensor):
        return name in _AS_ANOTHER
    known = func in READING or func in _CONVERTING or name in _WITHOUT_SHAPE
    return not known and (isinstance(result, (bool, int, float, str, Iterator)) or type(result) in (tuple, list))


def _but_inputs(kwargs: Mapping[str, Any]) -> Sequence[Any]:
    return [value for name, value in kwargs.items() if name not in ("input", "self", "a", "b", "out")]


def name_of(func: Callable[..., Any]) -> str:
    """The name of a function, for messages and tables."""
    return getattr(func, "__name__", str(func))


class PythonValues(TorchFunctionMode):
    """Mode that notes what Python is given, where no tracker is active."""

    def __init__(self, reader: _Reader) -> None:
        super().__init__()
        self.reader = reader

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = noting_reads(self.reader, _called, func, args, kwargs or {})
        if func in READING and isinstance(args[0], Tensor):
            self.reader.note_read(name_of(func), args[0], result)
        return result


def _called(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(*args, **kwargs)
