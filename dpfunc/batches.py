"""The arguments of a step: batches as pytrees, with their length and rows; parameters, with their kind and numbers.

May import: types and below. Privacy depends on it: yes.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from dpfunc._utils.digests import checksum_and_marks, in_hex
from dpfunc._utils.parts import local
from dpfunc._utils.processes import on_any_process
from dpfunc._utils.validation import expect, refuse, shorten
from dpfunc.errors import InvalidArgument, UnsupportedModel
from dpfunc.types import Batch, LossFn, Params

_Found = TypeVar("_Found")

_ROWS = (
    "If it belongs to the records, make a tensor of it with one row a record (collate_fn of plan.loader; lists of "
    "different lengths filled up to one length, with a mask): what loss_fn reads beside the batch is not clipped. Only "
    "what is public and the same for all records may be a constant of loss_fn."
)
COMPLEX = (
    "Of complex numbers train the real ones: torch.view_as_real(weight) is the parameter, and "
    "torch.view_as_complex(weight) is what the module or loss computes with."
)
_OF_RANGE = re.compile(
    "out of (bounds|range)|expected target dtype|multi-target|smaller than num_classes|between 0 and 1|"
    "classes? .*outside of those|Expected dtype int|device-side assert"
)
_LEAVES = frozenset((Tensor, torch.nn.Parameter, bool, int, float, str, type(None)))
_TRAINED = (torch.float64, torch.float32, torch.bfloat16)


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of a pytree in order, as torch's own function has them, at a fifth of its time for plain containers.

    >>> tree_leaves({"b": [1, (2, None)], "a": 3})
    [1, 2, None, 3]
    """
    found: list[Any] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Any]) -> None:
    kind = type(tree)
    if kind in _LEAVES:
        found.append(tree)
    elif kind in (dict, tuple, list):
        for part in tree.values() if kind is dict else tree:
            _collect(part, found)
    else:  # containers that others have registered, classes of tensors, any object
        found += pytree.tree_leaves(tree)


def batch_size(batch: Batch) -> int:
    """The length B of axis 0, on which all leaves agree."""
    values = tree_leaves(batch)
    sizes = {value.shape[0] if isinstance(value, Tensor) and value.ndim and dense(value) else None for value in values}
    if len(sizes) != 1 or None in sizes:
        _refuse(batch)
    return int(values[0].shape[0])


def dense(value: Tensor) -> bool:
    """True for a tensor with rows of one shape: neither sparse nor nested."""
    return value.layout is torch.strided and not value.is_nested


def filled(value: Tensor) -> Tensor:
    """A tensor with all of its zeros; rows of a nested one are filled up with them."""
    if dense(value):
        return value
    return value.to_padded_tensor(0.0) if value.is_nested else value.to_dense()


def _refuse(batch: Batch) -> NoReturn:
    """Raise the error of a batch whose leaves are not tensors that agree."""
    leaves = pytree.tree_leaves_with_path(batch)
    if not leaves:
        raise InvalidArgument("Expected a batch with at least one tensor, got an empty pytree.")
    sizes: dict[str, int] = {}
    for path, leaf in leaves:
        name = "batch" + pytree.keystr(path)
        if not isinstance(leaf, Tensor):
            advice = "Make tensors of texts in the collate_fn of plan.loader." if isinstance(leaf, str) else _ROWS
            raise InvalidArgument(
                f"Expected every leaf of the batch to be a tensor, got {name} of type {type(leaf).__name__}. {advice}"
            )
        if not dense(leaf):
            raise InvalidArgument(
                f"Expected every leaf of the batch to be a dense tensor, got {name}, "
                f"{'a nested tensor' if leaf.is_nested else f'one of layout {leaf.layout}'}. Fill rows up to one "
                "length in the collate_fn, with a mask; or call .to_dense()."
            )
        if leaf.ndim == 0:
            raise InvalidArgument(f"Expected axis 0 of {name} to be the samples, got a 0-dimensional tensor. {_ROWS}")
        sizes[name] = leaf.shape[0]
    (first, size), *_ = sizes.items()  # numbers of samples are private: the names alone are told
    raise InvalidArgument(
        "Expected the same number of samples on axis 0 of all leaves of the batch, got another one than that of "
        f"{first} in {shorten([name for name, other in sizes.items() if other != size])}. Where a processor puts "
        "the images of all samples into one tensor, give each sample rows of its own, as image_text_collator does."
    )


def refuse_list_of_rows(batch: Batch, size: int) -> None:
    """Refuse a list of as many tensors as there are rows: each may be a record's own, or a column of all of them."""
    parts = (
        batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, (list, tuple)) else ()
    )
    if lists := [name for name, part in parts if size > 1 and isinstance(part, list) and len(part) == size]:
        raise InvalidArgument(
            f"Expected axis 0 of each tensor to be the records, got batch[{lists[0]!r}], a list of {size} tensors, in "
            f"a batch of {size} records: each tensor may be one record's. Make one tensor of them, torch.stack(list), "
            "with a mask if their lengths differ; or a tuple, if each has a row of every record. Nothing was spent."
        )


@contextmanager
def ranges_told(batch: Batch) -> Iterator[None]:
    """Context in which torch's error about a label or an index out of range names the tensors that hold it.

    Guarantees:
        tests/test_step.py::test_labels_out_of_range_are_told.
    """
    try:
        yield
    except (IndexError, RuntimeError, UnsupportedModel) as error:
        if not _OF_RANGE.search(str(error)):
            raise
        given = [f"batch{pytree.keystr(path)} ({leaf.dtype})" for path, leaf in pytree.tree_leaves_with_path(batch)]
        words = re.sub(r"\d+", "..", str(error).partition("\n")[0])  # without the label of a record
        raise InvalidArgument(
            f"Expected labels and indices of the type, shape and range that the loss takes, got others in one of "
            f"{shorten(given)}: {words}. Labels of cross_entropy are whole numbers (torch.int64) from 0 to the number "
            "of classes - 1, or ignore_index, one a row; those of binary_cross_entropy are from 0 to 1; ids are below "
            "the number of rows of their table. Look at .min(), .max(), .dtype and .shape; of an error of CUDA, on a "
            "CPU. Nothing was released and nothing was spent by this step."
        ).with_traceback(error.__traceback__) from None


tree_map: Callable[[Callable[[Tensor], Tensor], Batch], Batch] = pytree.tree_map
"""The batch with a function applied to every leaf."""


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def take(batch: Batch, indices: Tensor) -> Batch:
    """The rows of a pytree of tensors at the given indices (none is fine).

    Args:
        batch: the data set, a pytree of tensors. indices: int64, (B,).

    >>> take({"x": torch.arange(5)}, torch.tensor([3, 1]))
    {'x': tensor([3, 1])}

    Raises:
        InvalidArgument: something else than tensors, indices of another kind, or too few rows.
    """
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int64, torch.int32) or indices.ndim != 1:
        given = f"{indices.dtype} of {indices.ndim} axes" if isinstance(indices, Tensor) else type(indices).__name__
        raise InvalidArgument(
            f"Expected indices to be a tensor of int64 with one axis, got {given}. Pass what plan.batches gives, "
            "torch.tensor(list_of_numbers), or mask.nonzero()[:, 0]."
        )

    def chosen(leaf: Tensor) -> Tensor:
        if not isinstance(leaf, Tensor):
            raise InvalidArgument(
                f"Expected data to be a pytree of tensors, got a {type(leaf).__name__} in it. Take the rows of other "
                "data sets by a loader: plan.loader(dataset, state)."
            )
        bits = leaf.view(_SIGNED.get(leaf.dtype, leaf.dtype))  # torch cannot select unsigned numbers
        try:
            return bits.index_select(0, indices.to(leaf.device)).view(leaf.dtype)
        except (IndexError, RuntimeError) as error:
            if "out of range" not in str(error):
                raise
            raise InvalidArgument(
                "Expected a row for each index, got data with a tensor of fewer rows than the plan has records "
                "(dataset_size): make the plan with the length of the data, or load the data that it was made "
                "for. Nothing was spent."
            ) from error

    return tree_map(chosen, batch)


def own_records(drawn: Tensor, num_records: int | None, rank: int = 0, size: int = 1) -> Tensor:
    """The drawn records that are there (below num_records, or all), and of these those of a process, see `deal`.

    Guarantees:
        a sampler of a user draws a record once (tests/sampling/test_base.py::test_a_record_is_drawn_once).
    """
    expect(
        isinstance(drawn, Tensor) and (drawn.dtype, drawn.ndim) == (torch.int64, 1) and _are_different(drawn),
        "a draw of different records, an int64 tensor (B,) of numbers >= 0",
        "indices of type", getattr(drawn, "dtype", type(drawn)),
        "One that is drawn twice in a step moves its sum twice as far as the noise hides. Nothing was spent.",
    )  # fmt: skip
    return deal(drawn if num_records is None else drawn[drawn < num_records], rank, size)


def _are_different(drawn: Tensor) -> bool:
    """True for different numbers >= 0; a draw lies on the CPU, so that no device is read."""
    ascending = bool((drawn[1:] > drawn[:-1]).all()) or len(drawn.unique()) == len(drawn)
    return ascending and bool((drawn >= 0).all())


def deal(indices: Tensor, rank: int, size: int) -> Tensor:
    """The records of one process among several: every `size`-th of the drawn ones, from the `rank`-th on.

    Whatever the number of processes, together they have the draw of one process.

    >>> deal(torch.tensor([3, 5, 8, 9, 11]), rank=1, size=2)
    tensor([5, 9])
    """
    return indices[rank::size]


def rows(batch: Batch, start: int, stop: int) -> Batch:
    """Rows start..stop of every leaf, without a copy."""
    return tree_map(lambda leaf: leaf[start:stop], batch)


def row_alone(batch: Batch, row: int) -> Batch:
    """A copy of one row: no other row is in its memory."""
    return tree_map(lambda leaf: leaf[row : row + 1].clone(), batch)


def own_memory(batch: Batch) -> Batch:
    """The same numbers in memory that is copied before it is written into: the caller's tensors stay as they are."""

    def own(leaf: Tensor) -> Tensor:
        if leaf.untyped_storage().nbytes() <= leaf.nbytes:  # a write would copy all that a part is a view of
            with suppress(RuntimeError):  # memory of NumPy, of other processes
                return torch._lazy_clone(leaf)
        return leaf.clone()

    return tree_map(lambda leaf: own(leaf.detach()), batch)


def pad_rows(batch: Batch, size: int) -> Batch:
    """The batch with its first row repeated at the end up to `size` rows (give those rows weight 0)."""

    def pad(leaf: Tensor) -> Tensor:
        missing = size - leaf.shape[0]
        return leaf if missing <= 0 else torch.cat([leaf, leaf[:1].expand(missing, *leaf.shape[1:])])

    return tree_map(pad, batch)


def signature(batch: Batch) -> tuple[object, ...]:
    """Shapes without their first axis, and dtypes, of all leaves: a key for what was learnt from such batches."""
    return tuple((tuple(leaf.shape[1:]), leaf.dtype) for leaf in tree_leaves(batch))


class ByLoss(WeakIdKeyDictionary):
    """Entries of losses, which end with them. A copy of an engine, also by a pickle, begins without any."""

    def __reduce__(self) -> tuple[type["ByLoss"], tuple[()]]:
        return ByLoss, ()

    def __deepcopy__(self, memo: object) -> "ByLoss":
        return ByLoss()


@dataclass(frozen=True)
class Memo(Generic[_Found]):
    """A cache of values that follow from a loss and public facts. An entry ends with its loss, and changes nothing."""

    _found: MutableMapping[LossFn, dict[object, _Found]] = field(default_factory=ByLoss)

    def __call__(self, make: Callable[[], _Found], loss_fn: LossFn, params: Params, batch: Batch) -> _Found:
        """Return the entry for these names, shapes, dtypes and devices; `make` computes it at the first call."""
        names = tuple(batch) if isinstance(batch, Mapping) else type(batch)
        key = (names, signature(batch), *[(name, p.shape, p.dtype, p.device) for name, p in params.items()])
        of_loss = self._found.setdefault(loss_fn, {})
        if on_any_process(key not in of_loss):
            of_loss[key] = make()
        return of_loss[key]


def check_named(params: Params) -> None:
    """Check that params are a non-empty mapping of floating tensors."""
    refuse(
        (not isinstance(params, Mapping),
         f"Expected params to be a mapping name -> tensor, got {type(params).__name__}. Those of a module: forward, "
         "params = dpfunc.functionalize(module)."),
        (isinstance(params, Mapping) and not params,
         "Expected at least one parameter, got params={}. Nothing would be trained."),
    )  # fmt: skip
    for name, param in params.items():
        if not isinstance(param, Tensor):
            raise InvalidArgument(f"Expected params[{name!r}] to be a tensor, got {type(param).__name__}.")
        if not param.is_floating_point():
            raise InvalidArgument(
                f"Expected params[{name!r}] to have a floating dtype, got {param.dtype}. "
                f"{COMPLEX if param.is_complex() else 'Leave it out of params: it cannot be trained by gradients.'}"
            )
        if not dense(param) or param.is_meta or param.is_inference() or torch.is_inference_mode_enabled():
            raise InvalidArgument(
                f"Expected params[{name!r}] to be a dense tensor that has numbers, outside of torch.inference_mode(), "
                f"got one of layout {param.layout} on {param.device}. Leave inference_mode before the step, and clone "
                "what was made in it; .to_dense() and .to_empty() make numbers. Nothing was spent."
            )


def refuse_narrow_range(params: Params) -> None:
    """Refuse trained parameters of a type with few exponents: float16, where 65504 is the largest number, or 8 bits."""
    for name, param in params.items():
        if param.dtype not in _TRAINED:
            raise InvalidArgument(
                f"Expected trained parameters in float32, bfloat16 or float64, got {name!r} in {param.dtype}. Large "
                "gradients are infinite there, and their records would count as zero, unnoticed; small ones, and the "
                "squares that Adam keeps, round to 0. Convert them with .float(), or load the model with "
                "from_pretrained(..., dtype=torch.float32): Transformers takes the type that the folder was saved in. "
                "Frozen parameters may stay as they are."
            )


def _sizes(params: Params) -> Tensor:
    """Norms of the parameters: one is not finite if its parameter is not, or if it overflows: then look closely."""
    parts = [local(param).detach() for param in params.values()]
    return torch.stack([norm.to(parts[0].device) for norm in torch._foreach_norm(parts)])


def _not_finite(values: Params) -> list[str]:
    """Names of the tensors that have NaN or inf in the part of this process."""
    return [name for name, value in values.items() if not bool(torch.isfinite(local(value).detach()).all())]


def _refuse_not_finite(params: Params) -> None:
    if bad := _not_finite(params):
        raise InvalidArgument(
            f"Expected finite parameters, got NaN or inf in {shorten(bad)}. The run has diverged: lower the learning "
            "rate and restart from the last checkpoint."
        )


def check_finite(params: Params) -> None:
    """Check that all numbers are finite. Reads once from the device: a norm for each parameter."""
    if not all(map(math.isfinite, _sizes(params).tolist())):
        _refuse_not_finite(params)


def check_params(params: Params) -> None:
    """Check that params are a non-empty mapping of finite, floating tensors."""
    check_named(params)
    check_finite(params)


def digest_and_mark(released: Params, params: Params | None, mark: Tensor) -> tuple[int, list[str], bool]:
    """A digest of what a step releases, names of what is not finite in it, and a mark (0-d, bool), in one read.

    Parameters that are not finite are refused; `params` is None where they were looked at before.
    """
    sizes = (mark.new_zeros(()) if params is None else _sizes(params).sum(), _sizes(released).sum())
    own, (look, spoiled, marked) = checksum_and_marks(released.items(), [*(~(s < math.inf) for s in sizes), mark])
    if look and params is not None:
        _refuse_not_finite(params)
    return own, _not_finite(released) if spoiled else [], marked


def own_digest(released: Params, params: Params | None, mark: Tensor) -> tuple[str, bool]:
    """A digest of what a process releases that is alone, and a mark; see `digest_and_mark`."""
    own, spoiled, marked = digest_and_mark(released, params, mark)
    if spoiled:
        refuse_sums(spoiled)
    return in_hex(own), marked


def refuse_sums(names: Sequence[str]) -> NoReturn:
    """Refuse sums that are not finite, which noise does not hide; no names: another process has the part."""
    raise InvalidArgument(
        "Expected finite sums of clipped gradients, got NaN or inf in "
        f"{shorten(names) or 'the part of another process'}. "
        "A sample has numbers so large, beside others so small, that their products cannot be computed in float32. "
        "Bring inputs and losses to ordinary sizes in the data set, with numbers that are public (a value such as 1e30 "
        "often stands for a missing one). Nothing was released and nothing was spent."
    )
