"""Numbers that Python reads, and shapes that follow from values: answered where all rows agree bit for bit.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

Elsewhere the pass ends, and each group of rows that agree runs by itself, down to single rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpfunc.batches import tree_leaves
from dpfunc.engines._batching import by_rows
from dpfunc.engines._levels import Handler, NeedsLoop, OutsideTransforms, Pass, inside, is_row, of_rows


def bits(values_B: Tensor) -> list[bytes]:
    with OutsideTransforms():
        flat = values_B.detach().reshape(len(values_B), values_B[0].numel())
        flat = flat.clone(memory_format=torch.contiguous_format).cpu().view(torch.uint8)
        return [row.tobytes() for row in flat.numpy()]


def read(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The answer to a read, if all rows agree on the tensors that are read."""
    flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    for place, value in enumerate(flat):
        if isinstance(value, Tensor):
            values_B = of_rows(value)
            if values_B is None:
                flat[place] = inside(value)
            else:
                owner.agree(bits(values_B), func.__name__)
                with OutsideTransforms():
                    flat[place] = values_B[0].detach()
    args, kwargs = pytree.tree_unflatten(flat, spec)
    with OutsideTransforms():
        return func(*args, **kwargs)


def _masks(index: Any) -> list[Any]:
    return list(index) if isinstance(index, tuple) else [index]


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8) and value.ndim > 0


def _is_number(value: Any) -> bool:
    return is_row(value) and not value.ndim and not value.is_floating_point() and value.dtype != torch.bool


def positions(owner: Pass, index: Any) -> tuple[Any, ...]:
    """An index with the positions that are set in place of each mask."""
    found: list[Any] = []
    for part in _masks(index):
        if _is_mask(part):
            found += by_rows(owner, Tensor.nonzero, (part,), {}, shapes_vary=True).unbind(1)
        else:
            found.append(part)
    return tuple(found)


def _sliced(owner: Pass, part: Any) -> Any:
    """A slice whose ends are whole numbers of a row, which are read."""
    ends = [part.start, part.stop, part.step] if isinstance(part, slice) else []
    return slice(*numbers(owner, ends)) if any_row(ends) else part


def getitem(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Select by a mask or a number of each row, or by a slice whose ends are numbers of the row."""
    if _is_number(args[1]):
        return args[0][args[1].reshape(1)].squeeze(0)
    parts = [_sliced(owner, part) for part in numbers(owner, _masks(args[1]))]
    if any(part is not given for part, given in zip(parts, _masks(args[1]), strict=True)):
        return args[0][tuple(parts)]
    if not any(_is_mask(part) for part in _masks(args[1])) or not any(
        is_row(value) for value in (args[0], *_masks(args[1]))
    ):
        return NotImplemented
    return args[0][positions(owner, args[1])]


def _numbers_first(target: Tensor, parts: Sequence[Any], value: Any) -> tuple[Tensor, tuple[Tensor, ...], Any]:
    """A write by tensors of whole numbers beside slices as one by these only; torch's rule for rows mixes up axes."""
    if ... in parts:
        dots = parts.index(...)
        whole = target.ndim - sum(part is not None and part is not ... for part in parts)
        parts = [*parts[:dots], *[slice(None)] * whole, *parts[dots + 1 :]]
    view = target[tuple([slice(None) if isinstance(part, Tensor) else part for part in parts])]
    kept = [part for part in parts if not isinstance(part, int) or isinstance(part, bool)]
    axes = [axis for axis, part in enumerate(kept) if isinstance(part, Tensor)]
    places = tuple([part for part in kept if isinstance(part, Tensor)])
    order = torch.broadcast_shapes(*[place.shape for place in places])
    if isinstance(value, Tensor) and value.ndim:
        ndim = view.ndim - len(axes) + len(order)
        value = value.reshape((1,) * max(0, ndim - value.ndim) + tuple(value.shape)[max(0, value.ndim - ndim) :])
        if axes[-1] - axes[0] == len(axes) - 1:  # else their axes come first
            value = value.movedim([axes[0] + each for each in range(len(order))], list(range(len(order))))
    return view.movedim(axes, list(range(len(axes)))), places, value


def _fill(target: Tensor, mask: Tensor, value: Any) -> None:
    """Write one number where a mask is set."""
    mask = mask.reshape(*mask.shape, *[1] * (target.ndim - mask.ndim))
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=target.dtype, device=target.device)
    target.copy_(torch.where(mask, value.to(target.dtype), target))


def setitem(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Write where a mask of each row is set, or by whole numbers of a row."""
    target, index, value = args
    parts = [torch.tensor(part) if isinstance(part, list) and not any_row(part) else part for part in _masks(index)]
    of_tensors = [isinstance(part, Tensor) for part in parts]
    apart = len({place - sum(of_tensors[:place]) for place, own in enumerate(of_tensors) if own}) > 1
    if not any(map(is_row, parts)) and not (apart and is_row(target)):
        return NotImplemented
    if len(parts) == 1 and _is_mask(parts[0]) and is_row(target) and getattr(value, "ndim", 0) == 0:
        return _fill(target, parts[0].bool(), value)
    view, places, value = _numbers_first(target, positions(owner, tuple(parts)), value)
    view[places] = value
    return None


def masked_scatter(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`masked_scatter` as a gather, which has a batching rule and a gradient."""
    names = ("input", "mask", "source")
    bound = dict(zip(names, args, strict=False), **kwargs)
    target, mask, source = (bound[name] for name in names)
    taken = mask.expand_as(target).flatten()
    place = (taken.cumsum(0) - 1).clamp(0, source.numel() - 1)
    out = torch.where(taken, source.flatten().gather(0, place), target.flatten()).view(target.shape)
    return target.copy_(out) if func is Tensor.masked_scatter_ else out


def masked_select(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Select by a mask, with a gradient."""
    bound = dict(zip(("input", "mask"), args, strict=False), **kwargs)
    if not any(map(is_row, bound.values())):
        return NotImplemented
    value, mask = torch.broadcast_tensors(bound["input"], bound["mask"])
    return value[positions(owner, mask)]


def where(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`torch.where` of nothing but a mask is `nonzero`."""
    if len(args) != 1 or kwargs or not is_row(args[0]):
        return NotImplemented
    return by_rows(owner, func, args, kwargs, shapes_vary=True)


def repeat_interleave(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Repeats that are numbers of a row."""
    names = ("repeats",) if (len(args) == 1 and "repeats" not in kwargs) else ("input", "repeats")
    bound = dict(zip(names, args, strict=False), **kwargs)
    return by_rows(owner, func, args, kwargs, shapes_vary=True) if is_row(bound.get("repeats")) else NotImplemented


def one_hot(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`one_hot` as a comparison; classes outside of the given ones are left to rows alone, which raise for them."""
    bound = dict(zip(("tensor", "num_classes"), args, strict=False), **kwargs)
    classes, count = bound["tensor"], bound.get("num_classes", -1)
    values_B = of_rows(classes) if is_row(classes) else None
    if values_B is None:
        return NotImplemented
    if count < 0:
        count = read(owner, Tensor.item, (classes.max(),), {}) + 1
    with OutsideTransforms():
        outside = bool(((values_B < 0) | (values_B >= count)).any())
    if outside:
        owner.stop(NeedsLoop("a class is outside of those of one_hot"))
    return (classes.unsqueeze(-1) == torch.arange(count, device=classes.device)).to(torch.int64)


def ctc_loss(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Lengths decide shapes inside of `ctc_loss`, so only rows of equal lengths are computed together."""
    bound = dict(zip(("log_probs", "targets", "input_lengths", "target_lengths"), args, strict=False), **kwargs)
    for name in ("input_lengths", "target_lengths"):
        if is_row(bound[name]):
            read(owner, Tensor.tolist, (bound[name],), {})
    return NotImplemented


def solve(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Equations whose sides have other batch axes, row by row: torch's rule mistakes rows for a batch axis."""
    bound = dict(zip(("A", "B"), args, strict=False), **kwargs)
    same = bound["A"].shape[:-2] == bound["B"].shape[:-2] and bound["B"].ndim > 1
    return by_rows(owner, func, args, kwargs) if any_row((args, kwargs)) and not same else NotImplemented


def sparse(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A sparse tensor of numbers of a level as a dense one: torch has no sparse tensors at levels."""
    bound = dict(zip(("indices", "values", "size"), args, strict=False), **kwargs)
    values, size = bound["values"], bound.get("size")
    if not isinstance(values, Tensor) or not (is_row(values) or values.requires_grad):
        return NotImplemented
    if size is None or bound.get("dtype") not in (None, values.dtype) or bound.get("requires_grad"):
        return owner.stop(NeedsLoop("a sparse tensor has no given size, or is of another dtype"))
    places = tuple(bound["indices"].long().unbind(0))
    return values.new_zeros(tuple(size)).index_put(places, values, accumulate=True)


def numbers(owner: Pass, given: Any) -> Any:
    """Arguments with the whole numbers of a row read: sizes and ends, which torch reads inside of an operation."""
    if not any_row(given):
        return given
    return pytree.tree_map_only(Tensor, lambda v: read(owner, Tensor.item, (v,), {}) if _is_number(v) else v, given)


def any_row(given: Any) -> bool:
    """True if there is a tensor of a row; without the cost of torch's trees, because shapes come with each step."""
    if isinstance(given, Tensor):
        return is_row(given)
    if isinstance(given, (list, tuple)):
        return any(map(any_row, given))
    return isinstance(given, dict) and any(map(is_row, tree_leaves(given)))


def stacked(owner: Pass, given: Any) -> Any:
    """Lists of numbers of a row as one tensor, which `torch.tensor` makes without a graph; read if of several kinds."""
    leaves = tree_leaves(given)
    if isinstance(given, Tensor) or not any(map(is_row, leaves)):
        return given
    same = all(isinstance(leaf, Tensor) and not leaf.ndim and leaf.dtype == leaves[0].dtype for leaf in leaves)

    def joined(value: Any) -> Tensor:
        found: Tensor = value.detach() if isinstance(value, Tensor) else torch.stack([joined(each) for each in value])
        return found

    if same:
        return joined(given)
    return pytree.tree_map_only(Tensor, lambda value: read(owner, Tensor.tolist, (value,), {}), given)


def sizes(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation whose sizes may be numbers of a row."""
    if not any_row(args[1:]) and not any_row(kwargs):
        return NotImplemented
    rest, kwargs = numbers(owner, (tuple(args[1:]), dict(kwargs)))
    return func(args[0], *rest, **kwargs)


def _of_varying_shape(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if any_row((args, kwargs)):
        return by_rows(owner, func, args, kwargs, shapes_vary=True)
    return owner.read_constant(func.__name__)


def _read(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return read(owner, func, args, kwargs) if any_row((args, kwargs)) else owner.read_constant(func.__name__)


def strided(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`as_strided` of memory that is dense, as that of a row alone."""
    values_B = of_rows(args[0] if args else kwargs["input"])
    if values_B is None:
        return NotImplemented
    with OutsideTransforms():
        dense = torch.empty_like(values_B[0]).stride() == values_B[0].stride()
    return NotImplemented if dense else owner.stop(NeedsLoop(f"{func.__name__} sees the memory of all rows"))


def _of_memory(owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return owner.stop(NeedsLoop(f"{func.__name__} sees the memory of all rows")) if is_row(args[0]) else NotImplemented


def _named(*names: str) -> list[Any]:
    owners = (torch, Tensor, torch._VF, torch.functional)
    return [getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)]


READS: dict[Any, Handler] = {
    **dict.fromkeys(
        (
            *_named("__bool__", "__int__", "__float__", "__index__", "__complex__", "__format__", "__repr__"),
            *_named("item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__array__", "__contains__"),
            torch._C._VariableFunctions.is_nonzero,
        ),
        _read,
    ),
    **dict.fromkeys(
        _named(
            "nonzero", "argwhere", "unique", "unique_consecutive", "_unique2", "_return_counts", "_return_inverse",
            "_return_output", "_unique_impl", "_unique_consecutive_impl", "bincount", "histc", "unique_dim", "isin",
        ),
        _of_varying_shape,
    ),
    **dict.fromkeys(_named("masked_select"), masked_select),
    **dict.fromkeys(_named("masked_scatter", "masked_scatter_"), masked_scatter),
    **dict.fromkeys(_named("repeat_interleave"), repeat_interleave),
    **dict.fromkeys((torch.linalg.solve, torch.linalg.solve_ex, torch.linalg.lstsq), solve),
    **dict.fromkeys(_named("as_strided_"), _of_memory),
    **dict.fromkeys(_named("as_strided", "as_strided_copy"), strided),
    **dict.fromkeys(
        _named("split", "split_with_sizes", "view", "reshape", "expand", "repeat", "unflatten", "narrow"), sizes
    ),
    torch.where: where,
    torch.sparse_coo_tensor: sparse,
    torch._C._nn.one_hot: one_hot,
    torch.ctc_loss: ctc_loss,
    Tensor.__getitem__: getitem,
    Tensor.__setitem__: setitem,
}  # fmt: skip
READING = frozenset(func for func, handler in READS.items() if handler is _read)
"""Functions by which Python is told numbers of a tensor."""
