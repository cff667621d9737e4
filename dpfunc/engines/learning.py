"""Finds the layouts of a loss: two and three samples, with shaken parameters, each loss differentiated alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dpfunc.checks import shorten
from dpfunc.engines import layout as layouts_of
from dpfunc.engines.collectives import Listener
from dpfunc.engines.graphs import refuse_reentrant
from dpfunc.engines.isolation import Still, check_isolated, rows_differ, shaken, some_rows
from dpfunc.engines.lockstep import in_lockstep, refused_by_all
from dpfunc.engines.loop import loop
from dpfunc.engines.rules.table import Use
from dpfunc.engines.scope import backward_inside
from dpfunc.engines.standing import is_stood_in, leaves_of
from dpfunc.engines.taps import as_it_is, leaf, tapped, watched
from dpfunc.engines.tracking import Key, Layouts, Tracked, Tracker, UnknownLayout
from dpfunc.errors import UnsupportedModel
from dpfunc.rng import insecure_key, torch_seed
from dpfunc.tree import signature
from dpfunc.types import Batch, LossFn, Params

ROUNDS = 20


@dataclass
class Watcher:
    """A recorder that only looks at uses that are not known yet."""

    leaves: dict[Key, list[Tensor]] = field(default_factory=dict)
    closed: bool = False

    def close(self) -> None:
        """The forward pass is over."""
        self.closed = True

    def use(self, use: Use, output: Tensor, needed: Mapping[str, Tensor | None]) -> Tensor:
        """Known: passes; like that of an engine, the result requires a gradient."""
        return tapped(output, as_it_is, [], [leaf(tuple(use.output), output.dtype, output.device)])

    def copies(self, tracked: Tracked, copies: Tensor, axis: int) -> None:
        """Known: passes."""

    def derived(self, sources: Sequence[Tracked]) -> None:
        """Followed by the tracker."""

    def unknown(self, key: Key, output: Tensor) -> Tensor:
        """Caught, to see which loss reaches which entry."""
        if not isinstance(output, Tensor):
            shapes = [tuple(value.shape) for value in output or () if isinstance(value, Tensor)]
            raise UnsupportedModel(
                f"No rule gives per-sample gradients for {key[1]} of parameter {key[0]!r}, whose results have shapes "
                f'{shapes}. Use engine="vmap" or "loop".'
            )
        caught = leaf(tuple(output.shape), output.dtype, output.device)
        if not self.closed:
            self.leaves.setdefault(key, []).append(caught)
        return watched(output.clone(), as_it_is, [caught])


def learn(loss_fn: LossFn, params: Params, batch: Batch, known: Layouts) -> Layouts:
    """The layout of every use, for batches of this structure.

    Derived values are found in turn: what is computed from a shared value is seen in the next round.

    Raises:
        UnsupportedModel: samples influence each other, or a use has no rule.
    """
    found = dict(known)
    values = shaken(params)
    listener = Listener()
    check_isolated(loss_fn, values, batch, listener)
    if listener.meshes:  # then single samples show whether ranks agree
        _look_at(loss_fn, values, some_rows(batch, 2))
    for _ in range(ROUNDS):
        seen = [_differentiate(loss_fn, values, some_rows(batch, count), count, found) for count in (2, 3)]
        if seen[0].keys() != seen[1].keys():
            odd = sorted({key[0] for key in seen[0].keys() ^ seen[1].keys()})
            raise UnsupportedModel(
                f"The loss uses {shorten(odd)} for some batch sizes only, so it cannot be told whose gradient is "
                'whose. Use engine="vmap" or "loop".'
            )
        if not seen[0]:
            if not found and not is_stood_in():
                _look_at(loss_fn, values, some_rows(batch, 1))
            return found
        with refused_by_all():
            found |= {key: _one_layout(key, seen[0][key], seen[1][key]) for key in seen[0]}
    raise UnsupportedModel('Parameters are transformed too often before they are used. Use engine="vmap" or "loop".')


def _look_at(loss_fn: LossFn, params: Params, batch: Batch) -> None:
    """Single samples: the loop refuses what is wrong with them, also a loss that reaches no parameter."""
    with torch_seed(insecure_key(0)), Still():
        loop()(loss_fn, params, batch)


Seen = dict[Key, list[tuple[torch.Size, list[Tensor | None]]]]


def _differentiate(loss_fn: LossFn, params: Params, batch: Batch, num_samples: int, known: Layouts) -> Seen:
    watcher = Watcher()
    leaves = leaves_of({name: param.clone() for name, param in params.items()})
    with (
        torch_seed(insecure_key(0)),
        torch.enable_grad(),
        backward_inside(),
        Tracker(leaves, num_samples, known, watcher),
    ):
        losses_B = loss_fn(leaves, batch)
        watcher.close()
        refuse_reentrant((), losses_B)
        every = [caught for group in watcher.leaves.values() for caught in group]
        grads: list[Sequence[Tensor | None]] = [[None] * len(every) for _ in range(num_samples)]
        if every and isinstance(losses_B, Tensor) and losses_B.requires_grad and losses_B.shape == (num_samples,):
            grads = [
                torch.autograd.grad(losses_B[i], every, retain_graph=True, allow_unused=True)
                for i in range(num_samples)
            ]
    by_leaf = {id(caught): [row[index] for row in grads] for index, caught in enumerate(every)}
    return {key: [(caught.shape, by_leaf[id(caught)]) for caught in group] for key, group in watcher.leaves.items()}


def _one_layout(
    key: Key,
    two: Sequence[tuple[torch.Size, list[Tensor | None]]],
    three: Sequence[tuple[torch.Size, list[Tensor | None]]],
) -> layouts_of.Layout | None:
    """The layout of all uses with this key; a use that no gradient reaches follows the others."""
    if len(two) != len(three):
        raise UnsupportedModel(
            f"{key[1]} of parameter {key[0]!r} is used {len(two)} times for 2 samples and {len(three)} times for 3, as "
            'if it ran over the samples one by one. Use engine="vmap" or "loop".'
        )
    sets = [layouts_of.find(key[0], key[1], (a[0], b[0]), (a[1], b[1])) for a, b in zip(two, three, strict=True)]
    common = set.intersection(*(set(options) for options in sets))
    if len(common) == 1:
        return common.pop()
    raise UnsupportedModel(
        f"It cannot be told which positions belong to which sample at {key[1]} of parameter {key[0]!r}, which gives "
        f"{tuple(two[0][0])} for 2 samples: "
        + ("its uses differ. " if not common else "no gradient flows there. ")
        + 'Use engine="vmap" or "loop", or leave the parameter out.'
    )


Result = TypeVar("Result")


Signature = tuple[object, ...]


@dataclass
class Memory:
    """The layouts of each loss function and of each shape of a row, since code may branch on shapes."""

    known: MutableMapping[LossFn, dict[Signature, Layouts]] = field(default_factory=WeakIdKeyDictionary)

    def learnt(self, loss_fn: LossFn, params: Params, batch: Batch) -> Layouts:
        """All layouts for batches like this one, learnt now if they are not known."""
        if loss_fn not in self.known:
            self.known[loss_fn] = {}
        known, shapes = self.known[loss_fn], signature(batch)
        if shapes not in known:
            found = learn(loss_fn, params, batch, {})
            if not rows_differ(batch):  # holds for these rows, which say nothing about others
                return found
            known[shapes] = found
        return known[shapes]

    def retried(self, loss_fn: LossFn, params: Params, batch: Batch, compute: Callable[[Layouts], Result]) -> Result:
        """Compute with the layouts; where one is missing after all, learn from these rows and compute again."""
        known = self.learnt(loss_fn, params, batch)
        try:
            return compute(known)
        except UnknownLayout as error:
            if in_lockstep():  # the others do not learn with this one: what is sent would meet something else
                raise UnsupportedModel(
                    f"{error.args[0][1]} of parameter {error.args[0][0]!r} occurs with this batch and not with the "
                    "first one. Processes that share a model run the same operations for all rows: choose by "
                    "torch.where, not by Python conditions on values."
                ) from error
            known.pop(error.args[0], None)
            known.update(learn(loss_fn, params, batch, known))
        try:
            return compute(known)
        except UnknownLayout as error:
            (key,) = error.args
            raise UnsupportedModel(
                f"{key[1]} of parameter {key[0]!r} occurs with this batch, and not so with two or three of its rows: "
                'which positions belong to which sample cannot be told. Use engine="vmap" or "loop".'
            ) from error
