"""Functions that give numbers of tensors to Python without an operation that shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.overrides import TorchFunctionMode

READING = frozenset(
    (
        Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__, Tensor.untyped_storage,
        Tensor.storage, Tensor.__repr__, Tensor.__format__, Tensor.__reduce_ex__, Tensor.__deepcopy__,
    )
)  # fmt: skip
SIZES = frozenset((Tensor.shape.__get__, Tensor.size, Tensor.__len__, Tensor.numel, Tensor.nelement))  # type: ignore[attr-defined]  # descriptors


class _Reader(Protocol):
    """Receiver of notes about values that Python was given."""

    def note_read(self, what: str, value: Tensor, result: object) -> None:
        """Note that Python was given numbers of a tensor."""
        ...

    def note_shape_read(self, value: Tensor) -> None:
        """Note that Python was given the shape of a tensor."""
        ...


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
        result = func(*args, **(kwargs or {}))
        if func in READING and isinstance(args[0], Tensor):
            self.reader.note_read(func.__name__, args[0], result)
        return result
