"""Torch's batching rules that were seen right on this version of torch; any other function runs row by row.

May import: its folder, batches, rng and below. Privacy depends on it: yes.

The tables `_verified/<version>.json` are written by tests/_support/batching_rules.py: docs/decisions/0019.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpfunc.batches import tree_leaves
from dpfunc.engines._guards.collectives import CollectiveRecorder, own_only
from dpfunc.engines._levels import NeedsLoop, Pass, at_a_level, is_row
from dpfunc.engines._native import Results, as_one_node

_log = logging.getLogger("dpfunc")
VERSION = ".".join(torch.__version__.split(".")[:2])
_TABLE = Path(__file__).with_name("_verified") / f"{VERSION}.json"


def named(name: str) -> Any:
    """The function of torch with this path below `torch`; None where this build has none.

    >>> named("Tensor.add") is torch.Tensor.add, named("Tensor.no_such_name")
    (True, None)
    """
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def verified() -> frozenset[Any]:
    """Functions of torch whose rows were right wherever rows stood among their arguments."""
    if not _TABLE.exists():
        _log.warning(
            "torch %s: nobody has compared its batching rules with rows alone, so each operation runs row by row, "
            "which is slow. Use a version of torch that has a table in dpfunc/engines/_verified, or make one: "
            "tests/_support/batching_rules.py.",
            torch.__version__,
        )
        return frozenset()
    found = map(named, json.loads(_TABLE.read_text())["right"])
    return frozenset(function for function in found if function is not None)


def _plain(tensor: Tensor, given: Sequence[Tensor]) -> bool:
    """True for a result that owns exactly its own memory, so that rows of it can be joined."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return all(tensor.untyped_storage()._cdata != each.untyped_storage()._cdata for each in given)


def _unchanged(value: Tensor, before: Tensor) -> bool:
    """False after a write in place, also one that an operation does not declare (statistics of a norm)."""
    if value._version or value.layout is not torch.strided or value.is_quantized:
        return not value._version
    return bool(((value == before) | (value != value)).all())


def by_rows(
    owner: Pass, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, shapes_vary: bool = False
) -> Any:
    """The result of a function, row by row below both levels, as one node; a call that it cannot do ends the pass.

    With `shapes_vary`, shapes of the result follow from values, so Python reads them whatever batching rules torch has.
    """
    flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    places = [place for place, value in enumerate(flat) if isinstance(value, Tensor)]
    inputs = [flat[place] for place in places]
    wanted = [value.requires_grad and torch.is_grad_enabled() for value in inputs]
    if not any(map(at_a_level, inputs)) or (not any(wanted) and not any(map(is_row, inputs))):
        return func(*args, **kwargs)
    name, rest = getattr(func, "__name__", str(func)), list[Any]()
    why = f"torch's rule of {name} for rows was not seen right in torch {VERSION}"
    if shapes_vary:
        why = f"shapes of {name} follow from values of rows"
    if not owner.at_levels():
        owner.stop(NeedsLoop(f"{why}, and the loss calls it inside of a transform"))

    def call(*values: Tensor) -> Results:
        found = [pytree.tree_flatten(_of_row(own)) for own in zip(*(value.unbind() for value in values), strict=True)]
        (leaves, made_of), keys = found[0], [(str(own), *map(_fact, leaves)) for leaves, own in found]
        same = all(key == keys[0] for key in keys)
        if shapes_vary or not same or not all(isinstance(leaf, Tensor) for leaf in leaves):
            owner.agree(keys, name)
        rest[:] = [made_of, *(... if isinstance(leaf, Tensor) else leaf for leaf in leaves)]
        each = zip(*(own for own, _ in (found if same else found[:1] * len(found))), strict=True)
        return tuple(torch.stack(own) for own in each if isinstance(own[0], Tensor))

    def _of_row(given_row: Sequence[Tensor]) -> Any:
        filled, own = list(flat), [value.clone() for value in given_row]
        for place, value in zip(places, own, strict=True):
            filled[place] = value
        given, named_ones = pytree.tree_unflatten(filled, spec)
        with own_only(CollectiveRecorder()):  # a function that communicates would mix the rows of processes
            found = func(*given, **named_ones)
        results = [value for value in tree_leaves(found) if isinstance(value, Tensor)]
        written = any(not _unchanged(*pair) for pair in zip(own, given_row, strict=True))
        if written or not all(_plain(value, own) for value in results):
            owner.stop(NeedsLoop(f"{why}, and it writes into, or shares memory with, what it is given"))
        return found

    before = torch.default_generator.get_state()
    made = as_one_node(owner, call, inputs, wanted)
    if not torch.equal(before, torch.default_generator.get_state()):
        owner.stop(NeedsLoop(f"{why}, and it draws random numbers"))
    if not shapes_vary:
        owner.by_row.setdefault(name)
    results = iter(made)
    return pytree.tree_unflatten([next(results) if leaf is ... else leaf for leaf in rest[1:]], rest[0])


def _fact(leaf: Any) -> Any:
    """The shape of a tensor, or a value of Python itself: parts of results on which all rows must agree."""
    return tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf
